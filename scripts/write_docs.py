#!/usr/bin/env python3
"""Writes the parts of `docs/` that come from the code, so that they cannot drift from it.

python scripts/write_docs.py            writes docs/recipe.md and the tables of plan.md and run-folder.md
python scripts/write_docs.py --check    exit code 1 and the first difference, where one of them is out of date
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- written by scripts/write_docs.py -->", "<!-- end of the written part -->"

RECIPE_HEAD = """\
# The recipe

Written by `scripts/write_docs.py` from `fitune/recipe.py`; change the fields there.

A recipe is what you want: one YAML file of `setting: value` lines, or the same settings as options of the command line
(`lora_r: 8` is `--lora-r 8`). Nothing but `model` and (to train) `data` has to be set; where the table
shows none, the setting is left to the plan (which says how and why) or not used.

```bash
fitune train examples/demo.yaml
fitune train examples/demo.yaml --steps 10 --lr 5e-4
fitune plan examples/qlora-7b-10gb.yaml --gpu rtx3080
```

Options override the file. An unknown setting is an error that names the nearest one. Sizes are GiB; `vram` and `ram`
also take a unit (`512MiB`). Paths are relative to the folder in which fitune is run. The recipe of every run lies in
its run folder as `recipe.yaml`.
"""

RECIPE_TAIL = """
## Not in the recipe

`--resume RUN` continues a run with the recipe it has; `--supervise` (the default) trains in a process of its own that
is started again when it is killed, `--no-supervise` in one, for debugging ([what a run survives](survive.md));
`--lang zh` writes the report in Chinese; `--json` prints one JSON value to stdout. `out` and the other settings of
*Run* change nothing in a plan, so `fitune plan` has no options for them.
"""


def recipe_page() -> str:
    """docs/recipe.md: one table a group, in the order of the fields."""
    from fitune.cli.options import metavar, option_name
    from fitune.recipe import Recipe

    groups: dict[str, list[str]] = {}
    for name, info in Recipe.model_fields.items():
        extra: dict[str, Any] = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        option = "`MODEL`" if name == "model" else f"`{option_name(name)}`"
        values = _values(metavar(info.annotation), info.annotation)
        row = f"| `{name}` | {option} | {values} | {_default(info.default)} | {_cell(info.description or '')} |"
        groups.setdefault(str(extra["group"]), []).append(row)
    lines = [RECIPE_HEAD]
    for group, rows in groups.items():
        lines += [f"## {group}", "", "| setting | option | values | default | meaning |"]
        lines += ["| --- | --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines).rstrip() + "\n" + RECIPE_TAIL


def plan_table() -> str:
    """The fields of `Plan` with their types and the comments that stand beside them in the source."""
    from fitune import plan

    source = Path(plan.__file__).read_text(encoding="utf-8")
    comments = _field_comments(source, "Plan")
    rows = [
        f"| `{field.name}` | `{_cell(str(field.type))}` | {_cell(comments.get(field.name, ''))} |"
        for field in dataclasses.fields(plan.Plan)
    ]
    return "\n".join([BEGIN, "", "| field | type | values |", "| --- | --- | --- |", *rows, "", END])


def events_table() -> str:
    """The kinds of events and their fields."""
    from fitune.train.events import EVENT_FIELDS

    rows = [f"| `{kind}` | {', '.join(f'`{name}`' for name in fields)} |" for kind, fields in EVENT_FIELDS.items()]
    return "\n".join([BEGIN, "", "| event | fields |", "| --- | --- |", *rows, "", END])


def renewed(page: Path, table: str) -> str:
    """A page with its written part replaced; the rest of it is written by hand.

    Raises:
        SystemExit: the page has lost the marks between which the table stands.
    """
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end_found, after = rest.partition(END)
    if not found or not end_found:
        raise SystemExit(f"{page} has no part between {BEGIN!r} and {END!r}")
    return before + table + after


def _field_comments(source: str, class_name: str) -> dict[str, str]:
    """The comment after each annotated field of a class."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            return {ast.unparse(item.target): lines[item.lineno - 1].partition("# ")[2] for item in fields}
    raise AssertionError(f"no class {class_name}")


def _values(shown: str, annotation: Any) -> str:
    if annotation is bool or str(annotation) == "bool | None":
        return "`true`, `false`"
    return ", ".join(f"`{value}`" for value in shown.split("|"))


def _default(value: Any) -> str:
    if value is None:
        return ""
    if value == []:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[Path, str]:
    """Every written page with the text it should have."""
    return {
        DOCS / "recipe.md": recipe_page(),
        DOCS / "plan.md": renewed(DOCS / "plan.md", plan_table()),
        DOCS / "run-folder.md": renewed(DOCS / "run-folder.md", events_table()),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is out of date")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    stale = False
    for path, wanted in pages().items():
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        if current == wanted:
            continue
        stale = True
        if options.check:
            name = path.relative_to(ROOT)
            lines = difflib.unified_diff(current.splitlines(), wanted.splitlines(), "is", "should be", lineterm="")
            print("\n".join(list(lines)[:20]))
            print(f"{name} is out of date; run: python scripts/write_docs.py")
        else:
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
