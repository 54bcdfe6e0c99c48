"""A run on several processes: the first rank leads (it plans, writes and shows), the others follow silently.

What decides how the run goes on (the plan, its history, a stop, a failure, how long a step takes) is exchanged, so that
all ranks take the same way; what only one of them learns is told to all before anyone acts on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import EXIT_FAILED, UserError, first_line
from fitune.parallel import world as worlds
from fitune.parallel.world import Single
from fitune.parallel.zero_config import stage_of
from fitune.plan import Plan
from fitune.recipe import Recipe
from fitune.train import session as sessions
from fitune.train.events import EventLog, as_stored
from fitune.train.oom import PEER, MemoryFailure, classify
from fitune.train.signals import StepGivenUp, StopSignals

if TYPE_CHECKING:
    from fitune.hardware import Device
    from fitune.planner import PlanResult

PEER_GONE = "another process of this run has ended, or hangs"
STOP = "stop"  # a failure's `where`: no failure, the step is given up because the process is being ended


# ---- the start -------------------------------------------------------------------------------------------------------


@contextmanager
def joined(recipe: Recipe) -> Iterator[tuple[Single, Recipe]]:
    """The group that this process belongs to, and the recipe as this rank obeys it (its own card is the only one).

    Raises:
        UserError: a process cannot begin (too few GPUs, say), or they have not come for the same job; or one is gone
            before the run has begun.
    """
    world = worlds.from_environment()
    if world is None:
        yield Single(), recipe
        return
    from fitune.parallel.group import TIMEOUT_S, Group
    from fitune.parallel.start import meet

    own, card, problem = recipe, None, None
    try:
        own, card = _own_place(recipe, world)
    except UserError as error:
        problem = error
    device = "cpu" if card is None else "cuda"
    store = meet(world, recipe, device, problem, TIMEOUT_S)
    try:
        group = Group(world, device, store=store)
        group.cards = tuple(group.gather(card)) if card is not None else ()
    except RuntimeError as error:
        line = first_line(error)
        raise UserError("the processes of this run have met, but cannot exchange anything", line,
                        "the machines must reach each other by any port; GLOO_SOCKET_IFNAME names the network device",
                        EXIT_FAILED) from error  # fmt: skip
    try:
        yield group, own
    except RuntimeError as error:
        found = classify(error)
        if found is None or found.where != PEER:
            raise
        raise UserError(PEER_GONE, found.line, "see the messages of the others", EXIT_FAILED) from error
    finally:
        group.close()


def _own_place(recipe: Recipe, world: worlds.World) -> tuple[Recipe, Device | None]:
    """The recipe as this rank obeys it, and its card, from now on the only one that it sees; None on the CPU.

    Raises:
        UserError: there is none for it, or this torch cannot use it.
    """
    from fitune import hardware

    sessions.check_machine(recipe)
    there = hardware.probe().devices
    if (recipe.devices or "").strip().lower() == "cpu" or not there:
        return recipe, None
    name = worlds.card_of(world, recipe.devices, os.environ.get(worlds.VISIBLE), len(there))
    os.environ[worlds.VISIBLE] = name
    seen = hardware.probe().devices
    if not seen:
        raise UserError(f"GPU {name} cannot be used", "the driver does not show it to this process",
                        "name others with --devices")  # fmt: skip
    return recipe.with_(devices=None), seen[0]


@contextmanager
def announced() -> Iterator[None]:
    """What a process does before `joined`: a problem there ends the others too, which wait for it.

    Raises:
        UserError: the problem; where the first process tells it, `ToldElsewhere`.
    """
    try:
        yield
    except Exception as error:
        world = worlds.from_environment()
        if world is None:
            raise
        from fitune.parallel.group import TIMEOUT_S
        from fitune.parallel.start import meet

        with nullcontext() if isinstance(error, UserError) else suppress(UserError):
            meet(world, None, "cpu", _as_problem(error), TIMEOUT_S)
        raise


def _as_problem(error: Exception) -> UserError:
    """As the others tell it."""
    if isinstance(error, UserError):
        return error
    line = next(iter(str(error).splitlines()), "")
    return UserError(f"a process has failed: {type(error).__name__}", line, "", EXIT_FAILED)


@contextmanager
def together(group: Single, *, by_node: bool = False) -> Iterator[None]:
    """A part of the start that all ranks do, or none: what goes wrong on one ends all, with one message.

    Args:
        by_node: the first rank of each node does it alone (a download), then the others.

    Raises:
        UserError: the first problem of any rank; where the first rank tells it, `ToldElsewhere`.
    """
    if group.size == 1:
        yield
        return
    from fitune.parallel.start import shared_problem

    own = None
    try:
        with group.leader_first() if by_node else nullcontext():
            yield
    except Exception as error:  # noqa: BLE001 raised again as soon as the others know
        own = error
    try:
        found = shared_problem(group, _as_problem(own) if own is not None else None)
    except RuntimeError:
        if own is None:
            raise
        raise own from own.__cause__  # nobody else can tell it
    if own is not None and not isinstance(own, UserError):
        raise own
    if found is not None:
        raise found from own


def check_same(session: sessions.Session, group: Single) -> None:
    """Raises UserError where the ranks have not read the same records or not the same model's configuration; where the
    first rank tells it, `ToldElsewhere`."""
    if group.size == 1:
        return
    from fitune.parallel.start import differing

    config = {name: value for name, value in session.config.to_dict().items() if name != "_name_or_path"}
    mine = {
        "models": hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest(),
        "training records": session.fingerprint,
        "held-out records": session.fingerprint_eval,
    }
    told = group.gather((socket.gethostname(), mine))
    for name in mine:
        values = [f"the checksum {sums[name][:8]}" for _, sums in told]
        fix = f"put the same {'model folder' if name == 'models' else 'data and tokenizer'} on every machine"
        found = differing(group.rank, values, [host for host, _ in told],
                          f"the processes of this run have read different {name}", fix)  # fmt: skip
        if found is not None:
            raise found


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan_for(session: sessions.Session, group: Single) -> PlanResult:
    """One process' plan, or that of each of the group's ranks (`fitune.planner.layouts`).

    Raises:
        UserError: settings that cannot run on several processes.
    """
    if group.size == 1:
        return sessions.plan_session(session)
    from fitune.planner.layouts import Ranks

    return sessions.plan_session(session, ranks=Ranks(group.size, group.local_size, group.cards))


def planned_together(session: sessions.Session, group: Single) -> PlanResult:
    """The first rank's plan, on all of them.

    Raises:
        UserError: as `plan_for`, or the job does not fit (exit code 3).
    """
    made = None
    with together(group):
        if group.is_leader:
            made = plan_for(session, group)
            sessions.require_fit(made)
    made = group.share(made)
    assert made is not None
    return made


def check_plan(plan: Plan, group: Single, show: Callable[[dict[str, Any]], None]) -> None:
    """Before anything of a plan is stored: what the library that it needs cannot do, or that it is not on a machine.

    Args:
        show: takes the event of a notice.

    Raises:
        UserError: see `fitune.parallel.zero_library.check`.
    """
    with together(group):
        if stage_of(plan) is not None:
            from fitune.parallel.zero_library import check as check_zero

            check_zero(plan, lambda text: show({"event": "notice", "text": text}))


# ---- agreement -------------------------------------------------------------------------------------------------------


class Agreement:
    """Tells every rank the first failure of any (see `fitune.train.recover.alone`).

    A stop goes before a failure: the step is dropped either way. Where the exchange itself fails, a peer is gone: that
    is a failure after which only new processes can go on.
    """

    def __init__(self, group: Single):
        self._group = group

    def __call__(self, failure: MemoryFailure | None) -> MemoryFailure | None:
        if failure is not None and failure.where == PEER:
            return failure
        try:
            told = [dataclasses.replace(found, rank=rank)
                    for rank, found in enumerate(self._group.gather(failure)) if found is not None]  # fmt: skip
        except RuntimeError as problem:
            found = classify(problem)
            line = first_line(problem)
            return found or MemoryFailure(PEER, "rank", line, fatal=True)
        return min(told, key=lambda found: found.where != STOP, default=None)


def given_up() -> MemoryFailure:
    """What a rank votes that gives its step up."""
    return MemoryFailure(STOP, "signal", "the process is being ended")


class PeerGaveUp(StepGivenUp):
    """Another rank gave the step up."""


class SharedStop(StopSignals):
    """A stop that any rank was asked for, in force on all of them from the same `sync` on."""

    def __init__(self, group: Single):
        self._group = group
        self._heard: str | None = None
        self._agreed: str | None = None
        super().__init__()

    @property  # type: ignore[override]
    def requested(self) -> str | None:
        """What all ranks know of."""
        return self._agreed

    @requested.setter
    def requested(self, value: str | None) -> None:
        self._heard = value

    def sync(self) -> None:
        self._agreed = next((heard for heard in self._group.gather(self._heard) if heard is not None), None)

    def check_step(self, started: float, usual_s: float | None) -> None:
        agreed, self._agreed = self._agreed, self._heard
        try:
            super().check_step(started, usual_s)
        finally:
            self._agreed = agreed


# ---- followers -------------------------------------------------------------------------------------------------------


class SilentLog(EventLog):
    """A follower's events: they are made, so that its history is the leader's, and not stored."""

    def __init__(self, path: Path):
        self.path, self._descriptor = path, -1

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        return as_stored(event, fields)

    def rewind(self, step: int) -> int:
        return 0


def check(recipe: Recipe, size: int) -> None:
    """Raises UserError where this many processes cannot share the job."""
    if size == 1 and (recipe.nproc or 1) > 1:
        raise UserError(f"cannot start {recipe.nproc} processes from here", "this process is one by itself",
                        "use the command `fitune train`, supervise=True, or torchrun")  # fmt: skip
    if recipe.parallel == "none" and size > 1:
        raise UserError(f"--parallel none cannot run on {size} processes", "it means one process with one GPU",
                        "leave one of the two out")  # fmt: skip
    from fitune.planner.layouts import check_records

    check_records(recipe, size)
