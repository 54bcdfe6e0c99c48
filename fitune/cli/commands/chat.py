"""`fitune chat`: talk to a trained run, or to a model as it is."""

from __future__ import annotations

import click

from fitune.cli.output import json_option, print_error, print_json
from fitune.errors import EXIT_DONE, UserError


@click.command("chat")
@click.argument("run")
@click.option("--prompt", metavar="TEXT", help="Ask this one thing and leave.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
              help="Longest answer, in tokens.")  # fmt: skip
@json_option
def command(run: str, prompt: str | None, max_tokens: int, as_json: bool) -> int:
    """Talk to a trained run or a model.

    RUN is a run folder, or a model as in `fitune train`. An empty line or Ctrl-D ends the conversation.
    """
    if as_json and prompt is None:
        raise UserError("--json needs --prompt", "a conversation is not one JSON value", "add --prompt TEXT")
    from fitune.train.chat import Chat

    chat = Chat(run, max_tokens=max_tokens)
    if prompt is not None:
        answer = chat.answer(prompt)
        if as_json:
            print_json({"prompt": prompt, "answer": answer})
        else:
            click.echo(answer)
        return EXIT_DONE
    while line := _next_line():
        try:
            click.echo(chat.answer(line))
        except UserError as error:  # one question that cannot be answered does not end the conversation
            print_error(error)
    return EXIT_DONE


def _next_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        click.echo()
        return ""
