"""The `fitune` command: finds the subcommand, runs it, turns errors into messages and exit codes."""

from __future__ import annotations

import difflib
import importlib
import sys
import time
from collections.abc import Sequence

import click

import fitune
from fitune.cli.output import close_quietly, is_closed_output, print_error
from fitune.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, ToldElsewhere, UserError

# A launcher such as torchrun ends all processes when one has ended: the one that tells why needs a moment for it.
TELL_S = 1.0
# Name and one line each. `fitune --help` shows these without importing the commands.
COMMANDS = {
    "plan": "Say what will fit, why, and how much memory each phase needs.",
    "predict": "Predict the memory of a recipe exactly as given, in every phase.",
    "train": "Plan, then fine-tune; --resume continues a run.",
    "export": "Write a run's adapter, or the merged model, to a folder.",
    "chat": "Talk to a trained run or a model.",
    "runs": "List the runs of a folder.",
    "gpus": "Show this machine's GPUs and the catalog's, or say which GPU does a job.",
    "calibrate": "Measure this machine's cards, link, memory and disk, for better plans.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"fitune.cli.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise UserError(f"unknown command {args[0]!r}", "", _nearest(args[0], list(COMMANDS)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fitune.__version__, prog_name="fitune", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Fine-tune a language model on the GPU you have.

    \b
    fitune train smollm2 --data demo             the bundled model and data, also without a GPU
    fitune plan Qwen/Qwen3-8B --gpu rtx3080      what fits on a card, before you have it
    fitune train MODEL --data FILE               the real thing

    Exit codes: 0 done or fits, 1 failed, 2 bad input, 3 does not fit, 130 interrupted, 143 terminated (both saved).
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None takes `sys.argv`.
    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets a `?`, not a traceback
            stream.reconfigure(errors="replace")
    try:
        # `obj`: how this process was started, for a command that starts itself again; None within another program.
        started = sys.argv[1:] if arguments is None else None
        result = cli.main(args=arguments, prog_name="fitune", standalone_mode=False, obj=started)
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_DONE
    except UserError as error:
        if isinstance(error, ToldElsewhere):
            time.sleep(TELL_S)
        else:
            print_error(error)
        return error.exit_code
    except click.ClickException as error:
        print_error(_usage_error(error, sys.argv[1:] if arguments is None else arguments))
        return EXIT_BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except OSError as error:
        if not is_closed_output(error):
            raise
        close_quietly()
        return EXIT_FAILED
    except (RuntimeError, MemoryError) as error:
        print_error(_out_of_memory(error))
        return EXIT_FAILED


def _out_of_memory(error: BaseException) -> UserError:
    """Memory that ran out in a command that cannot go on with less; every other error is raised again."""
    from fitune.train.oom import PLACES, classify

    found = classify(error)
    if found is None:
        raise error
    fix = "close other programs, or use --devices cpu where the command has it"
    return UserError(f"out of {PLACES[found.where]}", found.line, fix, EXIT_FAILED)


def _usage_error(error: click.ClickException, arguments: Sequence[str]) -> UserError:
    """click's own complaint in the form of ours: one message, with the nearest option."""
    ctx = getattr(error, "ctx", None)
    command = next((word for word in arguments[:1] if word in COMMANDS), "")
    see = f"see `fitune {command} --help`" if command else "see `fitune --help`"
    if isinstance(error, click.NoSuchOption):
        names = [name for p in (ctx.command.params if ctx else []) for name in (*p.opts, *p.secondary_opts)]
        return UserError(f"no such option {error.option_name}", "", _nearest(error.option_name, names, see))
    if isinstance(error, click.MissingParameter):
        name = error.param.human_readable_name if error.param else "an argument"
        return UserError(f"{name} is missing", "", see)
    message = error.format_message().rstrip(".")
    return UserError(message[:1].lower() + message[1:], "", see)


def _nearest(name: str, names: list[str], otherwise: str = "see `fitune --help`") -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise
