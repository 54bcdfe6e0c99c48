"""All policies at once give what each gives by itself."""

from __future__ import annotations

import random

import pytest

from fitune.memory.policies import highest_peaks
from fitune.memory.replay import LayerParts, LayerTerms, Part, PassParts, StepTerms, peaks


def random_terms(chance, count):
    def part():
        delta = chance.randint(-500, 500)
        return Part(max(0, delta) + chance.choice((0, chance.randint(0, 2000))), delta)

    def layer():
        return LayerParts(part(), (part(), part()), (part(), part()))

    names = ["a", "b", "c"][: chance.randint(1, 3)]

    def one_pass():
        return PassParts(part(), layer(), {name: layer() for name in names}, part(), part(), part())

    size = lambda: chance.choice((0, chance.randint(0, 3000)))  # noqa: E731
    return StepTerms(
        kinds=tuple(chance.choice(names) for _ in range(count)),
        layers={name: LayerTerms(size(), size(), size(), part()) for name in names},
        other_weight_bytes=size(), other_trained_bytes=size(), other_state_bytes=size(), first_pass=one_pass(),
        later_pass=one_pass(), optimizer_peak_bytes=size(), eval_embed=part(), eval_tail=part(),
        largest_weight_bytes=size(),
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_number_of_recomputed_layers(count):
    chance = random.Random(count)
    for _ in range(100):
        terms = random_terms(chance, count)
        for accumulates in (False, True):
            one_by_one = [peaks(terms, n, accumulates) for n in range(count + 1)]
            expected = [max(p.load, p.first_step, p.step, p.eval, p.save) for p in one_by_one]
            assert highest_peaks(terms, accumulates) == expected
