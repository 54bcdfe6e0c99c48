"""What stands beside a plan's memory: download, disk, RAM, time with its interval, and the command to type."""

from __future__ import annotations

import shlex

from click.testing import CliRunner

from fitune.cli import render_needs
from fitune.cli.commands.plan import command as plan_command
from fitune.cli.commands.train import command as train_command
from fitune.cli.options import given
from fitune.recipe import Recipe, build
from fitune.units import GIB

PREDICTED = {
    "host_bytes": 7 * GIB, "pinned_bytes": 3 * GIB, "step_s": 14.8, "step_low_s": 10.3, "step_high_s": 22.5,
    "tokens_per_s": 1104.4, "step_basis": "catalog",
    "phases": {"load": {"disk": {"model files": 15 * GIB}}, "save": {"disk": {"checkpoints": GIB, "adapter": GIB // 2}},
               "merge": {"disk": {"merged model": 15 * GIB}}},
}  # fmt: skip
RESULT = {"plan": {"device": "cuda"}, "predicted": PREDICTED}


def test_download_disk_and_ram():
    assert render_needs.needs_line(RESULT, "en") == (
        "Besides: download 15.00 GiB, disk 16.50 GiB (15.00 GiB more for a merged model), "
        "RAM 7.00 GiB (3.00 GiB of it pinned)"
    )
    assert render_needs.needs_line(RESULT, "zh").startswith("此外需要：下载 15.00 GiB，磁盘 16.50 GiB")
    assert render_needs.needs_line({"plan": {"device": "cuda"}, "predicted": {}}, "en") == ""


def test_a_time_comes_with_its_interval_and_its_basis():
    assert render_needs.speed_line(PREDICTED, "en") == (
        "about 14.8 s a step (10.3 s to 22.5 s), 1,104 tokens/s; from the card's data sheet, not verified"
    )
    assert render_needs.speed_line(PREDICTED | {"step_basis": "measured"}, "en").endswith("1,104 tokens/s")
    assert "未验证" in render_needs.speed_line(PREDICTED, "zh")
    assert render_needs.speed_line({"step_s": 3.0}, "en") == "", "without an interval"


def test_the_command_asks_for_the_very_recipe():
    recipe = build(
        dict(
            model="a/b c", method="lora", lora_targets="q_proj,v_proj", vram=8.5, packing=False, data="my data.jsonl",
            rope_scaling="type=yarn,factor=4", recompute=12, gpu="rtx3080", ram=16, wsl=True,
        )
    )  # fmt: skip
    line = render_needs.next_line(recipe.as_dict(), "en").removeprefix("To train it there: ")
    program, train, *arguments = shlex.split(line)
    assert (program, train) == ("fitune", "train")
    params = train_command.make_context("train", arguments).params
    typed = build(given({k: v for k, v in params.items() if k in Recipe.model_fields}))
    assert typed == recipe.with_(gpu=None, ram=None, wsl=False)
    assert render_needs.next_line({"model": "m"}, "zh") == "在该机器上训练：fitune train m --data FILE"


def test_a_laptop_under_wsl():
    """A card of 8 GB, 16 GB of RAM of which WSL shows half, and little of that can be pinned."""
    asked = ["llama-3.1-8b", "--gpu", "rtx4060-laptop", "--ram", "16", "--wsl", "--lang", "en"]
    shown = " ".join(CliRunner().invoke(plan_command, asked, standalone_mode=False).output.split())
    assert "under WSL: 8.00 GiB of the RAM, 512 MiB of it pinnable" in shown
    assert shown.count("of it pinnable") == 1, "what Windows could pin is of no use there"
    assert "Besides: download 14.96 GiB, disk 16." in shown and "changes nothing" not in shown
    assert "laptop: clock and speed depend on its power limit" in shown
    assert "fits on GeForce RTX 4060 Laptop 8GB" in shown and "from pinned RAM" not in shown
