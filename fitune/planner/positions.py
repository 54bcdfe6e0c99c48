"""How long records may be: the one place where a recipe's `seq_len` meets the positions a model has."""

from __future__ import annotations

from typing import Any

from fitune.errors import UserError
from fitune.recipe import Recipe


def effective_seq_len(recipe: Recipe, config: Any) -> tuple[int, str | None]:
    """(tokens of the longest record, a sentence when that is less than the default).

    A model with learned positions cannot read beyond them: where the person set no `seq_len`, the default is cut to
    the positions there are. Rotary positions have no such end (see `beyond_rotary`). Planning and training both ask
    here, so that they agree.

    Args:
        config: the model's configuration, with the recipe's rope scaling.

    Raises:
        UserError: the person asked for more than there are learned positions.
    """
    longest = num_positions(config)
    if longest is None or recipe.seq_len <= longest or getattr(config, "rope_parameters", None):
        return recipe.seq_len, None
    if "seq_len" in recipe.model_fields_set:
        raise UserError(
            f"seq_len {recipe.seq_len} is longer than this model can read",
            f"it has {longest} learned positions",
            f"use --seq-len {longest}",
        )
    return longest, f"this model has {longest} learned positions: seq_len is {longest} instead of {recipe.seq_len}"


def num_positions(config: Any) -> int | None:
    """Positions the model has learned or was trained on; None where its configuration does not say."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or None


def beyond_rotary(longest_tokens: int, config: Any) -> str | None:
    """A sentence when the longest record goes beyond the positions that a rotary model was trained on."""
    longest = num_positions(config)
    if longest is None or longest_tokens <= longest or not getattr(config, "rope_parameters", None):
        return None
    return (
        f"seq_len {longest_tokens} is beyond the {longest} positions this model was trained on; consider --rope-scaling"
    )
