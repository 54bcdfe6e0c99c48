"""Tensor parallel: every rank holds a part of each layer's heads, intermediate width and vocabulary, and works on all
tokens.

Attention's q, k and v and a gated MLP's gate and up projections are split by output, what follows them by input
(https://arxiv.org/abs/1909.08053): one sum over ranks for each of the two in forward, one in backward. Experts are
split by their intermediate width, so that every rank routes alike. Embedding and head are split by vocabulary, and the
loss is taken from the parts (`tensor_exchange.VocabularyLoss`): no rank holds whole logits. The driver runs the layers
as on one GPU; neither DTensor nor transformers' hooks are used, which know no packed weights and no layer that is run
again without its last product.

Inside a region everything that is not split is there on all ranks and has a part of its gradient on each (a split
projection's other adapter matrix, norms of heads, routers); outside all ranks have the same gradients.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fitune.errors import UserError
from fitune.model.build import Built, adapted_weights, wanted_weights
from fitune.model.dropout import apply as counter_dropout
from fitune.model.experts import PackedExperts, has_fused_experts
from fitune.model.formats import BLOCK_4BIT, DENSE
from fitune.model.linear import BaseLinear
from fitune.parallel.tensor_cut import Cut, check_blocks, shares, take_packed
from fitune.parallel.tensor_exchange import Enter, Exchanges, Leave, VocabularyLoss
from fitune.parallel.world import FLAT_OPTIMIZERS, Single
from fitune.plan import Adapter, Plan

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEADS_SOURCE = "-1, self.head_dim"  # of a forward that finds out the number of heads from what the projections give,
_COUNTS_SOURCE = ("num_heads", "num_attention_heads", "num_key_value_heads")  # and of one that is told
# Projections of an MLP that are split by output, and the one after them. One that holds two halves, gate and up, is cut
# in both.
_MLPS = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"), (("up_proj",), "down_proj"),
         (("c_fc",), "c_proj"))  # fmt: skip
_HALVES = "gate_up_proj"


class Split:
    """How a model is split, and its exchanges. The model's modules are changed when this is made; their weights are cut
    as they arrive (`take`).

    Attributes:
        cuts: of weights, biases and adapter matrices by name; what is not here is whole on every rank.
        regions: prefixes of names inside regions.
    """

    def __init__(self, built: Built, plan: Plan, group: Single):
        self.rank, self.size = group.rank, group.size
        self.exchanges = Exchanges()
        self.cuts: dict[str, Cut] = {}
        self.regions: list[str] = []
        self.num_parameters = built.num_parameters()
        self._first_only: set[str] = set()
        self._built, self._format = built, plan.base_format
        self._trains_biases = plan.method == "full" or (plan.adapter is not None and plan.adapter.bias != "none")
        self._linears: list[SplitLinear] = []
        self._wanted = wanted_weights(built)
        for index, layer in enumerate(built.layers):
            self._split_layer(f"{built.layers_prefix}.{index}", layer)
        self.loss = self._split_ends()

    # -- weights --------------------------------------------------------------------------------------------------

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight as it comes from the files; one that is packed first stays whole until then."""
        if name in self._first_only and self.rank != 0:
            return torch.zeros_like(whole)
        packs = self._format not in DENSE and self._is_packed(name)
        return whole if packs or name not in self.cuts else self.cuts[name].take(whole, self.rank)

    def _is_packed(self, name: str) -> bool:
        module_name, _, leaf = name.rpartition(".")
        if leaf == "weight" and module_name in self._built.linears:
            return True
        return any(name in experts.names() for experts in self._built.experts)

    def finish(self) -> None:
        """After the last weight: split projections know their own widths."""
        for linear in self._linears:
            linear.narrow()

    def kind(self, name: str) -> str:
        """ "cut", or whole on every rank with a "partial" gradient on each, or with the "same" one."""
        if name in self.cuts:
            return "cut"
        return "partial" if name.startswith(tuple(self.regions)) else "same"

    # -- layers ---------------------------------------------------------------------------------------------------

    def _split_layer(self, prefix: str, layer: nn.Module) -> None:
        for child, module in layer.named_children():
            name = f"{prefix}.{child}"
            linears = {path: linear for path, linear in module.named_modules() if path and _is_linear(linear)}
            if all(path in linears for path in _ATTENTION):
                row = self._split_attention(name, module, linears)
            elif self._experts_in(name, module):
                row = self._split_experts(name, module, linears)
            elif not linears:
                continue
            else:
                row = self._split_mlp(name, module, linears)
            self.regions.append(f"{name}.")
            run = functools.partial(_through_region, self.exchanges, self._built.context, (row, module), module.forward)
            module.__dict__["forward"] = run

    def _split_attention(self, name: str, module: Any, linears: dict[str, Any]) -> nn.Module:
        source = inspect.getsource(type(module).forward)
        told = any(word in source for word in _COUNTS_SOURCE)
        if len(linears) > len(_ATTENTION) or told or _HEADS_SOURCE not in source:
            raise _refused(f"{type(module).__name__} is no attention whose heads can be split")
        q, k, v, o = (linears[path] for path in _ATTENTION)
        size = int(module.head_dim)
        heads, kv_heads = _widths(q)[0] // size, _widths(k)[0] // size
        if _widths(o)[1] != heads * size or _widths(v)[0] != kv_heads * size or heads % kv_heads:
            raise _refused(f"{type(module).__name__} has no plain heads of one size")
        if heads % self.size:
            raise _refused(f"{heads} heads cannot be split over {self.size} GPUs",
                           f"use --nproc with a divisor of {heads}, or --parallel fsdp2 or pp")  # fmt: skip
        ranges = shares(heads, self.size)
        elements = [(start * size, end * size) for start, end in ranges]
        for path, p in module.named_parameters():
            if path == "sinks":
                self.cuts[f"{name}.{path}"] = Cut.of(0, ranges)
            elif path.rpartition(".")[0] not in linears and tuple(p.shape) != (size,):
                raise _refused(f"{name}.{path} works on all heads together")
        self._cut_linear(f"{name}.q_proj", q, Cut.of(0, elements))
        groups = heads // kv_heads
        if kv_heads % self.size == 0:
            kv_elements = [(start * size, end * size) for start, end in shares(kv_heads, self.size)]
            for path in ("k_proj", "v_proj"):
                self._cut_linear(f"{name}.{path}", linears[path], Cut.of(0, kv_elements))
        else:
            first, last = ranges[self.rank]
            own_groups = math.gcd(groups, last - first)
            chosen = [head // groups for head in range(first, last, own_groups)]
            for path in ("k_proj", "v_proj"):
                self._cut_inside_heads(f"{name}.{path}", linears[path], kv_heads * size, chosen, size)
            groups = own_groups
        module.num_key_value_groups = groups
        return self._cut_linear(f"{name}.o_proj", o, Cut.of(1, elements))

    def _cut_inside_heads(self, name: str, linear: Any, width: int, chosen: list[int], size: int) -> None:
        """Key or value heads that cannot be shared out (fewer than ranks, say): every rank makes some columns of them,
        the ranks exchange these, and each takes the heads that its query heads look at. With whole weights on every
        rank the ranks would hold more than a copy of the model in all (TinyLlama's layers on 8 GPUs: 1.17), to save an
        exchange of a few hundred columns a token, a small part of what the borders of a region exchange."""
        columns = torch.tensor([head * size + i for head in chosen for i in range(size)])
        if self._built.device.type != "meta":
            columns = columns.to(self._built.device)
        ranges = shares(width, self.size)
        made = self._cut_linear(name, linear, Cut.of(0, ranges))
        made.__dict__["forward"] = functools.partial(
            _some_columns, self.exchanges, made.forward, ranges[self.rank], width, columns
        )

    def _split_mlp(self, name: str, module: Any, linears: dict[str, Any]) -> nn.Module:
        for columns, row in _MLPS:
            if linears.keys() == {*columns, row}:
                break
        else:
            raise _refused(f"{type(module).__name__} is no MLP that can be split")
        width = _widths(linears[row])[1]
        ranges = self._share_width(width)
        for path in columns:
            copies = 2 if path == _HALVES else 1
            if _widths(linears[path])[0] != copies * width:
                raise _refused(f"{name}.{path} does not have the width of {row}")
            self._cut_linear(f"{name}.{path}", linears[path], Cut.of(0, ranges, copies))
        return self._cut_linear(f"{name}.{row}", linears[row], Cut.of(1, ranges))

    def _share_width(self, width: int) -> list[tuple[int, int]]:
        """Parts of an intermediate width: in whole blocks of a 4-bit format where there are enough of them."""
        unit = BLOCK_4BIT if width % BLOCK_4BIT == 0 and width // BLOCK_4BIT >= self.size else 1
        return shares(width, self.size, unit)

    def _experts_in(self, name: str, module: nn.Module) -> bool:
        packed = any(experts.prefix.startswith(f"{name}.") for experts in self._built.experts)
        return packed or any(has_fused_experts(inner) for inner in module.modules())

    def _split_experts(self, name: str, module: Any, linears: dict[str, Any]) -> nn.Module:
        """A router and fused experts, perhaps with an MLP that all tokens pass beside them."""
        inner = next(path for path, m in module.named_modules() if self._holds_experts(f"{name}.{path}", m))
        experts, prefix = module.get_submodule(inner), f"{name}.{inner}"
        shapes = {
            n: self._wanted[f"{prefix}.{n}"] for n in ("gate_up_proj", "down_proj") if f"{prefix}.{n}" in self._wanted
        }
        transposed = bool(getattr(experts, "is_transposed", False))
        others = {n.rpartition(".")[2] for n in self._wanted if n.startswith(f"{prefix}.")} - shapes.keys()
        if len(shapes) < 2 or not others <= {"gate_up_proj_bias", "down_proj_bias"}:
            raise _refused(f"{type(experts).__name__} holds experts of another form")
        width = shapes["down_proj"][1 if transposed else 2]
        if shapes["gate_up_proj"][2 if transposed else 1] != 2 * width:
            raise _refused(f"{type(experts).__name__} holds experts of another form")
        together = bool(getattr(experts, "is_concatenated", True))
        ranges = self._share_width(width)
        wide = Cut.of(2 if transposed else 1, ranges, 2) if together else _doubled(2 if transposed else 1, ranges)
        for leaf, cut in (("gate_up_proj", wide), ("down_proj", Cut.of(1 if transposed else 2, ranges))):
            self.cuts[f"{prefix}.{leaf}"] = cut
            check_blocks(f"{prefix}.{leaf}", shapes[leaf], cut, self._format)
        if others:
            self.cuts[f"{prefix}.gate_up_proj_bias"] = Cut(1, wide.parts)
            self._add_once(f"{prefix}.down_proj_bias")
        self._split_packed(prefix)
        self._split_shared(name, module, linears, int(shapes["down_proj"][0]))
        return module

    def _holds_experts(self, name: str, module: nn.Module) -> bool:
        return has_fused_experts(module) or any(experts.prefix == name for experts in self._built.experts)

    def _split_packed(self, prefix: str) -> None:
        for index, experts in enumerate(self._built.experts):
            if experts.prefix == prefix:
                cuts = {n: self.cuts[n] for n in experts.names() if n in self.cuts}
                self._built.experts[index] = SplitExperts(experts, cuts, self.rank)

    def _split_shared(self, name: str, module: Any, linears: dict[str, Any], num_experts: int) -> None:
        parents = {
            path.rpartition(".")[0] for path, linear in linears.items() if _widths(linear)[0] not in (1, num_experts)
        }
        for parent in sorted(parents):
            inside = {
                path.rpartition(".")[2]: linear for path, linear in linears.items() if path.startswith(f"{parent}.")
            }
            if not parent:
                raise _refused(f"{type(module).__name__} has a layer beside its experts that cannot be split")
            self._split_mlp(f"{name}.{parent}", module.get_submodule(parent), inside)

    def _cut_linear(self, name: str, linear: Any, cut: Cut) -> Any:
        """Cut a projection [O, I] and what belongs to it; the module that stands there now."""
        weight = f"{name}.weight"
        self.cuts[weight] = cut
        check_blocks(weight, _widths(linear), cut, self._format if name in self._built.linears else "")
        if linear.bias is not None:
            if cut.axis == 0:
                self.cuts[f"{name}.bias"] = cut
            else:
                self._add_once(f"{name}.bias")
        if name not in self._built.linears:
            return linear
        self.cuts[f"{name}.lora_B" if cut.axis == 0 else f"{name}.lora_A"] = cut
        made = SplitLinear(linear, cut, self.rank)
        parent, _, leaf = name.rpartition(".")
        setattr(self._built.model.get_submodule(parent), leaf, made)
        self._built.linears[name] = made
        self._linears.append(made)
        return made

    def _add_once(self, name: str) -> None:
        """A bias that is added to a sum over ranks: the first rank has it, the others zeros."""
        if self._trains_biases:
            raise _refused(f"{name} would be trained, and is added after the parts have been summed up")
        self._first_only.add(name)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _split_ends(self) -> VocabularyLoss:
        model: Any = self._built.model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear or embedding.max_norm is not None:
            raise _refused("its embedding or its head is of another kind")
        names = {module: name for name, module in model.named_modules()}
        entries, outputs = embedding.weight.shape[0], head.weight.shape[0]
        if model.config.tie_word_embeddings and entries != outputs:
            raise _refused("embedding and head are tied and have different vocabularies")
        ranges = shares(entries, self.size)
        first, end = ranges[self.rank]
        self.cuts[f"{names[embedding]}.weight"] = Cut.of(0, ranges)
        padding = embedding.padding_idx
        embedding.padding_idx = padding - first if padding is not None and first <= padding < end else None
        embedding.__dict__["forward"] = functools.partial(_some_rows, self.exchanges, embedding.forward, first, end)
        ranges = shares(outputs, self.size)
        self.cuts[f"{names[head]}.weight"] = self.cuts[f"{names[head]}.bias"] = Cut.of(0, ranges)
        head.__dict__["forward"] = functools.partial(_through_head, self.exchanges, head.forward)
        return VocabularyLoss(self.exchanges, ranges[self.rank][0], self.rank, self.size)


class SplitLinear(BaseLinear):
    """A rank's part of a frozen linear layer: its outputs (`cut.axis` 0) or inputs (1). Takes the whole weight, and
    starts its adapter from the whole one's values."""

    def __init__(self, whole: BaseLinear, cut: Cut, rank: int):
        super().__init__(whole.name, whole.in_features, whole.out_features, whole.context)
        self.bias, self.cut, self.rank = whole.bias, cut, rank
        self._whole = whole.out_features, whole.in_features
        self._first = cut.parts[rank][0][0] if cut.axis == 1 else 0

    def narrow(self) -> None:
        self.out_features, self.in_features = self.cut.shape(self._whole, self.rank)

    def set_weight(self, weight: torch.Tensor, format: str, double_quant: bool) -> None:
        super().set_weight(weight, format, double_quant)
        assert self.packed is not None
        if format not in DENSE:
            self.packed = take_packed(self.packed, self.cut, self.rank)

    def add_lora(self, *arguments: Any, **options: Any) -> None:
        own = self.out_features, self.in_features
        self.out_features, self.in_features = self._whole
        super().add_lora(*arguments, **options)
        self.out_features, self.in_features = own
        assert self.lora_A is not None and self.lora_B is not None
        if self.cut.axis == 0:
            self.lora_B = nn.Parameter(self.cut.take(self.lora_B.detach(), self.rank))
        else:
            self.lora_A = nn.Parameter(self.cut.take(self.lora_A.detach(), self.rank))

    def dropped(self, x_NI: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        if keys is None or self.dropout == 0:
            return x_NI
        on_cuda = self.context.on_cuda
        return counter_dropout(x_NI, self.dropout, keys, self.module_key, first=self._first, on_cuda=on_cuda)


class SplitExperts(PackedExperts):
    """A rank's part of packed experts."""

    def __init__(self, whole: PackedExperts, cuts: dict[str, Cut], rank: int):
        self.__dict__.update(whole.__dict__)
        self._cuts, self._rank = cuts, rank

    def set_weight(self, name: str, weight: torch.Tensor, format: str, double_quant: bool) -> None:
        super().set_weight(name, weight, format, double_quant)
        key = name.removeprefix(f"{self.prefix}.")
        if name in self._cuts and format not in DENSE:
            self.packed[key] = take_packed(self.packed[key], self._cuts[name], self._rank)


def open_split(built: Built, plan: Plan, group: Single) -> None:
    """Before the first weight is read: split the model's modules.

    Raises:
        UserError: something that cannot be split.
    """
    if plan.stream_from != "none" or plan.head_place != "device" or plan.embedding_place != "device":
        raise _refused("the plan keeps weights in host memory", "use --parallel streamed or fsdp2")
    if plan.optimizer not in FLAT_OPTIMIZERS:
        raise _refused(f"the state of optimizer {plan.optimizer} belongs to whole matrices or blocks of them",
                       "use --optimizer adamw, lion or sgd")  # fmt: skip
    if plan.adapter is not None and plan.adapter.dora:
        raise _refused("DoRA needs the norms of whole rows", "use --parallel ddp or fsdp2")
    if plan.adapter is not None and _adapts_experts(built, plan.adapter):
        raise _refused("adapters of fused experts are made with whole weights",
                       "use --parallel ddp, fsdp2 or pp, or other --lora-targets")  # fmt: skip
    built.parts = Split(built, plan, group)
    built.host_opened = True


def _adapts_experts(built: Built, spec: Adapter) -> bool:
    adapted = set(adapted_weights(built, spec))
    return any(adapted & set(experts.names()) for experts in built.experts)


def _refused(why: str, fix: str = "use --parallel fsdp2 or pp") -> UserError:
    return UserError("this job cannot be split inside its layers (--parallel tp)", why, fix)


def _is_linear(module: Any) -> bool:
    if isinstance(module, (nn.Linear, BaseLinear)):
        return True
    return type(module).__name__ == "Conv1D"


def _widths(linear: Any) -> tuple[int, int]:
    """(outputs, inputs)."""
    if getattr(linear, "transposed", False) or not hasattr(linear, "out_features"):
        raise _refused("its linear layers are stored the other way round")
    return int(linear.out_features), int(linear.in_features)


def _doubled(axis: int, ranges: Iterable[tuple[int, int]]) -> Cut:
    """Where gate and up stand in turn."""
    return Cut(axis, tuple(((2 * start, 2 * end),) for start, end in ranges))


def _through_region(
    exchanges: Exchanges, context: Any, last: tuple[nn.Module, ...], inner: Any, *arguments: Any, **options: Any
) -> Any:
    if arguments:
        arguments = Enter.apply(arguments[0], exchanges), *arguments[1:]
    else:
        options["hidden_states"] = Enter.apply(options["hidden_states"], exchanges)
    out = inner(*arguments, **options)
    if any(context.unneeded is module for module in last):  # zeros that nothing reads
        return out
    if isinstance(out, tuple):
        return Leave.apply(out[0], exchanges), *out[1:]
    return Leave.apply(out, exchanges)


def _some_columns(
    exchanges: Exchanges, inner: Any, own: tuple[int, int], width: int, columns: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """`columns` of the whole that the ranks make together, each its `own` part; on the way back each part gets the
    gradients of all ranks."""
    whole = nn.functional.pad(inner(x), (own[0], width - own[1]))
    whole = Enter.apply(Leave.apply(whole, exchanges), exchanges)
    return whole.index_select(-1, columns.to(x.device))


def _some_rows(exchanges: Exchanges, inner: Any, first: int, end: int, input_ids: torch.Tensor) -> torch.Tensor:
    outside = (input_ids < first) | (input_ids >= end)
    rows = inner(torch.where(outside, 0, input_ids - first))
    return Leave.apply(rows.masked_fill(outside[..., None], 0.0), exchanges)


def _through_head(exchanges: Exchanges, inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner(Enter.apply(x, exchanges))
