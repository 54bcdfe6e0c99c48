"""How long a job is: records, tokens and optimizer steps, from the person's data or from a number of tokens.

Where the model's tokenizer lies on this machine its tokens are counted; otherwise they are estimated from characters.
Nothing is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.plan import Plan
from fitune.planner import lengths as data_lengths
from fitune.planner.lengths import DataFacts
from fitune.recipe import Recipe

if TYPE_CHECKING:
    from fitune.speed import Workload

UNIT_TOKENS = 1_000_000  # the job where neither data nor tokens are named: cost and time per million tokens
# Tokens of a text whose tokenizer is not here. SmolLM2's tokenizer on the bundled demo set (2026-11-30, 17,920 tokens
# of English): 3.8 characters a token, 4.3 tokens for the marks of a message. Vocabularies two to three times as large
# make somewhat fewer tokens; of Chinese those with Chinese entries make 0.5 to 0.8 a character (not measured here;
# SmolLM2, which has none, 1.9). ESTIMATE_ERROR is meant to cover both.
LATIN_CHARS_PER_TOKEN = 3.9
TOKENS_PER_OTHER_CHAR = 0.75
MESSAGE_TOKENS = 5  # role, begin and end of a message in common chat templates
ESTIMATE_ERROR = (0.75, 1.35)
EVALS_PER_RUN = 4  # of `eval_every`'s default


@dataclass(frozen=True)
class Job:
    """One run over the data.

    Attributes:
        num_records: records that are trained on; None where only a number of tokens is known.
        tokens: of one pass over them, without padding.
        epochs, steps: passes, and optimizer steps of the whole run.
        lengths: of the records, or of a sample of them.
        target_share: share of the tokens under loss.
        eval_tokens: of the records held out.
        basis: counted | sampled | estimated | given | unit.
        error: (low, high) factors on the number of tokens.
        facts: what planning needs to know of the data; None: every record is taken to be `seq_len` long.
    """

    num_records: int | None
    tokens: float
    epochs: float
    steps: int
    batch: int
    lengths: tuple[int, ...] = ()
    target_share: float = 1.0
    eval_tokens: float = 0.0
    basis: str = "given"
    error: tuple[float, float] = (1.0, 1.0)
    facts: DataFacts | None = None
    notes: tuple[str, ...] = field(default=())
    _padded: dict[int, float] = field(default_factory=dict, compare=False, repr=False)  # by micro-batch

    @property
    def num_evals(self) -> int:
        return EVALS_PER_RUN if self.eval_tokens else 0

    @property
    def mean_tokens(self) -> float | None:
        """Of a record."""
        return self.tokens / self.num_records if self.num_records else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_records": self.num_records, "tokens": round(self.tokens), "epochs": self.epochs, "steps": self.steps,
            "batch": self.batch, "mean_tokens": self.mean_tokens, "target_share": self.target_share,
            "eval_tokens": round(self.eval_tokens), "basis": self.basis, "error": list(self.error),
        }  # fmt: skip

    def workload(self, plan: Plan) -> tuple[Plan, Workload]:
        """The plan as its mean step is, and what its rows hold, padding included (see `fitune.speed.predict`).

        Without packing records of like length share a step, as in training. Packed rows are full but for what whole
        records leave.
        """
        from fitune.speed import Workload

        mean = self.mean_tokens
        if mean is None or not self.lengths:
            return plan, Workload(plan.seq_len)
        if not plan.packing:
            if plan.micro_batch not in self._padded:
                some = self.lengths[:: -(-len(self.lengths) // data_lengths.MOST_COUNTED)]
                self._padded[plan.micro_batch] = mean * padding(some, plan.micro_batch, self.batch)
            return plan, Workload(self._padded[plan.micro_batch], self.target_share)
        per_step = plan.batch * mean
        rows = max(1, round(per_step / (PACKED_SHARE * plan.seq_len)))
        packed = plan.with_(batch=rows, micro_batch=min(plan.micro_batch, rows))
        return packed, Workload(min(per_step / rows, plan.seq_len), self.target_share, doc_tokens=mean)


PACKED_SHARE = 0.95  # of a packed row that records fill; whole records do not fill it to the end


def padding(lengths: Sequence[int], micro_batch: int, batch: int) -> float:
    """Tokens with padding over tokens without, in one epoch of the order that training takes.

    Args:
        lengths: of all records or of a sample.
        micro_batch: rows that are padded to the same width.
        batch: records of a whole step.
    """
    from fitune.data.batches import plan_epoch

    records: Any = [_Length(i, n) for i, n in enumerate(lengths)]
    padded = 0
    for step in plan_epoch(records, batch, 0, 0, group_by_length=True):
        ordered = sorted((lengths[i] for i in step), reverse=True)
        for at in range(0, len(ordered), micro_batch):
            some = ordered[at : at + micro_batch]
            padded += some[0] * len(some)
    return padded / sum(lengths)


class _Length:
    """What batching asks of a record, without its tokens."""

    def __init__(self, index: int, num_tokens: int):
        self.index = index
        self.input_ids = self.labels = range(num_tokens)


def of(recipe: Recipe, seq_len: int, tokens: float | None = None) -> Job:
    """The job of a recipe.

    Args:
        seq_len: as the model allows it (see `positions.effective_seq_len`).
        tokens: of one pass, where the person knows it; goes before the data.

    Raises:
        UserError: no such file, or one that cannot be used.
    """
    if tokens is not None or recipe.data is None:
        return _from_tokens(recipe, seq_len, tokens)
    from fitune.data.readers import check_there, read

    check_there(recipe.data)
    if not data_lengths.is_here(recipe.data):
        raise UserError(f"cannot measure {recipe.data}", "it is not a file of this machine; nothing is fetched here",
                        "give a file, or say how many tokens it has with --tokens")  # fmt: skip
    tokenizer = tokenizer_here(recipe)
    if tokenizer is not None:
        return _counted(recipe, seq_len, tokenizer, len(read(recipe.data).rows))
    return _estimated(recipe, seq_len)


def _from_tokens(recipe: Recipe, seq_len: int, tokens: float | None) -> Job:
    total = float(UNIT_TOKENS if tokens is None else tokens)
    epochs = recipe.epochs or 1.0
    steps = recipe.steps or max(1, math.ceil(total * epochs / (recipe.batch * seq_len)))
    return Job(None, total, epochs, steps, recipe.batch, basis="unit" if tokens is None else "given")


def tokenizer_here(recipe: Recipe) -> Any:
    """The model's own tokenizer where it lies on this machine; None otherwise. Nothing is fetched."""
    from pathlib import Path

    from fitune.model import bundled, hub
    from fitune.model.source import RANDOM, resolve

    name = recipe.model.strip()
    is_here = Path(name).expanduser().exists() or (name.lower() == bundled.NAME and bundled.find_gguf())
    if name.startswith(RANDOM) or not (is_here or hub.cached_config(name, recipe.hub)):
        return None
    try:
        source = resolve(name, hub=recipe.hub, trust_remote_code=recipe.trust_remote_code, weights=False)
        return source.tokenizer()
    except UserError:  # a configuration without tokenizer files: as good as none
        return None


def _counted(recipe: Recipe, seq_len: int, tokenizer: Any, num_rows: int) -> Job:
    """With the model's tokenizer, by the code that training reads data with."""
    from fitune.data.dataset import load_dataset

    assert recipe.data is not None
    limit = data_lengths.MOST_COUNTED if num_rows > data_lengths.MOST_COUNTED else None
    data = load_dataset(
        recipe.data, tokenizer, eval_data=recipe.eval_data, eval_share=recipe.eval_share, columns=recipe.columns,
        seq_len=seq_len, loss_on=recipe.loss_on, seed=recipe.seed, hub=recipe.hub, limit=limit,
    )  # fmt: skip
    lengths = tuple(len(record) for record in data.train)
    targets = sum(record.num_targets for record in data.train)
    times = num_rows / limit if limit else 1.0
    return _job(
        recipe, lengths, times, targets / sum(lengths), sum(len(record) for record in data.eval) * times,
        "sampled" if limit else "counted", (0.9, 1.1) if limit else (1.0, 1.0),
        data_lengths.facts_of(data.train, data.eval, recipe.batch, seq_len), data.notes,
    )  # fmt: skip


def _estimated(recipe: Recipe, seq_len: int) -> Job:
    """From characters, where the tokenizer is not here."""
    from fitune.data import dataset
    from fitune.data.conversations import to_conversations
    from fitune.data.layouts import recognise
    from fitune.data.readers import read

    assert recipe.data is not None
    table = read(recipe.data)
    read_as = to_conversations(table, recognise(table, recipe.columns))[0]
    sizes = [size for conversation in read_as for size in _estimate(conversation, seq_len)]
    if not sizes:
        raise UserError(f"none of the records of {recipe.data} can be trained on", "", "correct the file")
    held_out = 0
    if recipe.eval_data is None and len(sizes) >= dataset.MIN_RECORDS_TO_SPLIT:
        share = dataset.EVAL_SHARE if recipe.eval_share is None else recipe.eval_share
        held_out = round(len(sizes) * share)
        if recipe.eval_share is None:
            held_out = min(dataset.MAX_EVAL_RECORDS, held_out)
    trained = sizes[: len(sizes) - held_out]
    lengths = tuple(tokens for tokens, _ in trained)
    targets = sum(t for _, t in trained) if recipe.loss_on == "responses" else sum(lengths)
    return _job(recipe, lengths, 1.0, targets / sum(lengths), sum(t for t, _ in sizes[len(trained) :]), "estimated",
                ESTIMATE_ERROR, _facts_of_lengths([t for t, _ in sizes], recipe.batch, seq_len), ())  # fmt: skip


def _estimate(conversation: Any, seq_len: int) -> list[tuple[int, int]]:
    """(tokens, tokens under loss) of the records that a conversation or a text makes; a long text makes several."""
    if conversation.text is not None:
        whole, rest = divmod(estimate_tokens(conversation.text), seq_len)
        return [(seq_len, seq_len)] * whole + ([(rest, rest)] if rest else [])
    total = targets = 0
    for message in conversation.messages:
        tokens = estimate_tokens(str(message.get("content") or "")) + MESSAGE_TOKENS
        total += tokens
        targets += tokens if message.get("role") == "assistant" else 0
    return [(max(1, min(seq_len, total)), max(1, min(seq_len, targets)))]


def estimate_tokens(text: str) -> int:
    """Tokens of a text, from its characters: Latin script by the group, other scripts one by one."""
    latin = sum(map(str.isascii, text))
    return max(1, round(latin / LATIN_CHARS_PER_TOKEN + (len(text) - latin) * TOKENS_PER_OTHER_CHAR))


def _facts_of_lengths(lengths: Sequence[int], batch: int, seq_len: int) -> DataFacts:
    """As `lengths.facts_of`; the longest record with the estimate's error, so that a plan errs to the safe side."""
    from fitune.data.batches import packing_gain

    records: Any = [_Length(i, n) for i, n in enumerate(lengths)]
    longest = min(seq_len, round(max(lengths) * ESTIMATE_ERROR[1]))
    most = min(batch * seq_len, round(sum(sorted(lengths)[-batch:]) * ESTIMATE_ERROR[1]))
    return DataFacts(longest, packing_gain(records, batch, seq_len), most, sum(lengths))


def _job(
    recipe: Recipe, lengths: tuple[int, ...], times: float, target_share: float, eval_tokens: float, basis: str,
    error: tuple[float, float], facts: DataFacts, notes: Sequence[str],
) -> Job:  # fmt: skip
    num_records = round(len(lengths) * times)
    epochs, steps = recipe.epochs or 1.0, recipe.num_steps(num_records)
    if recipe.steps:
        epochs = recipe.steps / -(-num_records // recipe.batch)
    return Job(num_records, sum(lengths) * times, epochs, steps, recipe.batch, lengths, target_share, eval_tokens,
               basis, error, facts, tuple(notes))  # fmt: skip
