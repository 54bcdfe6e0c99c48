"""Where output goes: results to stdout, messages to stderr, `--json` as one JSON value."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from fitune.errors import UserError
from fitune.memory.groups import LANGUAGES

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 110  # columns when the output is not a terminal

lang_option = click.option(
    "--lang", type=click.Choice(LANGUAGES), default=lambda: system_language(), show_default="the system's",
    help="Language of headings and explanations.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else to stdout.")


def system_language() -> str:
    """`zh` where the system's messages are in Chinese (LC_ALL, LC_MESSAGES, LANG), else `en`."""
    chosen = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    return "zh" if chosen.lower().startswith("zh") else "en"


def print_json(value: Any) -> None:
    """One JSON value, indented, to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def console(stderr: bool = False) -> Console:
    """A rich console on stdout or stderr: plain and of fixed width where that is not a terminal.

    Writing to a reader that has gone raises BrokenPipeError, as `print` does; rich itself would end the program.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    made = PlainConsole(stderr=stderr, highlight=False)
    return made if made.is_terminal else PlainConsole(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


def print_error(error: UserError) -> None:
    """`error: what`, then why and fix, to stderr; coloured only on a terminal, and not where NO_COLOR is set."""
    color = None if not os.environ.get("NO_COLOR") else False
    what, *rest = str(error).split("\n")
    lines = [click.style("error:", fg="red", bold=True) + " " + what]
    for line in rest:
        label = line[:6]
        lines.append(click.style(label, bold=True) + line[6:] if label in ("  why:", "  fix:") else line)
    try:
        click.echo("\n".join(lines), err=True, color=color)
    except OSError as problem:
        if not is_closed_output(problem):
            raise


def is_closed_output(error: OSError) -> bool:
    """Whether the reader of our output has gone: a pipe that nobody reads, or a terminal that was closed."""
    return isinstance(error, BrokenPipeError) or error.errno in (errno.EIO, errno.ENXIO)


def close_quietly() -> None:
    """The reader of our output has gone (`fitune gpus | head`): keep Python from complaining about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
