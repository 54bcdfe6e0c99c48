"""The first meeting of a run's processes: before they are a group, each tells what it comes with, and all of them
begin, or end with one message.

What they tell is text in torch's store, which takes no device, no backend and no object of ours: so processes meet here
that could exchange nothing else (another version, a GPU that is not there, a recipe that cannot be read).
"""

from __future__ import annotations

import datetime
import json
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from fitune.errors import EXIT_FAILED, ToldElsewhere, UserError, first_line
from fitune.parallel.world import Single, World, publish
from fitune.recipe import Recipe

PER_PROCESS = ("model", "data", "eval_data", "hub", "devices", "nproc", "out", "lang", "log_to")
"""Settings that may differ: where a machine has its files (what they hold is compared when they have been read), its
GPUs, and what only the first process obeys."""
_LOOK_S = 0.1  # how often a process looks for the others
Told = tuple[str, list[Any] | None]  # a process' machine, and a problem as `as_told` makes it


def open_store(world: World, timeout_s: float) -> dist.Store:
    """The store that all processes of the run reach.

    Raises:
        UserError: the others did not come in time, or the first one is not found (exit code 1).
    """
    publish(world)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    except RuntimeError as error:
        raise _apart(world, error) from error
    store.set_timeout(timeout)
    return dist.PrefixStore("fitune", store)


def _apart(world: World, error: RuntimeError) -> UserError:
    return UserError(f"the {world.size} processes of this run did not come together",
                     first_line(error),
                     f"start all of them; the first one must be reached at {world.address}, port {world.port}",
                     EXIT_FAILED)  # fmt: skip


def meet(world: World, recipe: Recipe | None, device: str, problem: UserError | None, timeout_s: float) -> dist.Store:
    """Come together; every process of a run calls this once. The store is for their group.

    Args:
        recipe: None where there is a problem with it.
        device: cpu or cuda.
        problem: why this process cannot begin.

    Raises:
        UserError: one of them cannot begin, or they have not come for the same job; where it is told by the first
            process, `ToldElsewhere`.
    """
    try:
        store = open_store(world, timeout_s)
        heard, store = _exchanged(store, world, _introduction(recipe, device, problem), timeout_s)
    except RuntimeError as error:
        raise problem or _apart(world, error) from error
    except UserError as apart:
        if problem is None:
            raise
        raise problem from apart  # nobody else is there to tell it
    found = one_problem(world.rank, [(said["host"], said["problem"]) for said in heard]) or _unlike(world.rank, heard)
    if found is not None:
        raise found
    return store


def _exchanged(
    store: dist.Store, world: World, said: dict[str, Any], timeout_s: float
) -> tuple[list[dict[str, Any]], dist.Store]:
    """What all say, and a part of the store that is theirs alone.

    A store may outlive its processes (torchrun's does, and its count of restarts differs between machines): what those
    before have left is there still. So the first process names a meeting, and another one is at it when what that has
    heard has its mark.
    """
    mark, end = uuid.uuid4().hex, time.monotonic() + timeout_s
    text = json.dumps(said | {"mark": mark})
    if world.rank == 0:
        name = uuid.uuid4().hex
        here = dist.PrefixStore(name, store)
        store.set("meeting", name)
        here.set("comes/0", text)
        _wait(here, "comes", world, end)
        heard = [json.loads(here.get(f"comes/{rank}")) for rank in range(world.size)]
        here.set("all", json.dumps(heard))
        here.set("heard/0", "")
        _wait(here, "heard", world, end)  # this process may be who holds the store: not gone before they have heard
        return heard, here
    invited, here, heard = b"", store, []
    while mark not in [one["mark"] for one in heard]:
        if store.check(["meeting"]) and (name_now := store.get("meeting")) != invited:
            invited, here = name_now, dist.PrefixStore(name_now.decode(), store)
            here.set(f"comes/{world.rank}", text)
        heard = json.loads(here.get("all")) if invited and here.check(["all"]) else []
        _sleep(end, lambda: "process 0, or those that it waits for")
    here.set(f"heard/{world.rank}", "")
    return heard, here


def _wait(here: dist.Store, what: str, world: World, end: float) -> None:
    """Until every process has told this."""
    keys = [f"{what}/{rank}" for rank in range(world.size)]
    while not here.check(keys):
        _sleep(end, lambda: "process " + ", ".join(key.rpartition("/")[2] for key in keys if not here.check([key])))


def _sleep(end: float, awaited: Callable[[], str]) -> None:
    """A moment, in which Ctrl-C is heard."""
    if time.monotonic() > end:
        raise RuntimeError(f"waited in vain for {awaited()}")
    time.sleep(_LOOK_S)


def _introduction(recipe: Recipe | None, device: str, problem: UserError | None) -> dict[str, Any]:
    import torch
    import transformers

    from fitune import __version__

    versions = {"fitune": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
    values = recipe.model_dump(mode="json", exclude=set(PER_PROCESS)) if recipe is not None else {}
    return {"host": socket.gethostname(), "problem": as_told(problem), "versions": versions, "device": device,
            "settings": {name.replace("_", "-"): value for name, value in values.items()}}  # fmt: skip


def _unlike(rank: int, heard: Sequence[dict[str, Any]]) -> UserError | None:
    """What the processes do not have in common and must."""
    hosts = [said["host"] for said in heard]
    for key, what, fix in (
        ("versions", "the processes of this run have different versions", "install the same versions for all of them"),
        ("settings", "the processes of this run were given different settings", "start all with the same settings"),
    ):
        for name in heard[0][key]:
            values = [f"{name} {json.dumps(said[key].get(name))}" for said in heard]
            if (found := differing(rank, values, hosts, what, fix)) is not None:
                return found
    what, fix = "some processes of this run have a GPU, others have none", "use machines with GPUs, or --devices cpu"
    return differing(rank, ["no GPU" if said["device"] == "cpu" else "a GPU" for said in heard], hosts, what, fix)


# ---- one message of several processes --------------------------------------------------------------------------------


def as_told(problem: UserError | None) -> list[Any] | None:
    """A problem as what goes into a store."""
    return None if problem is None else [problem.what, problem.why, problem.fix, problem.exit_code]


def shared_problem(group: Single, problem: UserError | None) -> UserError | None:
    """`one_problem` of a group's processes, each of which comes here with its own or none."""
    return one_problem(group.rank, group.gather((socket.gethostname(), as_told(problem))))


def one_problem(rank: int, told: Sequence[Told]) -> UserError | None:
    """The first problem that any process has told, as this one raises it; None where all are well."""
    by = next((i for i, (_, problem) in enumerate(told) if problem is not None), None)
    if by is None:
        return None
    what, why, fix, code = told[by][1] or []
    if by != 0:  # who reads it sees the first process
        why = f"{why} ({place(by, [host for host, _ in told])} of {len(told)})"
    return as_seen_by(rank)(what, why, fix, code)


def as_seen_by(rank: int) -> type[UserError]:
    """What a process raises of a problem that all have: the first one tells it."""
    return UserError if rank == 0 else ToldElsewhere


def differing(rank: int, values: Sequence[str], hosts: Sequence[str], what: str, fix: str) -> UserError | None:
    """What to raise where not every process has the first one's value; None where all have."""
    other = next((i for i, value in enumerate(values) if value != values[0]), None)
    if other is None:
        return None
    parts = [f"{place(i, hosts)} has {values[i]}" for i in (0, other)]
    return as_seen_by(rank)(what, ", ".join(parts), fix)


def place(rank: int, hosts: Sequence[str]) -> str:
    """`process 3`, and on which machine where there are several."""
    return f"process {rank}" + (f" on {hosts[rank]}" if len(set(hosts)) > 1 else "")
