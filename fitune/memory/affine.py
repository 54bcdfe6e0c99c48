"""One text for all adapter ranks: every number is a + b x rank, so that two ranks give all. Plain Python.

A script depends on the rank through sizes only, and every size is linear in it (an adapter is [r, in] and [out, r],
its activations [tokens, r]). What is not (an optimizer's 8-bit state) must be left out of the text. `join` refuses
texts that differ in anything but numbers, and the tests compare scripts of other ranks with fresh traces.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")
_MARK = "$"  # ends a number that depends on the rank: `12+3$` is 12 + 3 x rank
_LINEAR = re.compile(r"(-?\d+)\+(\d+)\$")


def join(texts: tuple[str, str], ranks: tuple[int, int]) -> str | None:
    """The text for any rank, from those of two ranks; None when they are not alike or a number is not linear."""
    first, second = texts
    if _MARK in first or _NUMBER.sub("0", first) != _NUMBER.sub("0", second):
        return None
    pairs = zip(_NUMBER.findall(first), _NUMBER.findall(second), strict=True)
    step = ranks[1] - ranks[0]
    numbers = []
    for low, high in ((int(a), int(b)) for a, b in pairs):
        slope, rest = divmod(high - low, step)
        if rest or slope < 0:
            return None
        numbers.append(f"{low - slope * ranks[0]}+{slope}{_MARK}" if slope else str(low))
    made = iter(numbers)
    return _NUMBER.sub(lambda _: next(made), first)


def at_rank(text: str, rank: int) -> str:
    """The text that `join` was made from, at a rank."""
    return _LINEAR.sub(lambda found: str(int(found[1]) + int(found[2]) * rank), text)
