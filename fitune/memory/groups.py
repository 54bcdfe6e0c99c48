"""Whose memory it is, as people read it: groups of owners in the order in which bars stack them, with a letter each.

Letters, so that a bar reads the same without colour, in a log file and on paper. Plain Python: terminal, picture and
report draw from this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Group:
    """Owners that are shown as one. `names` in English and Chinese; `color` is a name that rich knows, `fill` about the
    same in pictures."""

    key: str
    letter: str
    owners: tuple[str, ...]
    names: tuple[str, str]
    color: str
    fill: str


# Key, letter, owners; then names in English and Chinese, colour on a terminal and in pictures.
_TABLE: tuple[tuple[str, str, tuple[str, ...], str, str, str, str], ...] = (
    ("context", "C", ("context", "process"), "CUDA context", "CUDA 上下文", "bright_black", "#8a8f98"),
    ("workspace", "S", ("workspace", "stream", "staging"), "workspaces and buffers", "工作区与缓冲", "bright_magenta",
     "#c59ad3"),
    ("weights", "W", ("weights", "embedding", "head", "streamed weights"), "weights", "权重", "blue", "#3b6fb6"),
    ("adapters", "a", ("adapters", "adapter"), "adapters", "适配器", "cyan", "#35a3a8"),
    ("masters", "M", ("masters",), "fp32 master weights", "fp32 主权重", "bright_blue", "#7aa6dc"),
    ("optimizer", "O", ("optimizer", "paged optimizer state"), "optimizer state", "优化器状态", "magenta", "#9a5fb0"),
    ("gradients", "G", ("gradients",), "gradients", "梯度", "green", "#5a9e4b"),
    ("activations", "A", ("inputs", "saved", "activations"), "activations", "激活值", "yellow", "#e0a52f"),
    ("logits", "L", ("logits",), "logits", "logits", "red", "#d0513f"),
    ("temporary", "T", ("temporary", "loader", "checkpoint", "largest tensor", "rows"), "working tensors", "临时张量",
     "bright_yellow", "#efcf6d"),
    ("data", "D", ("data",), "data", "数据", "bright_cyan", "#9fd6d8"),
    ("allocator", ".", ("allocator", "heap"), "held by the allocator, unused", "分配器保留未用", "white", "#d5d8dc"),
    ("other", "x", (), "other", "其他", "white", "#b0b0b0"),
)  # fmt: skip
GROUPS = tuple(Group(key, letter, owners, (en, zh), color, fill) for key, letter, owners, en, zh, color, fill in _TABLE)
"""In the order of the stack, from the left or from below."""
OTHER = GROUPS[-1]
_PROCESS = ("Python and libraries", "Python 与程序库")
_STATES = {
    "adamw": ("Adam's two moments", "Adam 的两个动量"),
    "adamw8bit": ("Adam's two moments (8-bit)", "Adam 的两个动量（8 位）"),
    "lion": ("Lion's moment", "Lion 的动量"),
    "lion8bit": ("Lion's moment (8-bit)", "Lion 的动量（8 位）"),
    "adafactor": ("Adafactor's factored moment", "Adafactor 的分解动量"),
}
_BY_OWNER = {owner: group for group in GROUPS for owner in group.owners}
_BY_KEY = {group.key: group for group in GROUPS}


def group_of(owner: str) -> Group:
    """The group of an owner; of one that is not known, the group of what has no name."""
    return _BY_OWNER.get(owner) or _BY_KEY.get(owner) or OTHER


def grouped(owners: Mapping[str, int] | None) -> dict[str, int]:
    """Owners' bytes by group, in the order of the stack; groups without bytes are left out."""
    sums: dict[str, int] = {}
    for owner, size in (owners or {}).items():
        key = group_of(owner).key
        sums[key] = sums.get(key, 0) + size
    return {group.key: sums[group.key] for group in GROUPS if sums.get(group.key)}


def cells(owners: Mapping[str, int], full_bytes: int, width: int) -> str:
    """A stacked bar of letters, `WWWWAAL`, in at most `width` cells of which `full_bytes` fill all.

    Ends are rounded, not lengths, so that the bar's length is right; a group too small for a cell of its own shows in
    none.
    """
    bar, position = "", 0
    for key, size in grouped(owners).items():
        position += size
        end = min(round(position / full_bytes * width), width) if full_bytes else 0
        bar += group_of(key).letter * (end - len(bar))
    return bar


def legend(keys: Iterable[str], plan: Mapping[str, Any], lang: str = "en") -> list[tuple[Group, str]]:
    """(group, name) of the groups in a drawing, in the order of the stack."""
    wanted = set(keys)
    return [(group, name_of(group.key, plan, lang)) for group in GROUPS if group.key in wanted]


def name_of(key: str, plan: Mapping[str, Any], lang: str = "en") -> str:
    """A group's name under a plan: `weights (nf4)`, `Adam's two moments`."""
    pair = group_of(key).names
    if key == "optimizer":
        pair = _STATES.get(str(plan.get("optimizer") or "").removeprefix("paged_"), pair)
    elif key == "context" and plan.get("device") == "cpu":
        pair = _PROCESS
    name = pair[LANGUAGES.index(lang)]
    return f"{name} ({plan['base_format']})" if key == "weights" and plan.get("base_format") else name
