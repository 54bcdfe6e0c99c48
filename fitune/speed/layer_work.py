"""The work of one micro-batch in a decoder layer: products, memory traffic, kernels and Python calls.

Counts of elementwise traffic and kernels follow `fitune.model.linear`, `fused`, `attention`, `tiled_mlp` and
transformers' own code of what is not replaced (rotary embeddings, routed experts); kernels were counted by running each
family's layers on `meta`. Shapes: M tokens of a micro-batch, T tokens of a row, I and O a matrix's inputs and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fitune.plan import Plan
from fitune.speed.segments import Gemm, Segment, Workload
from fitune.speed.shape import Decoder, Layer, Linear

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "nf4": 0.5, "fp4": 0.5}
SCALE_BYTES = {True: (1 + 4 / 256) / 64, False: 4 / 64}  # of a 4-bit weight, by double quantisation
TILE = 128  # rows of a product's tile on the device
WIDE_ROTARY_BACKWARD = 2.2  # of the forward pass's traffic, counted by operation
BLOCK_QUERIES = 256  # rows of a block of fitune.model.attention's blockwise kernel
DEPENDS_ON = (
    "batch", "micro_batch", "method", "base_format", "double_quant", "adapter", "device", "precision", "attention",
)  # fmt: skip
"""What of a plan the work of a layer depends on, besides the data and the number of pieces of its MLP."""


@dataclass
class Count:
    """What a pass adds up while its layer is walked through."""

    gemms: list[Gemm] = field(default_factory=list)
    memory: float = 0.0
    skinny: float = 0.0
    unpack: float = 0.0
    dropout: float = 0.0
    kernels: float = 0.0
    calls: float = 0.0
    unpacks: int = 0
    attention: float = 0.0
    scores: float = 0.0
    wide_rotated: float = 0.0

    @cached_property
    def products(self) -> tuple[Gemm, ...]:
        """Equal products as one with their count; grouped ones stay apart, since their count fills the device. (Asked
        for once all are there.)"""
        counts: Counter[tuple[float, float, float, bool]] = Counter()
        for g in self.gemms:
            if not g.grouped:
                counts[g.m, g.n, g.k, g.narrow] += g.count
        merged = (Gemm(m, n, k, count, narrow=narrow) for (m, n, k, narrow), count in counts.items())
        return (*merged, *(g for g in self.gemms if g.grouped))

    def segment(
        self, phase: str, name: str, times: int, link_in: float = 0.0, link_out: float = 0.0, transfers: float = 0.0
    ) -> Segment:
        return Segment(
            phase, name, times, self.products, attention_flops=self.attention,
            attention_backward=name == "backward", scores=self.scores, skinny_bytes=self.skinny,
            memory_bytes=self.memory, unpack_bytes=self.unpack, dropout_elements=self.dropout,
            wide_rotated=self.wide_rotated, kernels=self.kernels, calls=self.calls, unpacks=self.unpacks,
            transfers=transfers, link_in_bytes=link_in, link_out_bytes=link_out,
        )  # fmt: skip


class LayerWork:
    """Counts of one micro-batch of a plan."""

    def __init__(self, plan: Plan, decoder: Decoder, load: Workload):
        self.plan, self.decoder, self.load = plan, decoder, load
        self.micro_batches = max(1, -(-plan.batch // plan.micro_batch))
        self.rows = plan.batch / self.micro_batches
        self.tokens = self.rows * load.row_tokens
        self.element = ELEMENT_BYTES[plan.precision]
        self.hidden_bytes = self.tokens * decoder.hidden * self.element
        self.layer_major = plan.accumulation_order == "layer-major"
        self.full = plan.method == "full"
        self.dropout = plan.adapter is not None and plan.adapter.dropout > 0
        self.four_bit = plan.base_format in ("nf4", "fp4")
        self.dense = plan.base_format == plan.precision
        which = tuple(getattr(plan, name) for name in DEPENDS_ON)
        self._counts: dict[tuple[Any, ...], Count] = decoder.counts.setdefault((load, which), {})

    # ---- weights ----

    def stored_bytes(self, layer: Layer) -> float:
        """Of a layer's frozen weights in the base format."""
        scales = SCALE_BYTES[self.plan.double_quant] if self.four_bit else 0.0
        return layer.params * (BASE_BYTES[self.plan.base_format] + scales)

    def adapted(self, linear: Linear) -> bool:
        adapter = self.plan.adapter
        return adapter is not None and ("all-linear" in adapter.targets or linear.name in adapter.targets)

    def trained_params(self) -> float:
        """Elements of adapters, or of everything."""
        if self.full:
            return float(self.decoder.params)
        r = self.plan.adapter.r if self.plan.adapter else 0
        kinds = self.decoder.kinds
        return float(
            sum(r * (m.inputs + m.outputs) * count for layer, count in kinds for m in layer.linears if self.adapted(m))
        )

    def trained_tensors(self) -> int:
        if self.full:
            return sum((len(layer.linears) + layer.num_norms + 2) * count for layer, count in self.decoder.kinds) + 3
        return 2 * sum(self.adapted(m) * count for layer, count in self.decoder.kinds for m in layer.linears)

    def _unpack(self, count: Count, params: float, uses: int = 1) -> None:
        """Uses of a stored weight in another format than the compute dtype."""
        if self.dense:
            return
        count.unpack += uses * params * (BASE_BYTES[self.plan.base_format] + self.element)
        count.kernels += uses * (3 if self.four_bit and self.plan.double_quant else 1)
        count.unpacks += uses * self.four_bit

    # ---- a layer ----

    def counted(self, way: Callable[..., Count], layer: Layer, *how: int) -> Count:
        """What `forward`, `again` or `backward` counts, counted once for all plans that differ in nothing it sees."""
        key = way.__name__, id(layer), how
        if key not in self._counts:
            self._counts[key] = way(layer, *how)
        return self._counts[key]

    def forward(self, layer: Layer, tiles: int = 1) -> Count:
        """A forward pass; its gated MLP in `tiles` pieces of tokens."""
        count = Count()
        self._mixing(count, layer, backward=False)
        self._mlp_forward(count, layer, tiles)
        return count

    def again(self, layer: Layer, tiles: int = 1) -> Count:
        """A forward pass for the sake of its backward pass, which does not read the last module's output: that is not
        made (`fitune.engine.driver.run_layer_again`). An MLP in pieces is such a module, and runs in backward."""
        count = Count()
        spared = None if layer.post_norms or layer.experts is not None else layer.linears[-1]
        self._mixing(count, layer, backward=False, spared=spared)
        if spared is None or tiles == 1:
            self._mlp_forward(count, layer, tiles, spared)
        return count

    def backward(self, layer: Layer, first: bool, tiles: int = 1) -> Count:
        """`first`: nobody needs the gradient of the layer's input. Each piece of an MLP runs forward again."""
        count = Count()
        self._mixing(count, layer, backward=True, first=first)
        if tiles > 1:
            self._mlp_forward(count, layer, tiles)
            count.calls += 4 * tiles  # a backward pass within a backward pass
        self._mlp_backward(count, layer, tiles)
        if self.micro_batches > 1:  # gradients are added to those of the micro-batches before
            adapted = sum(self.adapted(m) for m in layer.linears)
            count.kernels += 2 * adapted * (self.micro_batches - 1) / self.micro_batches
        return count

    def _mixing(
        self, count: Count, layer: Layer, *, backward: bool, first: bool = False, spared: Linear | None = None
    ) -> None:
        """All of a layer but its gated MLP."""
        for linear in layer.linears:
            if not linear.in_mlp and linear is not spared:
                if backward:
                    self._linear_backward(count, linear, wanted=not (first and linear.reads_input))
                else:
                    self._linear_forward(count, linear)
        self._attention(count, layer, backward=backward)
        self._elementwise(count, layer, backward=backward)
        self._experts(count, layer, backward=backward)

    def _mlp_forward(self, count: Count, layer: Layer, tiles: int, spared: Linear | None = None) -> None:
        for linear in layer.linears:
            if linear.in_mlp and linear is not spared:
                self._linear_forward(count, linear, tiles)
        per_width = 5 if layer.gated else 2
        count.memory += layer.mlp_width * self.tokens * self.element * per_width
        count.kernels += (2 if tiles == 1 else 3) * tiles  # pieces are copied to their place
        count.calls += tiles

    def _mlp_backward(self, count: Count, layer: Layer, tiles: int) -> None:
        for linear in layer.linears:
            if linear.in_mlp:
                self._linear_backward(count, linear, tiles)
        per_width = 11 if layer.gated else 3
        count.memory += layer.mlp_width * self.tokens * self.element * per_width
        count.kernels += 4 * tiles
        count.calls += tiles

    def _linear_forward(self, count: Count, linear: Linear, tiles: int = 1) -> None:
        count.gemms.append(Gemm(self.tokens / tiles, linear.outputs, linear.inputs, tiles))
        count.kernels += tiles
        count.calls += tiles
        self._unpack(count, linear.params, tiles)
        if self.adapted(linear):
            self._adapter_forward(count, linear, tiles)

    def _linear_backward(self, count: Count, linear: Linear, tiles: int = 1, wanted: bool = True) -> None:
        """`wanted`: the input's gradient is."""
        count.calls += tiles
        if wanted:
            count.gemms.append(Gemm(self.tokens / tiles, linear.inputs, linear.outputs, tiles))
            count.kernels += tiles
            self._unpack(count, linear.params, tiles)
        if self.full:
            count.gemms.append(Gemm(linear.outputs, linear.inputs, self.tokens / tiles, tiles))
            count.kernels += 3 * tiles
            count.memory += linear.params * (self.element + 8) * tiles  # added to the fp32 master's gradient
        if self.adapted(linear):
            self._adapter_backward(count, linear, tiles)

    def _adapter_forward(self, count: Count, linear: Linear, tiles: int) -> None:
        assert self.plan.adapter is not None
        r = self.plan.adapter.r
        rows = self.tokens / tiles
        for m, n, k in ((rows, r, linear.inputs), (rows, linear.outputs, r)):
            count.gemms.append(Gemm(m, n, k, tiles, narrow=True))
        count.skinny += self.tokens * self.element * (linear.inputs + 2 * linear.outputs)
        count.kernels += 4 * tiles
        if self.dropout:
            self._dropout(count, linear.inputs)
        if self.plan.adapter.dora:
            count.memory += linear.params * (self.element + 4) + 3 * self.tokens * linear.outputs * self.element
            count.kernels += 12
            self._unpack(count, linear.params)

    def _adapter_backward(self, count: Count, linear: Linear, tiles: int) -> None:
        assert self.plan.adapter is not None
        r = self.plan.adapter.r
        rows, i, o = self.tokens / tiles, linear.inputs, linear.outputs
        for m, n, k in ((rows, r, o), (rows, r, i), (r, i, rows), (o, r, rows), (rows, i, r)):
            count.gemms.append(Gemm(m, n, k, tiles, narrow=True))
        count.skinny += self.tokens * self.element * (4 * i + 2 * o)
        count.kernels += 11 * tiles
        if self.dropout:
            self._dropout(count, linear.inputs)
            self._dropout(count, linear.inputs)
        if self.plan.adapter.dora:
            count.memory += 6 * self.tokens * linear.outputs * self.element
            count.kernels += 8

    def _dropout(self, count: Count, width: int) -> None:
        elements = self.tokens * width
        count.dropout += elements
        on_cuda = self.plan.device == "cuda"
        count.kernels += 2 if on_cuda else 18 * max(1.0, elements / 2**24) + 4
        count.calls += on_cuda  # Triton's launcher is Python

    def _scores_per_head(self, layer: Layer) -> float:
        """Query-key pairs within causality, documents and window, of one head and all rows."""
        span = min(self.load.doc_tokens or self.load.row_tokens, self.load.row_tokens)
        documents = self.tokens / span
        window = min(layer.window or span, span)
        return documents * (window * span - window * window / 2)

    def _attention(self, count: Count, layer: Layer, *, backward: bool) -> None:
        if layer.kind == "linear":
            self._delta_net(count, layer, backward)
            return
        pairs = self._scores_per_head(layer) * layer.heads
        flops = 2.0 * pairs * (layer.head_dim + layer.value_dim) * (2.5 if backward else 1)
        kernel = self.plan.attention
        fused = not layer.capped and layer.head_dim == layer.value_dim and layer.head_dim <= 256
        if kernel == "efficient" or kernel == "cpu":
            fused = fused and (layer.window is None or layer.window >= self.load.row_tokens)
        width = (layer.heads + layer.kv_heads) * (layer.head_dim + layer.value_dim)
        count.memory += self.tokens * width * self.element * (2 if backward else 1)
        count.kernels += 6 if backward else 2
        count.calls += 1 if backward else 3
        if fused and kernel in ("flash", "efficient", "cpu", "sdpa"):
            count.attention += flops
            return
        # plain torch: scores in memory, products of a block of queries at a time
        masked = self.rows * self.load.row_tokens**2 * layer.heads if kernel == "native" else pairs
        count.scores += masked * (2 if backward else 1)
        blocks = 1 if kernel == "native" else self.load.row_tokens / BLOCK_QUERIES
        rows = self.load.row_tokens if kernel == "native" else BLOCK_QUERIES
        batched = max(1, round(self.rows * layer.heads))
        keys = masked / max(1.0, self.rows * layer.heads * self.load.row_tokens)
        number = max(1, round(batched * blocks))
        count.gemms.append(Gemm(rows, keys, layer.head_dim, number * (3 if backward else 1), grouped=True))
        count.gemms.append(Gemm(rows, layer.value_dim, keys, number * (2 if backward else 1), grouped=True))
        count.kernels += blocks * (45 if backward else 24)

    def _delta_net(self, count: Count, layer: Layer, backward: bool) -> None:
        """Gated delta net in plain torch, chunks of 64 tokens: a rough count."""
        chunks = self.load.row_tokens / 64
        count.kernels += chunks * (24 if backward else 12) + (120 if backward else 60)
        count.calls += 6
        count.memory += self.tokens * self.decoder.hidden * self.element * (160 if backward else 60)

    def _elementwise(self, count: Count, layer: Layer, *, backward: bool) -> None:
        """Norms, rotary embedding and residuals."""
        hidden, unit = self.decoder.hidden, self.tokens * self.element
        if layer.fused_norms:
            count.memory += layer.norm_widths * unit * (3.5 if backward else 2)
            count.kernels += layer.num_norms * (2 if backward else 1)
        else:  # fp32 copies in plain torch
            count.memory += layer.norm_widths * self.tokens * (78 if backward else 40)
            count.kernels += layer.num_norms * (12 if backward else 10)
        count.calls += layer.num_norms + 1  # norms; the layer
        rotated = (layer.heads + layer.kv_heads) * layer.head_dim
        count.kernels += 18 if backward else 12
        if layer.wide_rotary:
            count.wide_rotated += rotated * self.tokens * (WIDE_ROTARY_BACKWARD if backward else 1.0)
            count.kernels += 6 if backward else 2
        else:
            count.memory += rotated * unit * (12 if backward else 9)
        count.memory += hidden * unit * (9 if backward else 6)  # residuals; in backward, gradients of shared inputs
        count.kernels += 6 if backward else 3
        if backward:
            self._rejoin(count, layer)

    def _rejoin(self, count: Count, layer: Layer) -> None:
        """Gradients of the parts of a joint projection are put together again: of slices each in a matrix of its own,
        which are added up; of a gated MLP's halves by `cat`."""
        for linear in layer.linears:
            passes = {"qkv_proj": 11, "gate_up_proj": 6}.get(linear.name, 0)
            count.memory += passes * self.tokens * linear.outputs * self.element
            count.kernels += passes

    def _experts(self, count: Count, layer: Layer, *, backward: bool) -> None:
        """Routed experts as transformers runs them (`grouped_mm`): tokens are sorted by expert and gathered, products
        of the active experts read all of their weights, results are put back in order. Backward of each of the three
        gathers sorts its indices and adds row by row.

        An expert's tokens fill whole tiles of the grouped product: half a tile more than their number on average.
        """
        experts = layer.experts
        if experts is None:
            return
        routed = self.tokens * experts.active
        used = min(float(experts.stored), routed)
        filled = routed / used + TILE / 2
        for n, k in ((2 * experts.width, experts.hidden), (experts.hidden, experts.width)):
            sizes = (k, n) if backward else (n, k)
            count.gemms.append(Gemm(filled, *sizes, count=max(1, round(used)), grouped=True))
            if self.full:
                count.gemms.append(Gemm(n, k, filled, count=max(1, round(used)), grouped=True))
        width_passes, hidden_passes = (14, 13) if backward else (5, 7)
        count.memory += routed * self.element * (experts.hidden * hidden_passes + experts.width * width_passes)
        count.memory += experts.params_each * used * self.element
        count.kernels += 90 if backward else 40
        count.calls += 3
        if not backward:
            self._unpack(count, experts.stored * 2 * experts.hidden * experts.width)
            self._unpack(count, experts.stored * experts.hidden * experts.width)
        elif self.full:
            count.memory += experts.stored * experts.params_each * (self.element + 8)
