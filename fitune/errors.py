"""The one exception meant for people: what happened, why, and what to do next."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DOES_NOT_FIT = 3
EXIT_RESTART = 75  # EX_TEMPFAIL of sysexits.h: a training process that wants a new one in its place
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its type where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class UserError(Exception):
    """A problem the person can act on. The command line prints it without a traceback.

    Args:
        what: what happened, one line, lower case, no full stop ("cannot read data.jsonl").
        why: the cause ("line 7 is not JSON: unterminated string at column 12").
        fix: what to do next ("correct line 7, or remove it").
        exit_code: 2 for bad input, 1 for a failure during the work, 3 when nothing fits.
    """

    def __init__(self, what: str, why: str = "", fix: str = "", exit_code: int = EXIT_BAD_INPUT):
        self.what, self.why, self.fix, self.exit_code = what, why, fix, exit_code
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class ToldElsewhere(UserError):
    """A problem of a run on several processes that its first one tells: this one ends with its exit code, silently."""


class NotFinite(UserError):
    """A step was refused because its loss or its gradients are no numbers."""
