"""From a model name to a `ModelSource`: configuration, tokenizer, and a stream of weights."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.catalog import models as catalog
from fitune.errors import UserError
from fitune.model import bundled, configs
from fitune.model import hub as hubs

if TYPE_CHECKING:
    import torch

RANDOM = "random:"
# No model is larger; a configuration that says so would be built layer by layer until the memory is full.
LARGEST = {"num_hidden_layers": 2_000, "hidden_size": 1 << 20, "intermediate_size": 1 << 22, "vocab_size": 1 << 26,
           "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelSource:
    """A model by name, ready to be planned or read.

    Args:
        name: as the person gave it.
        kind: ``folder``, ``huggingface``, ``modelscope``, ``bundled``, ``gguf``, ``random``, or ``shape``
            (configuration only: planning).
        path: folder of the safetensors files, or a GGUF file that is read in place; None for shapes.
        config: transformers configuration of the text model.
        dtype: format in which weights are handed out: ``bf16``, ``fp16``, ``fp32``.
        notes: what the person should know about the model, one sentence each.
        tokenizer_path: folder with the tokenizer's files, None when there is none.
        full_config: configuration of the whole checkpoint when it is multimodal, else None.
        seed: seed of random weights.
    """

    name: str
    kind: str
    path: Path | None
    config: Any
    dtype: str
    notes: tuple[str, ...] = ()
    tokenizer_path: Path | None = None
    full_config: Any = field(default=None, repr=False)
    trust_remote_code: bool = False
    seed: int = 0

    @property
    def reference(self) -> str:
        """The base model's name in an adapter's files: its hub id where it has one, else the folder or file."""
        place = Path(self.name).expanduser()
        if place.exists():
            return str(place.resolve())
        shape = catalog.find(self.name)
        return shape.id if shape is not None else self.name

    def tokenizer(self) -> Any:
        """The model's tokenizer. Random weights without one of their own get the bundled model's, or bytes.

        Raises:
            UserError: there is none (a shape without files), or it cannot be read.
        """
        from fitune.model import tokenizers

        return tokenizers.load(self)

    def weight_names(self) -> list[str]:
        """Names of all tensors `iter_weights` gives: parameters (tied ones once) and persistent buffers, in order."""
        from fitune.model.weights import tensor_names

        return list(tensor_names(self._weights.model))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape, in the order of `weight_names`."""
        from fitune.model.weights import tensor_names

        return tensor_names(self._weights.model)

    def iter_weights(
        self, names_wanted: Collection[str] | None = None, device: Any = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the order of the model, so that a decoder layer's tensors come together.

        Names are those of ``AutoModelForCausalLM.from_config(config)``; of tied tensors only the first name comes. One
        tensor is in memory at a time (fused expert weights: one layer's). The dtype is the stored one.

        Raises:
            UserError: no weights (a shape), damaged files, or tensors that do not match the configuration.
        """
        from fitune.model import checkpoint, random_weights, weights

        wanted = None if names_wanted is None else set(names_wanted)
        if self.kind == "shape":
            raise UserError(f"{self.name} has no weights here", "only its shape is known", f"use {RANDOM}{self.name}")
        state = self._weights
        if self.kind == "random":
            return random_weights.stream(state.model, self.seed, checkpoint.torch_dtype(self.dtype), device, wanted)
        return weights.stream(state.tensors, state.groups, state.model, state.view, device, wanted, self.name)

    def meta_model(self) -> Any:
        """A fresh causal LM of this configuration on the meta device."""
        from fitune.model.weights import meta_model

        return meta_model(self.config, self.trust_remote_code)

    @functools.cached_property
    def _weights(self) -> Any:
        from fitune.model import loading

        return loading.open_source(self)


def resolve(
    name: str, *, hub: str = "huggingface", trust_remote_code: bool = False, weights: bool = True, seed: int = 0
) -> ModelSource:
    """The model a person names: a folder, a GGUF file, ``smollm2``, a hub id, a short name, or ``random:MODEL``.

    With ``weights=False`` (planning) no weights are fetched and a shape is enough: catalog, local or cached
    ``config.json``, and as a last resort that one file from the hub.

    Raises:
        UserError: unknown, unreachable, unreadable, quantised, or in need of remote code.
    """
    name = name.strip()
    if not name:
        raise UserError("no model given", "the name is empty", "name a model, for example smollm2")
    if name.startswith(RANDOM):
        return _random(name, hub, trust_remote_code, seed)
    source = _local(name, trust_remote_code, weights)
    if source is None and name.lower() == bundled.NAME:
        source = _bundled(name, weights)
    if source is None:
        source = _from_hub(name, hub, trust_remote_code) if weights else _shape(name, hub, trust_remote_code)
    return _settled(source) if weights else source


# ---- places ----------------------------------------------------------------------------------------------------------


def _local(name: str, trust_remote_code: bool, weights: bool) -> ModelSource | None:
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, "folder", path, trust_remote_code, weights)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"no GGUF file at {path}", "the file does not exist", "check the path")
        return _gguf(name, "gguf", path)
    if path.is_file() and path.suffix == ".json":
        if weights:
            raise UserError(
                f"{path} has no weights",
                "a config.json is only a shape",
                f"give the model's folder, or {RANDOM}{name} for random weights",
            )
        return _from_config(name, "shape", path, trust_remote_code, weights)
    if path.is_file():
        raise UserError(
            f"{path} is not a model",
            "a model is a folder, a .gguf file or a hub id",
            "give the folder that has config.json and the *.safetensors files",
        )
    if re.match(r"(\.{1,2}|~)?[/\\]|[A-Za-z]:[/\\]", name) or name in (".", ".."):
        raise UserError(f"no model folder at {path}", "it does not exist", "check the path")
    return None


def _folder(name: str, kind: str, path: Path, trust_remote_code: bool, weights: bool) -> ModelSource:
    config = path / "config.json"
    if not config.is_file():
        adapter = (path / "adapter_config.json").is_file()
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        raise UserError(
            f"{path} is not a model folder",
            "it is an adapter, not a model" if adapter else "it has no config.json",
            f"name the GGUF file: {path / ggufs[0]}"
            if ggufs
            else "name the adapter's base model"
            if adapter
            else "give the folder that has config.json and the *.safetensors files",
        )
    return _from_config(name, kind, config, trust_remote_code, weights)


def _from_config(name: str, kind: str, config: Path, trust_remote_code: bool, weights: bool) -> ModelSource:
    folder = config.parent
    values = configs.read(config)
    _check_sizes(config, values)
    found = configs.from_values(name, values, folder, trust_remote_code, weights)
    tokenizer = folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None
    kind, place = (kind, folder) if weights else ("shape", None)
    return ModelSource(
        name, kind, place, found.config, found.dtype, found.notes, tokenizer, found.full, trust_remote_code
    )


def _check_sizes(config: Path, values: dict[str, Any]) -> None:
    """Raises UserError for a size that no model has: no number, none at all, or beyond `LARGEST`."""
    text = values.get("text_config")
    for part in (values, text if isinstance(text, dict) else {}):
        for field_name, largest in LARGEST.items():
            size = part.get(field_name)
            if isinstance(size, list):  # one per layer: transformers checks it
                continue
            if size is not None and (type(size) is not int or not 1 <= size <= largest):
                raise UserError(
                    f"cannot use {config}", f"its {field_name} is {str(size)[:40]}", "download or copy the file again"
                )


def _gguf(name: str, kind: str, path: Path) -> ModelSource:
    from transformers import AutoConfig

    from fitune.model.gguf import open_gguf

    file = open_gguf(path)
    config = AutoConfig.from_pretrained(str(file.folder))
    place = file.folder if file.converted else path
    return ModelSource(name, kind, place, config, file.format, (file.note,), file.folder)


def _bundled(name: str, weights: bool) -> ModelSource:
    if weights:
        return _gguf(name, "bundled", bundled.fetch_gguf())
    return dataclasses.replace(_catalog_shape(name), dtype="fp32")  # planning must not wait for the conversion


def _catalog_shape(name: str) -> ModelSource:
    shape = catalog.find(name)
    assert shape is not None, name
    found = configs.from_shape(shape)
    return ModelSource(name, "shape", None, found.config, found.dtype, found.notes)


def _from_hub(name: str, hub: str, trust_remote_code: bool) -> ModelSource:
    shape = catalog.find(name)
    model_id = name if name.count("/") == 1 else shape.id if shape is not None else None
    if model_id is None:
        raise _unknown(name)
    if shape is not None and not shape.native and not trust_remote_code:
        raise configs.needs_code(model_id, {"model_type": shape.model_type, "auto_map": True})
    patterns: tuple[str, ...] = (*hubs.MODEL_FILES, *hubs.CODE_FILES)
    if not trust_remote_code:
        patterns = hubs.MODEL_FILES
        # First its configuration alone: what cannot be trained is refused before gigabytes of weights are fetched.
        _folder(name, hub, hubs.fetch(model_id, hub, hubs.CONFIG_FILES), trust_remote_code, True)
    return _folder(name, hub, hubs.fetch(model_id, hub, patterns), trust_remote_code, True)


def _shape(name: str, hub: str, trust_remote_code: bool) -> ModelSource:
    if catalog.find(name) is not None:
        return _catalog_shape(name)
    if name.count("/") != 1:
        raise _unknown(name)
    config = hubs.cached_config(name, hub)
    if config is None:
        try:
            config = hubs.fetch(name, hub, hubs.CONFIG_FILES) / "config.json"
        except UserError as error:
            near = catalog.hint(name, "the nearest models that need no network")
            raise UserError(
                error.what, f"{error.why}; it is not in the catalog either", f"{error.fix}; {near}", error.exit_code
            ) from None
    if not config.is_file():
        raise UserError(f"{name} has no config.json", "it is not a transformers model", "check the model's page")
    # Its code is not here (only config.json is), so planning takes the nearest class even where code is allowed.
    return _from_config(name, "shape", config, trust_remote_code=False, weights=False)


def _unknown(name: str) -> UserError:
    return UserError(
        f"unknown model {name!r}",
        "there is no such folder or file, and the catalog has no such name",
        f"give a folder, a GGUF file or a hub id (owner/name); {catalog.hint(name)}",
    )


def _random(name: str, hub: str, trust_remote_code: bool, seed: int) -> ModelSource:
    inner = name[len(RANDOM) :].strip()
    if not inner:
        raise UserError(f"cannot use {name}", "no model is named after random:", "for example random:llama-3.1-8b")
    source = _local(inner, trust_remote_code, False) or _shape(inner, hub, trust_remote_code)
    return dataclasses.replace(
        source,
        name=name,
        kind="random",
        path=None,
        notes=(*source.notes, random_note(seed)),
        full_config=None,
        seed=seed,
    )


def random_note(seed: int) -> str:
    """What to say of a model with random weights."""
    return f"random weights with seed {seed}: for measuring and testing, not for use"


def _settled(source: ModelSource) -> ModelSource:
    from fitune.model import loading

    return loading.settle(source)
