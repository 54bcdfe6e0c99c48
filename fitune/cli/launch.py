"""`fitune train` on several GPUs: how many processes, and starting them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.cli import api
from fitune.errors import EXIT_FAILED

if TYPE_CHECKING:
    from fitune.train.supervise import Link


def wanted(model: str | Path | None, resume: str | Path | None, settings: dict[str, Any]) -> int:
    """How many processes this job is for on this machine.

    Raises:
        UserError: a setting that cannot be, or more GPUs than there are.
    """
    from fitune import hardware
    from fitune.parallel.launch import num_processes

    recipe = api.recipe_of_run(resume, settings)[0] if resume is not None else api.make_recipe(model, settings)
    return num_processes(recipe, len(hardware.probe().devices))


def run(command: list[str], size: int, link: Link | None) -> int:
    """This very command once per process; its exit code."""
    from fitune.parallel.launch import Launcher
    from fitune.train.supervise import EXIT_RESTART, for_ranks

    tie, status = for_ranks(link)
    code = Launcher(command, size, tie, status=status).run()
    return EXIT_FAILED if code == EXIT_RESTART and link is None else code
