"""Datasets of a hub to rows: Hugging Face through `datasets`, ModelScope through `modelscope`."""

from __future__ import annotations

import re
from typing import Any

from fitune.data.readers import Table
from fitune.errors import UserError

HUBS = ("huggingface", "modelscope")
_ID = re.compile(r"(?P<name>[^:@]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?")


def read_hub(dataset_id: str, *, hub: str, split: str | None, limit: int | None = None) -> Table:
    """Rows of a hub's dataset.

    Args:
        dataset_id: ``owner/name``, ``owner/name:config``, ``owner/name@split`` or both.
        hub: ``huggingface`` or ``modelscope``.
        split: wins over the id's; ``train`` when neither says.
        limit: fetch no more rows than this from what was downloaded.

    Raises:
        UserError: unknown hub or id, missing configuration or split, or the hub cannot be reached.
    """
    parts = _ID.fullmatch(dataset_id)
    assert parts is not None, "the caller recognised the id"
    name, config, split = parts["name"], parts["config"], split or parts["split"] or "train"
    if hub == "huggingface":
        rows = _from_hugging_face(name, config, split, limit)
    elif hub == "modelscope":
        rows = _from_modelscope(name, config, split, limit)
    else:
        raise UserError(f"there is no hub called {hub!r}", "", f"use one of {', '.join(HUBS)}")
    if not rows:
        raise UserError(f"cannot train on {dataset_id}", f"its split {split!r} is empty", "choose another split")
    return Table(rows, "hub", [f"split {split!r} of {name} on {hub}"], dataset_id)


def _from_hugging_face(name: str, config: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    try:
        import datasets
        from datasets.exceptions import DatasetNotFoundError, DatasetsError
    except ImportError:
        why = "the datasets package is not installed"
        raise UserError(f"cannot load {name}", why, "pip install datasets") from None
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except DatasetNotFoundError as error:
        raise UserError(
            f"cannot find the dataset {name}",
            f"neither a file nor a dataset you may read on the Hugging Face hub ({_first_line(error)})",
            "check the spelling; for a gated dataset accept its terms on its page and log in with: hf auth login",
        ) from None
    except ValueError as error:
        raise _wrong_part(name, config, split, str(error)) from None
    except (OSError, DatasetsError) as error:  # connection errors of requests, httpx and the hub are OSErrors here
        raise _unreachable(name, error) from None
    if limit is not None:
        loaded = loaded.select(range(min(limit, len(loaded))))
    return loaded.to_list()


def _wrong_part(name: str, config: str | None, split: str, message: str) -> UserError:
    """A ValueError of `datasets.load_dataset`: a configuration or a split that is missing or unknown."""
    first = " ".join(message.split())
    if "split" in message.lower():
        return UserError(f"cannot load {name}", f"it has no split {split!r}: {first}", f"name one: {name}@SPLIT")
    if "config" in message.lower():
        return UserError(f"cannot load {name}", first, f"name the configuration: {name}:CONFIG")
    return UserError(f"cannot load {name}", first, "download the file and give its path")


def _unreachable(name: str, error: Exception) -> UserError:
    return UserError(
        f"cannot load the dataset {name}",
        f"there is no such file here, and the hub did not answer ({type(error).__name__}: {_first_line(error)})",
        "check the path or the network; where huggingface.co is blocked set HF_ENDPOINT to a mirror, "
        "or use --hub modelscope",
    )


def _from_modelscope(name: str, config: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError:
        raise UserError(
            f"cannot load {name} from ModelScope", "the modelscope package is not installed", "pip install modelscope"
        ) from None
    try:
        loaded = MsDataset.load(name, subset_name=config or "default", split=split)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot load {name} from ModelScope",
            f"{type(error).__name__}: {_first_line(error)}",
            "check the id, the split and the network",
        ) from None
    rows = [dict(row) for row in loaded]
    return rows if limit is None else rows[:limit]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
