"""Seconds of an optimizer step that several GPUs share: each card's own work, and what passes between them.

What is exchanged beside the computation (fsdp2's layers, which the ring gathers ahead, and its gradients) is counted as
link time of its phase, which takes the longer of both; what the engines wait for is added: gradients of ddp and
streamed after the last backward pass, what fsdp2 publishes after an update, two sums per layer and direction in tensor
parallel. Rates are `fitune.speed.links`'. A ring sends each byte (N - 1) / N times to gather or to scatter, twice that
to sum (https://arxiv.org/abs/1802.05799). A pipeline of p stages and m micro-batches takes (m + p - 1) / m times its
longest stage (https://arxiv.org/abs/1811.06965). Nothing of it was measured on several GPUs: the interval says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fitune.plan import Plan, layers_of
from fitune.speed.cards import CardRates
from fitune.speed.links import EXCHANGE_LATENCY_S, Links
from fitune.speed.roofline import StepTime, predict_step
from fitune.speed.segments import Segment, StepWork, Workload
from fitune.speed.shape import Decoder, Layer, Linear
from fitune.speed.work import step_work, trained_params

SEVERAL_ERROR = (0.9, 1.3)
"""Factors on the interval of a step on several GPUs, on top of what is unsure of one card."""
EXCHANGE = "exchange"  # the part of a step that waits for other GPUs


def rank_step(
    plan: Plan, decoder: Decoder, cards: Sequence[CardRates], links: Links, workload: Workload | None = None,
    rank: int | None = None,
) -> StepTime:  # fmt: skip
    """The step's time.

    Args:
        plan: a rank's own: `batch` are its records of a step (in pp and tp all of them).
        cards: each rank's; the slowest sets the pace.
        rank: the one whose own time is meant; None: that of all.
    """
    if plan.parallel == "pp":
        slowest = _pipelined(plan, decoder, cards, links, workload, rank)
    else:
        kinds = {card.name: card for card in (cards if rank is None else [cards[rank]])}
        times = (_of_card(plan, decoder, card, links, workload) for card in kinds.values())
        slowest = max(times, key=lambda t: t.step_s)
    low, high = SEVERAL_ERROR
    basis = "kin" if slowest.basis in ("measured", "calibrated") else slowest.basis
    return replace(slowest, low_s=slowest.low_s * low, high_s=slowest.high_s * high, basis=basis)


def _of_card(plan: Plan, decoder: Decoder, card: CardRates, links: Links, workload: Workload | None) -> StepTime:
    card = card.with_link(min(card.link_bytes_per_s, links.host))
    ranks = plan.world_size
    if plan.parallel == "tp":
        work = step_work(plan, _cut(decoder, ranks), workload)
        tokens, waited = work.tokens, _tensor_parallel_s(plan, decoder, work, links)
    elif plan.parallel == "cp":
        work = _sliced(plan, decoder, workload or Workload(plan.seq_len))
        tokens, waited = work.tokens * ranks, _context_parallel_s(plan, decoder, work, links)
    else:
        own = plan.with_(stream_from="shards", resident_layers=0) if plan.parallel == "zero3" else plan
        work = step_work(own, decoder, workload)
        tokens = work.tokens * ranks
        if plan.parallel in ("fsdp2", "zero3"):
            work, card = _gathered(plan, decoder, work, card, links)
        waited = blocking_s(plan, decoder, links)
    return _with_exchange(replace(predict_step(work, card), tokens=tokens), waited)


def _with_exchange(time: StepTime, seconds: float) -> StepTime:
    parts = time.parts | {EXCHANGE: seconds}
    bound = "link" if seconds > time.step_s else time.bound
    return replace(time, step_s=time.step_s + seconds, low_s=time.low_s + seconds / 2,
                   high_s=time.high_s + 2 * seconds, parts=parts, bound=bound)  # fmt: skip


# ---- data parallel ---------------------------------------------------------------------------------------------------


def blocking_s(plan: Plan, decoder: Decoder, links: Links) -> float:
    """Seconds that data-parallel ranks wait for each other in a step."""
    once = (plan.world_size - 1) / plan.world_size
    trained = trained_params(plan, decoder)
    if plan.parallel in ("ddp", "streamed", "zero1", "zero2", "cp"):
        return 2 * once * 4 * trained / links.peer + EXCHANGE_LATENCY_S
    if plan.method == "full":  # outside the layers: gradients are scattered, weights gathered after the update
        ends = decoder.hidden * decoder.vocab * (1 if decoder.tied else 2)
        return once * ends * (4 + 2) / links.peer + 2 * EXCHANGE_LATENCY_S
    return once * 4 * trained / links.peer + len(decoder.layers) * EXCHANGE_LATENCY_S


def _gathered(
    plan: Plan, decoder: Decoder, work: StepWork, card: CardRates, links: Links
) -> tuple[StepWork, CardRates]:  # fmt: skip
    """Layers that come from all ranks instead of host memory, and gradients that go to them after each layer."""
    ranks = plan.world_size
    rate = links.peer * ranks / (ranks - 1)  # 1/N of what is put together is there already
    if plan.offload_inputs:  # they take their way in the same phases
        rate = min(rate, links.host)
    per_layer = trained_params(plan, decoder) / len(decoder.layers)
    if plan.method == "full":
        per_layer = sum(layer.params for layer in decoder.layers) / len(decoder.layers)
    passes = 1 if plan.accumulation_order == "layer-major" else max(1, -(-plan.batch // plan.micro_batch))
    scattered = Segment("backward", "scatter", passes * len(decoder.layers), link_in_bytes=4 * per_layer, kernels=2.0)
    faster = replace(card, link_bytes_per_s=max(rate, card.link_bytes_per_s), sources={**card.sources, "shards": rate})
    return replace(work, segments=(*work.segments, scattered), source="shards"), faster


# ---- tp and pp -------------------------------------------------------------------------------------------------------


def is_cut_by_outputs(linear: Linear) -> bool:
    """Queries, keys, values, gates: by their outputs; what makes hidden states of these again: by its inputs."""
    return linear.reads_input or linear.outputs > linear.inputs


def _cut(decoder: Decoder, ranks: int) -> Decoder:
    """One rank's part of each layer's heads and widths, and of the vocabulary."""

    def layer(found: Layer) -> Layer:
        linears = tuple(
            replace(m, outputs=-(-m.outputs // ranks)) if is_cut_by_outputs(m)
            else replace(m, inputs=-(-m.inputs // ranks))
            for m in found.linears
        )  # fmt: skip
        experts = found.experts and replace(found.experts, width=-(-found.experts.width // ranks))
        return replace(
            found, linears=linears, experts=experts, heads=max(1, found.heads // ranks),
            kv_heads=max(1, found.kv_heads // ranks), mlp_width=-(-found.mlp_width // ranks),
        )  # fmt: skip

    made = {id(found): layer(found) for found in decoder.layers}
    return replace(decoder, layers=tuple(made[id(found)] for found in decoder.layers),
                   vocab=-(-decoder.vocab // ranks))  # fmt: skip


def _tensor_parallel_s(plan: Plan, decoder: Decoder, work: StepWork, links: Links) -> float:
    """Two sums of hidden states per layer in forward, in backward and in recomputation; nothing computes meanwhile."""
    micro_batches = work.tokens / work.micro_batch_tokens
    times = 2 * (2 * len(decoder.layers) + plan.recompute_layers) * micro_batches
    hidden = work.micro_batch_tokens * decoder.hidden * (4 if plan.precision == "fp32" else 2)
    once = 2 * (plan.world_size - 1) / plan.world_size * hidden / links.peer
    return times * (once + EXCHANGE_LATENCY_S)


def _sliced(plan: Plan, decoder: Decoder, load: Workload) -> StepWork:
    """One rank's part of each row's tokens, with its share of what attention does over whole rows."""
    ranks = plan.world_size
    documents = None if load.doc_tokens is None else load.doc_tokens / ranks
    work = step_work(plan, decoder, replace(load, row_tokens=load.row_tokens / ranks, doc_tokens=documents))
    segments = (replace(s, attention_flops=s.attention_flops * ranks, scores=s.scores * ranks) for s in work.segments)
    return replace(work, segments=tuple(segments))


def _context_parallel_s(plan: Plan, decoder: Decoder, work: StepWork, links: Links) -> float:
    """Tokens change places with heads before and after attention (all-to-all); gradients are summed at the end."""
    element = 4 if plan.precision == "fp32" else 2
    micro_batches = work.tokens / work.micro_batch_tokens
    once = (plan.world_size - 1) / plan.world_size * work.micro_batch_tokens * element / links.peer
    passes = (2 * len(decoder.layers) + plan.recompute_layers) / len(decoder.layers) * micro_batches
    widths = sum(2 * layer.heads * layer.head_dim + 2 * layer.kv_heads * layer.head_dim for layer in decoder.layers)
    calls = 4 * len(decoder.layers) * EXCHANGE_LATENCY_S
    return passes * (widths * once + calls) + blocking_s(plan, decoder, links)


def _pipelined(
    plan: Plan, decoder: Decoder, cards: Sequence[CardRates], links: Links, workload: Workload | None,
    only: int | None = None,
) -> StepTime:  # fmt: skip
    """The longest stage with the time that the pipeline takes to fill and to empty; of `only` one stage its own work
    and what it hands on."""
    stages = plan.world_size
    looked_at: Iterable[int] = {0, stages - 1}  # on cards that are alike these say all
    if plan.stages or len({card.name for card in cards}) > 1:
        looked_at = range(stages)
    found = []
    for stage in looked_at if only is None else (only,):
        card = cards[stage].with_link(min(cards[stage].link_bytes_per_s, links.host))
        work = _of_stage(plan, decoder, stage, workload)
        found.append((predict_step(work, card), work))
    longest, work = max(found, key=lambda pair: pair[0].step_s)
    micro_batches = max(1, round(work.tokens / work.micro_batch_tokens))
    bubble = longest.step_s * (stages - 1) / micro_batches if only is None else 0.0
    hidden = work.micro_batch_tokens * decoder.hidden * (4 if plan.precision == "fp32" else 2)
    handed = 2 * (micro_batches + stages - 2) * (hidden / links.peer + EXCHANGE_LATENCY_S)
    return _with_exchange(longest, bubble + handed)


def _of_stage(plan: Plan, decoder: Decoder, stage: int, workload: Workload | None) -> StepWork:
    """A stage's layers; the last one has the loss too."""
    own = layers_of(len(decoder.layers), stage, plan.world_size, plan.stages)
    mine = plan.with_(num_layers=len(own), recompute_layers=len([i for i in own if i < plan.recompute_layers]))
    work = step_work(mine, replace(decoder, layers=decoder.layers[own.start : own.stop]), workload)
    if stage == plan.world_size - 1:
        return work
    return replace(work, segments=tuple(s for s in work.segments if s.phase != "tail"))
