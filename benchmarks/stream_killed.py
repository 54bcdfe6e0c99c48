"""The case of `stream.py` that is killed: training from the disk in little host memory ends in the middle of a step by
SIGKILL, goes on from its last checkpoint, and comes to the bits of a run that was left alone.

Three processes, each with the case's host memory and nothing of the weights in the page cache: a whole run; the same
one, which kills itself while a step's weights are on their way; and that one resumed. All by `fitune.train.run`, with
deterministic kernels and a checkpoint after every step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
from bench import GIB
from stream_cases import Case
from stream_limits import leave_ram, sweep

KILLED_IN = 2  # the step, of
STEPS = 3
_COMPARED = ("losses", "gradient_norms", "adapter_sha256")
_TINY_RAM_BYTES = 4 * GIB
_TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)


def measure(name: str, case: Case, tiny: bool) -> dict[str, Any]:
    """The record: both runs' losses, whether all bits are the same, memory and speed of the run that was left alone."""
    import fitune.data.dataset  # read once, for all that are forked
    import fitune.model.loading
    import fitune.planner.make
    import fitune.train.loop  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="stream-killed-") as made:
        root = Path(made)
        job = _Job(case, root, tiny)
        whole = job.train("whole")
        killed = job.train("killed", kills=True)
        kept = _steps(root / "killed")
        resumed = job.train("killed", resumes=True)
        sweep()
        for what, record in (("whole", whole), ("resumed", resumed)):
            if "error" in record:
                return record | {"error": f"{what}: {record['error']}"}
        if "exit code -9" not in killed.get("error", ""):
            return {"name": name, "error": f"it was not killed in step {KILLED_IN}: {killed}"}
        return {
            **bench.header(name),
            "model": case.recipe["model"] if not tiny else "tiny",
            "job": whole["job"],
            "recipe": whole["recipe"],
            "plan": whole["plan"],
            "why": case.why,
            "acceptance": case.acceptance,
            "ram_left": whole["ram_left"],
            "killed": {"in_step": KILLED_IN, "steps_before": kept, "resumed_from": resumed["resumed_from"]},
            "bit_identical": {key: whole[key] == resumed[key] for key in _COMPARED},
            "losses": [whole["losses"], resumed["losses"]],
            "link": whole["link"],
            "measured": whole["measured"],
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Job:
    case: Case
    root: Path
    tiny: bool

    def train(self, run: str, *, kills: bool = False, resumes: bool = False) -> dict[str, Any]:
        """What one process comes to; of one that was killed bench's record of a death."""
        sweep()
        return bench.forked_record(run, lambda: self._train(run, kills, resumes))

    def _train(self, run: str, kills: bool, resumes: bool) -> dict[str, Any]:
        import torch

        from fitune import recipe as recipes
        from fitune.model.cache import cache_dir
        from fitune.train import run as train

        _drop_cached(cache_dir() / "streamed")
        limit = _TINY_RAM_BYTES if self.tiny else self.case.ram_bytes
        limited = leave_ram(limit, fill=not self.tiny) if limit else None
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        recipe = recipes.build(self._recipe(self.root / run))
        self._plan_as_the_case()
        if kills:
            _kill_in_step(KILLED_IN)
        result = train(recipe, resume=self.root / run if resumes else None)
        assert result.status == "done", result
        return _come_to(self.root / run) | {"recipe": recipe.as_dict(), "ram_left": limited}

    def _recipe(self, out: Path) -> dict[str, Any]:
        values = dict(self.case.recipe) | dict(
            data=str(_rows(self.root / "rows.jsonl")), out=str(out), steps=STEPS, save_every=1, eval_share=0,
            schedule="constant", warmup=0,
        )  # fmt: skip
        if not self.tiny:
            return values
        return values | dict(model=str(_tiny_model(self.root / "tiny")), devices="cpu", seq_len=64, base_format="auto")

    def _plan_as_the_case(self) -> None:
        """Every plan of this process has the case's changes, whatever would be faster here."""
        from fitune.train import session

        plan_session: Callable[..., Any] = session.plan_session

        def planned(*args: Any, **how: Any) -> Any:
            result = plan_session(*args, **how)
            changes = self.case.changes | ({"loss_chunk": 32} if self.tiny else {})
            plan = result.plan.with_(micro_batch=1, recompute_layers=result.plan.num_layers, predicted={}, **changes)
            return dataclasses.replace(result, plan=plan, fits=True)

        session.plan_session = planned
        session.techniques_of = lambda *_: []  # what each technique would save: traces that nobody asks for here


def _kill_in_step(number: int) -> None:
    """This process kills itself once most of the layers of step `number` have been fetched."""
    from fitune.engine.engine import Engine
    from fitune.engine.ring import Ring

    step, fetch = Engine.step, Ring._fetch
    left = [-1]

    def counted_step(self: Any, *args: Any, **how: Any) -> Any:
        left[0] = self.plan.num_layers - 1 if how["step"] == number - 1 else -1
        return step(self, *args, **how)

    def counted_fetch(self: Any, item: Any, slot: Any) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        fetch(self, item, slot)

    Engine.step, Ring._fetch = counted_step, counted_fetch  # type: ignore[method-assign]


def _come_to(path: Path) -> dict[str, Any]:
    """A finished run's figures from its folder."""
    from fitune.train.link_sums import link_fields
    from fitune.train.report_memory import FIELDS, measured_peaks
    from fitune.train.run_folder import RunFolder

    folder = RunFolder(path)
    events, plan = folder.events(), folder.plan_values()
    steps = [e for e in events if e["event"] == "step"]
    starts = [e for e in events if e["event"] == "start"]
    phases = measured_peaks(events)
    step_s = statistics.median(e["step_s"] for e in steps[1:])
    job = {key: plan[key] for key in ("batch", "micro_batch", "seq_len", "num_layers")}
    return {
        "plan": plan,
        "job": job,
        "resumed_from": starts[-1]["resumed_from"],
        "losses": [e["loss"] for e in steps],
        "gradient_norms": [e["grad_norm"] for e in steps],
        "adapter_sha256": hashlib.sha256((folder.adapter_path / "adapter_model.safetensors").read_bytes()).hexdigest(),
        "link": link_fields(steps),
        "measured": {key: max((p[key] or 0) for p in phases.values()) for key in FIELDS}
        | {"step_s": step_s, "tokens_per_s": statistics.median(e["tokens"] for e in steps) / step_s, "phases": phases},
    }


def _steps(run: Path) -> int:
    """Steps that a run has recorded."""
    from fitune.train.events import read_events

    return sum(1 for event in read_events(run / "events.jsonl") if event["event"] == "step")


def _rows(path: Path) -> Path:
    """Sixteen texts, each longer than any sequence length here."""
    rows = [" ".join(str((7 * i + 3 * j * j) % 1000) for j in range(2500)) for i in range(16)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return path


def _tiny_model(path: Path) -> Path:
    """A random Llama of four narrow layers with the tokenizer of the bundled model."""
    if path.exists():
        return path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fitune.model.source import resolve

    tokenizer = resolve("smollm2").tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(**_TINY, vocab_size=len(tokenizer), tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _drop_cached(folder: Path) -> None:
    """Nothing of the packed files is left in the page cache: it would be memory that the limit does not see."""
    for path in folder.rglob("*") if hasattr(os, "posix_fadvise") else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row(record: dict[str, Any]) -> str:
    """What a person reads of the record."""
    same, measured, link, killed = (record[key] for key in ("bit_identical", "measured", "link", "killed"))
    verdict = "same bits" if all(same.values()) else f"DIFFERENT {', '.join(k for k, v in same.items() if not v)}"
    return (
        f"{record['name']:40} killed in step {killed['in_step']}, resumed after {killed['resumed_from']}: {verdict}"
        f"  losses {record['losses']}\n    {measured['tokens_per_s']:.0f} tok/s, step {measured['step_s']:.2f} s, "
        f"allocated {measured['peak_allocated_bytes'] / GIB:.3f} GiB, host {measured['host_bytes'] / GIB:.3f} GiB, "
        f"{link['link_bytes'] / 1e9:.2f} GB at {(link['link_bytes_per_s'] or 0) / 1e9:.2f} GB/s, "
        f"waits {link['link_wait_share'] * 100:.1f} %  {record['ram_left']}"
    )
