#!/usr/bin/env python3
"""Writes `docs/techniques/` in English and Chinese from `fitune/planner/techniques_list`, where the texts are.

python scripts/write_techniques.py            writes docs/techniques/index.md and zh.md
python scripts/write_techniques.py --check    exit code 1 where one of them is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "techniques"
FILES = {"en": "index.md", "zh": "zh.md"}

_WORDS = {
    "title": ("Techniques", "技术一览"),
    "intro": (
        "What makes a training job fit a card, one entry each. Written by `scripts/write_techniques.py` from\n"
        "`fitune/planner/techniques_list/`; change the texts there. How much each saves *in your job* is computed, not "
        "written\nhere: `fitune plan MODEL --explain`. [中文](zh.md)",
        "让训练任务放进显卡的各项技术，每项一条。由 `scripts/write_techniques.py` 根据\n"
        "`fitune/planner/techniques_list/` 生成，请在那里修改。每项技术*在你的任务中*能省多少由程序计算：\n"
        "`fitune plan MODEL --explain --lang zh`。"
        "[English](index.md)",
    ),
    "symbols": ("Symbols", "符号"),
    "overview": ("Overview", "概览"),
    "technique": ("technique", "技术"),
    "saves_column": ("saves (bytes)", "节省（字节）"),
    "kind": ("kind", "性质"),
    "asked": ("how to ask for it", "如何使用"),
    "how": ("How it works", "原理"),
    "saves": ("What it saves", "节省什么"),
    "costs": ("What it costs", "代价"),
    "when": ("When to use it", "何时使用"),
    "source": ("Source", "出处"),
    "exact": ("exact", "精确"),
    "approximate": ("approximate", "近似"),
    "other": ("another method", "另一种方法"),
    "auto": ("by itself", "自动"),
    "ends": (": ", "："),
    "comma": (", ", "，"),
}


def page(lang: str) -> str:
    """One language's page: symbols, overview, then an entry per technique."""
    from fitune.planner.techniques_list import ALL, LANGUAGES, SYMBOLS

    def word(key: str) -> str:
        return _WORDS[key][LANGUAGES.index(lang)]

    lines = [f"# {word('title')}", "", word("intro"), "", f"## {word('symbols')}", "", "| | |", "| --- | --- |"]
    lines += [f"| `{symbol}` | {meaning[LANGUAGES.index(lang)]} |" for symbol, meaning in SYMBOLS]
    heads = [word(key) for key in ("technique", "saves_column", "kind", "asked")]
    lines += ["", f"## {word('overview')}", "", f"| {' | '.join(heads)} |", "| --- | --- | --- | --- |"]
    for t in ALL:
        ways = ([word("auto")] if t.is_auto else []) + ([f"`{t.setting}`"] if t.setting else [])
        asked = word("comma").join(ways)
        lines.append(f"| {t.text('name', lang)} | `{t.formula}` | {word(t.exact)} | {asked} |")
    for t in ALL:
        lines += ["", f'<a id="{t.key}"></a>', "", f"## {t.text('name', lang)}", ""]
        for field in ("how", "saves", "costs", "when"):
            extra = f" `{t.formula}`" if field == "saves" and t.formula != "0" else ""
            lines.append(f"- **{word(field)}**{word('ends')}{t.text(field, lang)}{extra}")
        lines.append(f"- **{word('source')}**{word('ends')}[{t.source[0]}]({t.source[1]})")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is out of date")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    stale = False
    for lang, name in FILES.items():
        path, wanted = FOLDER / name, page(lang)
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        stale = True
        if options.check:
            print(f"{path.relative_to(ROOT)} is out of date; run: python scripts/write_techniques.py")
        else:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
