"""Everything a run needs before its first step: model, data, plan; then the filled engine."""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fitune.errors import EXIT_DOES_NOT_FIT, UserError
from fitune.plan import Plan
from fitune.recipe import Recipe
from fitune.train.device import prepare
from fitune.units import format_bytes

if TYPE_CHECKING:
    import torch

    from fitune.data.dataset import DataSet
    from fitune.data.records import Record
    from fitune.engine.engine import Engine
    from fitune.model.build import Built
    from fitune.model.source import ModelSource
    from fitune.parallel.world import Single
    from fitune.planner import DataFacts, PlanResult
    from fitune.planner.layouts import Ranks


@dataclass
class Session:
    """Model and data of a run; the plan is made from both."""

    recipe: Recipe
    source: ModelSource
    config: Any
    tokenizer: Any
    data: DataSet

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the training records' tokens and labels."""
        return _digest(self.data.train)

    @functools.cached_property
    def fingerprint_eval(self) -> str:
        """The same of the held-out records."""
        return _digest(self.data.eval)


def _digest(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(len(record).to_bytes(8, "little") + record.input_ids.tobytes() + record.labels.tobytes())
    return digest.hexdigest()


def check_machine(recipe: Recipe) -> None:
    """Raises UserError when the installed torch cannot use this machine's card, unless the CPU was asked for."""
    from fitune import hardware

    if (recipe.devices or "").strip().lower() != "cpu":
        hardware.check_torch_matches(hardware.probe(), hardware.torch_build())


def open_session(recipe: Recipe, date: datetime.date | None = None) -> Session:
    """Find the model, read and tokenise the data. No weights are read yet.

    Args:
        date: what a chat template that writes today's date writes (a resumed run: the day it was started on).

    Raises:
        UserError: see `fitune.model.source.resolve` and `fitune.data.load_dataset`; or `--gpu` was given.
    """
    from fitune.data.dataset import load_dataset
    from fitune.data.readers import check_there
    from fitune.model.build import with_rope_scaling
    from fitune.model.source import resolve
    from fitune.planner.positions import effective_seq_len

    if recipe.gpu is not None:
        raise UserError(
            "--gpu is for planning",
            "training runs on this machine's own devices",
            "use `fitune plan` with --gpu; for training use --vram to stay below a limit",
        )
    for file in (recipe.data, recipe.eval_data):
        if file is not None:
            check_there(file)  # before a model's gigabytes are downloaded
    source = resolve(
        recipe.model, hub=recipe.hub, trust_remote_code=recipe.trust_remote_code, weights=True, seed=recipe.seed
    )
    config = with_rope_scaling(source.config, recipe.rope_scaling)
    seq_len, _ = effective_seq_len(recipe, config)  # the plan says it where this is less than the recipe's
    tokenizer = source.tokenizer()
    assert recipe.data is not None
    data = load_dataset(
        recipe.data,
        tokenizer,
        eval_data=recipe.eval_data,
        eval_share=recipe.eval_share,
        columns=recipe.columns,
        seq_len=seq_len,
        loss_on=recipe.loss_on,
        seed=recipe.seed,
        hub=recipe.hub,
        date=date,
    )
    _check_vocabulary(source, data)
    return Session(recipe, source, config, tokenizer, data)


def _check_vocabulary(source: ModelSource, data: DataSet) -> None:
    """A token beyond the embedding would be an index error in the middle of the run, on a GPU an unreadable one."""
    highest = max(int(record.input_ids.max()) for record in (*data.train, *data.eval))
    if highest >= source.config.vocab_size:
        raise UserError(
            f"the tokenizer of {source.name} does not belong to this model",
            f"it gives token {highest}, the model's vocabulary ends at {source.config.vocab_size - 1}",
            "use the tokenizer files that came with the model, or its whole folder",
        )


def plan_session(session: Session, *, detailed: bool = True, ranks: Ranks | None = None) -> PlanResult:
    """The plan for this model and this data on this machine.

    Args:
        detailed: predict every phase of it too (see `fitune.planner.make_plan`).
        ranks: the processes that share it; None: this one alone.

    Raises:
        UserError: a card this machine does not have was asked for, or settings that cannot run on the device.
    """
    from fitune import hardware
    from fitune.planner import make_plan

    alone = session.recipe if ranks is not None else session.recipe.with_(nproc=1)
    return make_plan(alone, hardware.probe(), config=session.config, data=_facts(session), detailed=detailed,
                     ranks=ranks)  # fmt: skip


def techniques_of(session: Session, plan: Plan) -> list[dict[str, Any]]:
    """What each technique that one process' plan uses saves in this job (`planner.effects`)."""
    from fitune import hardware
    from fitune.planner.context import open_context
    from fitune.planner.effects import effects

    recipe = session.recipe.with_(nproc=1)
    context = open_context(recipe, hardware.probe(), config=session.config, data=_facts(session))
    return [effect.as_dict() for effect in effects(context, plan, used_only=True)]


def _facts(session: Session) -> DataFacts:
    from fitune.planner.lengths import facts_of
    from fitune.planner.positions import effective_seq_len

    seq_len, _ = effective_seq_len(session.recipe, session.config)
    return facts_of(session.data.train, session.data.eval, session.recipe.batch, seq_len)


def require_fit(result: PlanResult) -> Plan:
    """The plan, or the error that says what would fit (exit code 3)."""
    if result.fits:
        return result.plan
    needed = result.predicted["peak_allocated_bytes"]
    fix = "; ".join(entry["change"] for entry in result.nearest_fits) or "use a card with more memory"
    budget = format_bytes(result.plan.budget_bytes or 0)
    raise UserError(
        f"{result.plan.model} does not fit on {result.plan.device_name}",
        f"the smallest plan needs {format_bytes(needed)} of tensors, the budget is {budget}",
        fix,
        EXIT_DOES_NOT_FIT,
    )


def load_model(
    session: Session, plan: Plan, on_weight: Callable[[str], None], group: Single | None = None
) -> Built:  # fmt: skip
    """Build, fill and adapt the model on the plan's device. `on_weight` is called with each weight's name; `group` are
    the ranks that load it together.

    Raises:
        UserError: no such device, or weights that do not fit the configuration.
    """
    import torch

    from fitune.model.build import add_adapter, build, fill, weights_to_read
    from fitune.model.outside import open_host
    from fitune.model.packed_file import identity

    if plan.device == "cuda" and not torch.cuda.is_available():
        raise UserError("this run was planned for a GPU", "torch sees none now", "start a new run with --devices cpu")
    device = plan_device(session.recipe, plan)
    notes = prepare(plan, device.index or 0)
    built = build(session.config, plan, device)
    known_as = identity(session.source, device) if plan.stream_from == "disk" else None
    if group is not None and group.size > 1:
        from fitune.parallel import setup

        setup.open_host_together(built, plan, group, known_as)
    open_host(built, plan, known_as)
    on_device = device if session.source.kind == "random" and device.type == "cuda" else "cpu"
    weights = session.source.iter_weights(weights_to_read(built), device=on_device)

    def announced() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            on_weight(name)
            yield name, tensor

    built.notes += notes
    fill(built, announced(), plan)
    if group is not None and group.size > 1:
        setup.finish_host_together(built, plan, group)
    add_adapter(built, plan)
    return built


def plan_device(recipe: Recipe, plan: Plan) -> torch.device:
    """The torch device of a plan: the card that was asked for, else the one that the planner takes."""
    import torch

    from fitune import hardware
    from fitune.planner.target import choose_target

    if plan.device == "cpu":
        return torch.device("cpu")
    digits = "".join(c for c in (recipe.devices or "").partition(",")[0] if c.isdigit())  # of several the first
    if digits or torch.cuda.device_count() == 1:
        return torch.device("cuda", int(digits or 0))
    return torch.device("cuda", choose_target(recipe, hardware.probe()).index or 0)


def has_device(recipe: Recipe) -> bool:
    """Whether the device that the recipe names (if any) is in this machine."""
    from fitune import hardware
    from fitune.planner.target import choose_target

    try:
        choose_target(recipe, hardware.probe())
    except UserError:
        return False
    return True


def device_here(recipe: Recipe) -> tuple[str, str]:
    """(cpu or cuda, its name) of the device that this machine has for the recipe; one it names and that is not here is
    passed over."""
    from fitune import hardware
    from fitune.planner.target import choose_target

    wanted = recipe if has_device(recipe) else recipe.with_(devices=None)
    target = choose_target(wanted, hardware.probe())
    return target.device, target.name


def make_engine(built: Built, plan: Plan, group: Single | None = None) -> Engine:
    from fitune.engine.engine import Engine

    if group is not None and group.size > 1:
        from fitune.parallel.setup import make_engine as make_together

        return make_together(built, plan, group)
    return Engine(built, plan)
