"""`fitune predict`: real calls of the command line, on the job that people start with and on a small model."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

import fitune
from fitune.cli import chart
from fitune.cli.main import main
from fitune.cli.render_predict import label_text, show_prediction
from fitune.cli.words_predict import BLOCKS
from fitune.errors import UserError
from fitune.units import GIB

FULL_7B = ["predict", "meta-llama/Llama-2-7b-hf", "--method", "full", "--batch", "4", "--seq-len", "512",
           "--gpu", "rtx3080"]  # fmt: skip
SMALL = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=256, intermediate_size=704, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=8000, max_position_embeddings=2048,
)  # fmt: skip
JOB = dict(batch=4, seq_len=128, gpu="rtx3080")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(SMALL))
    return f"random:{path}"


@pytest.fixture(scope="module")
def lora(model: str) -> dict:
    return fitune.predict(model, method="lora", **JOB)


@pytest.fixture(scope="module")
def tight(model: str) -> dict:
    """A job that does not fit as it is given, and does with less."""
    return fitune.predict(model, method="full", vram=0.84, **JOB)


def printed(result: dict, width: int, lang: str = "en") -> str:
    console = Console(width=width, highlight=False, file=io.StringIO())
    show_prediction(console, result, lang)
    return console.file.getvalue()


def size_in(text: str, name: str) -> float:
    """GiB in the first size after a name at the beginning of a line."""
    found = re.search(rf"^\S? *{re.escape(name)}.*?([\d.]+) (GiB|MiB)", text, re.MULTILINE)
    assert found, f"{name} is not in:\n{text}"
    return float(found[1]) / (1 if found[2] == "GiB" else 1024)


def test_the_question_people_start_with(capsys: pytest.CaptureFixture[str]):
    """Full fine-tuning of a 7B model on 10 GB: what it needs, what each technique takes off, and what fits."""
    assert main(FULL_7B) == 3
    text = capsys.readouterr().out
    assert "meta-llama/Llama-2-7b-hf does not fit on GeForce RTX 3080 10GB" in text
    params = 6_738_415_616 / GIB
    assert size_in(text, "weights (bf16)") == pytest.approx(2 * params, rel=0.01)
    assert size_in(text, "fp32 master weights") == pytest.approx(4 * params, rel=0.01)
    assert size_in(text, "gradients") == pytest.approx(4 * params, rel=0.02)
    assert size_in(text, "Adam's two moments") == pytest.approx(8 * params, rel=0.01)
    assert 4 < size_in(text, "activations") < 16
    assert 0.1 < size_in(text, "logits") < 1
    assert 0.3 < size_in(text, "CUDA context") < 1
    assert size_in(text, "budget") == pytest.approx(9.70, abs=0.02)
    saved = {name: size_in(text, name) for name in ("QLoRA", "LoRA on an int8 base", "8-bit Adam", "LoRA r=16")}
    assert saved["QLoRA"] > saved["LoRA on an int8 base"] > saved["LoRA r=16"] > 80 > saved["8-bit Adam"] > 30
    for name in ("activation checkpointing", "accumulation", "half the length"):
        assert name in text
    assert 4 < size_in(text, "The plan that fits") < 9.70
    fitting = " ".join(text[text.index("The plan that fits") :].split())
    assert re.search(r"LoRA r=16 on a (nf4|int8|bf16) .*batch 4", fitting)
    assert "on a bf16" not in fitting or "layers streamed from RAM" in fitting, "12.6 GiB are not on this card"


def test_json_is_the_contract_and_the_python_call(model: str, lora: dict, capsys: pytest.CaptureFixture[str]):
    arguments = ["predict", model, "--method", "lora", "--batch", "4", "--seq-len", "128", "--gpu", "rtx3080"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(lora)), "fitune.predict returns what --json prints"
    assert {"fits", "plan", "predicted", "reasons", "alternatives", "nearest_fits", "breakdown", "timeline",
            "techniques", "interval", "needed_bytes", "fitting"} <= set(told)  # fmt: skip
    assert set(told["predicted"]["phases"]) == {"load", "first_step", "step", "eval", "save", "merge", "resume"}
    step = told["predicted"]["phases"]["step"]
    assert sum(step["device"].values()) == step["device_bytes"] == told["needed_bytes"]
    assert told["predicted"]["step_s"] > 0
    assert sum(row["at_peak_bytes"] for row in told["breakdown"]) == told["needed_bytes"]
    assert told["interval"]["low_bytes"] < told["needed_bytes"] < told["interval"]["high_bytes"]
    assert told["predicted"]["host_bytes"] is None or told["predicted"]["host_bytes"] > 0, "null, never a guess"


def test_nothing_is_chosen(lora: dict):
    """A recipe as it stands: the whole batch at once, nothing recomputed, nothing quantised."""
    plan = lora["plan"]
    assert (plan["micro_batch"], plan["recompute_layers"], plan["base_format"]) == (4, 0, "bf16")


def test_settings_given_are_kept(model: str):
    plan = fitune.predict(model, method="lora", micro_batch=2, recompute=3, loss_chunk=96, **JOB)["plan"]
    assert (plan["micro_batch"], plan["recompute_layers"], plan["loss_chunk"]) == (2, 3, 96)


def test_the_timeline_is_one_step_and_names_its_blocks(lora: dict):
    parts = [moment["part"] for moment in lora["timeline"]]
    assert "load" not in parts and parts[-1] == "optimizer"
    forward = [m["bytes"] for m in lora["timeline"] if m["part"] == "forward"]
    assert forward == sorted(forward), "kept activations pile up"
    labels = [block["label"] for m in lora["timeline"] for block in m["largest"]]
    assert any(label.startswith("logits ") and "x8000" in label for label in labels)
    step = lora["predicted"]["phases"]["step"]
    assert max(m["bytes"] for m in lora["timeline"]) == step["peak_allocated_bytes"]


@pytest.mark.parametrize(
    ("setting", "technique"),
    [
        (dict(micro_batch=1), "accumulation"),
        (dict(recompute="all"), "activation checkpointing"),
        (dict(method="qlora"), "QLoRA"),
        (dict(optimizer="adamw8bit"), "8-bit Adam"),
    ],
)
def test_what_a_technique_needs_is_what_its_setting_needs(model: str, lora: dict, setting: dict, technique: str):
    """Each is really predicted again: the same number as a prediction of the changed recipe."""
    (entry,) = [t for t in lora["techniques"] if t["technique"].startswith(technique)]
    again = fitune.predict(model, **(dict(method="lora", **JOB) | setting))
    assert entry["needs_bytes"] == pytest.approx(again["needed_bytes"], rel=0.005)


def test_where_it_does_not_fit_a_plan_that_does_is_named(tight: dict):
    assert tight["fits"] is False
    assert tight["needed_bytes"] > tight["plan"]["budget_bytes"]
    fitting = tight["fitting"]
    assert fitting is None or fitting["predicted"]["device_bytes"] <= tight["plan"]["budget_bytes"]
    assert fitting is not None or tight["nearest_fits"]


def test_what_a_fitting_plan_keeps_in_ram_is_said(tight: dict):
    """A plan in 16 bits that is smaller than its weights would read as a mistake."""
    assert tight["fitting"] is not None
    plan = tight["fitting"]["plan"] | dict(
        stream_from="pinned", resident_layers=1, head_place="host", offload_inputs=True, recompute_layers=3
    )
    shown = tight | {"fitting": tight["fitting"] | {"plan": plan}}
    text = " ".join(printed(shown, 120).split())
    assert "3 of 4 layers recomputed, weights of 3 of 4 layers streamed from RAM, head streamed from RAM" in text
    assert "layer inputs in RAM" in text


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_output_keeps_to_the_width(lora: dict, tight: dict, width: int, lang: str):
    for result in (lora, tight):
        for line in printed(result, width, lang).splitlines():
            assert cell_len(line) <= width, line


def test_bars_can_be_read_without_colour(lora: dict, tight: dict):
    text = printed(lora, 80)
    (bar,) = re.findall(r"^step .*?GiB|^step .*?MiB +(\S+)", text, re.MULTILINE) or [""]
    step = next(line for line in text.splitlines() if line.startswith("step "))
    assert "C" in step and "W" in step and "A" in step
    assert "the budget of 9.70 GiB is far to the right" in text
    assert all("|" in line for line in printed(tight, 80).splitlines() if line.startswith(("step ", "save ")))
    assert "W weights (bf16)" in text and "highest: " in text
    assert "\x1b" not in text


def test_chinese_headings(lora: dict):
    text = printed(lora, 80, "zh")
    assert "各阶段与预算" in text and "权重 (bf16)" in text and "Where it goes" not in text
    for english in ("note:", "LoRA r=16 on", "a step", "layer 3", "checkpointing", "8-bit", " at 24.9"):
        assert english not in text
    assert "LoRA r=16，底座 bf16" in text and "第 3 层的反向" in text and "8 位 Adam" in text


def test_svg_shows_every_phase_and_its_bytes(lora: dict, tmp_path: Path):
    path = tmp_path / "memory.svg"
    chart.write_chart(lora, path)
    root = ElementTree.parse(path).getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"load", "first step", "step", "evaluation", "save", "resume", "forward", "backward"} <= set(texts)
    boxes = [float(node.get("x")) + float(node.get("width")) for node in root.iter("{http://www.w3.org/2000/svg}rect")
             if node.get("x")]  # fmt: skip
    assert boxes and max(boxes) <= float(root.get("width"))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polygon"))) >= 4


def test_png_through_the_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "memory.png"
    arguments = ["predict", model, "--batch", "4", "--seq-len", "128", "--gpu", "rtx3080", "--chart", str(path)]
    assert main(arguments) == 0
    with image.open(path) as picture:
        assert picture.width == 2000
        colours = {colour for _, colour in picture.convert("RGB").getcolors(maxcolors=1_000_000)}
    weights = next(g.fill for g in chart.GROUPS if g.key == "weights")
    assert tuple(int(weights[i : i + 2], 16) for i in (1, 3, 5)) in colours
    capsys.readouterr()


def test_png_without_pillow_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="cannot draw a PNG") as caught:
        chart.check_path(tmp_path / "memory.png")
    assert "pip install 'fitune[charts]'" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smollm2", "--stack", "foo"], "there is no stack 'foo'"),
        (["smollm2", "--devices", "cpu", "--stack", "trl"], "cannot predict trl on the CPU"),
        (["no-such.yaml"], "no recipe at no-such.yaml"),
        (["smollm2", "--method", "full", "--base-format", "nf4"], "full fine-tuning trains every weight"),
        (["smollm2", "--recompute", "99", "--devices", "cpu"], "cannot recompute 99 layers"),
        (["smollm2", "--micro-batch", "9"], "micro_batch 9 is larger than batch 8"),
        (["smollm2", "--gpu", "rtx9999"], "rtx9999"),
        (["smollm2", "--chart", "memory.bmp"], "cannot write a chart to memory.bmp"),
        (["smollm2", "--chart", "no/such/folder/memory.svg"], "does not exist"),
        (["smollm2", "--seq-len", "0"], "seq_len"),
        (["smollm2", "--optimizer", "paged_adamw", "--devices", "cpu"], "paged_adamw cannot run here"),
        ([], "no model named"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert captured.err.count("error:") == 1 and "Traceback" not in captured.err


def test_another_tool_with_the_same_settings():
    """A verdict about the tool a person has: full logits and k-bit preparation weigh."""
    job = dict(method="qlora", batch=4, seq_len=2048, gpu="rtx3090")
    told = fitune.predict("meta-llama/Llama-3.1-8B", stack="hf-trainer", **job)
    assert told["stack"] == "hf-trainer" and told["stack_settings"]["loss"] == "full_logits"
    step = told["predicted"]["phases"]["step"]
    assert step["device_bytes"] == told["needed_bytes"] and step["device"]["logits"] > 4 * GIB
    assert told["predicted"]["phases"]["merge"]["device_bytes"] is None, "not modelled is null"
    assert sum(row["at_peak_bytes"] for row in told["breakdown"]) == told["needed_bytes"]
    assert sum(step["device"].values()) == told["needed_bytes"]
    chunked = next(t for t in told["techniques"] if "chunked loss" in t["technique"])
    assert chunked["saves_bytes"] > 3 * GIB
    text = printed(told, 80)
    assert "meta-llama/Llama-3.1-8B [hf-trainer]" in text and "loss full logits" in text
    assert size_in(text, "backward loss") == pytest.approx(step["peak_allocated_bytes"] / GIB, abs=0.01)


def test_another_tools_columns_are_of_all_its_parts():
    """Full fine-tuning peaks at the update, where the activations of an earlier part are gone."""
    job = dict(method="full", batch=4, seq_len=512, gpu="rtx3080", recompute="none")
    told = fitune.predict("meta-llama/Llama-2-7b-hf", stack="llamafactory", **job)
    rows = {row["owner"]: row for row in told["breakdown"]}
    assert rows["logits"]["most_bytes"] > rows["logits"]["at_peak_bytes"] == 0
    params = 6_738_415_616
    assert rows["optimizer"]["at_peak_bytes"] == pytest.approx(8 * params, rel=0.01), "two fp32 moments, nothing else"
    assert rows["temporary"]["at_peak_bytes"] == pytest.approx(4 * params, rel=0.01), "square roots of one of them"
    assert any("foreach" in note and "25.10 GiB" in note for note in told["notes"])
    assert told["plan"]["base_format"] == "fp32", "as that tool stores what it trains"
    assert "weights (fp32)" in printed(told, 80)


def test_another_tools_evaluation_is_a_phase_of_its_own():
    """8 rows of whole logits after a step with a fused loss: the peak is no longer the step's."""
    job = dict(method="lora", batch=1, seq_len=2048, gpu="h200", eval_every=10)
    told = fitune.predict("meta-llama/Llama-3.1-8B", stack="unsloth", **job)
    phases = told["predicted"]["phases"]
    assert phases["eval"]["device_bytes"] == told["needed_bytes"] == sum(phases["eval"]["device"].values())
    assert phases["step"]["peak_allocated_bytes"] < phases["eval"]["peak_allocated_bytes"]
    assert phases["step"]["device_bytes"] is None, "what is reserved before the peak is not computed"
    assert "assumed" in told["interval"]["source"], "no complete run of it was published"


def test_another_tool_on_a_model_outside_the_catalog(model: str, tmp_path: Path):
    """Shapes come from the configuration; layers that are not modelled are refused, never taken for a llama's."""
    told = fitune.predict(model, stack="trl", method="lora", **JOB)
    assert told["needed_bytes"] < 2 * GIB
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)))
    with pytest.raises(UserError, match="cannot predict .* with another tool") as caught:
        fitune.predict(f"random:{path}", stack="trl", method="lora", **JOB)
    assert "architecture mixtral is not modelled" in str(caught.value)


@pytest.mark.parametrize(
    ("label", "chinese"),
    [
        ("saved matrix product 16384x14336 bf16", "保存的矩阵乘积 16384x14336 bf16"),
        ("gradient of the logits 256x128256 bf16", "logits 的梯度 256x128256 bf16"),
        ("gradient of lm_head.weight 32000x4096 fp32", "lm_head.weight 的梯度 32000x4096 fp32"),
        ("sum of losses scalar fp32", "损失之和 scalar fp32"),
        ("hidden states 8x2048x4096 bf16", "隐藏状态 8x2048x4096 bf16"),
        ("dequantize 4bit 4096x4096 bf16", "dequantize 4bit 4096x4096 bf16"),  # torch's own name of an operation
    ],
)
def test_what_a_block_is_in_chinese(label: str, chinese: str):
    assert label_text(label, "zh") == chinese
    assert label_text(label, "en") == label


def test_every_word_for_a_block_is_in_the_table():
    from fitune.memory.cut import _WORDS

    assert set(_WORDS.values()) <= set(BLOCKS)
