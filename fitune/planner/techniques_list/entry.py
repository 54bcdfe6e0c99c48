"""What is written of a technique, in English and Chinese side by side so that neither can be forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.groups import LANGUAGES

Pair = tuple[str, str]
EXACT = ("exact", "approximate", "other")
"""`exact`: the same mathematics; `approximate`: rounded numbers; `other`: another training method or optimizer."""


@dataclass(frozen=True)
class Technique:
    """One entry. Texts are (English, Chinese).

    Attributes:
        key: its name in JSON and in links.
        saves: what it takes off, in words; `formula` in symbols (see `SYMBOLS`), the same in both languages.
        exact: one of `EXACT`.
        setting: how it is asked for in fitune; empty where it cannot be. `is_auto`: a plan takes it by itself (with the
            usual effort).
        source: authors and year, and the address.
    """

    key: str
    name: Pair
    how: Pair
    saves: Pair
    formula: str
    costs: Pair
    when: Pair
    exact: str
    setting: str
    is_auto: bool
    source: Pair

    def text(self, field: str, lang: str) -> str:
        """One of the texts in a language."""
        pair: Pair = getattr(self, field)
        return pair[LANGUAGES.index(lang)]


SYMBOLS: tuple[tuple[str, Pair], ...] = (
    ("P", ("parameters of the model", "模型参数量")),
    ("T", ("trained parameters (P in full fine-tuning, the adapters' with LoRA)",
           "训练的参数量（全参数微调时为 P，LoRA 时为适配器参数）")),
    ("L", ("decoder layers, K of them keep their activations", "解码层数，其中 K 层保留激活值")),
    ("b, s, h", ("rows of a micro-batch, tokens of a row, hidden size", "微批行数、每行 token 数、隐藏维度")),
    ("f, a, V", ("MLP's inner size, attention heads, vocabulary", "MLP 内部维度、注意力头数、词表大小")),
    ("A", ("bytes of activations that one layer keeps", "一层保留的激活值字节数")),
    ("n", ("GPUs", "GPU 数量")),
    ("c", ("tokens of a loss chunk", "损失分块的 token 数")),
)  # fmt: skip
