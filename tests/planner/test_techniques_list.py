"""The list of techniques is complete, in both languages, and the pages are written from it."""

from __future__ import annotations

import importlib.util
import re

import pytest

from fitune.planner import techniques_list
from fitune.planner.techniques_list import ALL, BY_KEY, EXACT, LANGUAGES
from fitune.recipe import BaseFormat, OptimizerName, Parallel, Recipe
from tests.house.source import ROOT

WANTED = {
    "data_parallel", "pipeline_parallel", "tensor_parallel", "context_parallel", "zero1", "zero2", "zero3", "fsdp",
    "accumulation", "fp16", "bf16", "int8", "fp4", "nf4", "double_quant", "lora", "qlora", "checkpointing",
    "flash_attention", "offload", "streaming", "adam8bit", "paged_optimizer", "cpu_optimizer", "chunked_loss",
    "packing",
}  # fmt: skip
TEXTS = ("name", "how", "saves", "costs", "when")


def script():
    spec = importlib.util.spec_from_file_location("write_techniques", ROOT / "scripts" / "write_techniques.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_list_is_complete():
    assert WANTED - BY_KEY.keys() == set()
    assert len(BY_KEY) == len(ALL)


def test_every_choice_of_a_recipe_is_explained():
    settings = " ".join(technique.setting for technique in ALL)
    known = {"adamw": "adam8bit", "lion8bit": "lion", "sgd": "adafactor", "paged_adamw8bit": "paged_optimizer",
             "fp32": "bf16", "streamed": "streaming", "none": "", "auto": ""}  # fmt: skip
    for choices in (BaseFormat, OptimizerName, Parallel):
        for choice in choices.__args__:
            assert choice in settings or choice in BY_KEY or choice in known, choice


@pytest.mark.parametrize("key", sorted(BY_KEY))
def test_entry_says_everything_in_both_languages(key: str):
    technique = BY_KEY[key]
    for field in TEXTS:
        english, chinese = (technique.text(field, lang) for lang in LANGUAGES)
        assert english and chinese
        assert not re.search(r"[\u4e00-\u9fff]", english), field
        if field != "name":
            assert re.search(r"[\u4e00-\u9fff]", chinese), field
            assert english.endswith(".") and chinese.endswith("。"), field
    assert technique.exact in EXACT
    assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", technique.source[1])
    assert re.search(r"\b20\d\d\b", technique.source[0])


@pytest.mark.parametrize("key", sorted(key for key, t in BY_KEY.items() if t.setting))
def test_named_settings_exist(key: str):
    for option, value in re.findall(r"--([a-z-]+)(?: ([\w.]+))?", BY_KEY[key].setting):
        name = option.replace("-", "_")
        assert name in Recipe.model_fields
        if value:
            Recipe.model_validate({name: value})


def test_every_technique_can_be_had():
    """By a setting, or because a plan takes it by itself; a way of several GPUs by the name it has in a recipe."""
    assert [t.key for t in ALL if not (t.setting or t.is_auto)] == []
    named = {way for t in ALL for way in re.findall(r"--parallel (\w+)", t.setting)}
    assert named == {*Parallel.__args__} - {"auto", "none", "streamed"}


def test_pages_are_current(capsys):
    assert script().main(["--check"]) == 0, capsys.readouterr().out


def test_pages_have_every_entry():
    for lang, name in script().FILES.items():
        text = (ROOT / "docs" / "techniques" / name).read_text(encoding="utf-8")
        for technique in ALL:
            assert f'<a id="{technique.key}"></a>' in text and f"## {technique.text('name', lang)}\n" in text
            assert technique.text("how", lang) in text and technique.source[1] in text


def test_a_page_that_is_not_current_is_found(tmp_path, monkeypatch, capsys):
    module = script()
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.main(["--check"]) == 1
    assert "write_techniques.py" in capsys.readouterr().out
    assert module.main([]) == 0 and module.main(["--check"]) == 0
    (tmp_path / "zh.md").write_text("old", encoding="utf-8")
    assert module.main(["--check"]) == 1


def test_symbols_of_formulas_are_explained():
    said = {name for symbols, _ in techniques_list.SYMBOLS for name in re.findall(r"\w+", symbols)} | {"K"}
    words = {"base", "bytes", "x", "per", "recomputed", "layer", "batch", "tiles"}
    for technique in ALL:
        used = set(re.findall(r"[A-Za-z]+", technique.formula))
        assert used <= said | words, (technique.key, used - said - words)
