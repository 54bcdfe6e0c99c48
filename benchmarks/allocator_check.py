"""Hold `fitune.memory.allocator` to what torch's own allocator does on this GPU.

    python benchmarks/allocator_check.py [--out benchmarks/results/allocator-NAME.json]

About a minute. Every case runs with and without expandable segments (each mode, and every training, in a forked process
of its own), free and below caps:

- random lists of births and deaths (`torch.empty`), of sizes log-uniform or such as layers of a model have;
- a real training (load and four steps of a model of random weights): torch records its own allocations, and the list
  of them is replayed on the model;
- planned runs of catalog models (load, first step, two steps), whose events the real allocator is made to follow.

Reserved and allocated bytes are compared along the way, not only their peaks, and so are retries and the request that
fails. The file keeps the lists, so that `tests/memory/test_allocator.py` replays them without a GPU.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench

from fitune.memory.allocator import CachingAllocator, OutOfMemory

MIB = 1024**2
EVERY = 50  # entries of a list between two readings
COUNT = 2400  # entries of a random list
# A list: a positive number is the birth of a block of that many bytes, -n - 1 the death of the n-th block born.
List = list[int]


def random_list(kind: str, seed: int, count: int = COUNT) -> List:
    """Births and deaths: `mixed` sizes are log-uniform from 64 bytes to 64 MiB and die at random; `layers` repeats a
    few shapes at a length that changes from pass to pass, and frees most of them last in, first out."""
    rng = random.Random(f"{kind} {seed}")
    made: List = []
    living: list[int] = []
    births, length = 0, 1024
    while len(made) < count:
        if kind == "layers" and rng.random() < 0.01:
            length = rng.randrange(256, 2048, 8)
        if living and rng.random() < (0.5 if len(living) < 150 else 0.7):
            last = kind == "layers" and rng.random() < 0.8
            made.append(-living.pop(-1 if last else rng.randrange(len(living))) - 1)
            continue
        if kind == "mixed":
            size = int(2 ** rng.uniform(6, 26))
        else:
            size = length * rng.choice([1, 4, 2048, 4096, 4096, 4096, 8192, 11264, 22528]) + rng.choice([0, 0, 8])
        made.append(size)
        living.append(births)
        births += 1
    return made


def replayed(made: Sequence[int], streams: dict[int, int], every: int = EVERY, **arguments: Any) -> dict[str, Any]:
    """What the model does with a list, in the form in which `drive` and `train` report the GPU's allocator."""
    allocator = CachingAllocator(**arguments)
    births, readings, failed = 0, [], None
    for position, entry in enumerate(made):
        if entry < 0:
            allocator.free(-entry - 1)
        else:
            try:
                allocator.allocate(births, entry, streams.get(births, 0))
            except OutOfMemory:
                failed = position
                break
            births += 1
        if position % every == every - 1:
            readings.append([allocator.allocated_bytes, allocator.reserved_bytes])
    return {
        "peak_allocated_bytes": allocator.peak_allocated_bytes, "peak_reserved_bytes": allocator.peak_reserved_bytes,
        "num_retries": allocator.num_retries, "oom_at": failed, "readings": readings,
    }  # fmt: skip


def drive(made: Sequence[int], every: int) -> dict[str, Any]:
    """The same with the GPU's allocator."""
    import torch

    tensors: dict[int, Any] = {}
    births, readings, failed = 0, [], None
    for position, entry in enumerate(made):
        if entry < 0:
            del tensors[-entry - 1]
        else:
            try:
                tensors[births] = torch.empty(entry, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                failed = position
                break
            births += 1
        if position % every == every - 1:
            readings.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
    return _stats() | {"oom_at": failed, "readings": readings}


def _stats() -> dict[str, Any]:
    import torch

    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "num_retries": stats["num_alloc_retries"],
    }


def train(base_format: str) -> tuple[List, dict[int, int], dict[str, Any]]:
    """(list, streams of blocks that are not on the first one, what the GPU's allocator did): load and four steps."""
    import torch

    from fitune.train.tiny import tiny_engine, tiny_step

    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=1_000_000)
    try:
        engine = tiny_engine(0, base_format=base_format, num_layers=4, hidden_size=2048, vocab_size=32_000, batch=2,
                             seq_len=1024)  # fmt: skip
        for step in range(4):
            tiny_step(engine, step)
    except torch.OutOfMemoryError:
        pass
    torch.cuda.synchronize()
    done = _stats()
    (trace,) = (entries for entries in torch.cuda.memory._snapshot()["device_traces"] if entries)
    torch.cuda.memory._record_memory_history(enabled=None)
    made, streams, readings, failed = _from_trace(trace)
    return made, streams, done | {"oom_at": failed, "readings": readings}


def _from_trace(trace: list[dict[str, Any]]) -> tuple[List, dict[int, int], list[list[int]], int | None]:
    """A list from torch's own record. Bytes allocated are counted from it as torch counts them where nothing is kept
    whole, which holds for expandable segments; elsewhere they are left at -1."""
    made: List = []
    streams: dict[int, int] = {}
    numbers: dict[int, int] = {}
    readings, failed, births, reserved = [], None, 0, 0
    first = next((entry["stream"] for entry in trace if entry["action"] == "alloc"), 0)
    others: dict[int, int] = {}
    for entry in trace:
        action, size = entry["action"], entry["size"]
        if action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        elif action == "oom":
            failed = len(made)
            made.append(size)
            break
        elif action in ("alloc", "free_completed"):
            if action == "alloc":
                numbers[entry["addr"]] = births
                if entry["stream"] != first:
                    streams[births] = others.setdefault(entry["stream"], len(others) + 1)
                births += 1
                made.append(size)
            else:
                made.append(-numbers.pop(entry["addr"]) - 1)
            if len(made) % EVERY == 0:
                readings.append([-1, reserved])
    return made, streams, readings, failed


PLANNED = {
    "qwen3-0.6b": dict(model="Qwen/Qwen3-0.6B", method="lora", batch=2, seq_len=1024, recompute="14"),
    "llama-8b-nf4": dict(model="meta-llama/Llama-3.1-8B", method="qlora", batch=2, micro_batch=1, seq_len=2048,
                         recompute="all"),
}  # fmt: skip


def planned(settings: dict[str, Any]) -> List:
    """Load, the first step and two more, as fitune predicts them for an H200."""
    from fitune import recipe as recipes
    from fitune.memory.known import tracer_for
    from fitune.planner import make_plan
    from fitune.planner.context import config_of

    recipe = recipes.build(settings | {"gpu": "h200"})
    config = config_of(recipe, [])
    plan = make_plan(recipe, config=config).plan
    tracer = tracer_for(config, plan)
    shape = (plan.micro_batch, plan.seq_len, plan.loss_chunk)
    how = {"recompute_layers": plan.recompute_layers, "accumulates": plan.micro_batch < plan.batch}
    first, later = (tracer.step_events(*shape, first_step=first, **how) for first in (True, False))
    made: List = []
    births = 0
    for number, events in enumerate((first, later, later)):
        names: dict[int, int] = {}
        for event in events:
            if event.part == "load" and number > 0 or not event.num_bytes:
                continue
            if event.num_bytes > 0:
                names[event.block] = births
                births += 1
                made.append(event.num_bytes)
            else:
                made.append(-names[event.block] - 1)
    return made


def driven(jobs: list[dict[str, Any]], send: bench.Send) -> None:
    """Every random or planned list of one mode, in one process: the allocator is empty before each."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    for job in jobs:
        limit = _set_limits(job, total)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        assert torch.cuda.memory_reserved() == 0
        real = drive(job["entries"], job["every"])
        real["num_retries"] -= before
        model = replayed(job["entries"], {}, job["every"], expandable=job["expandable"], limit_bytes=limit,
                         total_bytes=total)  # fmt: skip
        send({**bench.header(job["name"]), **job, "limit_bytes": limit, "streams": {}, "real": real, "model": model})


def trained(job: dict[str, Any], send: bench.Send) -> None:
    """One real training."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    limit = _set_limits(job, total)
    made, streams, real = train(job["list"].split("-")[1])
    model = replayed(made, streams, EVERY, expandable=job["expandable"], limit_bytes=limit, total_bytes=total)
    send({**bench.header(job["name"]), **job, "limit_bytes": limit, "streams": streams, "entries": made, "real": real,
               "model": model, "every": EVERY})  # fmt: skip


def _set_limits(job: dict[str, Any], total: int) -> int | None:
    """The allocator's mode and its limit, of which the bytes are returned."""
    import torch

    if job["expandable"]:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    fraction = 1.0 if job["cap_bytes"] is None else job["cap_bytes"] / total
    torch.cuda.set_per_process_memory_fraction(fraction, 0)
    return None if job["cap_bytes"] is None else int(fraction * total)


def list_jobs(lists: dict[str, List], expandable: bool) -> list[dict[str, Any]]:
    """Lists that are driven; caps follow from what the model says of each without one."""
    found = []
    for name, made in lists.items():
        every = max(EVERY, len(made) // 80)
        free = replayed(made, {}, every, expandable=expandable)
        allocated, reserved = free["peak_allocated_bytes"], free["peak_reserved_bytes"]
        caps = {"free": None, "tight": allocated + (reserved - allocated) // 3, "short": int(allocated * 0.97)}
        mode = "expandable" if expandable else "plain"
        for word, cap in caps.items():
            found.append(dict(name=f"{name}-{mode}-{word}", list=name, expandable=expandable, cap_bytes=cap,
                              entries=made, every=every))  # fmt: skip
    return found


def training_jobs() -> Iterator[dict[str, Any]]:
    for base_format in ("nf4", "bf16"):
        for expandable in (True, False):
            mode = "expandable" if expandable else "plain"
            yield dict(name=f"training-{base_format}-{mode}-free", list=f"training-{base_format}",
                       expandable=expandable, cap_bytes=None)  # fmt: skip


def follow_up(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A real training again, below caps at which it meets pressure."""
    if "error" not in record and record["list"].startswith("training") and record["cap_bytes"] is None:
        allocated, reserved = (record["real"][f"peak_{what}_bytes"] for what in ("allocated", "reserved"))
        caps = {"tight": allocated + max(8 * MIB, (reserved - allocated) // 3), "short": int(allocated * 0.95)}
        for word, cap in caps.items():
            name = record["name"].replace("-free", f"-{word}")
            yield {key: record[key] for key in ("list", "expandable")} | {"name": name, "cap_bytes": cap}


def send_planned(settings: dict[str, dict[str, Any]], send: bench.Send) -> None:
    """Made in a process of its own: a trace may import bitsandbytes, which starts CUDA."""
    for name, values in settings.items():
        send({"name": f"planned-{name}", "entries": planned(values)})


def difference(record: dict[str, Any]) -> float:
    """The largest relative error of reserved bytes, of all readings and the peak."""
    real, model = record["real"], record["model"]
    pairs = [(m[1], r[1]) for m, r in zip(model["readings"], real["readings"], strict=False)]
    pairs.append((model["peak_reserved_bytes"], real["peak_reserved_bytes"]))
    return max(abs(m / r - 1) if r else float(m > 0) for m, r in pairs)


def row(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"{record['name']:32} {record['error'][:160]}\n{record.get('traceback', '')}"
    real, model = record["real"], record["model"]

    def cells(side: dict[str, Any]) -> str:
        end = "-" if side["oom_at"] is None else f"oom@{side['oom_at']}"
        peaks = [side[f"peak_{what}_bytes"] / MIB for what in ("allocated", "reserved")]
        return f"{peaks[0]:9.1f} {peaks[1]:9.1f} {side['num_retries']:3d} {end:>9}"

    worst = difference(record)
    return f"{record['name']:32} real {cells(real)}   model {cells(model)}   worst {worst:8.3%}"


def packed(made: List) -> str:
    """A list as text a tenth as long."""
    return base64.b64encode(zlib.compress(json.dumps(made).encode(), 9)).decode()


def unpacked(text: str) -> List:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def save(out: Path, records: list[dict[str, Any]]) -> None:
    """Lists once, cases without theirs; the lists of trainings are each their own."""
    lists: dict[str, str] = {}
    cases = []
    for record in records:
        own = record["name"] if record["list"].startswith("training") else record["list"]
        if own not in lists:
            lists[own] = packed(record["entries"])
        cases.append({key: value for key, value in record.items() if key not in ("entries", "model")} | {"list": own})
    values = [{"name": f"list {name}", "entries": text} for name, text in lists.items()] + cases
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("[\n" + ",\n".join(json.dumps(value) for value in values) + "\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/allocator-gpu.json"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    bench.import_before_forks()
    started = time.time()
    lists = {f"{kind}-{seed}": random_list(kind, seed) for kind in ("mixed", "layers") for seed in (1, 2)}
    records: list[dict[str, Any]] = []

    def take(record: dict[str, Any]) -> None:
        records.append(record)
        print(row(record), flush=True)

    for made in bench.forked("planned", lambda send: send_planned(PLANNED, send)):
        if "error" in made:
            take(made)
        else:
            lists[made["name"]] = made["entries"]
    for expandable in (True, False):
        jobs = [j for j in list_jobs(lists, expandable) if args.only in j["name"]]
        for record in bench.forked("lists", lambda send, jobs=jobs: driven(jobs, send)):
            take(record)
    waiting = [job for job in training_jobs() if args.only in job["name"]]
    while waiting:
        job = waiting.pop(0)
        for record in bench.forked(job["name"], lambda send, job=job: trained(job, send)):
            take(record)
            waiting += follow_up(record)
    good = [record for record in records if "error" not in record]
    save(args.out, good)
    errors = [difference(record) for record in good]
    print(f"{len(records)} cases in {time.time() - started:.0f} s, {sum(e == 0 for e in errors)} exact, worst error of "
          f"reserved bytes {max(errors, default=0):.3%}, {len(records) - len(good)} failed")  # fmt: skip
    return int(len(good) < len(records))


if __name__ == "__main__":
    sys.exit(main())
