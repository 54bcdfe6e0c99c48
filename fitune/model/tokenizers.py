"""The tokenizer of a model source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.model import bundled

if TYPE_CHECKING:
    from fitune.model.source import ModelSource

_SPECIAL = ("<pad>", "<bos>", "<eos>")


def load(source: ModelSource) -> Any:
    """The source's own tokenizer; for random weights without one, the bundled model's or bytes.

    Raises:
        UserError: there is none, or its files cannot be read.
    """
    if source.tokenizer_path is not None:
        return _from_folder(source)
    if source.name.lower() == bundled.NAME and bundled.find_gguf():
        return _bundled()
    if source.kind != "random":
        raise UserError(
            f"{source.name} has no tokenizer here",
            "there are no tokenizer files beside its configuration",
            "download the whole model, or give the folder that has tokenizer.json",
        )
    if bundled.find_gguf() and source.config.vocab_size >= bundled.VOCAB_SIZE:
        return _bundled()
    return _bytes(source.name, source.config.vocab_size)


def _bundled() -> Any:
    from transformers import AutoTokenizer

    from fitune.model.gguf import open_gguf

    return AutoTokenizer.from_pretrained(str(open_gguf(bundled.fetch_gguf()).folder))


def _from_folder(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(source.tokenizer_path), trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError, IndexError, RecursionError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"cannot read the tokenizer of {source.name}",
            why,
            "check tokenizer.json and tokenizer_config.json, or download them again",
        ) from error


def _bytes(name: str, vocab_size: int) -> Any:
    """One token per byte (ids 0 to 255) and three special tokens: enough to measure and test with any shape."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 256 + len(_SPECIAL):
        raise UserError(
            f"{name} has no tokenizer",
            f"its vocabulary of {vocab_size} is too small for bytes",
            "use a configuration with vocab_size of at least 259",
        )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_SPECIAL[0], bos_token=_SPECIAL[1], eos_token=_SPECIAL[2]
    )
