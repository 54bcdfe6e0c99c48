"""fp32 masters, gradients and optimizer state in host memory; what computes is on the device, or streams.

A part (a decoder layer, or the model's ends) sends its gradients away as soon as its backward pass of a group of
micro-batches is over: on CUDA into a pinned buffer on a stream of its own, at most two parts on the device at once. One
thread takes them in: it adds up what several groups send (in fp32), takes their norms, and updates. Two layers'
gradients are on their way to it at most: a backward pass that is faster than the updates waits, so that host memory
never holds more of them than that.

With clipping or loss scaling an update needs the norm of all gradients first. They wait in host memory, and the update
runs after the step, part by part in the order in which the next forward pass comes by: `ready` (and the ring, for
streamed weights) waits for one part's update only. Without either the update of a part runs as soon as its last
gradients are there, beside the rest of the backward pass, and its buffers serve the next parts.

The updates are torch's or bitsandbytes' own, on the same fp32 numbers as on the device: on the CPU the same to the bit.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch import nn

from fitune.engine.host_parcels import Parcel, aligned, cut, norm_of
from fitune.engine.optimizers import Masters
from fitune.engine.parts import ENDS, PartedOptimizer, part_of
from fitune.model.build import Built
from fitune.model.host import HostBuffer
from fitune.model.host_threads import thread_with_few

UNDERWAY = 2
"""Layers whose gradients are on their way to the thread, or being updated there."""


_WIDE_BYTES = 64 * 2**20  # gradients of a part up to this size are widened into a buffer that stays


class Updater(Protocol):
    """Updates a part of the masters somewhere else than on the CPU (see `streamed_update`)."""

    def update(
        self, masters: HostMasters, part: int, grads: dict[str, torch.Tensor], factors: list[float], used: Any
    ) -> None:
        """Update masters and state with `grads` times all `factors`, and what computes after the event `used`."""


class HostMasters(Masters):
    """Masters of the trained parameters in host memory.

    Args:
        parts: names of the trained parameters by part.
        narrow: adapters on the device become 16-bit working copies (they are used in the compute format anyway).
        pin: masters and state are pinned, for updates on the GPU.
    """

    def __init__(
        self,
        built: Built,
        trainable: dict[str, nn.Parameter],
        parts: dict[int, list[str]],
        *,
        narrow: bool,
        pin: bool = False,
    ):
        self.built, self.device = built, built.device
        self.order, self.parts = list(trainable), {part: names for part, names in parts.items() if names}
        self.on_meta, self._on_cuda = self.device.type == "meta", self.device.type == "cuda"
        self._pin = pin and self._on_cuda
        self.pairs = {}
        self.stores: dict[str, torch.Tensor] = {}  # where the weights that stream are
        self._buffers: list[HostBuffer] = []
        self.pinned: set[int] = set()  # addresses of optimizer state that is pinned
        for name, p in trainable.items():
            self.pairs[name] = p, nn.Parameter(self._master(name, p))
            if narrow and p.dtype == torch.float32 and built.compute_dtype != torch.float32 and ".lora_" in name:
                p.data = p.data.to(built.compute_dtype)
        self.optimizer: PartedOptimizer | None = None
        self.updater: Updater | None = None
        self.changed: Callable[[int], None] = lambda part: None
        """Called when the host memory of a part's streamed weights is about to change."""
        self.touched = False  # a part has been updated while the backward pass went on
        self._held: dict[str, torch.Tensor] = {}
        self._grads: dict[str, tuple[torch.Tensor, Parcel]] = {}
        self._norms: dict[str, torch.Tensor] = {}
        self._pool: dict[int, list[HostBuffer]] = {}
        self._cuts: weakref.WeakKeyDictionary[HostBuffer, dict[tuple[Any, ...], list[torch.Tensor]]]
        self._cuts = weakref.WeakKeyDictionary()  # goes with its buffer, which a failed step loses
        self._sent: set[int] = set()  # parts that have sent gradients in this step
        self._norm_rooms = self._rooms_for_norms() if self._on_cuda else {}
        self._wide: torch.Tensor | None = None
        self._stages: dict[int, tuple[HostBuffer, list[torch.Tensor]]] = {}
        self._published: dict[int, Any] = {}
        self._pending: dict[int, Future[None]] = {}
        self._arrivals: list[Future[None]] = []
        self._underway: deque[Future[None]] = deque()
        self._leaving: deque[tuple[list[torch.Tensor], Any]] = deque()
        self._at_once: float | None = None
        self._broken = False
        self.failed = False  # an update broke off in the middle
        self._hooks_wanted = False
        self._name_of: dict[int, str] = {}
        begin = functools.partial(_use, self.device)
        few = narrow and self._on_cuda  # adapters: many small tensors
        self._worker = thread_with_few("updates", begin) if few else ThreadPoolExecutor(1, "updates", begin)
        self._up = torch.cuda.Stream(self.device) if self._on_cuda else None
        self._down = torch.cuda.Stream(self.device) if self._on_cuda else None

    @torch.no_grad()
    def _master(self, name: str, p: nn.Parameter) -> torch.Tensor:
        if self.on_meta:
            return torch.empty_like(p, dtype=torch.float32)
        source = p.detach()
        if self.built.streamed is not None and self.built.streamed.takes(name):
            source = self.stores[name] = self.built.streamed.in_host(name)
            if source.dtype == torch.float32:
                return source  # the weights that stream are their own masters
        return self.host_tensor(source.shape, torch.float32, self._pin).copy_(source)

    def host_tensor(self, shape: torch.Size, dtype: torch.dtype, pin: bool) -> torch.Tensor:
        """A tensor of zeros in host memory that lives as long as this object."""
        buffer = HostBuffer(shape.numel() * dtype.itemsize, pin)
        self._buffers.append(buffer)
        return buffer.tensor.view(dtype).view(shape)

    # -- gradients leave ----------------------------------------------------------------------------------------------

    def collect_each(self) -> None:
        """For large trained weights: a gradient is collected as soon as it is made, so that not all of a layer's are
        there in two widths. (The hooks come at the first step: others may watch the gradients before they go.)"""
        self._hooks_wanted = True
        self._name_of = {id(p): name for name, (p, _) in self.pairs.items()}

    def _hook(self) -> None:
        self._hooks_wanted = False
        for name, (p, _) in self.pairs.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.collect((name,)))

    @torch.no_grad()
    def add_rows(self, parameter: torch.Tensor, rows: Any, part: torch.Tensor) -> None:
        """Add a gradient of some rows (a slice, or their numbers, each once) to what has not been sent yet, in fp32."""
        name = self._name_of[id(parameter)]
        held = self._held.get(name)
        if held is None:
            while self._leaving:  # the last layer's make room first
                self._let_go()
            held = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        held = self._held[name] = held.float()
        if isinstance(rows, slice):
            held[rows] += part
        else:
            held.index_add_(0, rows, part.float())

    def begin(self, lr: float | None) -> None:
        """A step begins; with `lr` every part is updated as soon as its last gradients are there."""
        self._at_once, self._broken, self.touched = lr, False, False
        self._sent.clear()
        if self._hooks_wanted:
            self._hook()

    def collect(self, names: Iterable[str]) -> None:
        """Add new gradients of these parameters to those that have not been sent yet, in fp32 from the second on."""
        for name in names:
            p = self.pairs[name][0]
            if p.grad is None:
                continue
            held = self._held.get(name)
            if held is None:
                self._held[name] = p.grad
            else:
                if held.dtype != torch.float32:
                    held = self._held[name] = held.float()
                held += p.grad
            p.grad = None

    def send(self, part: int, *, last: bool) -> None:
        """A part's backward pass of a group is over: its gradients leave. `last`: nothing more comes in this step."""
        tensors = {name: self._held.pop(name) for name in self.parts.get(part, ()) if name in self._held}
        if self.on_meta and tensors:
            self._leaving.append((list(tensors.values()), None))
            tensors.clear()
            while len(self._leaving) > int(part != ENDS):
                self._let_go()
        if self.on_meta or part not in self.parts:
            return
        if part != ENDS:
            while len(self._underway) >= UNDERWAY:
                wait([self._underway.popleft()])  # what went wrong there is raised by `norm`
        if tensors:
            parcel = self._parcel({name: (t.shape, t.dtype) for name, t in tensors.items()})
            is_whole = last and part not in self._sent
            self._sent.add(part)
            room = self._norm_rooms.get(part) if is_whole else None
            event = self._leave(tensors, parcel, most=int(part != ENDS), norms=room)
            self._arrivals.append(self._worker.submit(self._arrive, parcel, event))
        if last:
            if self._at_once is not None:
                self.changed(part)
            done = self._worker.submit(self._complete, part, self._now())
            self._arrivals.append(done)
            if self._at_once is not None:
                self._pending[part] = done
        if part != ENDS and self._arrivals:
            self._underway.append(self._arrivals[-1])

    def _parcel(self, shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> Parcel:
        sizes = [aligned(shape.numel() * dtype.itemsize) for shape, dtype in shapes.values()]
        spare = self._pool.setdefault(sum(sizes), [])
        buffer = spare.pop() if spare else HostBuffer(sum(sizes), self._on_cuda)
        key, cuts = tuple(shapes.values()), self._cuts.setdefault(buffer, {})
        if key not in cuts:
            cuts[key] = cut(buffer, shapes.values())
        return Parcel(buffer, dict(zip(shapes, cuts[key], strict=True)))

    def _rooms_for_norms(self) -> dict[int, torch.Tensor]:
        """Of each part in host memory, where the device has taken them."""
        counts = [len(names) for names in self.parts.values()]
        buffer = HostBuffer(4 * sum(counts), True)
        self._buffers.append(buffer)
        return dict(zip(self.parts, buffer.tensor.view(torch.float32).split(counts), strict=True))

    @torch.no_grad()
    def _leave(self, tensors: dict[str, torch.Tensor], parcel: Parcel, *, most: int, norms: torch.Tensor | None) -> Any:
        """At most so many parts stay on the device meanwhile: a head is too large to wait beside the last layer.
        `norms`: where those of the gradients go, if all of the part's are here."""
        leaving = list(tensors.values())
        tensors.clear()
        if self._up is None:
            torch._foreach_copy_(list(parcel.tensors.values()), leaving)
            return None
        taken = torch.stack(torch._foreach_norm(leaving, 2, torch.float32)) if norms is not None else None
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._up):
            torch._foreach_copy_(list(parcel.tensors.values()), leaving, non_blocking=True)
            if norms is not None and taken is not None:
                parcel.norms = norms[: len(leaving)]
                parcel.norms.copy_(taken, non_blocking=True)
                leaving.append(taken)
            event = self._up.record_event()
        self._leaving.append((leaving, event))
        while len(self._leaving) > most:
            self._let_go()
        return event

    def _let_go(self) -> None:
        _, event = self._leaving.popleft()
        if event is not None:  # its memory may be used again only after the copy
            torch.cuda.current_stream(self.device).wait_event(event)

    def _now(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event() if self._on_cuda else None

    # -- the thread's work --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _arrive(self, parcel: Parcel, event: Any) -> None:
        if event is not None:
            event.synchronize()
        if parcel.norms is not None:  # and nothing else comes for this part
            self._norms.update(zip(parcel.tensors, parcel.norms.clone(), strict=True))
        is_kept = False
        for name, tensor in parcel.tensors.items():
            if name not in self._grads:
                self._grads[name] = tensor, parcel
                is_kept = True
                continue
            total, home = self._grads[name]
            if total.dtype != torch.float32:
                wide = self._parcel({name: (total.shape, torch.float32)})
                self._grads[name] = wide.tensors[name].copy_(total), wide
                total = wide.tensors[name]
                self._give_back({home})
            total += tensor
        if not is_kept:
            self._give_back({parcel})

    def _give_back(self, parcels: set[Parcel]) -> None:
        """Buffers that no gradient uses any more serve the next ones."""
        used = {id(parcel) for _, parcel in self._grads.values()}
        for parcel in parcels:
            if id(parcel) not in used:
                self._pool.setdefault(parcel.buffer.num_bytes, []).append(parcel.buffer)

    @torch.no_grad()
    def _complete(self, part: int, used: Any) -> None:
        """All gradients of a part are there: their norms, and the update where it need not wait."""
        for name in self.parts[part]:
            if name in self._grads and name not in self._norms:
                self._norms[name] = norm_of(self._grads[name][0])
        if self._at_once is None:
            return
        norms = [self._norms[name] for name in self.parts[part] if name in self._norms]
        self._broken = self._broken or not (not norms or bool(torch.stack(norms).isfinite().all()))
        if not self._broken:
            self.touched = True
            self._apply(part, self._at_once, [], used)

    @torch.no_grad()
    def _apply(self, part: int, lr: float, factors: list[float], used: Any) -> None:
        """Update a part with its gradients times `factors`, then what computes with it. `used`: an event after the last
        use of that."""
        assert self.optimizer is not None
        self.failed = True
        optimizer = self.optimizer.each[part]
        for group in optimizer.param_groups:
            group["lr"] = lr
        grads = {name: self._grads[name][0] for name in self.parts[part] if name in self._grads}
        parcels = {self._grads.pop(name)[1] for name in grads}
        if self.updater is not None:
            self.updater.update(self, part, grads, factors, used)
        else:
            for name, grad in zip(grads, self._widened(list(grads.values()), parcels, factors), strict=True):
                self.pairs[name][1].grad = grad
            optimizer.step()
            for name in grads:
                self.pairs[name][1].grad = None
            self._publish(part, used)
        self._give_back(parcels)
        self.failed = False

    def _widened(self, grads: list[torch.Tensor], parcels: set[Parcel], factors: list[float]) -> list[torch.Tensor]:
        """Gradients of a part times all factors in fp32. Adapters' are many and small: a buffer of them is widened
        whole."""
        if not grads:
            return []
        dtypes = {grad.dtype for grad in grads}
        (parcel, *others) = parcels
        if others or len(dtypes) > 1 or torch.float32 in dtypes or 2 * parcel.buffer.num_bytes > _WIDE_BYTES:
            wide = [grad.float() for grad in grads]
            for factor in factors:
                torch._foreach_mul_(wide, factor)
            return wide
        flat = parcel.buffer.tensor.view(*dtypes)
        if self._wide is None or self._wide.numel() < flat.numel():
            self._wide = torch.empty(flat.numel(), dtype=torch.float32)
        whole = self._wide[: flat.numel()].copy_(flat)
        for factor in factors:
            whole.mul_(factor)
        return [whole.as_strided(grad.shape, grad.stride(), grad.storage_offset()) for grad in grads]

    @torch.no_grad()
    def _publish(self, part: int, used: Any = None) -> None:
        """Round a part's masters into what computes: streamed weights in host memory, the others on the device."""
        targets, sources = [], []
        for name in self.parts[part]:
            p, master = self.pairs[name]
            if name not in self.stores:
                targets.append(p)
                sources.append(master)
            elif self.stores[name].data_ptr() != master.data_ptr():
                self.stores[name].copy_(master)
        if not targets:
            return
        if self._down is None:
            torch._foreach_copy_(targets, sources)
            return
        rounded = self._stage(part, targets)
        torch._foreach_copy_(rounded, sources)
        with torch.cuda.stream(self._down):
            if used is not None:
                self._down.wait_event(used)
            torch._foreach_copy_(targets, rounded, non_blocking=True)
            self._published[part] = self._down.record_event()

    def _stage(self, part: int, targets: list[nn.Parameter]) -> list[torch.Tensor]:
        """Pinned memory for a part's working copies on their way to the device, after the last ones have arrived."""
        if part in self._published:
            self._published[part].synchronize()
        if part not in self._stages:
            shapes = [(p.shape, p.dtype) for p in targets]
            stage = HostBuffer(sum(aligned(shape.numel() * dtype.itemsize) for shape, dtype in shapes), True)
            self._stages[part] = stage, cut(stage, shapes)
        return self._stages[part][1]

    # -- what the engine calls ----------------------------------------------------------------------------------------

    def norm(self, scale: float) -> torch.Tensor:
        """L2 norm of all gradients of the step divided by `scale`, a fp32 scalar on the CPU."""
        if self.on_meta:
            self._leaving.clear()
            return torch.zeros((), device=self.device)
        while self._leaving:
            self._let_go()
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.result()
        norms = [self._norms[name] for name in self.order if name in self._norms]
        self._norms = {}
        if not norms:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(norms)) / scale

    def update(self, lr: float, factors: list[float]) -> None:
        """Begin to update every part that has not been, in the order of the next forward pass."""
        if self.on_meta or self._at_once is not None:
            return
        used = self._now()
        for part in sorted(self.parts):
            self.changed(part)
            self._pending[part] = self._worker.submit(self._apply, part, lr, factors, used)

    def is_pending(self, part: int) -> bool:
        """Whether an update of this part is not over yet."""
        return part in self._pending and not self._pending[part].done()

    def wait(self, part: int) -> None:
        """Until a part's update is over in host memory. Any thread may call it."""
        pending = self._pending.get(part)
        if pending is not None:
            pending.result()

    def ready(self, part: int) -> None:
        """Called before a part computes: what it computes with is up to date."""
        if part not in self._pending:
            return
        self.wait(part)
        self._pending.pop(part)
        if part in self._published:
            torch.cuda.current_stream(self.device).wait_event(self._published[part])

    def settle(self) -> None:
        """Until every update that was begun is over."""
        for part in list(self._pending):
            self.ready(part)

    def forget(self) -> None:
        """Drop the step's gradients; updates of the step before go on."""
        for p, _ in self.pairs.values():
            p.grad = None
        self._held.clear()
        if self.on_meta:
            self._leaving.clear()
            return
        while self._leaving:
            self._let_go()
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.result()
        self._worker.submit(self._drop).result()
        self._sent.clear()

    def _drop(self) -> None:
        parcels = {parcel for _, parcel in self._grads.values()}
        self._grads.clear()
        self._norms.clear()
        self._give_back(parcels)

    def publish(self) -> None:
        """Round all masters into what computes, at once."""
        self.settle()
        if self.on_meta:
            return
        for part in self.parts:
            self.changed(part)
            self._publish(part, self._now())
            if part in self._published:
                torch.cuda.current_stream(self.device).wait_event(self._published[part])

    def host_bytes(self) -> int:
        """Masters, gradients' and working copies' buffers as they are now; state and streamed weights left out."""
        spare = sum(buffer.num_bytes for buffers in self._pool.values() for buffer in buffers)
        used = {id(parcel): parcel.buffer.num_bytes for _, parcel in self._grads.values()}
        stages = sum(stage.num_bytes for stage, _ in self._stages.values())
        return sum(b.num_bytes for b in self._buffers) + spare + sum(used.values()) + stages


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def parts_of(names: Iterable[str], layers_prefix: str) -> dict[int, list[str]]:
    """Names of trained parameters by part, `ENDS` first, each part in the names' order."""
    parts: dict[int, list[str]] = {ENDS: []}
    for name in names:
        parts.setdefault(part_of(name, layers_prefix), []).append(name)
    return {part: parts[part] for part in sorted(parts) if parts[part]}
