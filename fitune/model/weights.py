"""From stored tensors to the tensors of the transformers model: names, conversions, checks, and the stream.

Renamings and conversions (per-expert weights to fused ones, prefixes that came and went) are transformers' own objects,
applied as `convert_and_load_state_dict_in_model` of transformers 5.17 to 5.24 applies them, but one group at a time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.model.checkpoint import Stored

if TYPE_CHECKING:
    import torch

# Buffers that old checkpoints stored and transformers computes today (`_adjust_missing_and_unexpected_keys`).
_COMPUTED_TODAY = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
_BELONG_TOGETHER = "check that config.json and the weight files belong to the same causal language model"


@dataclass(frozen=True)
class Group:
    """Stored tensors that become model tensors together: one and one, or per-expert weights and their fused form.

    ``targets`` are names in the model; ``sources`` are (the converter's pattern or None, stored name).
    """

    targets: tuple[str, ...]
    sources: tuple[tuple[str | None, str], ...]
    converter: Any = None


@dataclass(frozen=True)
class TextView:
    """Where the text model sits inside a multimodal one: pairs of a prefix there and the same prefix here."""

    full_model: Any
    prefixes: tuple[tuple[str, str], ...]

    def here(self, full_name: str) -> str | None:
        """The text model's name of a tensor; None for the other towers' tensors."""
        return next((text + full_name[len(full) :] for full, text in self.prefixes if full_name.startswith(full)), None)

    def there(self, text_name: str) -> str:
        return next(full + text_name[len(text) :] for full, text in self.prefixes if text_name.startswith(text))


def meta_model(config: Any, trust_remote_code: bool = False) -> Any:
    """The causal LM of ``config`` on the meta device: names and shapes, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def tensor_names(model: Any) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter (tied ones once) and persistent buffer, in the order of the model."""
    tied = tied_names(model)
    return {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items() if name not in tied}


def tied_names(model: Any) -> dict[str, str]:
    """Names of parameters that are another one: ``lm_head.weight`` to ``model.embed_tokens.weight``."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def groups(checkpoint: dict[str, Stored], model: Any, view: TextView | None, name: str) -> list[Group]:
    """Which stored tensors make which tensors of ``model``, in the order of the model.

    Raises:
        UserError: a tensor is missing, unexpected, or has another shape.
    """
    tied = tied_names(model)
    collected, unexpected = _assign(checkpoint, view.full_model if view else model)
    if view is not None:  # the other towers' tensors are not ours to judge
        unexpected = [key for key in unexpected if view.here(key) is not None]
    found: dict[str, Group] = {}
    for full_targets, (sources, converter) in collected.items():
        here = [view.here(target) if view else target for target in full_targets]
        targets = tuple(tied.get(target, target) for target in here if target is not None)
        if targets:
            found.setdefault(targets[0], Group(targets, tuple(sources), converter))
    wanted = tensor_names(model)
    _check(checkpoint, model, wanted, list(found.values()), unexpected, name)
    place = {target: i for i, target in enumerate(wanted)}
    return sorted(found.values(), key=lambda group: min(place.get(target, len(place)) for target in group.targets))


def stored_names(checkpoint: dict[str, Stored], model: Any, view: TextView | None, names: Collection[str]) -> list[str]:
    """Stored names of the model tensors ``names`` that need no conversion; tied ones are told apart here."""
    found = []
    for targets, (sources, converter) in _assign(checkpoint, view.full_model if view else model)[0].items():
        target = view.here(targets[0]) if view else targets[0]
        if converter is None and target in names:
            found.append(sources[0][1])
    return found


def _assign(checkpoint: dict[str, Stored], model: Any) -> tuple[dict[tuple[str, ...], tuple[list, Any]], list[str]]:
    """Targets to (sources, converter), and the (renamed) stored names that no tensor of the model takes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    collected: dict[tuple[str, ...], tuple[list, Any]] = {}
    unexpected = []
    for key in sorted(checkpoint, key=dot_natural_key):  # experts in the order of their numbers
        renamed, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if renamed not in known and key in known:
            renamed, pattern = key, None
        if renamed not in known:
            unexpected.append(renamed)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        targets: tuple[str, ...] = (renamed,)
        if converter is not None:
            first = converter.target_patterns[0]
            targets = tuple(renamed.replace(first, target) for target in converter.target_patterns)
        collected.setdefault(targets, ([], converter))[0].append((pattern, key))
    return collected, unexpected


def _check(
    checkpoint: dict[str, Stored],
    model: Any,
    wanted: dict[str, tuple[int, ...]],
    found: list[Group],
    unexpected: list[str],
    name: str,
) -> None:
    def matches(patterns: Collection[str] | None, key: str) -> bool:
        return any(re.search(pattern, key) for pattern in patterns or ())

    ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED_TODAY)
    unexpected = [key for key in unexpected if not matches(ignored, key)]
    have = {target for group in found for target in group.targets}
    missing = [k for k in wanted if k not in have and not matches(model._keys_to_ignore_on_load_missing, k)]
    shapes = [(g.targets[0], checkpoint[g.sources[0][1]].shape) for g in found if g.converter is None]
    wrong = [f"{k} is {list(shape)}, expected {list(wanted[k])}" for k, shape in shapes if shape != wanted[k]]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", wrong))
    problems = [
        f"{len(keys)} {kind}: {', '.join(keys[:4])}{', …' if len(keys) > 4 else ''}" for kind, keys in kinds if keys
    ]
    if problems:
        raise UserError(
            f"the weights of {name} do not match its config.json ({type(model).__name__})",
            "tensors " + "; ".join(problems),
            _BELONG_TOGETHER,
        )


def stream(
    checkpoint: dict[str, Stored],
    plan: list[Group],
    model: Any,
    view: TextView | None,
    device: Any,
    names_wanted: Collection[str] | None,
    name: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``plan`` in the stored dtype on ``device``; one group is in memory at a time.

    Raises:
        UserError: damaged files, or a converted tensor of another shape than the model's.
    """
    shapes = tensor_names(model)
    for group in plan:
        if names_wanted is not None and not set(group.targets).intersection(names_wanted):
            continue
        if group.converter is None:
            made = {group.targets[0]: checkpoint[group.sources[0][1]].read()}
        else:
            made = _convert(checkpoint, group, view.full_model if view else model, view, name)
        for target in list(made):
            tensor = made.pop(target)
            if tuple(tensor.shape) != shapes[target]:
                raise UserError(
                    f"the weights of {name} do not match its config.json ({type(model).__name__})",
                    f"{target} is {list(tensor.shape)} after conversion, expected {list(shapes[target])}",
                    _BELONG_TOGETHER,
                )
            if names_wanted is None or target in names_wanted:
                yield target, tensor.to(device)


def _convert(checkpoint: dict[str, Stored], group: Group, model: Any, view: TextView | None, name: str) -> dict:
    """transformers' own converter, run on the group's tensors."""
    converter = deepcopy(group.converter)
    first = view.there(group.targets[0]) if view else group.targets[0]
    for pattern, key in group.sources:
        converter.add_tensor(first, key, pattern, checkpoint[key].read)
    try:
        made = converter.convert(first, model=model, config=model.config)
    except (RuntimeError, ValueError, KeyError) as error:
        why = f"{group.targets[0]} from {len(group.sources)} stored tensors: {error}"
        raise UserError(f"cannot convert the weights of {name}", why, _BELONG_TOGETHER) from error
    tensors = {view.here(full) if view else full: t[0] if isinstance(t, list) else t for full, t in made.items()}
    return {target: tensor for target, tensor in tensors.items() if target is not None}
