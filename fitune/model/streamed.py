"""Weights that wait outside the device: one flat host buffer per decoder layer, and where its tensors lie in it.

A layer's buffer holds all its frozen tensors (packed data, quantisation state, norms, routers), each at a multiple of
512 bytes, so that one copy brings a layer to the device. The layer's modules then hold views of the copy: `bind` points
them at it. Adapters, trained biases and module buffers stay on the device. In full fine-tuning a layer's own weights
are trained: what waits here are their working copies, written again after every update (`engine.host_masters`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from fitune.errors import UserError
from fitune.hardware.host import memory as host_memory
from fitune.model.formats import DENSE, Packed, pack
from fitune.model.host import HostBuffer
from fitune.units import format_bytes

if TYPE_CHECKING:
    from fitune.model.build import Built
    from fitune.plan import Plan

ALIGNMENT_BYTES = 512  # as torch's CUDA allocator aligns tensors: kernels choose the same paths as for resident weights


@dataclass(frozen=True)
class Piece:
    """A tensor in a layer's buffer. `key` names a tensor of a packed weight; empty for a plain parameter."""

    name: str  # of the weight, as in the model
    key: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor in a flat uint8 buffer that holds the layer."""
        return buffer[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where a layer's frozen tensors lie, and the size of them all."""

    pieces: tuple[Piece, ...]
    num_bytes: int


class Backing(Protocol):
    """Where the layers' bytes are kept. `reused`: they were there before."""

    reused: bool

    def write(self, layer: int, piece: Piece, tensor: torch.Tensor) -> None: ...
    def finish(self) -> None:
        """All weights have been written."""

    def flat(self, layer: int) -> HostBuffer | None:
        """The layer in host memory; None when it must be read with `read_into`."""

    def read_into(self, layer: int, start: int, target: torch.Tensor) -> None:
        """Fill a flat uint8 CPU tensor with the layer's bytes from `start` on."""

    def will_need(self, layer: int) -> None:
        """A hint that the layer is read soon."""


class RamBacking:
    """Each layer in a buffer of its own, all of them made (and pinned) before the first weight is read."""

    reused = False

    def __init__(self, layouts: dict[int, Layout], pin: bool):
        self.buffers = {layer: HostBuffer(layout.num_bytes, pin) for layer, layout in layouts.items()}

    def write(self, layer: int, piece: Piece, tensor: torch.Tensor) -> None:
        piece.view(self.buffers[layer].tensor).copy_(tensor)

    def finish(self) -> None:
        pass

    def flat(self, layer: int) -> HostBuffer | None:
        return self.buffers[layer]

    def read_into(self, layer: int, start: int, target: torch.Tensor) -> None:
        target.copy_(self.buffers[layer].tensor[start : start + target.numel()])

    def will_need(self, layer: int) -> None:
        pass


class StreamedLayers:
    """The frozen weights of some decoder layers: layouts, their backing, and the modules that use them."""

    def __init__(self, built: Built, plan: Plan):
        self.base_format, self.double_quant = plan.base_format, plan.double_quant
        self.ring_buffers = plan.ring_buffers
        self.is_trained = plan.method == "full"
        self.layouts: dict[int, Layout] = {}
        self.backing: Backing | None = None  # none on meta
        self._device = built.device
        self._packed: dict[str, Packed] = {}
        self._transposed = {name for name, linear in built.linears.items() if linear.transposed}
        self._parameters: dict[str, tuple[nn.Module, str]] = {}
        self._layer_of: dict[str, int] = {}
        self._bound: dict[int, list[torch.Tensor]] = {}
        for index in plan.streamed_layers():
            self._lay_out(built, index, trains_biases=plan.adapter is not None and plan.adapter.bias != "none")

    def _lay_out(self, built: Built, index: int, trains_biases: bool) -> None:
        prefix = f"{built.layers_prefix}.{index}."
        pieces: list[Piece] = []
        offset = 0

        def add(name: str, key: str, tensor: torch.Tensor) -> None:
            nonlocal offset
            pieces.append(Piece(name, key, offset, tuple(tensor.shape), tensor.dtype))
            offset = _aligned(offset + pieces[-1].num_bytes)

        for name, shape in self._packed_shapes(built, prefix):
            abstract = pack(torch.empty(shape, dtype=DENSE.get(self.base_format, torch.bfloat16), device="meta"),
                            self.base_format, self.double_quant)  # fmt: skip
            self._packed[name] = Packed(self.base_format, shape, {})
            for key, tensor in abstract.tensors.items():
                add(name, key, tensor)
        for path, module in built.layers[index].named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if leaf.endswith("bias") and trains_biases:
                    continue
                name = prefix + (f"{path}.{leaf}" if path else leaf)
                self._parameters[name] = module, leaf
                add(name, "", parameter)
        self.layouts[index] = Layout(tuple(pieces), offset)
        self._layer_of |= {piece.name: index for piece in pieces}

    def _packed_shapes(self, built: Built, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, linear in built.linears.items():
            if name.startswith(prefix):
                yield f"{name}.weight", (linear.out_features, linear.in_features)
        for experts in built.experts:
            if experts.prefix.startswith(prefix):
                for leaf, shape in experts.shapes.items():
                    yield f"{experts.prefix}.{leaf}", shape

    def open(self, place: str, identity: str | None) -> None:
        """Make room for the layers' bytes: `place` is a plan's `stream_from`.

        Raises:
            UserError: not enough RAM or disk space.
        """
        if place == "disk":
            from fitune.model.packed_file import DiskBacking

            packed = f"{self.base_format} {self.double_quant}"  # formats of one size share their layouts
            self.backing = DiskBacking(self.layouts, f"{identity} {packed}" if identity is not None else None)
            return
        available = host_memory(Path("/")).available_bytes
        if self.total_bytes > available:
            raise UserError(
                "not enough RAM for the weights that wait outside the GPU",
                f"they take {format_bytes(self.total_bytes)}, {format_bytes(available)} are available",
                "close other programs, use a smaller base (--method qlora), or stream from disk",
            )
        self.backing = RamBacking(self.layouts, pin=place == "pinned" and self._device.type == "cuda")

    def in_host(self, name: str) -> torch.Tensor:
        """A plain parameter in the RAM that it is streamed from; what is written there is what the next copy brings."""
        layer = self._layer_of[name]
        buffer = self.backing.flat(layer) if self.backing is not None else None
        assert buffer is not None, f"{name} is not in RAM"
        return next(p for p in self.layouts[layer].pieces if p.name == name).view(buffer.tensor)

    def is_there(self, name: str) -> bool:
        """Whether this weight is in a packed file that an earlier run has left."""
        return name in self._layer_of and self.backing is not None and self.backing.reused

    def refusals(self) -> list[str]:
        """A sentence when the driver did not pin all of the layers."""
        buffers = [self.backing.flat(layer) for layer in self.layouts] if self.backing is not None else []
        refused = sum(1 for buffer in buffers if buffer is not None and not buffer.pinned)
        if not refused:
            return []
        pinned = f"{len(buffers) - refused} of {len(buffers)}"
        return [f"the driver pinned {pinned} streamed layers: the others reach the GPU through a small buffer, slower"]

    @property
    def largest_bytes(self) -> int:
        return max((layout.num_bytes for layout in self.layouts.values()), default=0)

    @property
    def total_bytes(self) -> int:
        return sum(layout.num_bytes for layout in self.layouts.values())

    def packed(self, name: str) -> Packed:
        """The packed weight that the module called `name` shares with this object; its tensors come with `bind`."""
        return self._packed[f"{name}.weight" if f"{name}.weight" in self._packed else name]

    def takes(self, name: str) -> bool:
        """Whether this weight of the model is one of the streamed ones."""
        return name in self._layer_of

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Pack a weight as it comes from the checkpoint (on the device where the format is quantised) and store it."""
        layer = self._layer_of[name]
        pieces = [piece for piece in self.layouts[layer].pieces if piece.name == name]
        if self.backing is None:
            return
        if name in self._parameters:
            self.backing.write(layer, pieces[0], tensor)
            return
        if name.removesuffix(".weight") in self._transposed:
            tensor = tensor.t().contiguous()
        if self.base_format not in DENSE:
            tensor = tensor.to(self._device)
        made = pack(tensor, self.base_format, self.double_quant).tensors
        for piece in pieces:
            assert made[piece.key].dtype == piece.dtype and tuple(made[piece.key].shape) == piece.shape, name
            self.backing.write(layer, piece, made[piece.key])

    def views(self, layer: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The layer's tensors in a buffer that holds (or will hold) its bytes, for `bind`."""
        return [piece.view(buffer) for piece in self.layouts[layer].pieces]

    def attach(self, layer: int, views: list[torch.Tensor]) -> None:
        """`bind` for the first time: parameters get their place on the device."""
        self._bound.pop(layer, None)
        for piece, view in zip(self.layouts[layer].pieces, views, strict=True):
            if not piece.key:
                module, leaf = self._parameters[piece.name]
                # `data`: a count of changes of its own, not that of the buffer it begins in, which a thread may be
                # filling for another layer while autograd holds this one's weights
                module._parameters[leaf] = nn.Parameter(view.data, requires_grad=self.is_trained)
        self.bind(layer, views)

    def bind(self, layer: int, views: list[torch.Tensor]) -> None:
        """Point the layer's modules at `views`, unless they are these already (a layer comes to the same buffer in
        every pass)."""
        if self._bound.get(layer) is views:
            return
        self._bound[layer] = views
        for piece, view in zip(self.layouts[layer].pieces, views, strict=True):
            if piece.key:
                self._packed[piece.name].tensors[piece.key] = view
            else:
                module, leaf = self._parameters[piece.name]
                parameter: Any = module._parameters[leaf]
                parameter.data = view

    def on_device(self, name: str) -> Packed:
        """A copy of one packed weight on the device, while no ring holds it (DoRA's row norms at the start)."""
        packed = self.packed(name)
        key = f"{name}.weight" if f"{name}.weight" in self._packed else name
        layer = self._layer_of[key]
        tensors = {}
        for piece in self.layouts[layer].pieces:
            if piece.name != key:
                continue
            host = torch.empty(piece.num_bytes, dtype=torch.uint8, device="cpu" if self.backing else "meta")
            if self.backing is not None:
                self.backing.read_into(layer, piece.offset, host)
            tensors[piece.key] = host.view(piece.dtype).view(piece.shape).to(self._device)
        return Packed(packed.format, packed.shape, tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
