"""Write fitune/memory/traces.zip: what planning needs of the catalog's models, so that it need not import torch.

    python scripts/build_traces.py [--only NAME ...] [--processes 2] [--keep]

For every model of the catalog: the values of its configuration, and the script of its training step for the common
variants (`memory.shipped`). Takes about half an hour on two cores. What is done is kept in build/traces/ and made again
only when the code that a trace runs has changed (with --keep, never), so that a run that was stopped goes on where it
was. To be run after every change of the step, of the model's build or of the trace that changes what is allocated;
`tests/memory/test_shipped.py` fails when it was not.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from fitune import hardware
from fitune.catalog import gpus, models
from fitune.catalog.models import ModelShape
from fitune.errors import UserError
from fitune.memory import affine, codec, known, shipped
from fitune.memory.entry import Entry
from fitune.memory.variant import for_any_rank, variant_of
from fitune.plan import Plan
from fitune.planner.ladder import default_chunk
from fitune.recipe import Recipe

WORK = Path(__file__).resolve().parents[1] / "build" / "traces"
# Two ranks from which all others follow (see memory.affine); the second pair where 16 is another size of the model too.
RANKS = ((16, 40), (24, 40))
USUAL_RANK = 16
USUAL_ROWS, USUAL_COLUMNS = (1, 2, 4, 8), 2048  # of plans with the default batch and length
LORA, NF4 = dict(method="lora"), dict(method="qlora")
INT8, FULL = dict(method="qlora", base_format="int8"), dict(method="full")
# Cards that stand for all of their kind (bf16 and flash attention; fp16 without it), and the processor; for each the
# jobs that people ask for most.
PLACES: tuple[tuple[dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    (dict(gpu="rtx-3090"), (LORA, NF4, INT8, FULL)),
    (dict(gpu="t4"), (LORA, NF4)),
    (dict(devices="cpu", precision="bf16"), (LORA, FULL)),
    (dict(devices="cpu", precision="fp32"), (LORA, FULL)),
)
MOST_ON_CPU = 1e9  # parameters; larger models are hardly trained on a processor


def plans(shape: ModelShape, rank: int) -> dict[str, Plan]:
    """Variant to a plan of it, as the planner drafts them."""
    from fitune.planner import choose
    from fitune.planner.context import PlanContext
    from fitune.planner.target import choose_target

    found = {}
    config = full_config(shape)
    for where, methods in PLACES:
        if "devices" in where and shape.params_total > MOST_ON_CPU:
            continue
        for method in methods:
            recipe = Recipe(model=shape.id, lora_r=rank, seq_len=8, **where, **method)
            machine = hardware.virtual(gpus.find(recipe.gpu or "rtx-3090")[0])
            context = PlanContext(recipe, choose_target(recipe, machine), config, recipe.seq_len)
            plan = choose.draft_of(context, choose.base_formats(context)[0])
            found[variant_of(plan)] = plan
    return found


def full_config(shape: ModelShape) -> Any:
    from fitune.model import configs

    return configs.from_shape(shape).config


def make_member(shape: ModelShape) -> dict[str, Any]:
    """One model's member of the archive."""
    config = full_config(shape)
    uses_interface, can_pack = known.abilities(config)
    entries: dict[str, str] = {}
    missing: list[str] = []
    for plan in plans(shape, USUAL_RANK).values():
        try:
            entries |= traced(config, plan)
        except (UserError, NotImplementedError) as error:
            missing.append(f"{variant_of(plan)}: {error}")
    return {"config": shipped.plain_values(config), "uses_interface": uses_interface, "can_pack": can_pack,
            "entries": entries, "missing": missing}  # fmt: skip


def traced(config: Any, plan: Plan) -> dict[str, str]:
    """Key to text of one variant: for every shape, and with adapters for every rank, where there is such a script
    (tests check other ranks); else for the usual rank and shapes."""
    tracer, entry = known.traced(config, plan)
    if entry.script is None:
        return {variant_of(plan): as_text(at_usual_shapes(config, plan, tracer, entry))}
    if plan.adapter is None:
        return {variant_of(plan): as_text(entry)}
    made = {plan.adapter.r: as_text(entry)}
    for ranks in RANKS:
        for rank in set(ranks) - set(made):
            other = plan.with_(adapter=dataclasses.replace(plan.adapter, r=rank))
            made[rank] = as_text(known.traced(config, other)[1])
        joined = affine.join((made[ranks[0]], made[ranks[1]]), ranks)
        if joined is not None:
            return {for_any_rank(variant_of(plan)): joined}
    print(f"  {variant_of(plan)} is not linear in the rank: rank {USUAL_RANK} only", flush=True)
    return {variant_of(plan): made[USUAL_RANK]}


def at_usual_shapes(config: Any, plan: Plan, tracer: Any, entry: Entry) -> Entry:
    """With terms of the shapes that are asked for most, in bf16 on a GPU; of the others only what is trained."""
    if plan.device != "cuda" or plan.precision != "bf16" or plan.base_format == "int8":
        return entry
    chunk = default_chunk(config.vocab_size)
    terms = {f"{rows},{USUAL_COLUMNS},{chunk}": tracer.terms(rows, USUAL_COLUMNS, chunk) for rows in USUAL_ROWS}
    return dataclasses.replace(entry, terms=terms)


def as_text(entry: Entry) -> str:
    return json.dumps(codec.encode(entry), separators=(",", ":"))


def build_one(job: tuple[str, bool]) -> str:
    """Makes a model's member in build/traces/ unless it is there from the same code; returns a line to print."""
    name, keep = job
    shape = models.find(name)
    assert shape is not None, name
    path = WORK / shipped.member_of(shape)
    code = known.code_hash()
    if path.is_file() and (keep or json.loads(path.read_text(encoding="utf-8"))["code"] == code):
        return f"{name}: there"
    begin = time.perf_counter()
    member = make_member(shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_suffix(".tmp")
    temp.write_text(json.dumps({"code": code, "member": member}), encoding="utf-8")
    temp.replace(path)
    lines = [f"{name}: {len(member['entries'])} variants in {time.perf_counter() - begin:.0f} s", *member["missing"]]
    return "\n  not shipped: ".join(lines)


def write_archive(path: Path = shipped.ARCHIVE) -> int:
    """Puts all members that are there into the archive; returns its size in bytes."""
    about = {
        "format": shipped.FORMAT,
        "versions": known.versions(),
        "date": datetime.date.today().isoformat(),
        "code": known.code_hash(),
    }
    temp = path.with_suffix(".tmp")
    with zipfile.ZipFile(temp, "w", zipfile.ZIP_LZMA) as archive:
        _add(archive, shipped.ABOUT, about)
        for shape in models.all_models():
            done = WORK / shipped.member_of(shape)
            if done.is_file():
                member = json.loads(done.read_text(encoding="utf-8"))["member"]
                del member["missing"]
                _add(archive, shipped.member_of(shape), member)
    temp.replace(path)
    return path.stat().st_size


def _add(archive: zipfile.ZipFile, name: str, value: Any) -> None:
    """A member with a fixed date, so that the same traces make the same archive."""
    info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_LZMA
    archive.writestr(info, json.dumps(value, separators=(",", ":")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="models to make (default: all of the catalog)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep what is there, whatever code made it")
    options = parser.parse_args(arguments)
    names = options.only or [shape.id for shape in sorted(models.all_models(), key=lambda s: s.params_total)]
    jobs = [(name, options.keep) for name in names]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, line in enumerate(pool.imap_unordered(build_one, jobs), 1):
            print(f"[{number}/{len(names)}, {time.perf_counter() - begin:.0f} s] {line}", flush=True)
    print(f"{shipped.ARCHIVE}: {write_archive() / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
