"""Context parallel: every rank has a slice of each row's tokens; only attention sees all of them.

Around attention, tokens and heads change places (an all-to-all, as in DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509):
a rank hands over the heads of its tokens and gets all tokens of its share of the heads, so that the attention kernels
run as they are, with documents, windows, soft-capping and sinks. Everything else in a decoder works on a token at a
time. A ring over keys and values (https://arxiv.org/abs/2310.01889) would need kernels that return partial sums, for
each of these variants. Weights are as in data parallel, on every device or streamed from the node's one copy, and
gradients are added up in the same way; activations are 1/N.

A rank that fails must not leave the others in an exchange. Before each one all ranks tell, on the host, that they have
come with its buffers made; one that has failed tells that instead (`drain`), once, and the others drop the pass too.

Shapes: B rows, T tokens of a whole row, N ranks, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fitune.engine.batch import Batch, HostBatch
from fitune.engine.engine import Engine, StepResult
from fitune.engine.step import Observer, ignore
from fitune.errors import UserError
from fitune.model.attention import attention_forward, counts_tokens
from fitune.model.build import RECURRENT_LAYERS, Built
from fitune.model.loss import IGNORED
from fitune.parallel.exchange import all_to_all
from fitune.parallel.meeting import Meeting, PeerAway
from fitune.parallel.replicated import Replicated
from fitune.parallel.world import Single
from fitune.plan import Plan

NAME = "fitune_context"
_NO_RECORD = -1
# Frequencies that depend on the longest position in sight, which differs from slice to slice.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def check_context(built: Built, plan: Plan) -> None:
    """Before the first weight is read.

    Raises:
        UserError: a model that mixes tokens elsewhere than in attention that goes through `fitune.model.attention`.
    """
    config = built.model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    each = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    kinds = getattr(config, "layer_types", None) or ()
    why = None
    if plan.attention == "native":
        why = "its attention is code of its own, which cannot be given heads instead of tokens"
    elif any(kind in RECURRENT_LAYERS for kind in kinds):
        why = "it has layers other than attention that look from token to token"
    elif any(rope.get("rope_type") in _ROPE_BY_LENGTH for rope in each):
        why = "its rotary frequencies depend on the length of the row, of which each GPU sees a part"
    elif any(counts_tokens(type(module)) for module in built.layers.modules()):
        why = "its attention counts tokens by itself, and each GPU sees a part of them"
    if why is not None:
        raise UserError(f"rows of {type(built.model).__name__} cannot be cut into slices (--parallel cp)", why,
                        "use --parallel ddp, fsdp2 or pp")  # fmt: skip


# ---- slices of rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSlices:
    """A rank's slice of every row of a micro-batch (see `HostBatch`). Targets were shifted before the rows were cut.
    `doc_lengths` are those of the whole rows, for attention; of packed rows padding is the last document."""

    input_ids: np.ndarray
    targets: np.ndarray
    position_ids: np.ndarray
    record_ids: np.ndarray
    doc_lengths: tuple[tuple[int, ...], ...]


def slices_of(host: HostBatch, rank: int, size: int) -> RowSlices:
    """The `rank`th of `size` equal slices; rows are padded on the right where their columns cannot be shared out."""
    num_columns = host.input_ids.shape[1]
    each = -(-num_columns // size)

    def cut(whole: np.ndarray, padding: int) -> np.ndarray:
        wide = np.pad(whole, ((0, 0), (0, each * size - num_columns)), constant_values=padding)
        return np.ascontiguousarray(wide[:, rank * each : (rank + 1) * each])

    documents = host.doc_lengths
    if any(len(row) > 1 for row in documents):
        rests = [each * size - sum(row) for row in documents]
        documents = tuple(row + ((rest,) if rest else ()) for row, rest in zip(documents, rests, strict=True))
    return RowSlices(cut(host.input_ids, 0), cut(host.targets, IGNORED), cut(host.position_ids, 0),
                     cut(host.record_ids, _NO_RECORD), documents)  # fmt: skip


# ---- attention over all tokens ---------------------------------------------------------------------------------------


class Contexted(Meeting, Replicated):
    """The engine's view of the other ranks: the same rows on all, other tokens on each.

    Attributes:
        num_tokens: of the whole step.
    """

    def __init__(self, group: Single):
        super().__init__(group)
        self.num_tokens = 0

    def totals(self, num_tokens: int, num_targets: int, num_passes: int) -> tuple[int, int, int]:
        (targets,) = self.group.sums([num_targets])
        self.is_open = True
        return self.num_tokens, int(targets), num_passes

    def begin(self, num_passes: int) -> None:
        self.is_open = True

    def swap(self, tensors: Sequence[torch.Tensor], split: int, join: int) -> tuple[torch.Tensor, ...]:
        """Each tensor cut into N parts along `split`, one for each rank; the parts that come joined along `join`."""
        parts = [torch.stack(tensor.chunk(self.group.size, split)) for tensor in tensors]
        came = [torch.empty_like(part) for part in parts]
        self.meet()
        for target, part in zip(came, parts, strict=True):
            all_to_all(target, part)
        del parts
        return tuple(torch.cat(came.pop(0).unbind(0), join) for _ in tensors)


class _Swap(torch.autograd.Function):
    """`Contexted.swap`; its gradient is the way back."""

    @staticmethod
    def forward(ctx: Any, ranks: Contexted, split: int, join: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.split, ctx.join = ranks, split, join
        return ranks.swap(tensors, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.ranks.swap(grads, ctx.join, ctx.split)


def attention_across(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As `attention_forward`, of which this rank has T/N tokens of every row: query [B, H, T/N, D], key and value
    [B, K, T/N, D]; returns [B, T/N, H, D]. Outside a pass (an answer by one rank) the tokens are all there are."""
    ranks: Contexted = module.fitune_ranks
    if not ranks.is_open:
        return attention_forward(module, query, key, value, attention_mask, s_aux=s_aux, **kwargs)
    size, num_heads = ranks.group.size, query.shape[1]
    key, value = (_for_each_rank(tensor, num_heads, size) for tensor in (key, value))
    query = _padded(query, size)
    q, k, v = _Swap.apply(ranks, 1, 2, query, key, value)
    if s_aux is not None:
        s_aux = F.pad(s_aux, (0, query.shape[1] - num_heads)).chunk(size)[ranks.group.rank]
    out, _ = attention_forward(module, q, k, v, attention_mask, s_aux=s_aux, **kwargs)
    (out,) = _Swap.apply(ranks, 1, 2, out)
    return out[:, :, :num_heads], None


def _for_each_rank(tensor: torch.Tensor, num_heads: int, size: int) -> torch.Tensor:
    """Key heads repeated until each rank has as many, which serve its share of the query heads."""
    num_keys = tensor.shape[1]
    times = math.lcm(num_keys, size) // num_keys
    if num_heads % (num_keys * times):
        times = num_heads // num_keys
    return _padded(tensor.repeat_interleave(times, 1) if times > 1 else tensor, size)


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """With heads of zeros where the heads cannot be shared out."""
    missing = -tensor.shape[1] % size
    return F.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor


# ---- the engine ------------------------------------------------------------------------------------------------------


class ContextEngine(Engine):
    """The engine of one rank; it is given whole micro-batches, the same as the others."""

    ranks: Contexted

    def __init__(self, built: Built, plan: Plan, group: Single):
        from transformers import AttentionInterface

        self.group = group
        ranks = Contexted(group)
        for module in built.model.modules():
            module.__dict__["fitune_ranks"] = ranks
        AttentionInterface.register(NAME, attention_across)
        built.model.set_attn_implementation(NAME)  # type: ignore[operator]
        assert built.model.config._attn_implementation == NAME
        super().__init__(built, plan, ranks)

    def _slices(self, host_batches: Sequence[HostBatch]) -> list[RowSlices]:
        return [slices_of(host, self.group.rank, self.group.size) for host in host_batches]

    def step(
        self, host_batches: Sequence[HostBatch], *, step: int, lr: float, observe: Observer = ignore
    ) -> StepResult:
        self.ranks.num_tokens = sum(sum(map(sum, host.doc_lengths)) for host in host_batches)
        return super().step(self._slices(host_batches), step=step, lr=lr, observe=observe)

    def _accumulate(self, groups: list[list[Batch]], grad_scale: float, observe: Observer) -> torch.Tensor:
        try:
            loss = super()._accumulate(groups, grad_scale, observe)
            self.ranks.close()
        except PeerAway:  # who observes the update tells what has happened
            return torch.zeros((), dtype=torch.float32, device=self.built.device)
        return loss

    def evaluate(self, host_batches: Sequence[HostBatch]) -> tuple[float, int]:
        """Sums over this rank's tokens."""
        self.ranks.evaluations(len(host_batches))  # from here on the others count on it
        try:
            found = super().evaluate(self._slices(host_batches))
            self.ranks.close()
        except PeerAway:
            return 0.0, 0
        return found

    def pass_by(self, host_batches: Sequence[HostBatch]) -> None:
        self.ranks.evaluations(len(host_batches))
        self.ranks.drain()
