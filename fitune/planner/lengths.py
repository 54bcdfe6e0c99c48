"""The lengths of a recipe's data, where they can be read without fetching anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fitune.errors import UserError
from fitune.recipe import Recipe

if TYPE_CHECKING:
    from fitune.data.records import Record

MOST_COUNTED = 5_000  # lengths that are kept, rows that are tokenised; the rest is taken to be like them


@dataclass(frozen=True)
class DataFacts:
    """What the data says. Without it a plan assumes every record to be `seq_len` long."""

    longest_tokens: int
    packing_gain: float
    most_step_tokens: int  # tokens of the largest step: a bound on what packed rows can hold together
    total_tokens: int | None = None  # of all records
    num_records: int | None = None  # that are trained on
    lengths: tuple[int, ...] = ()  # of these, or of a sample


def read(recipe: Recipe, seq_len: int) -> tuple[DataFacts | None, str | None]:
    """(facts of the recipe's data, a sentence where it names data that is not read).

    Raises:
        UserError: a data file that is not there or cannot be used.
    """
    from fitune.data.dataset import load_dataset
    from fitune.data.readers import check_there
    from fitune.model.source import resolve

    if recipe.data is None:
        return None, None
    files = [file for file in (recipe.data, recipe.eval_data) if file is not None]
    for file in files:
        check_there(file)
    assumed = f"every record is taken to be {seq_len} tokens long"
    if any(not is_here(file) for file in files):
        return None, f"{recipe.data} is not fetched for a prediction: {assumed}"
    try:
        source = resolve(
            recipe.model, hub=recipe.hub, trust_remote_code=recipe.trust_remote_code, weights=False, seed=recipe.seed
        )
        tokenizer = source.tokenizer()
    except UserError as error:
        return None, f"the data is not read ({error.what}): {assumed}"
    data = load_dataset(
        recipe.data, tokenizer, eval_data=recipe.eval_data, eval_share=recipe.eval_share, columns=recipe.columns,
        seq_len=seq_len, loss_on=recipe.loss_on, seed=recipe.seed, hub=recipe.hub,
    )  # fmt: skip
    return facts_of(data.train, data.eval, recipe.batch, seq_len), None


def facts_of(train: Sequence[Record], evaluation: Sequence[Record], batch: int, seq_len: int) -> DataFacts:
    """What the planner needs to know of records that have been read."""
    from fitune.data.batches import packing_gain

    lengths = [len(record) for record in train]
    everything = lengths + [len(record) for record in evaluation]
    return DataFacts(
        longest_tokens=max(everything),
        packing_gain=packing_gain(train, batch, seq_len),
        most_step_tokens=sum(sorted(lengths)[-batch:]),
        total_tokens=sum(everything),
        num_records=len(train),
        lengths=tuple(lengths[:: -(-len(lengths) // MOST_COUNTED) or 1]),
    )


def is_here(file: str) -> bool:
    """Whether data lies on this machine."""
    from pathlib import Path

    from fitune.data.readers import DEMO

    return file == DEMO or Path(file).expanduser().exists()
