"""The two ends of a model in host memory: embedding rows are gathered there, a frozen output head crosses to the device
in tiles of the vocabulary.

Shapes: x [..., H] what enters the head, weight [V, H], a tile [W, H] of its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fitune.model.host import HostBuffer
from fitune.model.host_threads import thread_with_few

EMBEDDING_STAGE_BYTES = 8 * 2**20  # of each of two buffers: a copy takes longer than to launch it, at a few GB/s too


class HostEmbedding(nn.Module):
    """A frozen embedding whose table stays in host RAM; the rows of a micro-batch are gathered there and copied.

    Exact. A row is 2 x hidden_size bytes per token; on CUDA rows pass through two small pinned buffers, one being
    gathered while the other is copied. `weight` is no parameter of the model.
    """

    def __init__(self, embedding: nn.Module, device: torch.device):
        super().__init__()
        self.__dict__["inner"] = embedding  # not a submodule: moving the model must not move the table
        self.device = device
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stages: list[tuple[HostBuffer, Any]] = []
        self._thread: ThreadPoolExecutor | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    @contextmanager
    def knowing(self, input_ids: torch.Tensor, host_ids: torch.Tensor | None) -> Iterator[None]:
        """Inside, `host_ids` are the same on the CPU, so that they need not be waited for."""
        self._known = (input_ids, host_ids) if host_ids is not None else None
        try:
            yield
        finally:
            self._known = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if input_ids.device.type == "meta":
            return self.inner(input_ids).to(self.device)
        known = self._known
        host = known[1] if known is not None and known[0] is input_ids else input_ids.cpu()
        if self.device.type != "cuda":
            return self.inner(host).to(self.device)
        if self._thread is None:
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self._thread = thread_with_few("embedding", functools.partial(torch.cuda.set_device, index))
        out = torch.empty(*host.shape, *self.weight.shape[1:], dtype=self.weight.dtype, device=self.device)
        stream = torch.cuda.current_stream(self.device)
        self._thread.submit(self._gather, host.reshape(-1), out.view(-1, out.shape[-1]), stream).result()
        return out

    @torch.no_grad()
    def _gather(self, ids_N: torch.Tensor, out_NH: torch.Tensor, stream: Any) -> None:
        plain = type(self.inner) is nn.Embedding and self.inner.max_norm is None
        width, dtype = out_NH.shape[1], out_NH.dtype
        step = max(1, EMBEDDING_STAGE_BYTES // (width * dtype.itemsize))
        if not self._stages:
            size = step * width * dtype.itemsize
            self._stages = [(HostBuffer(size, pin=True), torch.cuda.Event()) for _ in range(2)]
        with torch.cuda.stream(stream):
            for number, start in enumerate(range(0, ids_N.numel(), step)):
                ids = ids_N[start : start + step]
                stage, copied = self._stages[number % 2]
                copied.synchronize()
                rows = stage.tensor[: ids.numel() * width * dtype.itemsize].view(dtype).view(-1, width)
                if plain:
                    torch.index_select(self.weight, 0, ids, out=rows)
                else:
                    rows.copy_(self.inner(ids))
                out_NH[start : start + step].copy_(rows, non_blocking=True)
                copied.record(stream)


class HostHead(nn.Module):
    """Takes the place of an output head `nn.Linear`. `weight` is no parameter of the model; a bias stays one.

    Called by the model's own code it gives the full logits, tile after tile (generation, and models whose code after
    the head looks at several logits at once). For the tiled loss, `tapped` and `standing_in` let the model's code
    around the head run without it.
    """

    def __init__(self, head: nn.Linear, dtype: torch.dtype, ring_buffers: int = 2):
        super().__init__()
        self.ring_buffers = ring_buffers  # of a ring that has only this to bring
        self.out_features, self.in_features = head.weight.shape
        self.bias = head.bias
        self.dtype = dtype
        self.buffer: HostBuffer | None = None
        self.__dict__["weight"] = torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")
        self.tile_rows = self.out_features
        self.__dict__["tiles"] = None
        self._tap: list[torch.Tensor] | None = None
        self._stand_in: torch.Tensor | None = None

    def allocate(self, pin: bool, make: Callable[[int, bool], HostBuffer] = HostBuffer) -> None:
        """Room for the weight in host memory."""
        self.buffer = make(self.out_features * self.in_features * self.dtype.itemsize, pin)
        self.__dict__["weight"] = self.buffer.tensor.view(self.dtype).view(self.out_features, self.in_features)

    @property
    def num_tiles(self) -> int:
        return -(-self.out_features // self.tile_rows)

    def rows(self, index: int) -> slice:
        """The vocabulary entries of a tile."""
        return slice(index * self.tile_rows, min((index + 1) * self.tile_rows, self.out_features))

    def logits(self, x: torch.Tensor, weight: torch.Tensor, index: int) -> torch.Tensor:
        """Logits [..., W] of a tile whose weight is on the device."""
        return F.linear(x, weight, None if self.bias is None else self.bias[self.rows(index)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._tap is not None:
            self._tap.append(x)
            return x[..., :1]
        if self._stand_in is not None:
            return self._stand_in
        return _Tiled.apply(x, self)

    @contextmanager
    def tapped(self) -> Iterator[list[torch.Tensor]]:
        """Inside, calls only note what enters the head."""
        self._tap = []
        try:
            yield self._tap
        finally:
            self._tap = None

    @contextmanager
    def standing_in(self, logits: torch.Tensor) -> Iterator[None]:
        """Inside, calls give `logits` whatever enters."""
        self._stand_in = logits
        try:
            yield
        finally:
            self._stand_in = None


class _Tiled(torch.autograd.Function):
    """Full logits and the input's gradient, one tile on the device at a time. The weight and bias get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, head: HostHead) -> torch.Tensor:
        ctx.head = head
        out = x.new_empty(*x.shape[:-1], head.out_features)
        for index in range(head.num_tiles):
            with head.tiles.tile(index) as weight:
                out[..., head.rows(index)] = head.logits(x, weight, index)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        head: HostHead = ctx.head
        total: torch.Tensor | None = None
        for index in reversed(range(head.num_tiles)):
            with head.tiles.tile(index) as weight:
                part = wide_product(grads[0][..., head.rows(index)].flatten(0, -2), weight)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(grads[0].dtype).view(*grads[0].shape[:-1], head.in_features), None


def wide_product(left_CW: torch.Tensor, right_WH: torch.Tensor) -> torch.Tensor:
    """left [C, W] @ right [W, H] in fp32 [C, H] without rounding to 16 bit in between, so that sums over tiles are as
    exact as one product over the vocabulary. (CUDA: `aten::mm.dtype`, torch 2.8 and newer.)"""
    if left_CW.dtype == torch.float32:
        return left_CW @ right_WH
    if left_CW.device.type == "cuda":
        return torch.ops.aten.mm.dtype(left_CW.contiguous(), right_WH, torch.float32)
    if left_CW.device.type == "meta":
        return torch.empty(left_CW.shape[0], right_WH.shape[1], dtype=torch.float32, device="meta")
    return left_CW.float() @ right_WH.float()
