"""Weights, adapters, gradients and optimizer states: what is there before the first token."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.errors import UserError
from fitune.memory.stacks import constants
from fitune.memory.stacks.settings import StackSettings

_FORMATS = {
    "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp32 weights, bf16-mixed": 4.0, "fp32 master + bf16 mixed": 4.0,
    "nf4": constants.NF4_BYTES, "fp4": constants.NF4_BYTES, "bnb-int4": constants.NF4_BYTES,
    "nf4 (double quant)": constants.NF4_DOUBLE_BYTES, "fp4 (double quant)": constants.NF4_DOUBLE_BYTES,
    "hqq-int4": constants.NF4_BYTES,
    "gptq-int4": constants.GPTQ_BYTES, "gptq-int4 (fp16)": constants.GPTQ_BYTES,
    "int8": constants.INT8_BYTES, "bnb-int8": constants.INT8_BYTES,
}  # fmt: skip


def linear_bytes(s: StackSettings) -> float:
    """Bytes an element of the decoder's linears.

    Raises:
        UserError: a format that no stack stores.
    """
    if s.base_dtype not in _FORMATS:
        raise UserError(
            f"cannot predict base weights in {s.base_dtype!r}",
            "bytes an element of this format are not known",
            f"one of: {', '.join(_FORMATS)}",
        )
    return _FORMATS[s.base_dtype]


def fp32_weights(s: StackSettings) -> bool:
    """Whether weights are kept in fp32 and computed in 16 bits under autocast."""
    return linear_bytes(s) == 4.0


@dataclass(frozen=True)
class Optimizer:
    """``state_bytes`` an element of what is trained; ``temporary_bytes``: of the update itself; ``in_backward``: every
    parameter is updated as soon as its gradient is there, so only one gradient lives at a time."""

    state_bytes: float
    temporary_bytes: float
    in_backward: bool
    paged: bool


def optimizer(s: StackSettings, param_bytes: float) -> Optimizer:
    """The states of an optimizer named as the tools name it, for parameters of ``param_bytes`` an element.

    torch's AdamW keeps both moments in the parameter's dtype, and its default ``foreach`` update holds the square
    root of every second moment at once: one more copy (torch.optim.adamw, ``_multi_tensor_adamw``). bitsandbytes keeps
    fp32 or one-byte moments and updates in one kernel; a paged optimizer's moments are managed memory, which
    torch's counters leave out. Lion and Muon keep one moment, Adafactor row and column sums, SGD nothing.
    """
    name = s.optimizer.lower()
    in_backward, paged = "in backward" in name, "paged" in name
    eight_bit = "8bit" in name
    if "sgd" in name or "adafactor" in name or "lomo" in name:
        return Optimizer(0.0, param_bytes, in_backward, paged)
    moments = 1 if "lion" in name or "muon" in name else 2
    if paged:
        return Optimizer(0.0, 0.0, in_backward, paged)
    if eight_bit:
        return Optimizer(constants.QUANT_BLOCK_STATE_BYTES * moments / 2, 0.0, in_backward, paged)
    if "bnb" in name or "32bit" in name:
        return Optimizer(4.0 * moments, 0.0, in_backward, paged)
    return Optimizer(moments * param_bytes, 0.0 if "fused" in name else param_bytes, in_backward, paged)


def largest_linear(s: StackSettings) -> int:
    """Elements of the largest linear of a layer."""
    return max(rows * columns for rows, columns in s.shape.linears.values())
