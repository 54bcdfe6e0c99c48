"""Masters and optimizer state of ZeRO's stage 3 as whole tensors, and back.

DeepSpeed updates sub-groups of parameters one after the other; of a group on a disk master and state are brought into
memory for it. Here each group is brought once for all of its parameters. (`deepspeed.utils`' access by parameter brings
the whole group for each one.) Source: `deepspeed/runtime/zero/stage3.py` of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

WHOLE = "one value for each of the parameter's"
_MASTER = None  # the key of what is no state


class Groups:
    """Stage 3's sub-groups.

    Args:
        optimizer: DeepSpeed's.
        names: of the trained parameters.
    """

    def __init__(self, optimizer: Any, names: dict[int, str]):
        self._optimizer, self._names = optimizer, names

    @contextmanager
    def _opened(self, number: int, *, changes: bool = False) -> Iterator[torch.Tensor]:
        """A group's master, in memory while inside; where it changes the disk gets master and state afterwards."""
        optimizer = self._optimizer
        is_on_disk = optimizer._swappable_optimizer_subgroup(number)
        if is_on_disk:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        yield optimizer.fp32_partitioned_groups_flat[number]
        if is_on_disk and changes:
            optimizer._optimizer_states_and_gradient_swap_out(number)
        elif is_on_disk:
            optimizer._release_swap_buffers(number)

    def read(self, key: str | None = _MASTER) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every trained parameter: masters, or the state of that name. All ranks do it
        together; a tensor is valid until the next one."""
        optimizer = self._optimizer
        for number, group in enumerate(optimizer.fp16_groups):
            with self._opened(number) as master:
                flat = master if key is None else optimizer.optimizer.state[master][key]
                for p in group:
                    part = self._part(flat, p)
                    yield self._names[id(p)], optimizer._fp32_state_allgather(p, part)

    @torch.no_grad()
    def write(self, find: Callable[[str], torch.Tensor | None]) -> None:
        """This rank's part of every parameter's master from what `find` has of its name (None: as it is), and, rounded,
        of what the layers compute with."""
        for number in range(len(self._optimizer.fp16_groups)):
            with self._opened(number, changes=True) as master:
                self._fill(number, master, find)
                self._optimizer._reassign_or_swap_out_partitioned_parameters(number)

    @torch.no_grad()
    def write_state(
        self, keys: Sequence[str], common: dict[str, Any], find: Callable[[str, str], torch.Tensor | None]
    ) -> None:  # fmt: skip
        """State made anew.

        Args:
            keys: those with a value for each element.
            common: the others, the same for all parameters.
            find: (name, key) to the whole tensor; None: zeros.
        """
        for number in range(len(self._optimizer.fp16_groups)):
            with self._opened(number, changes=True) as master:
                state: dict[str, Any] = {key: torch.zeros_like(master, requires_grad=False) for key in keys}
                for key, flat in state.items():
                    self._fill(number, flat, lambda name, key=key: find(name, key))  # type: ignore[misc]
                for key, value in common.items():
                    there = isinstance(value, torch.Tensor)
                    state[key] = value.to(master.device, copy=True) if there else value
                self._optimizer.optimizer.state[master] = state

    def described(self, leaves_out: Sequence[str]) -> dict[str, Any]:
        """Of the first group; see `described`."""
        with self._opened(0) as master:
            return described(self._optimizer.optimizer.state.get(master, {}), master.numel(), leaves_out)

    def _fill(self, number: int, flat: torch.Tensor, find: Callable[[str], torch.Tensor | None]) -> None:
        for p in self._optimizer.fp16_groups[number]:
            whole = find(self._names[id(p)])
            if whole is None:
                continue
            part = self._part(flat, p)
            start = part.numel() * self._optimizer._get_param_partition_rank(p)
            mine = whole.reshape(-1)[start : start + part.numel()]  # the last rank's may be shorter
            part[: mine.numel()].copy_(mine)

    def _part(self, flat: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
        _, start, size = self._optimizer.grad_position[self._optimizer.get_param_id(p)]
        return flat.detach().narrow(0, start, size)


def described(state: dict[str, Any], size: int, leaves_out: Sequence[str]) -> dict[str, Any]:
    """What an optimizer has of a part of `size` elements: `WHOLE`, or on the CPU what it has for all of them; empty
    before the first update."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key in leaves_out:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        per_element = is_tensor and value.numel() == size
        found[key] = WHOLE if per_element else value.detach().cpu().clone() if is_tensor else value
    return found
