"""Which of how many processes this one is. No torch: the process that starts the others asks too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fitune.errors import UserError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VISIBLE = "CUDA_VISIBLE_DEVICES"


T = TypeVar("T")
SAME_RECORDS = ("tp", "pp", "cp")
"""Ways of working together in which every rank sees all records of a step."""
SAME_STATE = ("ddp", "streamed", "cp")
"""Ways in which every rank has the whole state of what is trained: to save it takes one of them."""
FLAT_OPTIMIZERS = ("adamw", "lion", "sgd")
"""Those that treat each element alone: their state can be cut anywhere, and a part's update is the whole's."""


@dataclass(frozen=True)
class World:
    """This process' place among those of the run, as torchrun's variables tell it (torch documentation, "torchrun").

    Attributes:
        elastic: who started the processes starts the same command again after a failure or a preemption (torchrun,
            Slurm), so that a run that is there already is this one.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = "127.0.0.1"
    port: int = 29500
    elastic: bool = False

    def environment(self) -> dict[str, str]:
        """The variables that say this to a process."""
        values = (self.rank, self.size, self.local_rank, self.local_size, self.address, self.port)
        return dict(zip(_NAMES, map(str, values), strict=True))


def from_environment(environ: Mapping[str, str] = os.environ) -> World | None:
    """The place that torchrun, fitune's own launcher or Slurm's `srun` gave this process; None for one process alone.

    Raises:
        UserError: a variable is missing or is no number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = dict(zip(_NAMES, _NAMES, strict=True))
        names["LOCAL_WORLD_SIZE"] = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "WORLD_SIZE"
        names["LOCAL_RANK"] = "LOCAL_RANK" if "LOCAL_RANK" in environ else "RANK"
    elif int(environ.get("SLURM_STEP_NUM_TASKS", "1") or 1) > 1 and "MASTER_ADDR" in environ:
        names = dict(zip(_NAMES, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
                                  "MASTER_ADDR", "MASTER_PORT"), strict=True))  # fmt: skip
    else:
        return None
    found = {}
    for name in _NAMES:
        value = environ.get(names[name], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.get(name, ""))
        if name != "MASTER_ADDR" and not value.strip().isdigit():
            raise UserError(
                "cannot tell which process of the run this is",
                f"{names[name]} is {value!r}, not a number",
                "start it with `fitune train`, torchrun or srun",
            )
        found[name] = value
    elastic = "TORCHELASTIC_RUN_ID" in environ or environ.get("SLURM_RESTART_COUNT", "0").strip() not in ("", "0")
    rank, size, local_rank, local_size = (int(found[name]) for name in _NAMES[:4])
    if size == 1:
        return None
    return World(rank, size, local_rank, local_size, found["MASTER_ADDR"], int(found["MASTER_PORT"]), elastic)


def publish(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torch reads where Slurm's stand instead of them."""
    for name, value in world.environment().items():
        environ.setdefault(name, value)


@contextmanager
def environment_with(given: Mapping[str, str]) -> Iterator[None]:
    """Inside, the process' environment has these values."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def card_of(world: World, devices: str | None, visible: str | None, num_cards: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves this rank its own card.

    Args:
        devices: the recipe's: indices among the cards that are visible; None: all of them.
        visible: what the variable is now; None when it is not set.
        num_cards: how many are visible.

    Raises:
        UserError: fewer cards than processes on this machine, or one is named that is not there.
    """
    names = visible.split(",") if visible is not None else None
    wanted = device_list(devices)
    if wanted is None and names is not None and len(names) == 1 and names[0].strip():
        return names[0]  # the scheduler has given each process its own
    there = num_cards if names is None else min(num_cards, len(names))
    check_devices(devices, there)
    own = range(there) if wanted is None else wanted
    if world.local_rank >= len(own):
        raise UserError(f"there are {max(world.local_size, world.local_rank + 1)} processes for {len(own)} GPUs",
                        "each process needs a GPU of its own", f"start {len(own)} for each machine")  # fmt: skip
    index = own[world.local_rank]
    return str(index) if names is None else names[index]


def check_devices(devices: str | None, num_cards: int) -> None:
    """Raises UserError where GPUs are named that are not there."""
    wanted = device_list(devices)
    if wanted is not None and max(wanted) >= num_cards:
        raise UserError(f"cannot use --devices {devices}", f"{num_cards} GPUs are there, counted from 0",
                        "name others with --devices")  # fmt: skip


def device_list(devices: str | None) -> list[int] | None:
    """GPU indices of `--devices 0,1`; None where none are named (nothing, or cpu).

    Raises:
        UserError: something else stands there, or one twice.
    """
    text = (devices or "").strip().lower()
    if not text or text == "cpu":
        return None
    parts = [part.strip().removeprefix("cuda:") for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UserError(
            f"cannot use --devices {devices}", "it is cpu or the indices of GPUs", "for example --devices 0,1"
        )
    if len(set(parts)) < len(parts):
        raise UserError(f"cannot use --devices {devices}", "a GPU is named twice", "name each once")
    return [int(part) for part in parts]


class Single:
    """A run of one process: what is shared is what it has."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    is_leader = True
    elastic = False
    cards: tuple[Any, ...] = ()  # each rank's (`fitune.hardware.Device`), where there are several with GPUs

    def share(self, value: T) -> T:
        """The first rank's value, on every rank."""
        return value

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return [value]

    def barrier(self) -> None:
        """Wait until every rank is here."""

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The first rank of each node does it alone (a download), then the others."""
        yield

    def largest(self, values: list[float]) -> list[float]:
        """The largest of every rank's numbers, each by itself."""
        return values

    def sums(self, values: list[float]) -> list[float]:
        """Numbers added over ranks."""
        return values

    def of_node(self, value: T) -> T:
        """The value of the first rank of this node."""
        return value

    def apart(self) -> Single:
        """The same ranks, with exchanges of their own for a thread beside the training; all make it together."""
        return self

    def leave_word(self, problem: UserError) -> None:
        """For those that will notice only that this process is gone: why it ends."""

    def last_word(self) -> UserError | None:
        """What the first of those that have ended has left (`ToldElsewhere` where the first rank tells it); None where
        none could."""
        return None

    @property
    def leads_node(self) -> bool:
        return self.local_rank == 0

    def close(self) -> None:
        """Leave the group."""
