"""The work of one optimizer step, counted from a plan and a decoder's shape: multiplications, bytes, kernels.

The step is that of `fitune.engine.step`: forward layer by layer, the loss tail on chunks of target tokens (forward and
backward at once), backward with the first `recompute_layers` layers run again, then the update. A frozen base has no
weight-gradient product; a full one has. Counts of elementwise traffic and kernels follow `fitune.model.linear`,
`fused`, `attention`, `loss` and `formats`; a test holds the multiplications to 2 x parameters x tokens.

Shapes: M tokens of a micro-batch, T tokens of a row, I and O a matrix's inputs and outputs, V vocabulary, C a chunk.
"""

from __future__ import annotations

from collections import Counter

from fitune.plan import Plan
from fitune.speed import host_update
from fitune.speed.layer_work import LayerWork
from fitune.speed.segments import Gemm, Segment, StepWork, Workload
from fitune.speed.shape import Decoder, truncated

HEAD_TILE_BYTES, HEAD_BLOCK_TOKENS = 64 * 2**20, 4096  # of fitune.engine's tiled loss tail
UPDATE_BYTES = {"adamw": 40, "adamw8bit": 28, "adafactor": 64, "lion": 32, "lion8bit": 26, "sgd": 24}
"""Device memory traffic per trained element of norm, clipping and update: gradient, fp32 parameter, moments."""


def step_work(plan: Plan, decoder: Decoder, workload: Workload | None = None) -> StepWork:
    """The work of a plan's optimizer step. Without `workload` rows are `seq_len` long and every token has a loss."""
    decoder = truncated(decoder, plan.num_layers)
    counter = MicroBatch(plan, decoder, workload or Workload(plan.seq_len))
    update = host_update.segments(counter) if plan.masters_in_host and plan.device == "cuda" else [counter.update()]
    segments = [*_layer_segments(counter), counter.tail(), counter.embedding(), *update]
    return StepWork(
        tuple(segments),
        tokens=plan.batch * counter.load.row_tokens,
        micro_batch_tokens=counter.tokens,
        precision=plan.precision,
        device=plan.device,
        source=plan.stream_from,
        attention=plan.attention,
        rough=not decoder.known or any(layer.kind == "linear" for layer, _ in decoder.kinds),
    )


def trained_params(plan: Plan, decoder: Decoder) -> float:
    """Elements of a plan's adapters, or of everything."""
    return MicroBatch(plan, truncated(decoder, plan.num_layers), Workload(1.0)).trained_params()


def _layer_segments(counter: MicroBatch) -> list[Segment]:
    """Forward, and backward with or without recomputation, of each kind of layer with one fate.

    A streamed layer's weights cross once per pass and micro-batch, or once per pass of the whole step where
    accumulation is layer-major; one copy serves recomputation and backward. The ring still holds the last layers when
    backward begins, unless the head's tiles went through it, and the first ones when the next forward pass begins.
    """
    plan, layers = counter.plan, counter.decoder.layers
    streamed = plan.streamed_layers()
    passing, held_forward = set(streamed), set(streamed[: plan.ring_buffers])
    held_backward = set(streamed[-plan.ring_buffers :]) if plan.head_place == "device" else set()
    by_id = {id(layer): layer for layer, _ in counter.decoder.kinds}
    fates = Counter(
        (id(layer), i < plan.recompute_layers, i == 0, i in passing, i in passing and i not in held_forward,
         i in passing and i not in held_backward)
        for i, layer in enumerate(layers)
    )  # fmt: skip
    fetches = 1.0 if counter.layer_major else float(counter.micro_batches)
    share = fetches / counter.micro_batches  # of a micro-batch
    made = []
    for (key, recomputed, first, entered, copied_forward, copied_backward), count in fates.items():
        layer, times = by_id[key], count * counter.micro_batches
        weights = counter.stored_bytes(layer) * share
        offloaded = plan.offload_inputs and recomputed
        inputs = counter.hidden_bytes if offloaded else 0.0
        orders = entered * share + offloaded
        tiles = plan.mlp_tiles if recomputed else 1
        forward = counter.counted(counter.forward, layer, tiles)
        made.append(forward.segment("forward", "forward", times, weights * copied_forward, inputs, orders))
        if recomputed:
            made.append(counter.counted(counter.again, layer, tiles).segment("backward", "recompute", times))
        backward = counter.counted(counter.backward, layer, first and not counter.full, tiles)
        link = weights * copied_backward + inputs
        made.append(backward.segment("backward", "backward", times, link, transfers=orders))
    return made


class MicroBatch(LayerWork):
    """Counts of one micro-batch of a plan, and of the update after all of them."""

    def tail(self) -> Segment:
        """All chunks of a micro-batch's loss: final norm, head and cross-entropy, forward and backward."""
        targets = self.tokens * self.load.target_share
        hidden, vocab = self.decoder.hidden, self.decoder.vocab
        chunks = max(1, -int(-targets // self.plan.loss_chunk))
        size = targets / chunks
        per_logit = 5 * self.element + 38 + (30 if self.decoder.capped_logits else 0)
        head = vocab * hidden * self.element
        tiles = -(-head // HEAD_TILE_BYTES) if self.plan.head_place == "host" else 1
        columns = vocab / tiles
        gemms = [Gemm(size, columns, hidden, chunks * tiles), Gemm(size, hidden, columns, chunks * tiles)]
        memory = targets * (vocab * per_logit + hidden * self.element * 12)
        if self.full:
            gemms.append(Gemm(vocab, hidden, size, chunks))
            memory += chunks * vocab * hidden * (self.element + 8)
        norms = self.decoder.layers[0]
        kernels = chunks * (41.0 if norms.fused_norms else 64.0 + 6 * self.decoder.capped_logits)
        link, orders = 0.0, 0.0
        if self.plan.head_place == "host":  # tile by tile, for a block of chunks at a time (fitune.engine.tiled_tail)
            memory += targets * (vocab * 8 + hidden * 8 * tiles)
            kernels += chunks * (34.0 + 20 * self.decoder.capped_logits) * tiles
            together = self.micro_batches if self.layer_major else 1
            passes = -(-targets * together // HEAD_BLOCK_TOKENS) / together
            link, orders = head * passes, tiles * passes
        return Segment(
            "tail", "loss", self.micro_batches, tuple(gemms), memory_bytes=memory, link_in_bytes=link,
            kernels=kernels, calls=chunks * (8 + len(self.decoder.layers) / 16), transfers=orders,
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
