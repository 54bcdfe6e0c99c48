"""The list of cases for several GPUs, and that a case becomes a plan and a prediction. (`multi_gpu.py run --cpu` runs
all of them.)"""

from __future__ import annotations

import sys

import multi_gpu
import multi_gpu_cases
import pytest
from multi_gpu_cases import CASES, OTHERS

from fitune.parallel.world import SAME_RECORDS


def test_the_list_says_what_each_case_is_for(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["multi_gpu.py", "--list"])
    multi_gpu.main()
    text = capsys.readouterr().out
    for name, why in ({name: case.why for name, case in CASES.items()} | OTHERS).items():
        assert name in text and why in text
    for case in CASES.values():
        assert not case.against or (CASES[case.against].ranks == 1 and case.ranks == int(case.alone))
    assert {case.way for case in CASES.values()} >= {"ddp", "streamed", "fsdp2", *SAME_RECORDS} - {"pp"}


@pytest.mark.parametrize("arguments", [["run", "--only", "8b-bf16-xy"], []])
def test_what_is_not_there_is_an_error(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["multi_gpu.py", *arguments])
    with pytest.raises(SystemExit):
        multi_gpu.main()


def test_rows_in_slices_become_a_plan_and_a_prediction():
    found = multi_gpu_cases.point("8b-nf4-64k-cp-streamed-24gib", 2, "h200", on_cpu=True)
    plan = found["plan"]
    assert (plan["parallel"], plan["world_size"], plan["batch"]) == ("cp", 2, 2)
    assert plan["stream_from"] == "pageable" and plan["mlp_tiles"] == 8
    assert found["predicted"]["phases"]["step"]["peak_allocated_bytes"] > 0
