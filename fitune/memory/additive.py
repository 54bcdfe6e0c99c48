"""Moments of a step from its traced terms: the sum that `memory.replay` takes, kept apart by owner."""

from __future__ import annotations

from fitune.memory.moments import Moment
from fitune.memory.replay import Part, PassParts, StepTerms
from fitune.plan import Plan


def resident(terms: StepTerms, plan: Plan) -> dict[str, int]:
    """Owner to bytes of what stays on the device: weights, what is trained, the optimizer's state."""
    weights, trained = terms.weight_bytes, terms.trained_bytes
    owners = {"weights": weights, "optimizer": terms.state_bytes}
    if plan.method != "full":
        owners |= {"weights": weights - trained, "adapters": trained}
    elif plan.precision != "fp32":
        owners |= {"weights": weights - trained, "masters": trained}
    return owners


def trained_bytes(terms: StepTerms) -> int:
    """See `StepTerms.trained_bytes`."""
    return terms.trained_bytes


def step_moments(terms: StepTerms, plan: Plan, *, has_state: bool = True) -> list[Moment]:
    """The highest moment of each part of a step: of its first micro-batch, or where there are several of a later one,
    which meets all gradients.

    Args:
        has_state: whether the optimizer's state is there already (in the first step it comes with the update).
    """
    base = resident(terms, plan)
    accumulates = plan.micro_batch < plan.batch
    during = base if has_state else {**base, "optimizer": 0}
    gradients = terms.trained_bytes
    parts = terms.later_pass if accumulates else terms.first_pass
    walk = _Walk(during | {"gradients": gradients if accumulates else 0})
    _walk(walk, terms, parts, plan.recompute_layers, accumulates)
    update = base | {"gradients": gradients, "temporary": terms.optimizer_peak_bytes}
    return [*walk.moments, Moment("optimizer", -1, _without_zeros(update))]


def eval_moments(terms: StepTerms, plan: Plan) -> list[Moment]:
    """The highest moment of each part of an evaluation."""
    walk = _Walk(dict(resident(terms, plan)))
    walk.run("embed", -1, terms.eval_embed, "temporary")
    for index, kind in enumerate(terms.kinds):
        walk.run("forward", index, terms.layers[kind].eval_forward, "temporary")
    walk.run("tail", -1, terms.eval_tail, "logits")
    return walk.moments


class _Walk:
    """Live bytes by owner, part after part."""

    def __init__(self, live: dict[str, int]):
        self.live = live
        self.moments: list[Moment] = []

    def add(self, owner: str, num_bytes: int) -> None:
        self.live[owner] = self.live.get(owner, 0) + num_bytes

    def run(self, name: str, layer: int, part: Part, peak_owner: str, leaves: str = "temporary") -> None:
        """A part whose own peak is `peak_owner`'s; what is alive after it more than before is `leaves`'s."""
        at_peak = dict(self.live)
        at_peak[peak_owner] = at_peak.get(peak_owner, 0) + part.peak_bytes
        self.moments.append(Moment(name, layer, _without_zeros(at_peak)))
        self.add(leaves, part.delta_bytes)


def _walk(walk: _Walk, terms: StepTerms, parts: PassParts, recompute_layers: int, accumulates: bool) -> None:
    count = len(terms.kinds)
    walk.run("embed", -1, parts.embed, "temporary")
    layers = [parts.layer(index, kind) for index, kind in enumerate(terms.kinds)]
    for index in range(recompute_layers):
        walk.run("stash", index, layers[index].stash, "inputs", "inputs")
    for index in range(count):
        recomputes = index < recompute_layers
        part = layers[index].recompute[0] if recomputes else layers[index].keep[0]
        owner = "temporary" if recomputes else "saved"
        walk.run("forward", index, part, owner, owner)
    kept_last = recompute_layers < count
    walk.run("tail", -1, parts.tail_after_keep if kept_last else parts.tail_after_recompute, "logits")
    for index in reversed(range(count)):
        recomputes = index < recompute_layers
        forward, backward = layers[index].recompute if recomputes else layers[index].keep
        walk.run("backward", index, backward, "temporary")
        # what the part leaves behind is a sum: new gradients, less what was held for it
        gone = {"inputs": -layers[index].stash.delta_bytes} if recomputes else {"saved": -forward.delta_bytes}
        made = {"gradients": 0 if accumulates else terms.layers[terms.kinds[index]].trained_bytes}
        for owner, num_bytes in (gone | made).items():
            walk.add(owner, num_bytes)
            walk.add("temporary", -num_bytes)
        if index == recompute_layers and index > 0:
            walk.add("temporary", -layers[index - 1].stash.delta_bytes)
    walk.run("backward", -1, parts.embed_backward, "temporary")


def _without_zeros(owners: dict[str, int]) -> dict[str, int]:
    """Sums that differ by a rounding of blocks may leave an owner a little below zero: the rest takes it."""
    total = sum(owners.values())
    kept = {owner: value for owner, value in owners.items() if value > 0}
    excess = sum(kept.values()) - total
    for owner in ("temporary", "saved", "inputs", "logits"):
        taken = min(excess, kept.get(owner, 0))
        if taken > 0:
            kept[owner] -= taken
            excess -= taken
    return {owner: value for owner, value in kept.items() if value}
