"""DeepSpeed, an optional library: loaded quietly, and what it cannot do told before a model is loaded."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fitune.errors import UserError
from fitune.parallel.world import FLAT_OPTIMIZERS, environment_with
from fitune.parallel.zero_config import stage_of
from fitune.plan import Plan
from fitune.recipe import QUANTISED_FORMATS

SHARED_MEMORY_OP = "deepspeed_shm_comm"


def load_deepspeed(device: str) -> Any:
    """The library, for tensors on this kind of device (cpu, cuda).

    Raises:
        UserError: it is not installed, or cannot be imported.
    """
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            "ZeRO needs DeepSpeed",
            f"it cannot be imported ({error})",
            'pip install "fitune[deepspeed]", or use --parallel fsdp2, which needs nothing else',
        ) from None
    for handler in logging.getLogger("DeepSpeed").handlers:
        handler.setLevel(logging.ERROR)  # it writes to standard output, which is for JSON and fitune's own words
    # names of torch.distributed that 0.19.8 still uses
    warnings.filterwarnings("ignore", r".*torch\.distributed\..* is deprecated", FutureWarning)
    _without_compiler(deepspeed)
    return deepspeed


def is_installed() -> bool:
    """Whether this Python has DeepSpeed, without importing it."""
    return importlib.util.find_spec("deepspeed") is not None


def _without_compiler(deepspeed: Any) -> None:
    """A patch of DeepSpeed (seen with 0.19.8): on the CPU it builds an exchange through shared memory with the C++
    compiler when it is first used, which takes minutes and prints to standard output; gloo's exchange does the same.
    Its own list of what can be built here is told that this one cannot."""
    known = deepspeed.ops.__compatible_ops__
    assert SHARED_MEMORY_OP in known, "DeepSpeed has no such operation any more: leave this function out"
    known[SHARED_MEMORY_OP] = False


@contextmanager
def card_of_this_rank(device: Any) -> Iterator[None]:
    """Inside, LOCAL_RANK is the index of this process' card among those that it sees (its own only), which DeepSpeed
    takes it for."""
    with environment_with({"LOCAL_RANK": str(device.index or 0)}):
        yield


def check(plan: Plan, tell: Callable[[str], None] = lambda text: None) -> None:
    """Before a model is loaded.

    Args:
        tell: what a person should know beforehand (something is compiled, a disk is slow).

    Raises:
        UserError: something that DeepSpeed cannot have, or DeepSpeed is not there.
    """
    stage, dense = stage_of(plan), plan.base_format not in QUANTISED_FORMATS
    name = f"--parallel {plan.parallel}"
    if plan.optimizer not in FLAT_OPTIMIZERS:
        raise UserError(
            f"optimizer {plan.optimizer} cannot be used with {name}",
            "its state belongs to whole matrices or blocks, and each GPU holds a part that ends anywhere",
            "use --optimizer adamw, lion or sgd",
        )
    if stage == 3 and plan.method == "lora" and not dense:
        raise UserError(
            f"a {plan.base_format} base cannot be used with {name}",
            "DeepSpeed shards floating-point parameters; packed weights and their scales are none",
            "use --parallel fsdp2, which shards them, or zero1 or zero2, where every GPU holds the base",
        )
    if stage == 3 and plan.method == "lora" and plan.base_format != plan.precision:
        raise UserError(
            f"a base in {plan.base_format} cannot be used with {name} and --precision {plan.precision}",
            "DeepSpeed brings all parameters to the format that the model computes in",
            f"use --base-format {plan.precision}, or --parallel fsdp2",
        )
    if stage == 3 and plan.adapter is not None and plan.adapter.dora:
        raise UserError(
            f"DoRA cannot be used with {name}",
            "its start needs whole weights, and no GPU holds them",
            "use --parallel ddp, zero1 or zero2",
        )
    if plan.optimizer == "lion" and plan.offload_optimizer != "none":
        raise UserError(
            "optimizer lion cannot be used with --offload-optimizer",
            "its updates run on the GPU only",
            "use --optimizer adamw or sgd",
        )
    deepspeed = load_deepspeed(plan.device)
    if plan.offload_optimizer == "nvme":
        from fitune.parallel.zero_disk import check_disk

        check_disk(plan, deepspeed, tell)
