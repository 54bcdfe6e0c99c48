"""Files that start one job on several machines: a plain script for torchrun, a Slurm job, a SkyPilot task.

Each starts the same command on every GPU and starts it again after a failure; the command finds its own run and goes on
from the last checkpoint (see `fitune.parallel.world.World.elastic`). Sources: torch documentation, "torchrun"; Slurm
documentation, "sbatch"; SkyPilot documentation, "Distributed Multi-Node Jobs".
"""

from __future__ import annotations

import shlex
from pathlib import Path

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.files import atomic_write, explained
from fitune.parallel.world import SAME_RECORDS

MAX_RESTARTS = 10
_SHELL = """\
#!/usr/bin/env bash
# Starts the job on this machine's {gpus} GPUs as part of {nodes} machines. Run it on each of them, with the address of
# the same one: MASTER_ADDR=10.0.0.1 bash launch.sh
# It may be run again after a machine was lost: the run goes on from its last checkpoint.
set -euo pipefail
: "${{NODES:={nodes}}}" "${{GPUS:={gpus}}}" "${{JOB_ID:={name}}}"
: "${{MASTER_ADDR:=127.0.0.1}}" "${{MASTER_PORT:=29500}}"
# Otherwise (torch 2.13) a machine that comes back waits for an address that those that stayed have told only once.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts {restarts} \\
  --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$JOB_ID" \\
  -m fitune train {recipe}
"""
_SLURM = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# `srun` starts one process per GPU; after a preemption Slurm queues the job again and the run goes on.
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
exec srun --kill-on-bad-exit=1 python -m fitune train {recipe}
"""
_SKY = """\
# sky jobs launch sky.yaml: a managed job, started again elsewhere when the machines are taken away
name: {name}
num_nodes: {nodes}
resources:
  accelerators: {gpu_name}:{gpus}
  use_spot: true
workdir: .
setup: pip install fitune
run: |
  MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  export MASTER_ADDR NODES=$SKYPILOT_NUM_NODES GPUS=$SKYPILOT_NUM_GPUS_PER_NODE JOB_ID=$SKYPILOT_TASK_ID
  exec bash {script}
"""


def write_launch(recipe: Path, out: Path, *, nodes: int, gpus: int, gpu_name: str) -> list[Path]:
    """Write launch.sh, job.slurm and sky.yaml into a folder.

    Args:
        recipe: a recipe file that names data and run folder.
        nodes, gpus: machines, and GPUs of each.
        gpu_name: as SkyPilot calls it.

    Raises:
        UserError: the recipe cannot be used on so many GPUs, or a file cannot be written.
    """
    wanted = recipes.build(recipes.load(recipe), str(recipe))
    if wanted.data is None or wanted.out is None:
        missing = "data" if wanted.data is None else "out"
        raise UserError(f"cannot launch {recipe}", f"it has no line `{missing}: ...`",
                        "every machine must know the data and the run folder; add it")  # fmt: skip
    if wanted.batch < nodes * gpus and wanted.parallel not in SAME_RECORDS:
        raise UserError(f"{nodes * gpus} GPUs cannot share a batch of {wanted.batch}",
                        "each needs at least one record of a step", f"set batch to {nodes * gpus} or more")  # fmt: skip
    name = "".join(c if c.isalnum() or c == "-" else "-" for c in Path(wanted.out).name.lower()).strip("-") or "fitune"
    values = dict(nodes=nodes, gpus=gpus, gpu_name=gpu_name, name=name, restarts=MAX_RESTARTS,
                  recipe=shlex.quote(str(recipe)), script=shlex.quote(str(out / "launch.sh")))  # fmt: skip
    with explained("write", out):
        out.mkdir(parents=True, exist_ok=True)
    written = []
    for file, text in (("launch.sh", _SHELL), ("job.slurm", _SLURM), ("sky.yaml", _SKY)):
        atomic_write(out / file, text.format(**values))
        written.append(out / file)
    return written
