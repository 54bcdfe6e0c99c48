"""Looks up what is said in a person's language. Tables stand beside what they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fitune.memory.groups import LANGUAGES

Table = Mapping[str, tuple[str, str]]
"""Key to its words in each of `LANGUAGES`."""


@dataclass(frozen=True)
class Words:
    """A table in one language. A key that is none of the table's is shown as it is, in words."""

    lang: str
    table: Table

    def __call__(self, key: str, **values: object) -> str:
        pair = self.table.get(key)
        text = pair[LANGUAGES.index(self.lang)] if pair else key.replace("_", " ")
        return text.format(**values) if values else text
