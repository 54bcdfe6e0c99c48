"""Record every allocation of a training step on this GPU, and compare it with what the step on `meta` says.

    python benchmarks/record_events.py                       # all cases
    python benchmarks/record_events.py --cases CASE ...      # some
    python benchmarks/record_events.py --out benchmarks/results/events-NAME.json.gz --frames

Models have a few layers of true widths and random weights; every case runs in its own forked process. A step before it
has loaded the kernels and made cuBLAS's workspaces. The file holds, per part of the step, what torch's allocator was
asked for and given back, in order, and the case itself, so that the comparison can be made again without a GPU
(`tests/memory/test_cuda_events.py`). With --frames, the Python line of every allocation that differs is shown.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import itertools
import json
import time
import traceback
from pathlib import Path
from typing import Any

import bench

LORA = dict(r=16, alpha=32, dropout=0.0, bias="none", targets=("all-linear",))
MULTIPROCESSORS = {"NVIDIA H200": 132}  # of the cards that records were made on
MARKER_BYTES = 100_001  # an odd size that no tensor has: its allocation marks the beginning of a part
# Name: model, layers, rows, columns, loss chunk, recomputed layers, micro-batches, whether the step is a run's first,
# and what the plan has besides the defaults below.
CASES: dict[str, tuple[str, int, int, int, int, int, int, bool, dict[str, Any]]] = {
    "llama-8b-nf4-lora": ("meta-llama/Llama-3.1-8B", 3, 1, 512, 128, 2, 1, False, dict(base_format="nf4")),
    "llama-8b-nf4-lora-kept": ("meta-llama/Llama-3.1-8B", 3, 2, 300, 256, 0, 2, False, dict(base_format="nf4")),
    "qwen3-0.6b-lora": ("Qwen/Qwen3-0.6B", 3, 2, 512, 256, 1, 1, False, {}),
    "qwen3-0.6b-full": ("Qwen/Qwen3-0.6B", 3, 1, 512, 128, 3, 2, False, dict(method="full")),
    "gemma-2-2b-lora": ("google/gemma-2-2b", 4, 1, 512, 128, 2, 1, False, {}),
    "gemma-3-1b-lora-int8": ("google/gemma-3-1b-it", 3, 2, 256, 128, 3, 1, False, dict(base_format="int8")),
    "qwen3-30b-a3b-nf4-lora": ("Qwen/Qwen3-30B-A3B", 2, 1, 256, 128, 2, 1, False, dict(base_format="nf4")),
    "qwen2.5-7b-first-step-8bit": (
        "Qwen/Qwen2.5-7B", 2, 1, 256, 256, 2, 1, True, dict(optimizer="adamw8bit", clip=0.0),
    ),
    "qwen3-0.6b-first-step": ("Qwen/Qwen3-0.6B", 2, 1, 256, 128, 2, 1, True, {}),
}  # fmt: skip


def plan_of(name: str) -> Any:
    """The plan of a case."""
    from fitune.plan import Adapter, Plan

    model, num_layers, rows, columns, chunk, recompute, micro_batches, _, changes = CASES[name]
    values: dict[str, Any] = dict(
        model=f"random:{model}", num_layers=num_layers, method="lora", base_format="bf16", double_quant=True,
        adapter=Adapter(**LORA), device="cuda", device_name="", precision="bf16", loss_scaling=False,
        embedding_place="device", attention="flash", seq_len=columns, batch=rows * micro_batches, micro_batch=rows,
        accumulation_order="micro-batch-major", packing=False, recompute_layers=recompute, loss_chunk=chunk,
        optimizer="adamw", lr=1e-4, schedule="constant", warmup=0.0, weight_decay=0.0, clip=1.0, seed=0,
        budget_bytes=None,
    )  # fmt: skip
    values |= changes
    if values["method"] == "full":
        values["adapter"] = None
    return Plan(**values)


def config_of(name: str) -> Any:
    """The model's configuration with the case's number of layers."""
    from fitune.model.source import resolve

    config = resolve(CASES[name][0], weights=False).config
    config.num_hidden_layers = CASES[name][1]
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(config, key, None):
            setattr(config, key, list(getattr(config, key))[: config.num_hidden_layers])
    return config


def predicted(name: str) -> list[tuple[str, int, list[Any]]]:
    """(part, layer, events) in order, from a trace on `meta` of the case as it is."""
    from contextlib import nullcontext
    from itertools import groupby

    from fitune.memory.dry import DryRun, Rows
    from fitune.memory.trace import events_of

    _, _, rows, columns, chunk, recompute, micro_batches, first, _ = CASES[name]
    dry = DryRun(config_of(name), plan_of(name))
    dry.engine.driver.casts = [nullcontext()] * len(dry.built.layers)  # (5)
    batches = [Rows(rows, columns)] * micro_batches
    follower = dry.step(batches, loss_chunk=chunk, recompute_layers=recompute, first_step=first)
    events = events_of(follower, dry.built.layers_prefix)
    return [(part, layer, list(found)) for (part, layer), found in groupby(events, lambda e: (e.part, e.layer))]


# What a trace on meta leaves out, exactly. Both kinds live within one op and depend on the card's number of
# multiprocessors: (1) FlashAttention's forward pass of a job that is too small to fill the card splits the keys and has
# fp32 results per split; (2) a reduction over so few rows that several blocks share one has a partial result per block
# and a counter per row (here: the loss's maximum and sum over the vocabulary).
#
# And what differs between versions of the libraries, where a record was made with others than those that predict it:
# (3) in transformers 5.17 the positions in fp32 live until rotary tables are made, in 5.24 until they are multiplied.
#
# And (4) the order of deaths with no birth between them: which of a function's variables goes first at its end changes
# with its source, and these records are older than the engine's `backward_layer`.
#
# And (5) these records are older than `model.casts`, which rounds all adapters of a layer at once: the prediction
# rounds each at each use, as they did. To be left out with the next record.
_SPLIT_BLOCK = 64  # queries per block of the split kernel


def num_splits(batch_heads: int, num_columns: int, head_size: int, multiprocessors: int) -> int:
    """Into how many pieces FlashAttention 2 splits the keys in its forward pass (`num_splits_heuristic`)."""
    blocks = batch_heads * -(-num_columns // _SPLIT_BLOCK)
    if blocks >= 0.8 * multiprocessors:
        return 1
    key_blocks = -(-num_columns // (256 if head_size <= 64 else 128 if head_size <= 128 else 64))
    possible = [n for n in range(1, min(128, multiprocessors, key_blocks) + 1)
                if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))]  # fmt: skip
    full = {n: blocks * n / multiprocessors / -(-blocks * n // multiprocessors) for n in possible}
    return next(n for n in possible if full[n] >= 0.85 * max(full.values()))


def without_scratch(case: dict[str, Any], config: Any) -> list[dict[str, Any]]:
    """The recorded parts without (1) and (2)."""
    _, _, rows, columns, chunk, *_ = case["case"]
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None)
    size = size or config.hidden_size // heads
    splits = num_splits(rows * heads, columns, size, MULTIPROCESSORS[case["gpu"]["name"]])
    sums = splits * rows * heads * columns * 4
    split = (sums, sums * size) if splits > 1 else None
    targets = rows * (columns - 1)
    tokens = {chunk, targets % chunk} - {0}
    found = []
    for part in joined(case["parts"]):
        events, gone = part["events"], set()
        for (a, x), (b, y) in itertools.pairwise(events):
            if part["part"] == "tail" and any(y == 4 * n and x % y == 0 and x > y for n in tokens):
                at = next(i for i, event in enumerate(events) if event[0] == a)
                if [e[1] for e in events[at : at + 4]] == [x, y, -y, -x]:
                    gone |= {a, b}
            elif part["part"] in ("forward", "backward") and (x, y) == split:
                gone |= {a, b}
        kept = [i for i, event in enumerate(events) if event[0] not in gone]
        frames = [part["frames"][i] for i in kept] if part["frames"] else []
        found.append(part | {"events": [events[i] for i in kept], "frames": frames})
    return found


def without_positions(recorded: list[dict[str, Any]], said: list[tuple[str, int, list[Any]]]) -> tuple[Any, Any]:
    """Both lists without (3), the deaths of the positions in fp32."""
    gpu, meta = [], []
    for part, (name, layer, events) in zip(recorded, said, strict=True):
        if name in ("embed", "tail"):
            births = [event for event in events if event.num_bytes > 0]
            places = {i for i, e in enumerate(births) if e.label.startswith("copy ") and e.label.endswith("x1 fp32")}
            on_gpu = [block for block, num_bytes in part["events"] if num_bytes > 0]
            moved = {on_gpu[i] for i in places if i < len(on_gpu)}
            part = part | {"events": [e for e in part["events"] if e[1] > 0 or e[0] not in moved]}
            blocks = {births[i].block for i in places}
            events = [e for e in events if e.num_bytes > 0 or e.block not in blocks]
        gpu.append(part)
        meta.append((name, layer, events))
    return gpu, meta


def compared(case: dict[str, Any], said: list[tuple[str, int, list[Any]]], frames: bool = False) -> list[str]:
    """What differs between a record and its prediction by the libraries that are installed, but for (1) to (5)."""
    import transformers

    recorded = without_scratch(case, config_of(case["name"]))
    if case["versions"]["transformers"] != transformers.__version__ and len(recorded) == len(said):
        recorded, said = without_positions(recorded, said)
    gpu = numbered([[tuple(e) for e in part["events"]] for part in recorded])
    meta = numbered([[(e.block, e.num_bytes) for e in events] for _, _, events in said])
    if [settled(events) for events in gpu] == [settled(events) for events in meta]:
        return []
    return differences(recorded, said, frames)


def settled(events: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Deaths with no birth between them, by block."""
    found: list[tuple[int, int]] = []
    for event in events:
        found.append(event)
        if event[1] < 0:
            start = len(found) - 1
            while start > 0 and found[start - 1][1] < 0 and found[start - 1] > event:
                start -= 1
            found.insert(start, found.pop())
    return found


def numbered(parts: list[list[Any]]) -> list[list[tuple[int, int]]]:
    """Events of each part as (block by order of birth, signed bytes): the same for equal programs, whoever noted it."""
    order: dict[int, int] = {}
    found = []
    for events in parts:
        made = []
        for block, num_bytes in events:
            if num_bytes > 0:
                order[block] = len(order)
            made.append((order.get(block, -1), num_bytes))
        found.append(made)
    return found


def differences(recorded: list[dict[str, Any]], said: list[tuple[str, int, list[Any]]], frames: bool) -> list[str]:
    """Sentences about what differs; none when both lists are equal, blocks' identities included."""
    gpu = [[tuple(e) for e in part["events"]] for part in recorded]
    meta = [[(e.block, e.num_bytes) for e in events] for _, _, events in said]
    if numbered(gpu) == numbered(meta):
        return []
    found = []
    if len(gpu) != len(meta):
        names = [(part["part"], part["layer"]) for part in recorded]
        found.append(f"parts differ: on the GPU {names}, on meta {[(p, layer) for p, layer, _ in said]}")
    for part, ours, mine in zip(recorded, gpu, said, strict=False):
        theirs = [(e.block, e.num_bytes) for e in mine[2]]
        matcher = difflib.SequenceMatcher(None, [n for _, n in ours], [n for _, n in theirs], autojunk=False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag == "equal":
                continue
            where = f"{part['part']} {part['layer']}, event {a} of {len(ours)}"
            found.append(f"{where}: on the GPU {[n for _, n in ours[a:b]]}, on meta {_said(mine[2][c:d])}")
            before = _said(mine[2][max(0, c - 3) : c])
            found.append(f"      after {before}")
            if frames and part.get("frames"):
                found += [f"      {ours[i][1]:+} at {part['frames'][i]}" for i in range(a, min(b, a + 8))]
    return found or ["the same sizes in the same order, but other blocks die"]


def _said(events: list[Any]) -> list[str]:
    return [f"{e.num_bytes:+} {e.label}" for e in events]


def record(name: str, frames: bool) -> dict[str, Any]:
    """Runs a case and notes what the allocator did, per part of the step."""
    import torch

    from fitune.engine.optimizers import build_optimizer
    from fitune.memory.dry import Rows

    _, _, rows, columns, _, _, micro_batches, first, _ = CASES[name]
    engine = _engine(name)
    batches = [Rows(rows, columns)] * micro_batches
    steps = 2
    for step in range(steps):
        engine.step(batches, step=step, lr=1e-4)
    if first:
        plan, parameters = plan_of(name), list(engine.masters.parameters())
        engine.optimizer = build_optimizer(plan.optimizer, parameters, lr=1e-4, weight_decay=0.0)
    torch.cuda.synchronize()
    parts: list[tuple[str, int]] = [("start", -1)]

    def observe(part: str, index: int) -> None:
        parts.append((part, index))
        torch.empty(MARKER_BYTES + 2 * (len(parts) - 1), dtype=torch.uint8, device="cuda")

    stacks = dict(context="all" if frames else None, stacks="python")
    torch.cuda.memory._record_memory_history("all", max_entries=1_000_000, **stacks)
    engine.step(batches, step=steps, lr=1e-4, observe=observe)
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    return {**bench.header(name), "case": list(CASES[name]), "parts": _cut(trace, parts)}


def _cut(trace: list[dict[str, Any]], parts: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Allocator's entries as parts of (block, signed bytes requested); -1 for blocks from before."""
    markers = {MARKER_BYTES + 2 * i: i for i in range(1, len(parts))}
    found: list[dict[str, Any]] = [{"part": p, "layer": i, "events": [], "frames": []} for p, i in parts]
    here, count, next_marker = found[0], 0, 1
    alive: dict[int, tuple[int, int]] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            if markers.get(entry["size"]) == next_marker:
                here, next_marker = found[next_marker], next_marker + 1
                alive[entry["addr"]] = (-2, 0)
                continue
            alive[entry["addr"]] = (count, entry["size"])
            here["events"].append([count, entry["size"]])
            count += 1
        elif entry["action"] == "free_requested":
            block, size = alive.pop(entry["addr"], (-1, entry["size"]))
            if block == -2:
                continue
            here["events"].append([block, -size])
        else:
            continue
        here["frames"].append(_frame(entry.get("frames") or []))
    return found


def _frame(frames: list[dict[str, Any]]) -> str:
    """The innermost lines of fitune and what called the allocator."""
    shown = [f"{Path(f['filename']).name}:{f['line']}" for f in frames if f["filename"].endswith(".py")]
    return " < ".join(shown[:5])


def joined(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recorded parts as the prediction has them: the mean of the losses, taken before the update, belongs to it."""
    parts = [dict(part, events=list(part["events"]), frames=list(part.get("frames") or [])) for part in recorded]
    update = next(i for i, part in enumerate(parts) if part["part"] == "optimizer")
    last = parts[update - 1]
    for key in ("events", "frames"):
        parts[update][key] = last[key][-2:] + parts[update][key]
        last[key] = last[key][:-2]
    for part in parts:
        part["layer"] = part["layer"] if part["part"] in ("stash", "forward", "backward") else -1
    return parts


def _engine(name: str) -> Any:
    import dataclasses

    from fitune.engine.engine import Engine
    from fitune.model.source import resolve

    plan = plan_of(name)
    source = dataclasses.replace(resolve(plan.model, weights=True), config=config_of(name))
    return Engine(bench.filled(source, plan), plan)


def show(result: dict[str, Any], frames: bool, most: int) -> None:
    """One line per case, and what differs."""
    if "error" in result:
        print(f"{result['name']}: ERROR\n{result['error']}", flush=True)
        return
    try:
        said = predicted(result["name"])
        found = compared(result, said, frames)
    except Exception as error:  # noqa: BLE001  (what was recorded is kept)
        print(f"{result['name']}: no comparison\n{''.join(traceback.format_exception(error))[-3000:]}", flush=True)
        return
    count = sum(len(part["events"]) for part in result["parts"])
    verdict = "equal" if not found else f"{sum(not line.startswith(' ') for line in found)} differences"
    print(f"{result['name']}: {count} events on the GPU, {sum(len(e) for _, _, e in said)} on meta: {verdict}")
    for line in found[:most]:
        print(f"  {line[:600]}")
    print(end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/events.json.gz"))
    parser.add_argument("--frames", action="store_true", help="show where differing allocations come from")
    parser.add_argument("--most", type=int, default=30, help="lines of differences shown per case")
    args = parser.parse_args()
    bench.import_before_forks()
    recorded = []
    for name in args.cases:
        started = time.time()
        recorded.append(bench.forked_record(name, lambda name=name: record(name, args.frames)))
        print(f"recorded {name} [{time.time() - started:.0f} s]", flush=True)
    results = [
        {**result, "parts": [{k: p[k] for k in ("part", "layer", "events")} for p in result["parts"]]}
        for result in recorded
        if "error" not in result
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(args.out, "wb", mtime=0) as file:
        file.write(json.dumps(results, separators=(",", ":")).encode())
    print(f"{args.out}: {len(results)} cases, {args.out.stat().st_size} bytes")
    for result in recorded:  # only now: a prediction may start CUDA, after which no fork can use it
        show(result, args.frames, args.most)


if __name__ == "__main__":
    main()
