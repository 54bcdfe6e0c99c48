"""`fitune train` on several GPUs: how many processes, and starting them; files that start a job on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitune.cli import api
from fitune.cli.output import json_option, print_json
from fitune.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESTART

if TYPE_CHECKING:
    from fitune.hardware import Machine
    from fitune.recipe import Recipe
    from fitune.train.supervise import Link


def wanted(model: str | Path | None, resume: str | Path | None, settings: dict[str, Any]) -> int:
    """How many processes this job is for on this machine: as many as are asked for, or as `fitune plan` says.

    Raises:
        UserError: a setting that cannot be, or more GPUs than there are.
    """
    from fitune import hardware
    from fitune.parallel.launch import num_processes

    if resume is None:
        recipe, before = api.make_recipe(model, settings), 0
    else:
        recipe, folder = api.recipe_of_run(resume, settings)
        before = api.size_of_run(folder)
    machine = hardware.probe()
    most = num_processes(recipe, len(machine.devices))
    if most in (1, before) or recipe.nproc is not None or recipe.gpu is not None:
        return most
    return _planned(recipe, machine, most)


def _planned(recipe: Recipe, machine: Machine, most: int) -> int:
    """Processes of the plan for this machine: fewer than GPUs where more would not be faster. (What the data's lengths
    change is left to the plan of these processes.)"""
    from fitune.planner import make_plan

    result = make_plan(recipe, machine, detailed=True)
    return min(most, result.plan.world_size) if result.fits else most


def run(command: list[str], size: int, link: Link | None) -> int:
    """This very command once per process; its exit code."""
    from fitune.parallel.launch import Launcher
    from fitune.train.supervise import Ear, for_ranks

    tie, status = for_ranks(link)
    if link is not None:
        return Launcher(command, size, tie, status=status).run()
    ear = Ear()
    launcher = Launcher(command, size, tie, status=ear.status)
    code = launcher.run()
    ear.close(code, launcher.said)
    return EXIT_FAILED if code == EXIT_RESTART else code


@click.command("launch")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--nodes", type=click.IntRange(min=1), default=2, show_default=True, help="Machines.")
@click.option("--gpus", type=click.IntRange(min=1), default=8, show_default=True, help="GPUs of each machine.")
@click.option("--gpu-name", default="H100", show_default=True, help="Their name, for SkyPilot.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", default=Path("launch"), show_default=True,
              help="Where to.")  # fmt: skip
@json_option
def export_command(recipe: Path, nodes: int, gpus: int, gpu_name: str, out: Path, as_json: bool) -> int:
    """Write files that start a job on several machines and go on after a preemption: launch.sh (any machines, by
    torchrun), job.slurm and sky.yaml.

    RECIPE is a recipe file (.yaml) that names its data and its run folder (out), both on storage that all machines see.
    """
    from fitune.export.launch import write_launch

    written = write_launch(recipe, out, nodes=nodes, gpus=gpus, gpu_name=gpu_name)
    if as_json:
        print_json({"files": [str(path) for path in written]})
    else:
        click.echo("\n".join(str(path) for path in written))
    return EXIT_DONE
