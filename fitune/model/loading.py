"""Open a source's weights: its model on meta, its stored tensors, and which of them make which."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.model import checkpoint, configs, weights

if TYPE_CHECKING:
    from fitune.model.source import ModelSource


@dataclass(frozen=True)
class Opened:
    """What a stream of weights needs. ``tensors`` and ``groups`` are empty for random weights and shapes."""

    model: Any
    tensors: dict[str, checkpoint.Stored]
    groups: list[weights.Group]
    view: weights.TextView | None


def open_source(source: ModelSource) -> Opened:
    """Model on meta, headers read, every tensor accounted for; no weight is read.

    Raises:
        UserError: damaged files, or tensors that do not match the configuration.
    """
    model = weights.meta_model(source.config, source.trust_remote_code)
    if source.kind in ("random", "shape"):
        return Opened(model, {}, [], None)
    view = _text_view(source, model) if source.full_config is not None else None
    tensors = _stored(source, model)
    return Opened(model, tensors, weights.groups(tensors, model, view, source.name), view)


def _stored(source: ModelSource, model: Any) -> dict[str, checkpoint.Stored]:
    assert source.path is not None
    if source.path.is_file():
        from fitune.model.gguf import open_tensors

        return open_tensors(source.path, model, checkpoint.torch_dtype(source.dtype))
    return checkpoint.open_folder(source.path)


def settle(source: ModelSource) -> ModelSource:
    """The source with what only its files tell: the stored dtype, and whether a "tied" head is really tied.

    Raises:
        UserError: as `open_source`; or the weights are fp8.
    """
    assert source.path is not None
    if source.path.is_dir():
        stored = checkpoint.stored_format(checkpoint.open_folder(source.path))
        if stored == "fp8":
            raise configs.quantised(source.name, "fp8 weights")
        source = dataclasses.replace(source, dtype=stored)
    opened = source._weights
    if opened.groups and _untied_head(opened):
        config = copy.deepcopy(source.config)
        config.tie_word_embeddings = False
        note = "config.json ties the head to the embedding, but the files hold two different ones: they are kept apart"
        source = dataclasses.replace(source, config=config, notes=(*source.notes, note))
        source._weights  # noqa: B018  checked now, not in the middle of a run
    return source


def _untied_head(opened: Opened) -> bool:
    """Both names of a tied pair are stored with different values (transformers then does not tie them either)."""
    for other, first in weights.tied_names(opened.model).items():
        pair = weights.stored_names(opened.tensors, opened.model, opened.view, (other, first))
        if len(pair) == 2 and not _equal(*(opened.tensors[key] for key in pair)):
            return True
    return False


def _equal(a: checkpoint.Stored, b: checkpoint.Stored) -> bool:
    import torch

    return a.shape == b.shape and bool(torch.equal(a.read(), b.read()))


def _text_view(source: ModelSource, text_model: Any) -> weights.TextView:
    """Find the text model inside the whole one, by class: as a causal LM, else as its body and its head."""
    import torch
    import transformers

    config = source.full_config
    name = next((n for n in config.architectures or () if hasattr(transformers, n)), None)
    kind = getattr(transformers, name) if name else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        full = kind._from_config(config) if name else kind.from_config(config)
    base = text_model.base_model_prefix
    body = getattr(text_model, base)
    for path, module in full.named_modules():
        if type(module) is type(text_model):
            return weights.TextView(full, ((f"{path}." if path else "", ""),))
        if type(module) is type(body):
            head = full.get_output_embeddings()
            prefixes = [(f"{path}.", f"{base}.")]
            prefixes += [(f"{p}.", "lm_head.") for p, m in full.named_modules() if head is not None and m is head]
            return weights.TextView(full, tuple(prefixes))
    raise UserError(
        f"cannot use {source.name}", f"no text model was found inside {type(full).__name__}", "choose a text-only model"
    )
