"""Model files from Hugging Face or ModelScope: only what is needed, resumable, every failure said in one message."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from fitune.errors import EXIT_FAILED, UserError
from fitune.files import file_error
from fitune.model.cache import cache_dir, need_space

CONFIG_FILES = ("config.json",)
# Everything a tokenizer may be made of, and the weights. Not: other frameworks' weights, pickles, sub-folders.
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.jinja", "*.txt")
CODE_FILES = ("*.py",)
IGNORED_FILES = ("*/*", "consolidated*", "*.onnx*", "adapter_*", "training_args*")
MODELSCOPE = "https://modelscope.cn"
_TIMEOUT_S = 30
_CHUNK_BYTES = 1 << 20


def fetch(model_id: str, hub: str, patterns: tuple[str, ...] = MODEL_FILES) -> Path:
    """The folder with the model's files that match ``patterns``, downloaded or already there.

    Raises:
        UserError: offline and not cached, not found, gated, no access, no space.
    """
    if hub == "modelscope":
        return _from_modelscope(model_id, patterns)
    return _from_huggingface(model_id, patterns)


def cached_config(model_id: str, hub: str) -> Path | None:
    """``config.json`` of a model that was downloaded before, without any network; else None."""
    if hub == "modelscope":
        path = _modelscope_folder(model_id) / "config.json"
        return path if path.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model_id, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, (str, os.PathLike)) else None


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def _from_huggingface(model_id: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    what = f"cannot get {model_id} from Hugging Face"
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        return Path(
            snapshot_download(
                model_id, endpoint=endpoint, allow_patterns=list(patterns), ignore_patterns=list(IGNORED_FILES)
            )
        )
    except GatedRepoError:
        raise UserError(
            what,
            "the model is gated: its owner wants you to accept terms first",
            f"open https://huggingface.co/{model_id}, accept the terms, make a token at "
            "https://huggingface.co/settings/tokens and run: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            what,
            "there is no model of this name, or it is private and you are not logged in (401 or 404)",
            "check the spelling; for a private model run: hf auth login",
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        cause = error.__cause__
        raise _offline(model_id, what, _first_line(cause) if isinstance(cause, HfHubHTTPError) else "") from None
    except EntryNotFoundError as error:
        raise UserError(what, _first_line(error), "check the model's files on its page") from None
    except HfHubHTTPError as error:
        raise UserError(
            what, _first_line(error), "try again later; a download continues where it stopped", EXIT_FAILED
        ) from None
    except HFValidationError:
        raise UserError(
            what,
            "this is not a model id (owner/name) and there is no such folder or file",
            "check the spelling or the path",
        ) from None
    except OSError as error:
        if error.errno is not None and error.filename:
            raise file_error("write", Path(str(error.filename)), error) from None
        raise _offline(model_id, what, _first_line(error)) from None


def _offline(model_id: str, what: str, why: str = "") -> UserError:
    why = why or "the hub cannot be reached (no network, or offline mode) and the model is not in the cache"
    return UserError(
        what,
        why,
        "connect to the network; or give a local folder; in mainland China try --hub modelscope, or "
        "HF_ENDPOINT=https://hf-mirror.com",
        EXIT_FAILED,
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---- ModelScope (its HTTP API, v1: https://modelscope.cn/docs) ----------------------------------------------------


def _modelscope_folder(model_id: str) -> Path:
    return cache_dir() / "modelscope" / model_id.replace("/", "--")


def _from_modelscope(model_id: str, patterns: tuple[str, ...]) -> Path:
    what = f"cannot get {model_id} from ModelScope"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model_id):
        raise UserError(
            what,
            "this is not a model id (owner/name) and there is no such folder or file",
            "check the spelling or the path",
        )
    folder = _modelscope_folder(model_id)
    listing = folder / ".files.json"
    try:
        files = _modelscope_files(model_id, what)
    except urllib.error.URLError as error:
        if isinstance(error, urllib.error.HTTPError):
            raise _modelscope_refused(what, error.code) from None
        files = json.loads(listing.read_text(encoding="utf-8")) if listing.is_file() else []
        wanted = [f for f in files if _wanted(f["Path"], patterns)]
        if wanted and all((folder / f["Path"]).is_file() for f in wanted):
            return folder
        raise UserError(
            what,
            f"modelscope.cn cannot be reached ({error.reason}) and the model is not in the cache",
            "connect to the network, or give a local folder",
            EXIT_FAILED,
        ) from None
    wanted = [f for f in files if _wanted(f["Path"], patterns)]
    missing = [f for f in wanted if not (folder / f["Path"]).is_file()]
    need_space(folder, sum(int(f.get("Size", 0)) for f in missing), model_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        listing.write_text(json.dumps(files), encoding="utf-8")
        for file in missing:
            _modelscope_file(model_id, file, folder / file["Path"], what)
    except urllib.error.HTTPError as error:
        raise _modelscope_refused(what, error.code) from None
    except urllib.error.URLError as error:
        raise UserError(
            what, f"the connection broke ({error.reason})", "run it again: it continues where it stopped", EXIT_FAILED
        ) from None
    except OSError as error:
        raise file_error("write", folder, error) from None
    return folder


def _wanted(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(path, p) for p in patterns) and not any(fnmatch.fnmatch(path, p) for p in IGNORED_FILES)


def _modelscope_url(model_id: str, tail: str, **query: str) -> str:
    endpoint = (os.environ.get("MODELSCOPE_ENDPOINT") or MODELSCOPE).rstrip("/")
    return f"{endpoint}/api/v1/models/{model_id}/{tail}?{urllib.parse.urlencode({'Revision': 'master', **query})}"


def _modelscope_files(model_id: str, what: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(_modelscope_url(model_id, "repo/files", Recursive="true"), timeout=_TIMEOUT_S) as reply:
        body = reply.read()
    try:
        answer = json.loads(body)
        return [f for f in answer["Data"]["Files"] if f.get("Type") != "tree"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise UserError(
            what,
            "its answer is not a list of files (there is no such model, or the service changed)",
            "check the spelling on https://modelscope.cn/models",
        ) from None


def _modelscope_file(model_id: str, file: dict[str, Any], target: Path, what: str) -> None:
    """One file, continued where an earlier attempt stopped, checked against its size and SHA-256."""
    part = target.with_name(target.name + ".part")
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(_modelscope_url(model_id, "repo", FilePath=file["Path"]))
    if have:
        request.add_header("Range", f"bytes={have}-")
    if not have or have < int(file.get("Size", 0)):
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            with part.open("ab" if have and reply.status == 206 else "wb") as out:
                while block := reply.read(_CHUNK_BYTES):
                    out.write(block)
    with part.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if part.stat().st_size != int(file.get("Size", 0)) or digest != (file.get("Sha256") or digest):
        if part.stat().st_size >= int(file.get("Size", 0)):
            part.unlink()
        raise UserError(
            what,
            f"{file['Path']} did not arrive whole (size or SHA-256 differs)",
            "run it again: it continues where it stopped",
            EXIT_FAILED,
        )
    os.replace(part, target)


def _modelscope_refused(what: str, code: int) -> UserError:
    if code in (401, 403):
        return UserError(
            what,
            f"the model is private or gated there (HTTP {code})",
            "download it with the modelscope command after `modelscope login`, and give the folder",
        )
    if code == 404:
        return UserError(
            what, "there is no model of this name (HTTP 404)", "check the spelling on https://modelscope.cn/models"
        )
    return UserError(what, f"the service answered HTTP {code}", "try again later", EXIT_FAILED)
