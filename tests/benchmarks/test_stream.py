"""The list of streamed cases: what a person is told, and that cases run. (`stream.py --tiny` runs all of them.)"""

from __future__ import annotations

import pytest
import stream
import stream_cases
from stream_cases import CASES, EQUALITIES


def test_every_acceptance_has_cases_and_every_case_its_reason():
    numbers = {case.acceptance for case in CASES.values() if not case.long}
    assert numbers - {0} == set(range(2, 10)) and {why[0] for why in EQUALITIES.values()} == {"1", "6"}
    text = stream.listed()
    for name, case in CASES.items():
        assert case.why in text and name in text
        assert case.against is None or case.against in CASES


def test_an_acceptance_brings_what_it_is_compared_with():
    names = stream.selected(8, with_long=False)
    assert names[0] == "8b-nf4-1x2048-resident" and "8b-bf16-4x2048-ring-12gb-s" in names
    assert stream.selected(1, with_long=False) == [name for name, why in EQUALITIES.items() if why[0] == "1"]
    assert not set(stream.selected(None, with_long=False)) & {name for name, case in CASES.items() if case.long}


@pytest.mark.parametrize("name", ["8b-nf4-1x2048-least", "qwen3-30b-a3b-nf4-1x2048-experts"])
def test_a_case_runs_at_tiny_sizes_on_the_cpu(name):
    record = stream.work(name, 2, tiny=True)
    assert record["plan"]["device"] == "cpu" and len(record["measured"]["losses"]) == 2
    assert record["predicted"]["peak_allocated_bytes"] > 0 and record["predicted"]["step_s"] > 0
    if "experts" in name:
        assert record["num_trained"] > 2 * 4 * 8 * 16 * 64, "every expert has its own A and B"
    assert name in stream.row(record, [record])


def test_a_shape_keeps_as_many_layers_as_asked_for():
    config = stream_cases.config_of("random:openai/gpt-oss-120b", 2, tiny=False)
    assert config.num_hidden_layers == len(config.layer_types) == 2 and config.hidden_size == 2880
    assert stream_cases.config_of("random:openai/gpt-oss-120b", None, tiny=False) is None
