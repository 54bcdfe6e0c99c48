"""What the measuring scripts share: a process per case, the head of a record, a filled model, full batches, files."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import platform
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

GIB = 1024**3
LLAMA_8B = "random:meta-llama/Llama-3.1-8B"
Record = dict[str, Any]
Send = Callable[[Record], None]


def import_before_forks() -> None:
    """Import once what every forked process needs (not bitsandbytes, which starts CUDA when it is imported)."""
    import torch
    import transformers  # noqa: F401

    import fitune.engine.engine
    import fitune.memory.trace  # noqa: F401

    assert not torch.cuda.is_initialized(), "a forked process cannot use CUDA once its parent does"


def forked(name: str, work: Callable[[Send], None]) -> Iterator[Record]:
    """What `work` sends from a process of its own. An error comes as a record of this name, and ends it."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child() -> None:
        try:
            work(send.send)
        except Exception as error:  # noqa: BLE001  (a failed case is recorded, and the next one runs)
            send.send({"name": name, "error": f"{type(error).__name__}: {error}",
                       "traceback": traceback.format_exc()[-3000:]})  # fmt: skip

    worker = context.Process(target=child)
    worker.start()
    send.close()
    try:
        while True:
            yield receive.recv()
    except EOFError:
        worker.join()
        if worker.exitcode:
            yield {"name": name, "error": f"the process died (exit code {worker.exitcode})"}


def forked_record(name: str, measure: Callable[[], Record]) -> Record:
    """The one record that `measure` gives in a process of its own, which has ended: its memory is free again."""
    records = list(forked(name, lambda send: send(measure())))
    return records[0] if records else {"name": name, "error": "the process said nothing"}


def header(name: str) -> Record:
    """The beginning of a record: on what, with which versions, when."""
    import torch
    import transformers

    import fitune

    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())  # fmt: skip
    versions = {"fitune": fitune.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    if importlib.util.find_spec("bitsandbytes"):  # not imported: that starts CUDA
        versions["bitsandbytes"] = importlib.metadata.version("bitsandbytes")
    return {
        "name": name,
        "gpu": _card() if torch.cuda.is_available() else None,  # None: a dry run
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "host": f"{platform.node()}, {cpu}",
    }  # fmt: skip


def _card() -> Record:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "total_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}"}  # fmt: skip


def filled(source: Any, plan: Any) -> Any:
    """A source's model as a plan has it, with its weights and adapters, on the plan's device."""
    import torch

    from fitune.model.build import add_adapter, build, fill, weights_to_read

    built = build(source.config, plan, plan.device)
    fill(built, source.iter_weights(weights_to_read(built), device=torch.device(plan.device)), plan)
    add_adapter(built, plan)
    return built


def forget(built: Any) -> None:
    """Free what an engine left: only the weights stay, the allocator's cache is empty."""
    import gc

    import torch

    built.context.scratch = None
    for parameter in built.model.parameters():
        parameter.grad = None
    gc.collect()
    if built.device.type == "cuda":
        torch.cuda.empty_cache()


def commit() -> str:
    """The commit of the code that runs."""
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain", "fitune"], capture_output=True, text=True, check=False)
    return (answer.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else "")


def decided(plan: Record) -> Record:
    """A plan's decisions, without what only describes it or the machine that it was made on."""
    said = ("predicted", "reasons", "device_name", "model", "budget_bytes")
    found: Record = json.loads(json.dumps({key: value for key, value in plan.items() if key not in said}))
    return found


def engine_of(recipe: Any, plan: Any) -> Any:
    """An engine over the filled model of a recipe."""
    from fitune.engine.engine import Engine
    from fitune.model.source import resolve

    return Engine(filled(resolve(recipe.model, weights=True), plan), plan)


def full_rows(plan: Any, step: int, vocab_size: int) -> list[Any]:
    """A step's records: full rows of random tokens, every one with a target but the last of its row."""
    from fitune.data.records import Record as DataRecord

    rng = np.random.default_rng(step)
    rows = (rng.integers(5, min(vocab_size, 32_000), plan.seq_len).astype(np.int32) for _ in range(plan.batch))
    return [DataRecord(index, ids, ids.copy()) for index, ids in enumerate(rows)]


def micro_batches(plan: Any, records: list[Any]) -> list[Any]:
    """Records as a plan's micro-batches."""
    from fitune.data.batches import step_batches

    return step_batches(records, micro_batch=plan.micro_batch, packing=False, seq_len=plan.seq_len, pad_id=0)


def batches(plan: Any, step: int, vocab_size: int) -> list[Any]:
    """A step of `full_rows` as micro-batches."""
    return micro_batches(plan, full_rows(plan, step, vocab_size))


def context_bytes() -> int:
    """What this process holds outside torch's allocator on a card that nobody else uses, once cuBLAS is there."""
    import torch

    a = torch.randn(256, 256, device="cuda")
    (a @ a).sum().item()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    del a
    torch.cuda.empty_cache()
    return outside


@dataclasses.dataclass
class Records:
    """The records of a file, written after every one; the last of a name counts."""

    path: Path

    def __post_init__(self) -> None:
        self.records: list[Record] = json.loads(self.path.read_text()) if self.path.exists() else []

    @property
    def names(self) -> set[str]:
        """Of those that did not fail."""
        return {record["name"] for record in self.records if "error" not in record}

    def add(self, record: Record) -> None:
        self.records = [r for r in self.records if r["name"] != record["name"]] + [record]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("[\n" + ",\n".join(json.dumps(r) for r in self.records) + "\n]\n")
