"""Updates on the GPU of masters and optimizer state that wait in host memory: both cross the link in pieces, both ways.

A piece (some elements of one tensor) is copied into one of two sets of device buffers on one stream, updated on a
second, and its master and state go back on a third, so that the three go on side by side. The numbers are those of an
update of everything on the device: a piece begins at a multiple of the 256 values that share a scale. What computes is
rounded from the new master on the device and goes to the host with it where it streams.

Which kernel runs:

- adamw: torch's fused AdamW, on both kinds of device.
- adamw8bit, 8-bit state, on CUDA: our own Triton kernel (`adamw8bit_kernel`). bitsandbytes 0.50's functions take no
  stream: they launch on the legacy default stream, in no order with these three. Where Triton is missing or cannot
  build the kernel, theirs runs there, and it and the second stream wait for one another: right as well, but the update
  also waits for what the default stream computes (less goes on side by side).
- adamw8bit, 8-bit state, on the CPU: bitsandbytes' function.
- adamw8bit, fp32 state (tensors of fewer than 4,096 elements): plain torch operations in bitsandbytes' order.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fitune.engine.host_masters import HostMasters
from fitune.engine.optimizers import _BNB_BLOCK, _BNB_MIN_8BIT
from fitune.model.dropout import kernel_failures

# Elements of a piece: 8 MiB per copied tensor of 16-bit values. Two sets of buffers take 2 x 18 bytes per element at
# most (master, gradient, working copy, fp32 state): 144 MiB; 96 MiB with 8-bit state. (Chosen, not measured.)
PIECE_ELEMENTS = 4 * 2**20


def buffers(optimizer: str, *, narrow: bool, wide: bool, streams: bool) -> list[tuple[str, int]]:
    """(what, bytes) of each buffer of one set. (Of small tensors the state is never in 8 bits.)

    Args:
        narrow, wide: gradients come in 16 bits; others, or the same, in fp32.
        streams: some working copies are in host memory, in 16 bits.
    """
    made = [("master", 4 * PIECE_ELEMENTS)]
    made += [("gradient in 16 bits", 2 * PIECE_ELEMENTS), ("gradient made wide", 4 * PIECE_ELEMENTS)] if narrow else []
    made += [("gradient", 4 * PIECE_ELEMENTS)] if wide else []
    moments, scales = ("first moment", "second moment"), 4 * (PIECE_ELEMENTS // _BNB_BLOCK)
    made += [(moment, PIECE_ELEMENTS * (4 if optimizer == "adamw" else 1)) for moment in moments]
    if optimizer == "adamw8bit":
        made += [("scales of a moment", scales)] * 2 + [("moment of a small tensor", 4 * _BNB_MIN_8BIT)] * 2
    return made + ([("working copy", 2 * PIECE_ELEMENTS)] if streams else [])


def buffer_bytes(optimizer: str) -> int:
    """Of both sets, for adapters, whose working copies are on the device and whose gradients are in 16 bits."""
    return 2 * sum(size for _, size in buffers(optimizer, narrow=True, wide=False, streams=False))


@dataclass
class _Set:
    """Device buffers of one piece by use, and the event after which they may be overwritten."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    free: Any = None

    def take(self, key: str, dtype: torch.dtype, count: int, device: torch.device) -> torch.Tensor:
        """`count` elements; the buffer is made once, for the largest piece."""
        most = PIECE_ELEMENTS // _BNB_BLOCK if key.startswith("absmax") else PIECE_ELEMENTS
        if key.startswith("state") and dtype == torch.float32:
            most = min(most, _BNB_MIN_8BIT)  # of tensors too small for 8 bits
        key = f"{key} {dtype}"
        if key not in self.buffers:
            self.buffers[key] = torch.empty(most, dtype=dtype, device=device)
        return self.buffers[key][:count]


@dataclass(frozen=True)
class _Settings:
    """What one update's kernels are told."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float

    def corrected(self, step: int) -> tuple[float, float]:
        """(-lr, eps), both with Adam's bias corrections at this step: what stands before first / (sqrt(second) + eps)
        where the moments are not corrected (bitsandbytes' form)."""
        corrections = [1 - beta**step for beta in self.betas]
        return -self.lr * math.sqrt(corrections[1]) / corrections[0], self.eps * math.sqrt(corrections[1])

    @property
    def kept(self) -> float:
        """What weight decay leaves of a value."""
        return 1.0 - self.lr * self.weight_decay


class StreamedUpdate:
    """Updates parts for `HostMasters` on its device; on the CPU the same pieces go through buffers in RAM."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sets = [_Set(), _Set()]
        self._next = 0
        self._tables: dict[int, torch.Tensor] = {}
        on_cuda = device.type == "cuda"
        self._in, self._work, self._out = (torch.cuda.Stream(device) if on_cuda else None for _ in range(3))

    @torch.no_grad()
    def update(
        self, masters: HostMasters, part: int, grads: dict[str, torch.Tensor], factors: list[float], used: Any
    ) -> None:
        """One update of a part; `grads` are in host memory, any float type. Returns when masters, state and streamed
        weights are in host memory again.

        Args:
            used: CUDA event after the last use of what computes on the device.
        """
        assert masters.optimizer is not None
        optimizer: Any = masters.optimizer.each[part]
        (group,) = optimizer.param_groups
        settings = _Settings(group["lr"], group["weight_decay"], (group["betas"][0], group["betas"][1]), group["eps"])
        if self._work is not None and used is not None:
            self._work.wait_event(used)
        indices = {id(p): index for index, p in enumerate(group["params"])}
        for name, grad in grads.items():
            p, master = masters.pairs[name]
            state = self._state(masters, optimizer, group, master, indices[id(master)])
            state["step"] += 1
            working = masters.stores.get(name)
            for start in range(0, master.numel(), PIECE_ELEMENTS):
                where = slice(start, min(start + PIECE_ELEMENTS, master.numel()))
                self._piece(settings, where, master, grad, state, factors, p if working is None else working)
        if self._out is not None:
            self._out.synchronize()

    def _state(self, masters: HostMasters, optimizer: Any, group: Any, master: Any, index: int) -> dict[str, Any]:
        """The state of a tensor, made (pinned) at its first update, under the names that its library gives."""
        state: dict[str, Any] = optimizer.state[master]
        zeros = functools.partial(self._zeros, masters)
        if not state and hasattr(optimizer, "init_state"):
            optimizer.get_state_buffer = zeros  # not first in memory that is given back: little of that goes back
            optimizer.init_state(group, master, 0, index)
            del optimizer.get_state_buffer  # else it and the masters would keep each other, and what is pinned
        elif not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = zeros(master), zeros(master)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and not key.startswith("qmap"):
                state[key] = self._pin(masters, value)
        return state

    def _zeros(self, masters: HostMasters, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if self._in is None:
            return torch.zeros_like(like, dtype=dtype)
        made = masters.host_tensor(like.shape, dtype, True)
        masters.pinned.add(made.untyped_storage().data_ptr())
        return made

    def _pin(self, masters: HostMasters, value: torch.Tensor) -> torch.Tensor:
        if self._in is None or value.untyped_storage().data_ptr() in masters.pinned:
            return value
        made = masters.host_tensor(value.shape, value.dtype, True).copy_(value)
        masters.pinned.add(made.untyped_storage().data_ptr())
        return made

    def _piece(
        self,
        settings: _Settings,
        where: slice,
        master: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
        factors: list[float],
        working: torch.Tensor,
    ) -> None:
        """Some elements of one tensor there, updated, and back."""
        buffers, self._next = self._sets[self._next], 1 - self._next
        blocks = slice(where.start // _BNB_BLOCK, -(-where.stop // _BNB_BLOCK))
        rooms: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # (in host memory, on the device)

        def room(key: str, host: torch.Tensor, part: slice) -> None:
            flat = host.detach().reshape(-1)[part]
            rooms[key] = flat, buffers.take(key, flat.dtype, flat.numel(), self.device)

        with _on(self._in):  # buffers are this stream's from the beginning
            room("master", master, where)
            room("grad", grad, where)
            for key in ("state1", "state2", "exp_avg", "exp_avg_sq"):
                if key in state:
                    room(key, state[key], where)
            for key in ("absmax1", "absmax2"):
                if key in state:
                    room(key, state[key], blocks)
        self._bring(buffers, rooms)
        with _on(self._work):
            if self._in is not None and self._work is not None:
                self._work.wait_stream(self._in)
            wide = rooms["grad"][1]
            if wide.dtype != torch.float32:
                wide = buffers.take("wide", torch.float32, wide.numel(), self.device).copy_(wide)
            for factor in factors:
                wide.mul_(factor)
            self._kernel(settings, rooms["master"][1], wide, {k: d for k, (_, d) in rooms.items()}, state)
            flat = working.detach().reshape(-1)[where]
            if flat.device.type == "cuda":
                flat.copy_(rooms["master"][1])
            elif flat.data_ptr() != rooms["master"][0].data_ptr():
                rounded = buffers.take("working", flat.dtype, flat.numel(), self.device)
                rooms["working"] = flat, rounded.copy_(rooms["master"][1])
        self._take_back(buffers, {key: pair for key, pair in rooms.items() if key != "grad"})

    def _bring(self, buffers: _Set, rooms: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        with _on(self._in):
            if self._in is not None and buffers.free is not None:
                self._in.wait_event(buffers.free)
            for host, there in rooms.values():
                there.copy_(host, non_blocking=True)

    def _take_back(self, buffers: _Set, rooms: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        with _on(self._out):
            if self._out is not None and self._work is not None:
                self._out.wait_stream(self._work)
            for host, there in rooms.values():
                host.copy_(there, non_blocking=True)
            if self._out is not None:
                buffers.free = self._out.record_event()

    def _kernel(
        self,
        settings: _Settings,
        master: torch.Tensor,
        grad: torch.Tensor,
        rooms: dict[str, torch.Tensor],
        state: dict[str, Any],
    ) -> None:
        lr, decay, eps, (beta1, beta2) = settings.lr, settings.weight_decay, settings.eps, settings.betas
        if "exp_avg" in rooms:
            step = torch.full((), state["step"].item(), device=self.device)
            torch._fused_adamw_(
                [master], [grad], [rooms["exp_avg"]], [rooms["exp_avg_sq"]], [], [step], lr=lr, beta1=beta1,
                beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        moments = [rooms["state1"], rooms["state2"]]
        if moments[0].dtype == torch.float32:
            _small_adamw(settings, state["step"], master, grad, *moments)
            return
        tables = [self._table(state[key]) for key in ("qmap1", "qmap2")]
        scales = [rooms["absmax1"], rooms["absmax2"]]
        launch = _fused(self.device) if self._work is not None else None
        if launch is not None:
            step_size, scaled_eps = settings.corrected(state["step"])
            launch(
                master, grad, moments, scales, tables,
                step_size=step_size, eps=scaled_eps, kept=settings.kept, betas=settings.betas,
            )  # fmt: skip
            return
        with _default_stream_within(self._work):
            _library_adamw8bit(settings, state["step"], master, grad, moments, scales, tables)

    def _table(self, table: torch.Tensor) -> torch.Tensor:
        """A code table on the device; the tensors of a part share theirs."""
        if table.device.type == self.device.type:
            return table
        if table.data_ptr() not in self._tables:
            self._tables[table.data_ptr()] = table.to(self.device)
        return self._tables[table.data_ptr()]


def _on(stream: Any) -> Any:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


@contextmanager
def _default_stream_within(work: Any) -> Iterator[None]:
    """What goes to the legacy default stream inside runs after all that `work` holds and before what it gets next."""
    if work is None:
        yield
        return
    default = torch.cuda.default_stream(work.device)
    default.wait_stream(work)
    yield
    work.wait_stream(default)


def _small_adamw(
    settings: _Settings,
    step: int,
    master: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
) -> None:
    """AdamW with fp32 state, in place, `grad` as room for what is between: nothing is allocated.

    In the order of bitsandbytes 0.50's 32-bit Adam: weight decay comes first on the CPU and last on CUDA.
    """
    (beta1, beta2), (step_size, eps) = settings.betas, settings.corrected(step)
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if master.device.type == "cpu":
        master.mul_(settings.kept)
    torch.sqrt(second, out=grad).add_(eps)
    master.add_(torch.div(first, grad, out=grad), alpha=step_size)
    if master.device.type != "cpu":
        master.mul_(settings.kept)


def _library_adamw8bit(
    settings: _Settings,
    step: int,
    master: torch.Tensor,
    grad: torch.Tensor,
    moments: list[torch.Tensor],
    scales: list[torch.Tensor],
    tables: list[torch.Tensor],
) -> None:
    """bitsandbytes' update of 8-bit state; on CUDA it goes to the legacy default stream whatever stream is current."""
    from bitsandbytes import functional

    functional.optimizer_update_8bit_blockwise(
        "adam", grad, master, *moments, *settings.betas, 0.0, 0.0, settings.eps, step, settings.lr, *tables, *scales,
        settings.weight_decay, gnorm_scale=1.0, skip_zeros=False,
    )  # fmt: skip


@functools.cache
def _fused(device: torch.device) -> Any:
    """What launches the Triton kernel of 8-bit AdamW, where Triton is there, can build it (it needs a C compiler) and
    the kernel gives what bitsandbytes gives; else None, and said once."""
    try:
        from fitune.engine.adamw8bit_kernel import launch

        with _on(torch.cuda.default_stream(device) if device.type == "cuda" else None):
            if _gives_the_librarys(launch, device):
                return launch
        why = "what it gives is not what bitsandbytes gives"
    except torch.OutOfMemoryError:
        raise  # of this moment: asked again the next time
    except kernel_failures() as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
    said = "8-bit AdamW in pieces runs without its Triton kernel, which is slower: %s"
    logging.getLogger(__name__).warning(said, why)
    return None


def _gives_the_librarys(launch: Any, device: torch.device) -> bool:
    """One update from a state that holds every code, a whole block and a part. New codes may be of neighbours (see the
    kernel); no weight decay, whose place in the library's order depends on the device."""
    from bitsandbytes import functional

    settings, step = _Settings(1e-2, 0.0, (0.9, 0.999), 1e-8), 100
    codes = torch.arange(_BNB_BLOCK + 44, dtype=torch.int32, device=device)
    grad = torch.sin(codes.float())
    tables = [functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
    ours, theirs = (
        (torch.zeros_like(grad), [(codes % 256).to(torch.uint8) for _ in tables],
         [torch.tensor([0.5, 0.25], device=device) for _ in tables])
        for _ in range(2)
    )  # fmt: skip
    step_size, eps = settings.corrected(step)
    launch(ours[0], grad, *ours[1:], tables, step_size=step_size, eps=eps, kept=settings.kept, betas=settings.betas)
    _library_adamw8bit(settings, step, theirs[0], grad, *theirs[1:], tables)
    moments = zip(ours[1], theirs[1], tables, strict=True)
    return (
        torch.allclose(ours[0], theirs[0], rtol=1e-3)
        and all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(ours[2], theirs[2], strict=True))
        and all((t[a.int()] - t[b.int()]).abs().max() <= 1.001 * t.diff().max() for a, b, t in moments)
    )


assert PIECE_ELEMENTS % _BNB_BLOCK == 0 and PIECE_ELEMENTS > _BNB_MIN_8BIT
