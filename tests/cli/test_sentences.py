"""The planner's sentences are translated: those of real plans of many kinds, and what would fit where nothing does."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from fitune.cli import render, render_memory
from fitune.planner import make_plan, nofit
from fitune.planner.sentences import _TABLE, duration, translated
from tests.planner import case

# On a small model, whose steps are traced in no time.
JOBS: list[dict[str, Any]] = [
    dict(gpu="rtx3080", vram=0.95),
    dict(gpu="rtx4090", method="lora", precision="bf16", optimizer="adamw8bit", packing=True),
    dict(gpu="t4", method="qlora", micro_batch=1, recompute="all"),
    dict(gpu="a100", seq_len=8192, method="qlora"),
    dict(gpu="h100", method="full"),
    dict(gpu="rtx3080", method="lora", micro_batch=4, vram=0.87),
    dict(gpu="rtx3080", vram=0.8, method="lora"),
    dict(gpu="rtx3080", vram=0.76, method="lora"),
    dict(gpu="rtx3080", vram=0.8, method="lora", effort="simple"),
    dict(gpu="rtx3080", vram=99, ram=64),
    dict(gpu="rtx3080:2"),
    dict(devices="cpu"),
]
# What reads the same in both languages: names of kernels, optimizers and formats.
NAMES = {"cpu", "flash", "efficient", "adamw", "adamw8bit", "fp32", "bf16", "fp16", "int8", "nf4", "fp4"}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FITUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = [make_plan(case.recipe(**job), config=case.config(), detailed=i < 1) for i, job in enumerate(JOBS)]
    return [result.as_dict() for result in made]


def is_chinese(text: str) -> bool:
    reads_alike = re.fullmatch(r"[\d /]+|(Lo|Do)RA r=[^ ]+", text)
    return text in NAMES or bool(re.search(r"[\u4e00-\u9fff]", text)) or bool(reads_alike)


def test_every_sentence_is_translated(plans):
    missing = set()
    for result in plans:
        said = [text for r in result["reasons"] for text in (r["decision"], str(r["value"]), r["why"])]
        said += [*result["notes"], *(offer["change"] for offer in result["nearest_fits"])]
        missing |= {text for text in said if not is_chinese(translated(text, "zh"))}
    assert not missing, "no Chinese in fitune/planner/sentences.py for:\n" + "\n".join(sorted(missing))


# Where sentences are made that a plan shows: reasons, notes, offers, ways of several GPUs.
FITUNE = Path(render.__file__).parents[1]
SPEAKING = (
    "planner/explain.py", "planner/layouts.py", "planner/sharing.py", "planner/ways.py", "planner/finish.py",
    "planner/mixed.py", "planner/nofit.py", "planner/techniques.py", "memory/moments.py",
    "planner/target.py", "planner/positions.py", "planner/lengths.py", "planner/advise.py", "planner/context.py",
    "speed/links.py", "memory/host.py", "memory/constants.py", "hardware/nvidia.py",
)  # fmt: skip
# Parts of sentences that stand in the table as a whole, and words that no plan shows.
PARTS = re.compile(
    r" with double .*|\? needs at least \? on each card, \? of |\? may be used|a card with more memory: \? \(\?\)|"
    r"\? of the available RAM|all of a \?|what is free on \?| \(\? are used by other processes\)|"
    r"--ram \? changes nothing: \? are \?| \(an NVLink bridge.*|PCIe through host memory|a cuBLAS workspace.*|"
    r"masters and state|paged optimizer state|, or plan for more cards: .*|weights are copied|gradients leave|"
    r"\?, masters and state in RAM, updated \?|ahead of the next forward pass, layer by layer|beside the backward pass|"
    r"all \? micro-batches pass a layer before the next: its \? once, not \? times"
)


def sentences_of(source: str) -> set[str]:
    """Texts of three words and more that are neither documentation nor an error's, with a `?` in every gap."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    hidden = [n for n in nodes if isinstance(n, ast.Raise)]
    hidden += [n.value for n in nodes if isinstance(n, ast.Expr) and not isinstance(n.value, ast.Call)]
    left_out = {id(inner) for node in hidden for inner in ast.walk(node)}
    left_out |= {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in ast.walk(n) if v is not n}
    found = set()
    for node in nodes:
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "?" for v in node.values)
        else:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if re.search(r"[a-z]+,? [a-z]+,? [a-z]+", text, re.IGNORECASE) and not PARTS.fullmatch(text):
            found.add(text)
    return found


@pytest.mark.parametrize("file", SPEAKING)
def test_every_sentence_in_the_source_is_translated(file):
    said = sentences_of((FITUNE / file).read_text(encoding="utf-8"))
    missing = {text for text in said if not is_chinese(translated(text.replace("?", "7"), "zh"))}
    assert not missing, "no Chinese in fitune/planner/sentences.py for:\n" + "\n".join(sorted(missing))


def test_a_new_sentence_would_be_missed():
    source = 'def f(n):\n    "What it says."\n    return Reason("x", "y", f"nobody has seen {n} of these")\n'
    assert sentences_of(source) == {"nobody has seen ? of these"}


def test_streaming_in_all_its_forms_is_among_the_plans(plans):
    decided = {(r["decision"], str(r["value"]).split()[0]) for result in plans for r in result["reasons"]}
    assert {decision for decision, _ in decided} >= {"streaming", "layer inputs", "micro-batch", "optimizer"}, decided
    assert ("streaming", "off") in decided


def test_light_optimizers_are_translated():
    for what in nofit.LIGHT_OPTIMIZERS.values():
        assert translated(f"another optimizer: {what}", "zh").startswith("换优化器：")
        assert is_chinese(translated(what, "zh"))


def test_gaps_are_filled():
    assert translated("21 of 32 layers", "zh") == "32 层中的 21 层"
    assert translated("bf16 needs at least 15.60 GiB and tensors have 8.57 GiB of 9.70 GiB", "zh") == (
        "bf16 至少需要 15.60 GiB，而 9.70 GiB 中可用于张量的只有 8.57 GiB"
    )
    assert translated("a sentence that nobody wrote", "zh") == "a sentence that nobody wrote"
    assert translated("you asked for it", "en") == "you asked for it"


def test_gaps_have_the_same_names():
    for english, chinese in _TABLE:
        assert set(re.findall(r"{(\w+)}", chinese)) <= set(re.findall(r"{(\w+)}", english)), english
        assert re.search(r"[\u4e00-\u9fff]|，", chinese) or "/" in chinese or chinese == english, english


def test_durations():
    assert [duration(text, "zh") for text in ("4.2 s", "3 min 20 s", "1 h 05 min")] == [
        "4.2 秒", "3 分 20 秒", "1 小时 05 分",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100])
def test_chinese_plan_fits_the_terminal(plans, width: int):
    for result in plans:
        console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
        render.show_plan(console, result, "zh")
        lines = console.export_text().splitlines()
        assert max(map(cell_len, lines)) <= width
        assert ("可以放入" if result["fits"] else "放不进") in lines[0]


def test_both_languages_have_the_same_parts(plans, monkeypatch):
    """A line of a plan in one language has its counterpart in the other: decisions, phases, offers."""
    monkeypatch.setattr(render_memory, "MOST_WIDTH", 4000)
    for result in plans:
        counts = []
        for lang in ("en", "zh"):
            console = Console(width=4000, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
            render.show_plan(console, result, lang)
            counts.append(len(console.export_text().splitlines()))
        assert counts[0] == counts[1]


def test_sentences_within_sentences():
    said = "nf4 on the card needs at least 6.35 GiB and tensors have 1.00 GiB of 2.00 GiB; the same mathematics"
    assert translated(said, "zh") == (
        "nf4 全部放在显卡上 至少需要 6.35 GiB，而 2.00 GiB 中可用于张量的只有 1.00 GiB；数学上等价"
    )
    assert translated("24 of 32 layers from pinned RAM", "zh") == "32 层中的 24 层，来自锁页内存"
    assert translated("streamed it would be 12 % slower", "zh") == "若流式加载则慢 12 %"
