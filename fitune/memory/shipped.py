"""What ships of the catalog's models: the values of their configurations, and the scripts of their training steps.

Planning one of them needs neither torch nor transformers. `traces.zip` holds one member per model, written by
`python scripts/build_traces.py`; tests hold it to fresh traces, byte for byte.
"""

from __future__ import annotations

import functools
import json
import zipfile
from pathlib import Path
from typing import Any

from fitune.catalog import models as catalog
from fitune.catalog.models import ModelShape
from fitune.memory import affine, codec
from fitune.memory.entry import Entry
from fitune.memory.variant import for_any_rank, variant_of
from fitune.plan import Plan

ARCHIVE = Path(__file__).with_name("traces.zip")
FORMAT = 1
ABOUT = "about.json"
_NOT_SHIPPED = ("transformers_version", "id2label", "label2id", "torch_dtype")


class CatalogConfig:
    """The configuration of a catalog model: the attributes of the transformers one that are plain values.

    What a class of transformers does (methods, properties) is not here: `full` makes the real object.

    Attributes:
        shape: the catalog's row.
        uses_interface: whether the model's class calls attention through transformers' interface.
        can_pack: whether no layer carries state across a row.
        values: attribute name to value.
    """

    def __init__(self, shape: ModelShape, values: dict[str, Any], uses_interface: bool, can_pack: bool):
        self.shape, self.values = shape, values
        self.uses_interface, self.can_pack = uses_interface, can_pack

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})  # absent while a copy is being made
        if name in values:
            return values[name]
        raise AttributeError(f"the configuration of {self.__dict__.get('shape') and self.shape.id} has no {name}")

    def full(self) -> Any:
        """The transformers configuration. Imports transformers."""
        from fitune.model import configs

        return configs.from_shape(self.shape).config


def member_of(shape: ModelShape) -> str:
    """Name of the archive's member for a shape; aliases share it."""
    return f"{shape.catalog_id}.json"


def about(archive: Path = ARCHIVE) -> dict[str, Any]:
    """Versions and date of the traces; empty when there are none."""
    return _read(archive, ABOUT) or {}


@functools.cache
def catalog_config(name: str, archive: Path = ARCHIVE) -> CatalogConfig | None:
    """The configuration of a catalog model by any of its names; None when nothing ships for it."""
    shape = catalog.find(name)
    held = None if shape is None else _member(archive, member_of(shape))
    if shape is None or held is None:
        return None
    return CatalogConfig(shape, held["config"], held["uses_interface"], held["can_pack"])


def find(config: CatalogConfig, plan: Plan, archive: Path = ARCHIVE) -> Entry | None:
    """What ships of a model's step in the variant of a plan: for adapters of any rank, or of this one only."""
    held = (_member(archive, member_of(config.shape)) or {}).get("entries", {})
    variant = variant_of(plan)
    text = held.get(for_any_rank(variant), held.get(variant))
    if text is None:
        return None
    if plan.adapter is not None:
        text = affine.at_rank(text, plan.adapter.r)
    return codec.decode(Entry, json.loads(text))


def plain_values(config: Any) -> dict[str, Any]:
    """The attributes of a transformers configuration that JSON can hold, under all of their names."""
    values = {**config.to_dict(), "model_type": config.model_type}
    values |= {alias: getattr(config, name) for alias, name in config.attribute_map.items() if hasattr(config, name)}
    values["dtype"] = str(config.dtype).removeprefix("torch.")
    kept = {k: v for k, v in values.items() if not k.startswith("_") and k not in _NOT_SHIPPED}
    made: dict[str, Any] = json.loads(json.dumps(kept))
    return made


@functools.lru_cache(maxsize=4)
def _member(archive: Path, name: str) -> dict[str, Any] | None:
    if _read(archive, ABOUT, "format") != FORMAT:
        return None
    return _read(archive, name)


def _read(archive: Path, member: str, key: str | None = None) -> Any:
    """A member of the archive, or one of its values; None where there is none."""
    try:
        with zipfile.ZipFile(archive) as held:
            values = json.loads(held.read(member))
    except (FileNotFoundError, KeyError):
        return None
    return values if key is None else values.get(key)
