"""Plans run as they are made, at 30 points of cap, model and method that are listed here beforehand.

    python benchmarks/plan_points.py predict          # no GPU needed; the commit stands in every record
    python benchmarks/plan_points.py run merge        # trains, then merges on the CPU
    python benchmarks/plan_points.py sweep
    python benchmarks/plan_points.py table
    python benchmarks/plan_points.py predict run merge sweep table --tiny     # a dry run of everything, on the CPU

A point is what `fitune train random:MODEL --method METHOD --vram CAP` does: the planner decides everything else, on
data whose every record is as long as records can be. `run` makes that very run, in a forked process below the cap (as
the driver counts it): a few steps, evaluations, a checkpoint; `merge` merges the adapters of models up to 8B. Where the
planner said that nothing fits, the smallest plan it knows is run all the same: it has to run out of GPU memory.
`sweep` (`plan_sweep.py`) times the combinations of micro-batch, recomputation and streaming at three of the points: how
far the plan is from the best of them. All of them go on where they were left; names of points may follow. Weights are
random (seeded, made on the GPU). A record has the format of `gpu_records.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import bench
import plan_sweep
from bench import GIB, Record

MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B", "3B": "meta-llama/Llama-3.2-3B", "8B": "meta-llama/Llama-3.1-8B",
    "14B": "Qwen/Qwen3-14B", "32B": "Qwen/Qwen2.5-32B", "70B": "meta-llama/Llama-3.3-70B-Instruct",
}  # fmt: skip
MERGED = ("0.5B", "3B", "8B")
BY_CAP = {
    6: "0.5B-full 3B-auto 8B-qlora 8B-auto 70B-qlora",
    8: "0.5B-lora 3B-lora 8B-lora 14B-qlora 32B-auto",
    10: "0.5B-full 3B-qlora 8B-auto 14B-auto 32B-qlora",
    12: "0.5B-qlora 3B-full 8B-qlora 14B-lora 70B-auto",
    16: "0.5B-auto 3B-lora 8B-full 32B-qlora 70B-full",
    24: "8B-lora 14B-full 14B-auto 32B-lora 70B-qlora",
}
CARD = "h200"
HOST_GIB = 128
TASKS = ("predict", "run", "merge", "sweep", "table")
STEPS, STEPS_S = (2, 12), 8.0  # as many steps as take so long, but from two to twelve: short ones grow faster at first
ROWS = {"train": 32, "eval": 8}
WORDS = ("water", "seven", "green", "house", "river", "under", "light", "stone", "paper", "cloud", "train", "north")
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=49152, max_position_embeddings=256)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """A model and method below a cap; `tiny`: a model of a few layers on the CPU in its place."""

    size: str
    method: str
    cap_gib: int
    tiny: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.size}-{self.method}@{self.cap_gib}"

    def recipe_values(self) -> dict[str, Any]:
        """What a person says: a model, a method, a cap."""
        if self.tiny is None:
            return {"model": f"random:{MODELS[self.size]}", "method": self.method, "vram": float(self.cap_gib)}
        too_little = {"ram": 0.05} if self.method == "full" and self.size != "0.5B" else {}
        return {"model": f"random:{self.tiny}", "method": self.method, "devices": "cpu", "seq_len": 64, **too_little}


def points(tiny: Path | None = None) -> list[Point]:
    """The thirty."""
    return [Point(*word.split("-"), cap, tiny) for cap, words in BY_CAP.items() for word in words.split()]


# ---- predict ---------------------------------------------------------------------------------------------------------


def predict(wanted: list[Point], out: bench.Records, commit: str, host_gib: float) -> None:
    """The plan of every point as this commit makes it, for an H200 in a host of so much RAM."""
    for point in wanted:
        if point.name in out.names:
            continue
        recipe, result = planned(point, machine_of(point, host_gib))
        out.add({"name": point.name, "commit": commit, **_described(point, recipe, result.as_dict())})
        print(_line(out.records[-1]), flush=True)


def machine_of(point: Point, host_gib: float) -> Any:
    """An H200 in a host of so much RAM; for a tiny model this machine."""
    from fitune import hardware
    from fitune.catalog import gpus

    if point.tiny:
        return hardware.probe()
    return hardware.virtual_mixed(gpus.parse_with_notes(CARD)[0], ram_bytes=int(host_gib * GIB))


def planned(point: Point, machine: Any) -> tuple[Any, Any]:
    """The recipe of a point and its plan, for data that fills every row."""
    from fitune import recipe as recipes
    from fitune.planner import make_plan
    from fitune.planner.lengths import DataFacts

    recipe = recipes.build(point.recipe_values())
    length, batch = recipe.seq_len, recipe.batch
    facts = DataFacts(longest_tokens=length, packing_gain=1.0, most_step_tokens=batch * length,
                      total_tokens=sum(ROWS.values()) * length, num_records=ROWS["train"],
                      lengths=(length,) * ROWS["train"])  # fmt: skip
    return recipe, make_plan(recipe, machine, data=facts, detailed=True)


def _described(point: Point, recipe: Any, result: dict[str, Any]) -> Record:
    """A record's fields that do not need a run. `result`: `PlanResult.as_dict()`."""
    from measure import slim

    plan = {**result["plan"], "predicted": {}, "reasons": []}
    adapter = plan["adapter"]
    return {
        "model": plan["model"],
        "job": {"batch": plan["batch"], "micro_batch": plan["micro_batch"], "seq_len": plan["seq_len"],
                "num_layers": plan["num_layers"], "lora_r": adapter["r"] if adapter else None,
                "lora_targets": list(adapter["targets"]) if adapter else None},
        "recipe": recipe.as_dict(),
        "plan": plan,
        "fits": result["fits"],
        "predicted": slim(result["predicted"]),
        "cap_bytes": point.cap_gib * GIB,
    }  # fmt: skip


# ---- run -------------------------------------------------------------------------------------------------------------


def run(wanted: list[Point], before: bench.Records, out: bench.Records, runs: Path, seconds: float) -> None:
    """Every point as it was predicted to be: trained, or forced."""
    bench.import_before_forks()
    predicted = {record["name"]: record for record in before.records}
    began = time.time()
    for point in wanted:
        if point.name in out.names:
            continue
        if point.name not in predicted:
            print(f"{point.name}: not predicted; run `predict` first", flush=True)
            continue
        if time.time() - began > seconds:
            print("time is up; call again to go on", flush=True)
            return
        at = time.time()
        values = predicted[point.name]
        work = trained if values["fits"] else forced
        record = bench.forked_record(point.name, lambda work=work, p=point, v=values: work(p, v, runs))
        out.add(record)
        print(_line(record), f"[{time.time() - at:.0f} s]", flush=True)


def trained(point: Point, values: Record, runs: Path) -> Record:
    """The record of the very run that the command makes."""
    from fitune import recipe as recipes
    from fitune.errors import UserError
    from fitune.train import run as train

    recipe = recipes.build(point.recipe_values())
    steps = max(STEPS[0], min(STEPS[1], 1 + int(STEPS_S / (values["predicted"]["step_s"] or STEPS_S))))
    folder = runs / point.name
    shutil.rmtree(folder, ignore_errors=True)
    train_file, eval_file = data_files(runs, recipe)
    # How long it runs is ours to say; what it runs is not.
    recipe = recipe.with_(data=str(train_file), eval_data=str(eval_file), steps=steps, eval_every=steps,
                          save_every=steps, out=str(folder))  # fmt: skip
    events: list[dict[str, Any]] = []
    outcome = "ran"
    try:
        train(recipe, on_event=events.append)
    except UserError as error:
        outcome = f"failed: {error.what}; {error.why}"
    replans = [e for e in events if e["event"] == "replan"]
    if replans:
        outcome += f" with {len(replans)} changes after an OOM: {replans[0]['change']}"
    planned = next((e for e in events if e["event"] == "plan"), None)
    described = {} if planned is None else _described(point, recipe, planned)
    measured = _measured(events, point)
    _keep_adapter(folder, point)
    same = planned is not None and bench.decided(planned["plan"]) == bench.decided(values["plan"])
    return {**values, **bench.header(point.name), **described, "same_plan_as_predicted": same, "outcome": outcome,
            "predicted_before": values["predicted"], "measured": measured}  # fmt: skip


def _measured(events: list[dict[str, Any]], point: Point) -> dict[str, Any]:
    """A run's figures from its events: peaks by phase, and the median time of the steps after the second."""
    from fitune.train.report_memory import measured_peaks

    fields = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")
    phases = measured_peaks(events)
    top = {f: max((p[f] for p in phases.values() if p.get(f) is not None), default=None) for f in fields}
    steps = [e for e in events if e["event"] == "step"]
    later = steps[2:] or steps[1:]
    step_s = statistics.median(e["step_s"] for e in later) if later else None
    tokens = statistics.median_low(e["tokens"] for e in later) if later else None  # an epoch's last step has fewer
    retries = None
    if not point.tiny:
        import torch

        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return {**top, "step_s": step_s, "tokens_per_s": tokens / step_s if step_s else None, "tokens": tokens,
            "seconds": [e["step_s"] for e in steps],
            "losses": [e["loss"] for e in steps],
            "eval_losses": [e["eval_loss"] for e in events if e["event"] == "eval"],
            "checkpoints": sum(e["event"] == "checkpoint" for e in events), "phases": phases,
            "num_alloc_retries": retries}  # fmt: skip


def _keep_adapter(folder: Path, point: Point) -> None:
    """Of the run only what `merge` needs stays on the disk."""
    if point.size not in MERGED or not (folder / "adapter").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def forced(point: Point, values: Record, runs: Path) -> Record:
    """The smallest plan there is, run where it is said not to fit. Only the GPU's memory counts."""
    from fitune import plan as plans
    from fitune.train.device import prepare
    from fitune.train.measure import Meter
    from fitune.train.oom import classify

    plan = plans.from_dict(values["plan"])
    prepare(plan, 0)
    meter = Meter(plan.device)
    outcome, where = "ran", "load"
    try:
        engine = bench.engine_of(_Named(plan.model), plan)
        where = "step"
        engine.step(bench.batches(plan, 0, engine.built.model.config.vocab_size), step=0, lr=1e-4)
    except (RuntimeError, MemoryError) as problem:
        failure = classify(problem)
        if failure is None:
            raise
        outcome = f"OOM of the {failure.where}, at the {where}: {str(problem)[:160]}"
    return {**values, **bench.header(point.name), "outcome": outcome, "measured": meter.peaks()}


@dataclasses.dataclass(frozen=True)
class _Named:
    """What `bench.engine_of` needs of a recipe."""

    model: str


def data_files(folder: Path, recipe: Any) -> tuple[Path, Path]:
    """A training and a validation text that are cut into rows, each as long as rows can be but for the last."""
    from fitune.model.source import resolve

    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    some = " ".join(rng.choices(WORDS, k=1000))
    words_per_row = recipe.seq_len * 1000 / len(resolve(recipe.model, weights=False).tokenizer()(some)["input_ids"])
    made = []
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl"
        if not path.exists():
            text = " ".join(rng.choices(WORDS, k=int(words_per_row * (rows + 0.1))))
            path.write_text(json.dumps({"text": text}) + "\n")
        made.append(path)
    return made[0], made[1]


# ---- merge -----------------------------------------------------------------------------------------------------------


def merge(wanted: list[Point], out: bench.Records, runs: Path, processes: int, seconds: float) -> None:
    """Merge the adapters that `run` left, some at a time; each merged model is looked at and removed."""
    left = {r["name"] for r in out.records if "merge" not in r}
    todo = [(point.name, runs / point.name) for point in wanted
            if point.name in left and (runs / point.name / "adapter").is_dir()]  # fmt: skip
    began = time.time()
    by_name = {record["name"]: record for record in out.records}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name, found in pool.imap(merged, todo):
            out.add(by_name[name] | {"merge": found})
            print(f"{name:14} merge: {found}", flush=True)
            if time.time() - began > seconds:
                print("time is up; call again to go on", flush=True)
                return


def merged(job: tuple[str, Path]) -> tuple[str, dict[str, Any]]:
    """Merge one run's adapter as `fitune export --merged` does."""
    import torch

    from fitune.export import export_run
    from fitune.train.run_folder import RunFolder

    name, folder = job
    torch.set_num_threads(4)
    target = folder / "merged"
    shutil.rmtree(target, ignore_errors=True)
    started = time.perf_counter()
    made = export_run(RunFolder.open_existing(folder), merged=True, out=target)
    shutil.rmtree(target)
    return name, {"bytes": made.size_bytes, "ram_bytes": made.ram_bytes, "seconds": time.perf_counter() - started}


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _how(plan: dict[str, Any]) -> str:
    """A plan in a few words."""
    parts = [plan["base_format"], f"{plan['micro_batch']}x{-(-plan['batch'] // plan['micro_batch'])}",
             f"recompute {plan['recompute_layers']}/{plan['num_layers']}"]  # fmt: skip
    if plan["stream_from"] != "none":
        parts.append(f"{plan['num_layers'] - plan['resident_layers']} streamed from {plan['stream_from']}")
    parts += ["inputs offloaded"] * plan["offload_inputs"]
    parts += ["layer-major"] * (plan["accumulation_order"] == "layer-major")
    parts += [f"MLP in {plan['mlp_tiles']} pieces"] * (plan["mlp_tiles"] > 1)
    parts += ["head in RAM"] * (plan["head_place"] == "host")
    parts += [f"optimizer on the {plan['optimizer_place']}"] * (plan["optimizer_place"] != "device")
    return ", ".join(parts)


def _cells(record: Record) -> list[str]:
    predicted, measured = record["predicted"], record.get("measured") or {}

    def pair(key: str, scale: float, form: str) -> str:
        guess, found = predicted.get(key), measured.get(key)
        cell = f"{(guess or 0) / scale:{form}}" + (f" / {found / scale:{form}}" if found else "")
        return cell + (f" ({guess / found - 1:+.1%})" if guess and found and record["fits"] else "")

    says = record.get("outcome", "")[:60] + (", merged" if "merge" in record else "")
    return [record["name"], _how(record["plan"]) if record["fits"] else "NoFit", pair("device_bytes", GIB, ".2f"),
            pair("peak_allocated_bytes", GIB, ".2f"), pair("step_s", 1, ".2f"), says]  # fmt: skip


HEADS = ("point", "plan", "device GiB predicted / measured", "allocated GiB", "step s", "outcome")


def _line(record: Record) -> str:
    if "error" in record:
        return f"{record['name']:14} ERROR {record['error'][:300]}\n{record.get('traceback', '')[-1500:]}"
    return "  ".join(_cells(record))


def table(out: bench.Records) -> None:
    """The points as Markdown."""
    rows = [_cells(record) for record in out.records if "error" not in record]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in (HEADS, ["---"] * len(HEADS), *rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="+", metavar="|".join((*TASKS, "POINT")))
    parser.add_argument("--points", type=Path, default=Path("benchmarks/plan-points.json"), help="what `predict` wrote")
    parser.add_argument("--out", type=Path, help="records (default: benchmarks/results/plan-points.json)")
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "plan-points", help="run folders")
    parser.add_argument("--commit", help="commit of the code (default: what git says)")
    parser.add_argument("--host-gib", type=float, default=HOST_GIB, help="RAM of the machine that is predicted for")
    parser.add_argument("--processes", type=int, default=3, help="merges at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after this time")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU: whether everything runs")
    args = parser.parse_intermixed_args()
    tasks = [word for word in args.what if word in TASKS]
    names = [word for word in args.what if word not in tasks]
    chosen = [p for p in points(_tiny_model(args.runs) if args.tiny else None) if not names or p.name in names]
    assert len(chosen) == len(names) or not names, f"the points are {', '.join(p.name for p in points())}"
    chosen.sort(key=lambda point: names.index(point.name) if names else 0)
    results = args.runs if args.tiny else Path("benchmarks/results")
    before = bench.Records(args.runs / "points.json" if args.tiny else args.points)
    out = bench.Records(args.out or results / "plan-points.json")
    for task in tasks:
        if task == "predict":
            predict(chosen, before, args.commit or bench.commit(), args.host_gib)
        elif task == "run":
            run(chosen, before, out, args.runs, args.seconds)
        elif task == "merge":
            merge(chosen, out, args.runs, args.processes, args.seconds)
        elif task == "sweep":
            records = bench.Records(out.path.with_name(out.path.name.replace("points", "sweep")))
            plan_sweep.sweep(chosen, records, args.seconds, args.host_gib)
        else:
            table(out)


def _tiny_model(folder: Path) -> Path:
    """A folder with the configuration of a small model."""
    from transformers import LlamaConfig

    path = folder / "tiny-model"
    path.mkdir(parents=True, exist_ok=True)
    LlamaConfig(**TINY).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
