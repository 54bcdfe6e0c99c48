"""A frozen linear layer in any base format, with an optional LoRA adapter, as one autograd function.

Shapes: x [..., I], weight [O, I], lora_A [R, I], lora_B [O, R]. The weight is unpacked at each use and never saved for
backward, so that where it lives (device, ring, host) is the caller's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fitune.model import dropout as counter_dropout
from fitune.model.casts import LayerCasts
from fitune.model.formats import Packed, Scratch, pack, unpack


@dataclass
class StepContext:
    """What the layers need to know of the running micro-batch. One object per model, set by the engine.

    Attributes:
        token_keys: [B * T] int32 keys of counter dropout; None turns dropout off (evaluation).
        doc_lengths: per row the lengths of its documents, padding last; None: one causal document per row.
        cu_seqlens: [num_docs + 1] int32 on the device, for packed rows.
        attention: flash | efficient | cpu | blockwise.
        scratch: buffer for unpacked weights and the loss's fp32 logits; None: they are allocated each time.
        unneeded: the module whose output the running layer's backward pass does not read; its output is zeros.
        watch: while a layer runs for its backward pass the first time, to find that module.
        casts: the running layer's adapters in the format that computes; None: each is rounded at each use.
        mlp_tiles: pieces of tokens in which a gated MLP of the running layer runs.
        on_cuda: the plan's device is a GPU, also while its step runs on meta: fused kernels stand for plain code.
    """

    token_keys: torch.Tensor | None = None
    doc_lengths: tuple[tuple[int, ...], ...] | None = None
    cu_seqlens: torch.Tensor | None = None
    attention: str = "cpu"
    on_cuda: bool = False
    scratch: Scratch | None = None
    mlp_tiles: int = 1
    unneeded: object | None = None
    watch: OutputWatch | None = None
    casts: LayerCasts | None = None


class OutputWatch:
    """Finds the module in a layer whose output no backward pass reads: the last one, when autograd saves nothing after
    it has run. (In most decoder layers that is the projection whose result is added to the residual stream.)"""

    def __init__(self) -> None:
        self.last: object | None = None
        self._seen: list[object] = []
        self._num_saved = 0

    def passed(self, module: object) -> None:
        """A module whose output can be left out has run, its own saving included."""
        self.last, self._num_saved = module, 0
        self._seen.append(module)

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor."""
        self._num_saved += 1
        return tensor

    def found(self) -> object | None:
        """The module, None where there is none."""
        is_last = self.last is not None and self._num_saved == 0 and sum(m is self.last for m in self._seen) == 1
        return self.last if is_last else None


# Inside a function with a backward pass of its own, ops need not ask autograd: that halves what a view costs.
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        lora_A: torch.Tensor | None,
        lora_B: torch.Tensor | None,
        layer: BaseLinear,
        keys: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, lora_A, lora_B, keys)
        ctx.layer, ctx.has_bias = layer, bias is not None
        if layer.context.unneeded is layer:
            return x.new_zeros(*x.shape[:-1], layer.out_features)
        return product(x, bias, lora_A, lora_B, layer, keys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with _below_autograd():
            return _FrozenLinear._backward(ctx, grads[0])

    @staticmethod
    def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, lora_A, lora_B, keys = ctx.saved_tensors
        layer: BaseLinear = ctx.layer
        need_x, need_bias, need_A = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        g_NO = grad.reshape(-1, grad.shape[-1])
        x_NI = x.reshape(-1, x.shape[-1])
        dx_NI = torch.mm(g_NO, layer.dense_weight(x.dtype)) if need_x else None
        d_bias = g_NO.sum(0) if ctx.has_bias and need_bias else None
        dA = dB = None
        if lora_A is not None and lora_B is not None:
            A, B = layer.rounded(0, lora_A, x.dtype), layer.rounded(1, lora_B, x.dtype)
            gb_NR = _scaled(g_NO, B, layer.scaling)
            if need_A:
                xd_NI = layer.dropped(x_NI, keys)
                dA = torch.mm(gb_NR.t(), xd_NI).to(lora_A.dtype)
                xa_NR = _scaled(xd_NI, A.t(), layer.scaling)
                del xd_NI
                dB = torch.mm(g_NO.t(), xa_NR).to(lora_B.dtype)
            if dx_NI is not None:
                if keys is not None and layer.dropout > 0:
                    dx_NI += layer.dropped(gb_NR @ A, keys)
                else:
                    dx_NI.addmm_(gb_NR, A)
        return (dx_NI.view(x.shape) if dx_NI is not None else None), d_bias, dA, dB, None, None


def product(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor | None,
    lora_B: torch.Tensor | None,
    layer: BaseLinear,
    keys: torch.Tensor | None,
) -> torch.Tensor:
    """x W^T + bias + s (dropped x) A^T B^T, without a graph."""
    with _below_autograd():
        y = F.linear(x, layer.dense_weight(x.dtype), bias)  # not a view: some models add to it in place
        if lora_A is not None and lora_B is not None:
            x_NI = x.reshape(-1, x.shape[-1])
            xa_NR = F.linear(layer.dropped(x_NI, keys), layer.rounded(0, lora_A, x.dtype))
            y.view(-1, y.shape[-1]).addmm_(xa_NR, layer.rounded(1, lora_B, x.dtype).t(), alpha=layer.scaling)
        return y


def _scaled(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """(left @ right) * scale, rounded in between; in one launch where a power of two makes that the same. (In fp16 it
    does not: numbers below 6e-5 have fewer bits.)"""
    if scale == 1:
        return torch.mm(left, right)
    if math.frexp(scale)[0] == 0.5 and left.dtype != torch.float16:
        return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale)
    return torch.mm(left, right).mul_(scale)


class BaseLinear(nn.Module):
    """Frozen weight in a base format, optional bias, optional LoRA or DoRA adapter.

    Takes the place of `nn.Linear` (or of GPT-2's transposed `Conv1D`) under the same name, so that adapters are saved
    under the names peft expects. `weight` is None until `set_weight`.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, context: StepContext, *, transposed: bool = False
    ):
        super().__init__()
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self.transposed = transposed  # stored as [in, out] in checkpoints
        self.context = context
        self.packed: Packed | None = None
        self.bias: nn.Parameter | None = None
        self.lora_A: nn.Parameter | None = None
        self.lora_B: nn.Parameter | None = None
        self.magnitude: nn.Parameter | None = None
        self.row_squares_O: torch.Tensor
        self.scaling, self.dropout, self.module_key = 1.0, 0.0, 0

    def set_weight(self, weight: torch.Tensor, format: str, double_quant: bool) -> None:
        """Pack `weight` [O, I] (or [I, O] when transposed) on its own device."""
        self.packed = pack(weight.t().contiguous() if self.transposed else weight, format, double_quant)

    def dense_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[O, I] in `dtype`; a temporary unless stored so, which the next call overwrites where there is a scratch."""
        assert self.packed is not None, f"{self.name} has no weight yet"
        return unpack(self.packed, dtype, self.context.scratch)

    def add_lora(
        self,
        r: int,
        scaling: float,
        dropout: float,
        index: int,
        generator: torch.Generator | None,
        device: torch.device | str,
        dora: bool,
    ) -> None:
        """LoRA as peft starts it: A uniform (Kaiming, a = sqrt(5)), B zero, both fp32; DoRA's magnitude is the norm of
        each output row of the weight (https://arxiv.org/abs/2402.09353), so the weight must be there already."""
        a = torch.empty(r, self.in_features, dtype=torch.float32)
        if str(device) != "meta":
            bound = 1 / math.sqrt(self.in_features)  # kaiming_uniform with a = sqrt(5)
            a.uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(a.to(device) if str(device) != "meta" else torch.empty_like(a, device="meta"))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, r, dtype=torch.float32, device=device))
        self.scaling, self.dropout = scaling, dropout
        self.module_key = counter_dropout.scramble_int(index + 1)
        if dora:
            weight = self.dense_weight(torch.float32)
            self.register_buffer("row_squares_O", (weight * weight).sum(1), persistent=False)
            self.magnitude = nn.Parameter(self.row_squares_O.sqrt())

    def _row_norm(self, dtype: torch.dtype) -> torch.Tensor:
        """[O] fp32 norms of the rows of W + s B A, from squares: |w|^2 + 2 s b.(W A^T) + s^2 b (A A^T) b^T. The
        sum itself, [O, I] in fp32, is never made."""
        assert self.lora_A is not None and self.lora_B is not None
        with torch.no_grad():
            across_OR = F.linear(self.dense_weight(dtype), self.lora_A.to(dtype)).float()
            within_OR = self.lora_B @ (self.lora_A @ self.lora_A.t())
            mixed = (self.lora_B * (2 * self.scaling * across_OR + self.scaling**2 * within_OR)).sum(1)
            return (self.row_squares_O + mixed).clamp_min_(0).sqrt_()

    def dropped(self, x_NI: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        if keys is None or self.dropout == 0:
            return x_NI
        return counter_dropout.apply(x_NI, self.dropout, keys, self.module_key, on_cuda=self.context.on_cuda)

    def rounded(self, which: int, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A factor of this layer's adapter (0: A, 1: B) in `dtype`; itself where it is stored so."""
        if factor.dtype == dtype:
            return factor
        pair = None if self.context.casts is None else self.context.casts.of(self, dtype)
        return factor.to(dtype) if pair is None else pair[which]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.context.token_keys if self.dropout > 0 else None
        # biases outside `lora_bias` are frozen and live in the compute dtype
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.magnitude is None:
            if not torch.is_grad_enabled():
                return product(x, bias, self.lora_A, self.lora_B, self, keys)
            y = _FrozenLinear.apply(x, bias, self.lora_A, self.lora_B, self, keys)
            if self.context.watch is not None:
                self.context.watch.passed(self)
            return y
        y = _FrozenLinear.apply(x, None, self.lora_A, self.lora_B, self, keys)
        scale = (self.magnitude / self._row_norm(x.dtype)).to(x.dtype)
        return y * scale if bias is None else torch.addcmul(bias, y, scale)
