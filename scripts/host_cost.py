"""What a training step costs the host, per decoder layer: milliseconds, ops dispatched, kernels launched, calls.

    python scripts/host_cost.py                                        # Llama-3.1-8B's layers, narrow, on the CPU
    python scripts/host_cost.py --device meta                          # true widths and a GPU's kernels, on meta
    python scripts/host_cost.py --cases resident ring --out cost.json

At a few thousand tokens a step a fast GPU waits for the host: Python, autograd, the dispatcher, launches. The step that
runs here is the engine's own (`Engine._accumulate`: all of a step but its update), every layer recomputed, NF4 with
adapters on all linear layers.

On the CPU the layers are narrow, so that kernels take little. Streams and events are not covered, and attention and
norms are not the kernels of a GPU. On `meta` the ops are a GPU's, and counting them is what it is for: its times are
mostly those of shape functions in Python (19 of 20 calls). Not covered there: bitsandbytes' two ops per unpacked weight
(their results are only allocated) and all copies of weights and layer inputs.

Times are the process's processor time, the least of all steps (others on the machine only add), to be compared with
those of other code on the same machine at the same time. Launches can be compared between versions; ops less so, since
below autograd a `linear` or a `to` counts as one, elsewhere as all that it is made of.

What a streamed layer does on CUDA alone, by reading `engine.ring` and `engine.inputs`. Per fetch: 4 events recorded, 1
waited for, 1 copy, 1 query; where the copy is not over when its layer begins, 2 more recorded, 1 more waited for. Per
layer input in host memory: 2 copies, 4 events recorded, 4 waited for.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitune.engine.batch import to_device
from fitune.engine.engine import Engine
from fitune.engine.step import Observer, ignore
from fitune.memory.dry import Rows
from fitune.model.build import add_adapter, build, fill, wanted_weights
from fitune.model.source import resolve
from fitune.plan import Adapter, Plan

RING = dict(stream_from="pageable", resident_layers=0)
LEAN = dict(**RING, head_place="host", embedding_place="host", offload_inputs=True, loss_chunk=1024)
CASES: dict[str, dict[str, Any]] = {
    "resident": {},
    "ring": RING,
    "lean": LEAN,
    "leanest": LEAN | dict(mlp_tiles=4, loss_chunk=512),
    "layer-major": LEAN | dict(accumulation_order="layer-major", batch=4),
}
# Widths of the model that computes on the CPU: whole blocks of 64 in every row.
NARROW = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
              vocab_size=512)  # fmt: skip


def plan_of(case: str, model: str, device: str, layers: int, seq_len: int) -> Plan:
    """The plan of a case: micro-batches of one row."""
    values: dict[str, Any] = dict(
        model=model, num_layers=layers, method="lora", base_format="nf4", double_quant=True,
        adapter=Adapter(16, 32, 0.0, "none", ("all-linear",)), device="cuda" if device == "meta" else device,
        device_name="", precision="bf16", loss_scaling=False, embedding_place="host",
        attention="flash" if device == "meta" else "cpu", seq_len=seq_len, batch=1, micro_batch=1,
        accumulation_order="micro-batch-major", packing=False, recompute_layers=layers, loss_chunk=256,
        optimizer="adafactor", lr=1e-4, schedule="constant", warmup=0.0, weight_decay=0.0, clip=1.0, seed=0,
        budget_bytes=None,
    )  # fmt: skip
    return Plan(**values | CASES[case])


def engine_of(plan: Plan, device: str) -> Engine:
    """An engine over random weights."""
    config = resolve(plan.model, weights=False).config
    config.num_hidden_layers = plan.num_layers
    if device == "cpu":
        for key, value in NARROW.items():
            setattr(config, key, value)
    built = build(config, plan, device)
    weights = ((name, torch.ones(shape, dtype=built.compute_dtype, device=device) / 16)
               for name, shape in wanted_weights(built).items())  # fmt: skip
    fill(built, weights, plan)
    add_adapter(built, plan)
    return Engine(built, plan)


class Clock:
    """Processor time spent in each part of a step, from one call of the observer to the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._part, self._since = "start", time.process_time()

    def observe(self, part: str, index: int) -> None:
        """A part begins."""
        now = time.process_time()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now


class _Ops(TorchDispatchMode):
    """Counts ops by the part of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_part: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.part = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_part[self.part][str(func)] += 1
        return func(*args, **(kwargs or {}))


def step_of(engine: Engine) -> Callable[[Observer], None]:
    """One step without its update."""
    plan = engine.plan
    rows = [Rows(plan.micro_batch, plan.seq_len)] * (plan.batch // plan.micro_batch)

    def step(observe: Observer) -> None:
        batches = [to_device(row, engine.built.device, dropout_seed=None) for row in rows]
        engine._accumulate(engine._groups(batches), 1.0, observe)
        observe("end", 0)
        engine.abandon()

    step(ignore)  # the first pass finds out what later ones can leave out
    return step


def python_calls(step: Callable[[Observer], None]) -> dict[str, int]:
    """Calls of Python and built-in functions in each part of a step."""
    counts: collections.Counter[str] = collections.Counter()
    part = ""

    def observe(name: str, index: int) -> None:
        nonlocal part
        part = name

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            counts[part] += 1

    sys.setprofile(count)
    try:
        step(observe)
    finally:
        sys.setprofile(None)
    return dict(counts)


def measured(case: str, plan: Plan, device: str, num_steps: int) -> dict[str, Any]:
    """Per layer and pass (all micro-batches of it), of the loss tail, and of a whole step."""
    step = step_of(engine_of(plan, device))
    times = []
    for _ in range(num_steps):
        clock = Clock()
        step(clock.observe)
        times.append(clock.seconds)
    with _Ops() as ops:
        step(lambda name, index: setattr(ops, "part", name))
    calls = python_calls(step)
    parts = {}
    for part, count in (("forward", plan.num_layers), ("backward", plan.num_layers), ("tail", 1)):
        found = ops.by_part[part]
        parts[part] = {
            "ms": min(t[part] for t in times) * 1e3 / count,
            "ops": sum(found.values()) / count,
            "launches": sum(n for op, n in found.items() if _launches(op)) / count,
            "python_calls": calls[part] / count,
        }
    return {
        "case": case,
        "device": device,
        "model": plan.model,
        "num_layers": plan.num_layers,
        "num_steps": num_steps,
        "torch": torch.__version__,
        "step_ms": min(sum(t.values()) for t in times) * 1e3,
        "parts": parts,
        "ops": {part: dict(ops.by_part[part].most_common()) for part in parts},
    }


def _launches(op: str) -> bool:
    """Whether an op has a kernel: it is neither a view nor an allocation."""
    others = ("view", "t", "transpose", "slice", "select", "unsqueeze", "squeeze", "detach", "alias", "expand",
              "_unsafe_view", "as_strided", "split", "permute", "reshape",
              "empty", "empty_like", "new_empty", "empty_strided")  # fmt: skip
    return op.split(".")[1] not in others


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """A line per case: of a step, and per layer of its passes."""
    parts = ("forward", "backward", "tail")
    heads = "".join(f" | {part:>8}  {'ops':>6} {'launch':>6} {'calls':>7}" for part in parts)
    yield f"{'case':12} {'step ms':>8}{heads}"
    for record in records:
        line = f"{record['case']:12} {record['step_ms']:8.1f}"
        for found in record["parts"].values():
            line += f" | {found['ms']:6.2f} ms {found['ops']:6.1f} {found['launches']:6.1f}"
            line += f" {found['python_calls']:7.0f}"
        yield line


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="random:meta-llama/Llama-3.1-8B")
    parser.add_argument("--device", choices=("cpu", "meta"), default="cpu")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--layers", type=int, default=32, help="decoder layers (default: 32)")
    parser.add_argument("--seq-len", type=int, help="tokens of a row (default: 2048 on meta, 32 on the CPU)")
    parser.add_argument("--steps", type=int, default=7, help="steps, of which the fastest is shown (default: 7)")
    parser.add_argument("--out", type=Path, help="write the figures here too, as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    seq_len = args.seq_len or (2048 if args.device == "meta" else 32)
    records = []
    for case in args.cases:
        plan = plan_of(case, args.model, args.device, args.layers, seq_len)
        records.append(measured(case, plan, args.device, args.steps))
    print("\n".join(table(records)))
    if args.out is not None:
        args.out.write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
