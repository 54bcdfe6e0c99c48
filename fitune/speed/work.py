"""The work of one optimizer step, counted from a plan and a decoder's shape: multiplications, bytes, kernels.

The step is that of `fitune.engine.step`: forward layer by layer, the loss tail on chunks of target tokens (forward and
backward at once), backward with the first `recompute_layers` layers run again, then the update. A frozen base has no
weight-gradient product; a full one has. Counts of elementwise traffic and kernels follow `fitune.model.linear`,
`fused`, `attention`, `loss` and `formats`; a test holds the multiplications to 2 x parameters x tokens.

Shapes: M tokens of a micro-batch, T tokens of a row, I and O a matrix's inputs and outputs, V vocabulary, C a chunk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fitune.plan import Plan
from fitune.speed.shape import Decoder, Layer, Linear, truncated

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "nf4": 0.5, "fp4": 0.5}
SCALE_BYTES = {True: (1 + 4 / 256) / 64, False: 4 / 64}  # of a 4-bit weight, by double quantisation
BLOCK_QUERIES = 256  # rows of a block of fitune.model.attention's blockwise kernel
HEAD_TILE_BYTES, HEAD_BLOCK_TOKENS = 64 * 2**20, 8192  # of fitune.engine's tiled loss tail
UPDATE_BYTES = {"adamw": 40, "adamw8bit": 28, "adafactor": 64, "lion": 32, "lion8bit": 26, "sgd": 24}
"""Device memory traffic per trained element of norm, clipping and update: gradient, fp32 parameter, moments."""


@dataclass(frozen=True)
class Gemm:
    """`count` products [m, k] x [k, n]."""

    m: float
    n: float
    k: float
    count: int = 1
    grouped: bool = False  # experts, each with its own tokens

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Segment:
    """A part of the step that repeats. All figures are for one repetition.

    Attributes:
        phase: forward | tail | backward | optimizer. Host, device and link overlap within a phase.
        attention_flops: of fused attention kernels; `attention_backward` says which.
        scores: attention scores that plain torch holds in memory (blockwise and native kernels).
        skinny_bytes: read and written by adapters' narrow products.
        memory_bytes: of elementwise kernels and norms; unpack_bytes: of unpacking the base.
        dropout_elements: elements that counter dropout hashes.
        kernels: launches; calls: modules and autograd functions entered from Python; unpacks: 4-bit weights unpacked,
            whose host cost is bitsandbytes' own.
        link_in_bytes, link_out_bytes: from host to device and back; the two ways do not hinder each other.
    """

    phase: str
    name: str
    times: int
    gemms: tuple[Gemm, ...] = ()
    attention_flops: float = 0.0
    attention_backward: bool = False
    scores: float = 0.0
    skinny_bytes: float = 0.0
    memory_bytes: float = 0.0
    unpack_bytes: float = 0.0
    dropout_elements: float = 0.0
    kernels: float = 0.0
    calls: float = 0.0
    unpacks: int = 0
    link_in_bytes: float = 0.0
    link_out_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return sum(g.flops for g in self.gemms) + self.attention_flops


@dataclass(frozen=True)
class Workload:
    """What the data says of a step. `target_share`: tokens with a loss, of all; `doc_tokens`: mean length of the
    documents in packed rows (None: rows are one document each)."""

    row_tokens: float
    target_share: float = 1.0
    doc_tokens: float | None = None


@dataclass(frozen=True)
class StepWork:
    """One optimizer step. `tokens` are those of all its rows; `source` is where streamed weights come from."""

    segments: tuple[Segment, ...]
    tokens: float
    micro_batch_tokens: float
    precision: str
    device: str
    source: str
    attention: str  # the plan's kernel
    rough: bool  # a part is only estimated: unknown family, plain-torch recurrences

    @property
    def flops(self) -> float:
        return sum(s.flops * s.times for s in self.segments)

    @property
    def link_bytes(self) -> float:
        """Both ways together."""
        return sum((s.link_in_bytes + s.link_out_bytes) * s.times for s in self.segments)

    @property
    def kernels(self) -> float:
        return sum(s.kernels * s.times for s in self.segments)


@dataclass
class _Count:
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

    def segment(self, phase: str, name: str, times: int, link_in: float = 0.0, link_out: float = 0.0) -> Segment:
        return Segment(
            phase, name, times, _merged(self.gemms), attention_flops=self.attention, scores=self.scores,
            skinny_bytes=self.skinny, memory_bytes=self.memory, unpack_bytes=self.unpack,
            dropout_elements=self.dropout, kernels=self.kernels, calls=self.calls, unpacks=self.unpacks,
            attention_backward=name == "backward", link_in_bytes=link_in, link_out_bytes=link_out,
        )  # fmt: skip


def _merged(gemms: list[Gemm]) -> tuple[Gemm, ...]:
    """Equal products as one with their count; grouped ones stay apart, since their count fills the device."""
    counts = Counter((g.m, g.n, g.k) for g in gemms if not g.grouped for _ in range(g.count))
    return tuple(Gemm(*size, count=n) for size, n in counts.items()) + tuple(g for g in gemms if g.grouped)


def step_work(plan: Plan, decoder: Decoder, workload: Workload | None = None) -> StepWork:
    """The work of a plan's optimizer step. Without `workload` rows are `seq_len` long and every token has a loss."""
    decoder = truncated(decoder, plan.num_layers)
    counter = _Counter(plan, decoder, workload or Workload(plan.seq_len))
    segments = [*_layer_segments(counter), counter.tail(), counter.embedding(), counter.update()]
    return StepWork(
        tuple(segments),
        tokens=plan.batch * counter.load.row_tokens,
        micro_batch_tokens=counter.tokens,
        precision=plan.precision,
        device=plan.device,
        source=plan.stream_from,
        attention=plan.attention,
        rough=not decoder.known or any(layer.kind == "linear" for layer in decoder.layers),
    )


def trained_params(plan: Plan, decoder: Decoder) -> float:
    """Elements of a plan's adapters, or of everything."""
    return _Counter(plan, truncated(decoder, plan.num_layers), Workload(1.0)).trained_params()


def _layer_segments(counter: _Counter) -> list[Segment]:
    """Forward, and backward with or without recomputation, of each kind of layer with one fate.

    A streamed layer's weights cross once per pass and micro-batch, or once per pass of the whole step where
    accumulation is layer-major; one copy serves recomputation and backward. The ring still holds the last layers when
    backward begins, unless the head's tiles went through it, and the first ones when the next forward pass begins.
    """
    plan, layers = counter.plan, counter.decoder.layers
    streamed = plan.streamed_layers()
    held_forward = set(streamed[: plan.ring_buffers])
    held_backward = set(streamed[-plan.ring_buffers :]) if plan.head_place == "device" else set()
    by_id = {id(layer): layer for layer in layers}  # hashing a layer costs more than counting it
    fates = Counter(
        (id(layer), i < plan.recompute_layers, i == 0, i in streamed and i not in held_forward,
         i in streamed and i not in held_backward)
        for i, layer in enumerate(layers)
    )  # fmt: skip
    fetches = 1.0 if counter.layer_major else float(counter.micro_batches)
    made = []
    for (key, recomputed, first, copied_forward, copied_backward), count in fates.items():
        layer, times = by_id[key], count * counter.micro_batches
        weights = counter.stored_bytes(layer) * fetches / counter.micro_batches
        inputs = counter.hidden_bytes if plan.offload_inputs and recomputed else 0.0
        tiles = plan.mlp_tiles if recomputed else 1
        forward = counter.forward(layer, tiles)
        made.append(forward.segment("forward", "forward", times, weights * copied_forward, inputs))
        if recomputed:
            made.append(counter.forward(layer, tiles).segment("backward", "recompute", times))
        backward = counter.backward(layer, first and not counter.full, tiles)
        made.append(backward.segment("backward", "backward", times, weights * copied_backward + inputs))
    return made


class _Counter:
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
        return float(
            sum(r * (m.inputs + m.outputs) for layer in self.decoder.layers for m in layer.linears if self.adapted(m))
        )

    def trained_tensors(self) -> int:
        if self.full:
            return sum(len(layer.linears) + layer.num_norms + 2 for layer in self.decoder.layers) + 3
        return 2 * sum(self.adapted(m) for layer in self.decoder.layers for m in layer.linears)

    def _unpack(self, count: _Count, params: float, uses: int = 1) -> None:
        """Uses of a stored weight in another format than the compute dtype."""
        if self.dense:
            return
        count.unpack += uses * params * (BASE_BYTES[self.plan.base_format] + self.element)
        count.kernels += uses * (3 if self.four_bit and self.plan.double_quant else 1)
        count.unpacks += uses * self.four_bit

    # ---- a layer ----

    def forward(self, layer: Layer, mlp_tiles: int = 1) -> _Count:
        count = _Count()
        for linear in layer.linears:
            tiles = mlp_tiles if linear.in_mlp else 1
            count.gemms.append(Gemm(self.tokens / tiles, linear.outputs, linear.inputs, tiles))
            count.kernels += tiles
            count.calls += tiles
            self._unpack(count, linear.params, tiles)
            if self.adapted(linear):
                self._adapter_forward(count, linear)
        self._attention(count, layer, backward=False)
        self._elementwise(count, layer, backward=False)
        self._experts(count, layer, backward=False, unpack=True)
        return count

    def backward(self, layer: Layer, first: bool, mlp_tiles: int = 1) -> _Count:
        """`first`: nobody needs the gradient of the layer's input."""
        count = _Count()
        for linear in layer.linears:
            tiles = mlp_tiles if linear.in_mlp else 1
            count.calls += tiles
            if not (first and linear.reads_input):
                count.gemms.append(Gemm(self.tokens / tiles, linear.inputs, linear.outputs, tiles))
                count.kernels += tiles
                self._unpack(count, linear.params, tiles)
            if self.full:
                count.gemms.append(Gemm(linear.outputs, linear.inputs, self.tokens))
                count.kernels += 3
                count.memory += linear.params * (self.element + 8)  # added to the fp32 master's gradient
            if self.adapted(linear):
                self._adapter_backward(count, linear)
        self._attention(count, layer, backward=True)
        self._elementwise(count, layer, backward=True)
        self._experts(count, layer, backward=True, unpack=False)
        return count

    def _adapter_forward(self, count: _Count, linear: Linear) -> None:
        assert self.plan.adapter is not None
        r = self.plan.adapter.r
        count.gemms.append(Gemm(self.tokens, r, linear.inputs))
        count.gemms.append(Gemm(self.tokens, linear.outputs, r))
        count.skinny += self.tokens * self.element * (linear.inputs + 2 * linear.outputs)
        count.kernels += 4
        if self.dropout:
            self._dropout(count, linear.inputs)
        if self.plan.adapter.dora:
            count.memory += linear.params * (self.element + 4) + 3 * self.tokens * linear.outputs * self.element
            count.kernels += 12
            self._unpack(count, linear.params)

    def _adapter_backward(self, count: _Count, linear: Linear) -> None:
        assert self.plan.adapter is not None
        r = self.plan.adapter.r
        count.gemms.append(Gemm(self.tokens, r, linear.outputs))
        count.gemms.append(Gemm(self.tokens, r, linear.inputs))
        count.gemms.append(Gemm(r, linear.inputs, self.tokens))
        count.gemms.append(Gemm(linear.outputs, r, self.tokens))
        count.gemms.append(Gemm(self.tokens, linear.inputs, r))
        count.skinny += self.tokens * self.element * (4 * linear.inputs + 2 * linear.outputs)
        count.kernels += 11
        if self.dropout:
            self._dropout(count, linear.inputs)
            self._dropout(count, linear.inputs)
        if self.plan.adapter.dora:
            count.memory += 6 * self.tokens * linear.outputs * self.element
            count.kernels += 8

    def _dropout(self, count: _Count, width: int) -> None:
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

    def _attention(self, count: _Count, layer: Layer, *, backward: bool) -> None:
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
        count.calls += blocks * (3 if backward else 1.5)  # beside the kernels some 24 views, 56 in backward

    def _delta_net(self, count: _Count, layer: Layer, backward: bool) -> None:
        """Gated delta net in plain torch, chunks of 64 tokens: a rough count."""
        chunks = self.load.row_tokens / 64
        count.kernels += chunks * (24 if backward else 12) + (120 if backward else 60)
        count.calls += 6
        count.memory += self.tokens * self.decoder.hidden * self.element * (160 if backward else 60)

    def _elementwise(self, count: _Count, layer: Layer, *, backward: bool) -> None:
        """Norms, rotary embedding, residuals and MLP activations."""
        hidden, unit = self.decoder.hidden, self.tokens * self.element
        rotated = (layer.heads + layer.kv_heads) * layer.head_dim
        if layer.fused_norms:
            count.memory += layer.norm_widths * unit * (3.5 if backward else 2)
            count.kernels += layer.num_norms * (2 if backward else 1)
        else:  # fp32 copies in plain torch
            count.memory += layer.norm_widths * self.tokens * (64 if backward else 34)
            count.kernels += layer.num_norms * (12 if backward else 10)
        count.calls += layer.num_norms + 2  # norms; the layer and its MLP
        count.memory += rotated * unit * (12 if backward else 9)
        count.kernels += 18 if backward else 12
        count.memory += hidden * unit * (9 if backward else 6)  # residuals; in backward, gradients of shared inputs
        count.kernels += 6 if backward else 3
        per_width = (11 if backward else 5) if layer.gated else (3 if backward else 2)
        count.memory += layer.mlp_width * unit * per_width
        count.kernels += 4 if backward else 2
        if backward:
            self._rejoin(count, layer)

    def _rejoin(self, count: _Count, layer: Layer) -> None:
        """Gradients of the parts of a joint projection are put together again: of slices each in a matrix of its own,
        which are added up; of a gated MLP's halves by `cat`."""
        for linear in layer.linears:
            passes = {"qkv_proj": 11, "gate_up_proj": 6}.get(linear.name, 0)
            count.memory += passes * self.tokens * linear.outputs * self.element
            count.kernels += passes

    def _experts(self, count: _Count, layer: Layer, *, backward: bool, unpack: bool) -> None:
        """Routed experts: products of the active ones, weights of all of them."""
        experts = layer.experts
        if experts is None:
            return
        routed = self.tokens * experts.active
        each = max(1.0, routed / experts.stored)
        used = min(float(experts.stored), routed)
        for n, k in ((2 * experts.width, experts.hidden), (experts.hidden, experts.width)):
            sizes = (k, n) if backward else (n, k)
            count.gemms.append(Gemm(each, *sizes, count=max(1, round(used)), grouped=True))
            if self.full:
                count.gemms.append(Gemm(n, k, each, count=max(1, round(used)), grouped=True))
        count.memory += routed * self.element * (experts.hidden * 6 + experts.width * (11 if backward else 5))
        count.memory += experts.params_each * used * self.element
        count.kernels += 40 if backward else 30
        count.calls += 3
        if unpack:
            self._unpack(count, experts.stored * 2 * experts.hidden * experts.width)
            self._unpack(count, experts.stored * experts.hidden * experts.width)
        if backward and self.full:
            count.memory += experts.stored * experts.params_each * (self.element + 8)

    # ---- around the layers ----

    def tail(self) -> Segment:
        """All chunks of a micro-batch's loss: final norm, head and cross-entropy, forward and backward."""
        targets = self.tokens * self.load.target_share
        hidden, vocab = self.decoder.hidden, self.decoder.vocab
        chunks = max(1, -int(-targets // self.plan.loss_chunk))
        size = targets / chunks
        per_logit = 5 * self.element + 38 + (30 if self.decoder.capped_logits else 0)
        gemms = [Gemm(size, vocab, hidden, chunks), Gemm(size, hidden, vocab, chunks)]
        memory = targets * (vocab * per_logit + hidden * self.element * 12)
        if self.full:
            gemms.append(Gemm(vocab, hidden, size, chunks))
            memory += chunks * vocab * hidden * (self.element + 8)
        kernels, link = chunks * 50.0, 0.0
        if self.plan.head_place == "host":  # logits are made twice, tile by tile (fitune.engine.tiled_tail)
            gemms.append(Gemm(size, vocab, hidden, chunks))
            memory += targets * vocab * (self.element + 24)
            head = vocab * hidden * self.element
            kernels += chunks * 34.0 * -(-head // HEAD_TILE_BYTES)
            whole = targets * (self.micro_batches if self.layer_major else 1)
            link = 2.0 * head * -(-whole // HEAD_BLOCK_TOKENS) / (self.micro_batches if self.layer_major else 1)
        return Segment(
            "tail", "loss", self.micro_batches, tuple(gemms), memory_bytes=memory, link_in_bytes=link,
            kernels=kernels, calls=chunks * (8 + len(self.decoder.layers) / 16),
        )  # fmt: skip

    def embedding(self) -> Segment:
        """Rows of the embedding; from host memory they cross the link. A trained one's gradient is dense."""
        trained = self.decoder.vocab * self.decoder.hidden * (self.element + 8.0) if self.full else 0.0
        return Segment(
            "forward", "embedding", self.micro_batches, memory_bytes=4 * self.hidden_bytes + trained,
            link_in_bytes=self.hidden_bytes if self.plan.embedding_place == "host" else 0.0,
            kernels=40, calls=10 + len(self.decoder.layers) / 4,
        )  # fmt: skip

    def update(self) -> Segment:
        """Gradient norm, clipping and the optimizer, once a step. Paged state crosses the link both ways: an upper
        bound, since the driver keeps it on the device while there is room."""
        params, tensors = self.trained_params(), self.trained_tensors()
        kind = self.plan.optimizer.removeprefix("paged_")
        paged = self.plan.optimizer != kind
        each = 14.0 if kind == "adafactor" else 3.0 if paged or kind != "adamw" and kind != "sgd" else 0.15
        moved = params * UPDATE_BYTES.get(kind, 40) + (params * 6 if self.full else 0)
        state = params * {"adamw": 8.0, "adamw8bit": 2.0}.get(kind, 0.0) if paged else 0.0
        return Segment(
            "optimizer", self.plan.optimizer, 1, memory_bytes=moved, kernels=60 + tensors * each,
            calls=10 + tensors * (1.0 if each >= 1 else 0.05), link_in_bytes=state, link_out_bytes=state,
        )  # fmt: skip
