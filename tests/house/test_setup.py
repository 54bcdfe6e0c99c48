"""The set-up script: which torch it takes where, and that it trusts only what it finished."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.house.source import ROOT

TORCH = "torch==2.13.0"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch):
    """The script as a module, on a Linux machine without graphics card whose network does not answer."""
    spec = importlib.util.spec_from_file_location("fitune_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module, "find_gpu", lambda: "")
    monkeypatch.setattr(module, "nvidia_driver", lambda: (None, []))
    monkeypatch.setattr(module, "index_answers", lambda url: False)
    monkeypatch.setattr(module, "configured_index_has_cpu", lambda pip, requirement: False)
    return module


def item(version: str, *requires: str) -> dict:
    """One entry of pip's report."""
    return {"metadata": {"name": "torch", "version": version, "requires_dist": list(requires)}}


@pytest.mark.parametrize(
    ("entry", "system", "is_cpu"),
    [
        (item("2.13.0+cpu", "sympy>=1.13"), "Linux", True),
        (item("2.13.0+cu130", "sympy"), "Linux", False),
        (item("2.13.0+rocm7.2", "sympy"), "Linux", False),
        (item("2.13.0", "sympy", 'nvidia-cudnn-cu13==9.1; platform_system == "Linux"'), "Linux", False),
        (item("2.13.0", "cuda-bindings<14,>=13; platform_system == 'Linux'", "sympy"), "Linux", False),
        (item("2.13.0", "triton==3.9; platform_system == 'Linux'"), "Linux", False),
        (item("2.13.0", "filelock", "sympy>=1.13"), "Linux", True),
        (item("2.13.0", "filelock", "sympy>=1.13"), "Darwin", True),
        (item("2.13.0+cu130", "filelock"), "Windows", False),
    ],
)
def test_cpu_build_is_told_from_others(setup, entry: dict, system: str, is_cpu: bool):
    assert setup.is_cpu_build(entry, system) is is_cpu


@pytest.mark.parametrize(
    ("report", "answer"),
    [
        ({"install": [item("2.13.0+cpu")]}, True),
        ({"install": [item("2.13.0", "nvidia-nccl-cu13==2")]}, False),
        ({"install": []}, False),
        ("not JSON", False),
    ],
)
def test_configured_index_is_asked_without_a_download(setup, report, answer: bool, tmp_path: Path):
    """A stand-in for pip notes how it was asked and prints a report."""
    text = report if isinstance(report, str) else json.dumps(report)
    script = tmp_path / "pip.py"
    note = f"open({str(tmp_path / 'asked')!r}, 'w').write(' '.join(sys.argv[1:]))"
    script.write_text(f"import sys\n{note}\nprint({text!r})\n")
    asked = load_again().configured_index_has_cpu([sys.executable, str(script)], TORCH)
    assert asked is answer
    words = (tmp_path / "asked").read_text().split()
    assert {"--dry-run", "--no-deps", TORCH} <= set(words) and "download" not in words


def load_again():
    """The script with nothing replaced."""
    spec = importlib.util.spec_from_file_location("fitune_setup_plain", ROOT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cpu_build_from_the_configured_index(setup, monkeypatch):
    monkeypatch.setattr(setup, "configured_index_has_cpu", lambda pip, requirement: True)
    assert setup.choose_torch("", "auto", ["pip"], TORCH) == ("cpu", [])


def test_cpu_build_from_pytorchs_index(setup, monkeypatch):
    monkeypatch.setattr(setup, "index_answers", lambda url: url.endswith("/cpu"))
    build, arguments = setup.choose_torch("", "auto", ["pip"], TORCH)
    assert build == "cpu"
    assert arguments == ["--index-url", "https://download.pytorch.org/whl/cpu", "--no-deps"]


def test_no_cpu_build_to_be_had(setup):
    with pytest.raises(setup.SetupError) as caught:
        setup.choose_torch("", "auto", ["pip"], TORCH)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert str(caught.value) == (
        f"error: no CPU build of torch==2.13.0 is to be had for Python {python}\n"
        "  why: this machine shows no GPU, the configured package index answers with the CUDA build (gigabytes of "
        "libraries that would lie unused) or not at all, and https://download.pytorch.org/whl/cpu does not answer\n"
        "  fix: check the network and try again; or allow the CUDA build: TORCH=cuda make demo; "
        "or name an index that has a CPU build: TORCH_INDEX=URL make demo"
    )


@pytest.mark.parametrize(
    ("driver", "cards", "system", "arguments"),
    [
        ("580.95.05", [(9, 0)], "Linux", []),
        ("580.95.05", [(8, 6)], "Windows", ["--index-url", "https://download.pytorch.org/whl/cu130"]),
        ("550.54.14", [(8, 6)], "Linux", ["--index-url", "https://download.pytorch.org/whl/cu126"]),
        ("572.83", [(8, 9)], "Linux", ["--index-url", "https://download.pytorch.org/whl/cu126"]),
        ("595.10", [(6, 1)], "Linux", ["--index-url", "https://download.pytorch.org/whl/cu126"]),
        (None, [], "Linux", []),
    ],
)
def test_cuda_build_that_the_driver_runs(setup, monkeypatch, driver, cards, system, arguments):
    monkeypatch.setattr(setup, "nvidia_driver", lambda: (driver, cards))
    monkeypatch.setattr(setup.platform, "system", lambda: system)
    assert setup.choose_torch("nvidia", "auto", ["pip"], TORCH) == ("cuda", arguments)


@pytest.mark.parametrize(("driver", "cards"), [("470.82", [(7, 5)]), ("572.83", [(12, 0)])])
def test_driver_too_old_for_the_pinned_torch(setup, monkeypatch, driver, cards):
    monkeypatch.setattr(setup, "nvidia_driver", lambda: (driver, cards))
    with pytest.raises(setup.SetupError, match=f"error: NVIDIA driver {driver} is too old for torch==2.13.0"):
        setup.choose_torch("nvidia", "auto", ["pip"], TORCH)


def test_torch_variable_decides(setup, monkeypatch):
    monkeypatch.setattr(setup, "configured_index_has_cpu", lambda pip, requirement: True)
    assert setup.choose_torch("nvidia", "cpu", ["pip"], TORCH) == ("cpu", [])
    assert setup.choose_torch("", "cuda", ["pip"], TORCH) == ("cuda", [])
    monkeypatch.setenv("TORCH_INDEX", "https://example.org/simple")
    assert setup.choose_torch("", "auto", ["pip"], TORCH)[1] == ["--index-url", "https://example.org/simple"]


def test_amd_card(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup, "configured_index_has_cpu", lambda pip, requirement: True)
    assert setup.choose_torch("amd", "auto", ["pip"], TORCH) == ("cpu", [])
    assert "an AMD GPU is present" in capsys.readouterr().out
    monkeypatch.setattr(setup, "index_answers", lambda url: "/rocm" in url)
    build, arguments = setup.choose_torch("amd", "auto", ["pip"], TORCH)
    assert build == "rocm" and "/whl/rocm" in arguments[1]


@pytest.mark.parametrize(
    ("files", "gpu"), [(["nvidia0", "nvidiactl"], "nvidia"), (["kfd"], "amd"), (["null"], ""), (["dxg"], "")]
)
def test_card_is_found_by_its_device_file(tmp_path: Path, files: list[str], gpu: str, monkeypatch):
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    monkeypatch.setenv("PATH", "")
    assert load_again().find_gpu(str(tmp_path)) == gpu


@pytest.fixture
def installs(setup, monkeypatch, tmp_path: Path):
    """set_up with everything but the installation itself; counts installations, and can be told to fail."""
    state = SimpleNamespace(done=[], fail=False, venv=tmp_path / "venv")

    def make_venv(venv: str) -> None:
        original_make(venv)

    def fake_install(venv: str, extras: list[str], gpu: str, wanted: str) -> str:
        if state.fail:
            raise KeyboardInterrupt
        state.done.append(extras)
        return "cpu"

    def fake_run(command, **options):
        if command[1:3] == ["-m", "venv"]:
            Path(command[3]).mkdir(exist_ok=True)
            (Path(command[3]) / "pyvenv.cfg").touch()
            python = Path(load_again().venv_python(command[3]))
            python.parent.mkdir(exist_ok=True)
            python.touch()
        return SimpleNamespace(returncode=0)

    original_make = setup.make_venv
    monkeypatch.setattr(setup, "make_venv", make_venv)
    monkeypatch.setattr(setup, "install", fake_install)
    monkeypatch.setattr(setup, "subprocess", SimpleNamespace(run=fake_run, DEVNULL=subprocess.DEVNULL))
    return state


def test_second_set_up_does_nothing(setup, installs):
    setup.set_up(str(installs.venv), [])
    setup.set_up(str(installs.venv), [])
    assert installs.done == [[]]


def test_extras_are_added_and_kept(setup, installs):
    setup.set_up(str(installs.venv), [])
    setup.set_up(str(installs.venv), ["dev"])
    setup.set_up(str(installs.venv), [])
    setup.set_up(str(installs.venv), ["tensorboard"])
    assert installs.done == [[], ["dev"], ["dev", "tensorboard"]]


def test_a_card_that_appears_means_another_torch(setup, installs, monkeypatch):
    setup.set_up(str(installs.venv), [])
    monkeypatch.setattr(setup, "find_gpu", lambda: "nvidia")
    setup.set_up(str(installs.venv), [])
    assert len(installs.done) == 2


def test_interrupted_set_up_is_not_trusted(setup, installs, capsys):
    installs.fail = True
    with pytest.raises(KeyboardInterrupt):
        setup.set_up(str(installs.venv), [])
    half = installs.venv / "half-installed"
    half.touch()
    installs.fail = False
    setup.set_up(str(installs.venv), [])
    assert "an earlier set-up did not finish" in capsys.readouterr().out
    assert installs.done == [[]] and not half.exists()


def test_interrupted_update_is_done_again(setup, installs):
    """The environment was whole before; what an interrupted update left of it is not taken for finished."""
    setup.set_up(str(installs.venv), [])
    installs.fail = True
    with pytest.raises(KeyboardInterrupt):
        setup.set_up(str(installs.venv), ["dev"])
    installs.fail = False
    setup.set_up(str(installs.venv), [])
    assert len(installs.done) == 2


def test_a_folder_of_ones_own_is_left_alone(setup, installs):
    installs.venv.mkdir()
    (installs.venv / "thesis.txt").write_text("mine")
    with pytest.raises(setup.SetupError, match="the folder exists and is not a virtual environment"):
        setup.set_up(str(installs.venv), [])
    assert (installs.venv / "thesis.txt").read_text() == "mine"


def test_message_instead_of_a_traceback(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "setup.py"), "--venv", str(tmp_path / "v")],
        env=os.environ | {"TORCH": "tpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot use TORCH=tpu\n  why: it is none of auto, cpu, cuda\n  fix: TORCH=cpu make demo\n"
    )
    assert not (tmp_path / "v").exists()


def test_old_python_can_read_the_script():
    """A Python older than 3.11 must get as far as the message, so the script keeps to the syntax of 3.8."""
    import ast

    source = (ROOT / "scripts" / "setup.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))


def test_old_python_hands_over(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    assert setup.main([]) == 2
    assert "error: fitune needs Python 3.11 or newer" in capsys.readouterr().err
