"""The command as a person meets it: messages, exit codes, stdout and stderr, a reader that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fitune.cli import main as cli
from fitune.cli.commands import plan as plan_command
from fitune.errors import UserError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_no_command_prints_help(capsys):
    code, out, err = run(capsys)
    assert code == 0 and err == ""
    assert "fitune train smollm2 --data demo" in out
    assert all(f"  {name}" in out for name in cli.COMMANDS)


def test_version(capsys):
    import fitune

    assert run(capsys, "--version") == (0, f"fitune {fitune.__version__}\n", "")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_line_is_the_commands_own(name: str):
    """The list that `fitune --help` shows without importing the commands says what each says of itself."""
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None and command.name == name
    assert (command.help or "").split("\n")[0] == cli.COMMANDS[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "error: unknown command 'trian'\n  fix: did you mean train?\n"),
        (["xyz"], "error: unknown command 'xyz'\n  fix: see `fitune --help`\n"),
        (["train", "smollm2", "--btach", "8"], "error: no such option --btach\n  fix: did you mean --batch?\n"),
        (["plan", "smollm2", "--lora_r=8"], "error: no such option --lora_r\n  fix: did you mean --lora-r?\n"),
        (["train", "a", "b"], "error: got unexpected extra argument (b)\n  fix: see `fitune train --help`\n"),
        (
            ["train", "smollm2", "--data"],
            "error: option '--data' requires an argument\n  fix: see `fitune train --help`\n",
        ),
        (["chat"], "error: RUN is missing\n  fix: see `fitune chat --help`\n"),
        (
            ["train", "smollm2"],
            "error: no data named\n  why: training needs a data file\n"
            "  fix: add --data FILE (or a dataset id), or --data demo for the bundled set\n",
        ),
        (
            ["train", "--data", "demo"],
            "error: no model named\n  why: MODEL is an id, a folder, a GGUF file, a short name or a recipe file\n"
            "  fix: name one, for example smollm2\n",
        ),
        (
            ["plan", "smollm2", "--batch", "many"],
            "error: cannot use batch = 'many' in the command line\n"
            "  why: Input should be a valid integer, unable to parse string as an integer\n"
            "  fix: give another value: Records per optimizer step over all GPUs; never changed by the planner.\n",
        ),
        (
            ["plan", "smollm2", "--precision", "bf17"],
            "error: cannot use precision = 'bf17' in the command line\n"
            "  why: Input should be 'auto', 'bf16', 'fp16' or 'fp32'\n  fix: one of: auto, bf16, fp16, fp32\n",
        ),
        (
            ["export", "nowhere", "--dtype", "fp16"],
            "error: --dtype needs --merged\n  why: an adapter is written as it was trained\n  fix: add --merged\n",
        ),
        (
            ["export", "nowhere", "--merged", "--ram", "big"],
            "error: cannot use --ram big\n"
            "  why: 'big' is not a size; write GiB as a number (10) or with a unit (10GiB, 512MiB)\n"
            "  fix: for example: --ram 8GiB\n",
        ),
        (
            ["chat", "nowhere", "--json"],
            "error: --json needs --prompt\n  why: a conversation is not one JSON value\n  fix: add --prompt TEXT\n",
        ),
        (
            ["train", "--resume", "runs/none", "--steps", "5", "--lora-r", "4"],
            "error: cannot resume with other settings: steps, lora-r\n"
            "  why: a resumed run keeps its recipe, so that it ends as it would have without the stop\n"
            "  fix: leave them out, or start a new run\n",
        ),
        (["train", "no.yaml"], "error: no recipe at no.yaml\n  why: the file does not exist\n  fix: check the path\n"),
    ],
)
def test_bad_input(arguments, message, capsys, tmp_path, monkeypatch):
    """One clear message on stderr, nothing on stdout, exit code 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *arguments) == (2, "", message)
    assert not list(tmp_path.iterdir())


def test_resume_of_a_run_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "train", "--resume", "runs/none")
    assert (code, out) == (2, "")
    assert "error: no run 'runs/none'" in err


def test_exit_code_of_an_error_is_kept(capsys, monkeypatch):
    def no_plan(model, settings):
        raise UserError("it does not fit", "the card is small", "take a larger one", exit_code=3)

    monkeypatch.setattr(plan_command.api, "planned", no_plan)
    code, out, err = run(capsys, "plan", "smollm2", "--json")
    assert (code, out) == (3, "")
    assert err == "error: it does not fit\n  why: the card is small\n  fix: take a larger one\n"


def test_interrupt_is_130_without_traceback(capsys, monkeypatch):
    def interrupted(model, settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command.api, "planned", interrupted)
    assert run(capsys, "plan", "smollm2") == (130, "", "\ninterrupted\n")


def test_an_error_of_ours_is_not_hidden(monkeypatch):
    """What is no `UserError` is a bug and keeps its traceback."""

    def broken(model, settings):
        raise ZeroDivisionError

    monkeypatch.setattr(plan_command.api, "planned", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", "smollm2"])


def test_errors_are_coloured_only_on_a_terminal(fitune_command):
    assert "\x1b" not in fitune_command("trian").stderr
    assert "\x1b[31m" in on_a_terminal("trian")
    assert "\x1b" not in on_a_terminal("trian", NO_COLOR="1")


def test_reader_that_goes_away(tmp_path):
    """`fitune gpus | head -1`: no traceback, no complaint at exit."""
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fitune", "gpus"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_gpus_of_a_name(capsys):
    code, out, _ = run(capsys, "gpus", "RTX 3090", "--json")
    card = json.loads(out)
    assert code == 0
    assert card["name"].endswith("RTX 3090") and 23 * 2**30 < card["usable_bytes"] < 24 * 2**30


def test_gpus_of_an_unknown_name(capsys):
    code, out, err = run(capsys, "gpus", "rtx9999", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: no GPU and no model is called 'rtx9999'\n")


def test_gpus_lists_machine_and_catalog(capsys):
    code, out, _ = run(capsys, "gpus", "--json")
    value = json.loads(out)
    assert code == 0
    assert value["machine"]["ram_total_bytes"] > 2**28 and len(value["catalog"]) > 50
    code, out, _ = run(capsys, "gpus")
    assert code == 0 and "RAM: " in out and "GeForce RTX 3090" in out


def test_runs_of_an_empty_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "runs", "--json") == (0, "[]\n", "")
    said = "no runs in runs; `fitune train` starts one, `fitune runs FOLDER` looks elsewhere\n"
    assert run(capsys, "runs") == (0, said, "")


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What the command writes to a terminal, stdout and stderr together."""
    pty = pytest.importorskip("pty")
    pid, descriptor = pty.fork()
    if pid == 0:
        root = str(Path(cli.__file__).parents[2])
        kept = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        env = kept | {"PYTHONPATH": root, "TERM": "xterm"} | environment
        os.execve(sys.executable, [sys.executable, "-m", "fitune", *arguments], env)
    output = b""
    try:
        while chunk := os.read(descriptor, 4096):
            output += chunk
    except OSError:  # Linux ends a terminal without a writer this way
        pass
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(status), signal.Signals(os.WTERMSIG(status))
    return output.decode()
