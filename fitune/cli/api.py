"""What the commands and Python callers share: settings to a recipe, a recipe to a plan or a run, as plain objects.

`fitune.plan(...)` and `fitune.train(...)` are these functions; they return what `--json` prints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune import recipe as recipes
from fitune.cli.output import system_language
from fitune.errors import UserError

if TYPE_CHECKING:
    from fitune.hardware import Machine
    from fitune.planner import PlanResult

OnEvent = Callable[[dict[str, Any]], None]
RECIPE_SUFFIXES = (".yaml", ".yml")


def plan(model: str | Path, **settings: Any) -> dict[str, Any]:
    """The plan for a job, as `fitune plan --json` prints it. Needs no GPU, no weights, and no network for a model of
    the catalog.

    Args:
        model: id, folder, GGUF file, short name, or a recipe file (then `settings` override its values).
        settings: fields of `fitune.recipe.Recipe`.
    Raises:
        UserError: a setting that cannot be, or a model that cannot be found.
    """
    return plan_result(model, settings).as_dict()


def train(
    model: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    on_event: OnEvent | None = None,
    supervise: bool = False,
    supervised: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Fine-tune, as `fitune train` does, and return what `fitune train --json` prints.

    Args:
        model: as in `plan`; None with `resume`.
        resume: a run folder to continue; its own recipe is used, so no other setting may be given but where it runs
            and its report's language (`fitune.recipe.WHERE`).
        on_event: called with each event of the run (one JSON object, as in `events.jsonl`).
        supervise: in a process of its own that is started again when the system kills it, as the command line does;
            off by default, so that it happens here.
        supervised: this process is such a one.
        settings: fields of `fitune.recipe.Recipe`; `data` is needed.
    Returns:
        `{"run": folder, "status": str, "exit_code": int, ...}`.
    Raises:
        UserError: bad input; `exit_code` 3 where nothing fits.
    """
    from fitune.train.ranks import announced

    with announced():
        wanted, folder = _wanted(model, resume, settings)
    return _run(wanted, folder, on_event, supervise, supervised)


def _wanted(
    model: str | Path | None, resume: str | Path | None, settings: dict[str, Any]
) -> tuple[recipes.Recipe, Path | None]:
    """The recipe to train, and the folder of the run that goes on."""
    if resume is not None:
        named = ["MODEL"] * (model is not None)
        named += [name.replace("_", "-") for name in settings if name not in recipes.WHERE]
        if named:
            raise UserError(f"cannot resume with other settings: {', '.join(named)}",
                            "a resumed run keeps its recipe, so that it ends as it would have without the stop",
                            "leave them out, or start a new run")  # fmt: skip
        return recipe_of_run(resume, settings)
    wanted = make_recipe(model, settings)
    if wanted.data is None:
        raise UserError("no data named", "training needs a data file",
                        "add --data FILE (or a dataset id), or --data demo for the bundled set")  # fmt: skip
    if wanted.lang is None:  # stored with the run, so that it has one language wherever it is resumed
        wanted = wanted.with_(lang=system_language())
    return wanted, None


def recipe_of_run(run: str | Path, settings: dict[str, Any]) -> tuple[recipes.Recipe, Path]:
    """A run's recipe, where it is to run changed by these settings, and its folder."""
    from fitune.train.run_folder import RunFolder

    folder = RunFolder.open_existing(run)
    stored = recipes.build(recipes.load(folder.recipe_path), str(folder.recipe_path))
    return stored.with_(**settings), folder.path


def size_of_run(folder: Path) -> int:
    """Processes of the plan that is in force in a run's folder."""
    from fitune import plan as plans
    from fitune.train.run_folder import RunFolder

    path = RunFolder.open_existing(folder).current_plan_path
    return plans.from_json(path.read_text(encoding="utf-8")).world_size


def predict(model: str | Path | None, *, stack: str | None = None, **settings: Any) -> dict[str, Any]:
    """What a recipe needs exactly as given, as `fitune predict --json` prints it. Nothing is planned or run.

    Args:
        model: as in `plan`.
        stack: another tool whose memory is predicted for the same settings (`fitune.memory.stacks.STACKS`).
        settings: fields of `fitune.recipe.Recipe`.
    Raises:
        UserError: a setting that cannot be, a model that cannot be found, or an unknown stack.
    """
    wanted = make_recipe(model, settings)
    if stack is not None:
        from fitune.planner.stack import predict as predict_stack

        return predict_stack(wanted, stack).as_dict()
    from fitune.planner.predict import predict as predict_recipe

    return predict_recipe(wanted).as_dict()


def _run(
    wanted: recipes.Recipe, resume: Path | None, on_event: OnEvent | None, supervise: bool, supervised: bool
) -> dict[str, Any]:
    from fitune.train import run, run_supervised

    if supervise:
        return result_dict(run_supervised(wanted, resume=resume, on_event=on_event))
    return result_dict(run(wanted, resume=resume, on_event=on_event, supervised=supervised))


def plan_result(model: str | Path | None, settings: dict[str, Any]) -> PlanResult:
    """`fitune.planner.make_plan` for these settings."""
    return planned(model, settings)[2]


def planned(model: str | Path | None, settings: dict[str, Any]) -> tuple[recipes.Recipe, Machine, PlanResult]:
    """The recipe of these settings, the machine that it is for, and the plan."""
    from fitune.planner import make_plan
    from fitune.planner.context import find_machine

    notes: list[str] = []
    wanted = make_recipe(model, settings)
    machine = find_machine(wanted, notes)
    return wanted, machine, make_plan(wanted, machine, notes=notes, detailed=True)


def make_recipe(model: str | Path | None, settings: dict[str, Any]) -> recipes.Recipe:
    """A recipe from MODEL (which may be a recipe file) and the settings that override it.

    Raises:
        UserError: no model, an unreadable file, an unknown setting or an impossible value.
    """
    if model is None or not str(model).strip():
        raise UserError("no model named", "MODEL is an id, a folder, a GGUF file, a short name or a recipe file",
                        "name one, for example smollm2")  # fmt: skip
    if not str(model).lower().endswith(RECIPE_SUFFIXES):
        return recipes.build({"model": str(model), **settings}, "the command line")
    path = Path(model)
    values = {str(key).replace("-", "_"): value for key, value in recipes.load(path).items()}
    if not values.get("model"):
        raise UserError(f"no model named in {path}", "the recipe has no line `model: ...`", "add `model: smollm2`, say")
    return recipes.build(values | settings, f"{path} and the command line" if settings else str(path))


def result_dict(result: Any) -> dict[str, Any]:
    """A `TrainResult` as JSON: its fields, with the run folder as `run`."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {"run": str(values.pop("run_folder")), **values}
