"""From the values of a config.json to the transformers configuration of a text model, or a reason why not."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.catalog import models as catalog
from fitune.catalog.models import ModelShape
from fitune.errors import UserError

# Quantised checkpoints whose 16-bit values can be had back exactly.
READABLE_QUANTISATION = ("mxfp4",)
_GENERIC_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_GENERIC_OPTIONS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")
_QUANTISED_NAME = r"(?i)[-_.](gptq|awq|bnb|int[48]|fp8|[48]bit|w[48]a16|nf4|unsloth).*$"


@dataclass(frozen=True)
class TextConfig:
    """Configuration of the text model; ``full`` is that of the whole checkpoint where it has other towers too."""

    config: Any
    full: Any
    dtype: str
    notes: tuple[str, ...]


def read(path: Path) -> dict[str, Any]:
    """The values of a config.json.

    Raises:
        UserError: unreadable, not JSON, or not a model's configuration.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}", f"it is not JSON ({error})", "download or copy the file again") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type", ""), str):
        raise UserError(
            f"cannot read {path}",
            "it is not the configuration of a model",
            "point to the folder of a transformers model",
        )
    return values


def _special_float(values: dict[str, Any]) -> Any:
    """transformers 5 writes what JSON has no number for as ``{"__float__": "Infinity"}`` (Mamba-2's time steps)."""
    if values.keys() == {"__float__"} and values["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(values["__float__"])
    return values


def from_shape(shape: ModelShape) -> TextConfig:
    """The configuration of a catalog's shape."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**catalog.to_hf_config_dict(shape))
    config.dtype = shape.dtype
    return TextConfig(config, None, format_of(shape.dtype), (shape.training_note,) if shape.training_note else ())


def from_values(name: str, values: dict[str, Any], folder: Path, trust_remote_code: bool, weights: bool) -> TextConfig:
    """A native class's configuration, remote code's, or (planning only, ``weights`` False) the nearest class's.

    Raises:
        UserError: already quantised, needs remote code, unknown model type, impossible values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    notes: list[str] = []
    quantisation = values.get("quantization_config") or {}
    if quantisation.get("quant_method") == "mxfp4":
        notes.append("its experts are stored as MXFP4: they are dequantised to bf16, which holds every value exactly")
    elif quantisation and weights:
        raise quantised(name, describe_quantisation(quantisation))
    elif quantisation:
        notes.append(f"it is quantised ({describe_quantisation(quantisation)}): training needs the 16-bit original")
    if values.get("model_type") in CONFIG_MAPPING and not _brings_its_own_class(values):
        config = _native(values, folder)
        _must_be_language_model(config)
    elif trust_remote_code and values.get("auto_map"):
        config = _remote(folder)
    elif weights:
        raise needs_code(name, values)
    else:
        config, note = _nearest(name, values)
        notes.append(note)
    text = config.get_text_config()
    if text is config:
        return TextConfig(text, None, format_of(config.dtype), tuple(notes))
    text.dtype = text.dtype or config.dtype
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings))
    notes.append(f"only the text part of this multimodal model ({config.model_type}) is used")
    return TextConfig(text, config, format_of(text.dtype), tuple(notes))


def format_of(dtype: Any) -> str:
    """A torch dtype or its name as ``bf16``, ``fp16`` or ``fp32``; bf16 when nothing is said."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(dtype).removeprefix("torch."), "bf16")


def _brings_its_own_class(values: dict[str, Any]) -> bool:
    """Whether the checkpoint ships a causal LM class that transformers does not have, under a native type's name."""
    import transformers

    shipped = str((values.get("auto_map") or {}).get("AutoModelForCausalLM", "")).rpartition(".")[2]
    return bool(shipped) and not hasattr(transformers, shipped)


def _native(values: dict[str, Any], folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kept = {key: value for key, value in values.items() if key not in ("auto_map", "quantization_config")}
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(kept)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"cannot use the configuration in {folder}", _first_line(error), "correct config.json, or download it again"
        ) from error


def _must_be_language_model(config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config()
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"model type {config.model_type} cannot be trained as a language model",
            f"transformers has no causal LM class for {text.model_type}",
            "choose a text model (fitune trains decoders that predict the next token)",
        )


def _remote(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    except (ValueError, ImportError, OSError, AttributeError, TypeError, SyntaxError) as error:
        raise UserError(
            f"the code shipped with the model in {folder} does not work",
            _first_line(error),
            "it may want another version of transformers; choose a native model instead",
        ) from error


def _nearest(name: str, values: dict[str, Any]) -> tuple[Any, str]:
    """For planning only: the configuration of the class that comes nearest, and the sentence that says so."""
    from transformers import AutoConfig

    shape = catalog.find(name)
    if shape is not None:
        found = from_shape(shape)
        return found.config, shape.training_note
    if not all(isinstance(values.get(key), int) for key in _GENERIC_FIELDS):
        raise needs_code(name, values)
    fields = {k: values[k] for k in (*_GENERIC_FIELDS, *_GENERIC_OPTIONS) if values.get(k) is not None}
    note = (
        f"transformers has no class for {values.get('model_type')}: this plan takes the llama class with the same "
        "sizes; training needs the publisher's remote code (--trust-remote-code)"
    )
    return AutoConfig.for_model("llama", **fields), note


def needs_code(name: str, values: dict[str, Any]) -> UserError:
    """For a model type that transformers has no class for: remote code where the model ships some."""
    import transformers

    kind = values.get("model_type") or "none given"
    shape = catalog.find(name)
    native = f"train a native model of similar size{f': {shape.native_alternative}' if shape else ''}"
    if values.get("auto_map"):
        return UserError(
            f"{name} needs code that is shipped with the model",
            f"transformers has no class for it (model type {kind}), and running a model's code is off",
            f"{native}; or, if you trust its publisher, add --trust-remote-code",
        )
    return UserError(
        f"{name} has an unknown model type ({kind})",
        f"transformers {transformers.__version__} has no class for it",
        f"upgrade transformers (pip install -U transformers), or {native}",
    )


def describe_quantisation(values: dict[str, Any]) -> str:
    """``gptq, 4 bit`` from a ``quantization_config``."""
    bits = values.get("bits") or (4 if values.get("load_in_4bit") else 8 if values.get("load_in_8bit") else None)
    return f"{values.get('quant_method') or 'bitsandbytes'}{f', {bits} bit' if bits else ''}"


def quantised(name: str, how: str) -> UserError:
    """For a checkpoint without 16-bit weights; names the original as the quantised name suggests it."""
    short = Path(name).name
    original = re.sub(_QUANTISED_NAME, "", short)
    shape = catalog.find(original)
    hint = f" ({shape.id if shape else original})" if original != short else ""
    return UserError(
        f"{name} is already quantised ({how})",
        "fitune quantises the 16-bit weights itself, and merges adapters into them",
        f"use the original 16-bit model{hint} with --base-format nf4 or int8",
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
