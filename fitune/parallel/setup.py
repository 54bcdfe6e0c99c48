"""A plan's way of working together, put around a model: before its weights are read, after them, and as its engine."""

from __future__ import annotations

from fitune.engine.engine import Engine
from fitune.errors import UserError
from fitune.model.build import Built
from fitune.model.outside import open_host
from fitune.parallel.replicated import Replicated
from fitune.parallel.shared import close_shared, open_shared
from fitune.parallel.world import Single
from fitune.parallel.zero_config import stage_of
from fitune.plan import Plan


def open_host_together(built: Built, plan: Plan, group: Single, known_as: str | None) -> None:
    """Before the first weight is read: room for the node's one copy of what waits on the host, or for this rank's part
    of every layer.

    Args:
        known_as: of the weights, for layers streamed from a file (`packed_file.identity`).
    """
    if stage_of(plan) is not None:
        from fitune.parallel.zero_library import check

        check(plan)
    if plan.parallel == "cp":
        from fitune.parallel.context import check_context

        check_context(built, plan)
    if plan.parallel == "fsdp2":
        from fitune.parallel.sharded import open_shards

        open_shards(built, plan, group)
    elif plan.parallel == "tp":
        from fitune.parallel.tensor import open_split

        open_split(built, plan, group)
        return
    elif plan.parallel == "zero3":
        from fitune.parallel.zero_loading import Parts

        built.parts = Parts(built, plan)
    elif plan.parallel == "pp":
        from fitune.parallel.pipeline import open_stage

        open_stage(built, plan, group)
        return
    elif plan.stream_from == "disk":
        if not group.leads_node:
            group.barrier()  # until the first rank has packed the layers and closed their file
        open_host(built, plan, known_as)
        return
    open_shared(built, plan, group)


def finish_host_together(built: Built, plan: Plan, group: Single) -> None:
    """After the last weight."""
    if built.parts is not None:
        built.parts.finish()
    if plan.parallel == "pp":
        return
    if plan.stream_from == "disk":
        if group.leads_node:
            group.barrier()
        return
    close_shared(built, group)


def make_engine(built: Built, plan: Plan, group: Single) -> Engine:
    """The engine of one rank.

    Raises:
        UserError: settings that this way of working together cannot have.
    """
    if plan.parallel == "fsdp2":
        from fitune.parallel.group import Group
        from fitune.parallel.sharded_state import ShardedEngine

        assert isinstance(group, Group)
        return ShardedEngine(built, plan, group)
    if plan.parallel == "tp":
        from fitune.parallel.group import Group
        from fitune.parallel.tensor_engine import TensorEngine

        assert isinstance(group, Group)
        return TensorEngine(built, plan, group)
    if plan.parallel == "pp":
        from fitune.parallel.group import Group
        from fitune.parallel.pipeline import PipelineEngine

        assert isinstance(group, Group)
        return PipelineEngine(built, plan, group)
    if stage_of(plan) is not None:
        from fitune.parallel.group import Group
        from fitune.parallel.zero import ZeroEngine

        assert isinstance(group, Group)
        return ZeroEngine(built, plan, group)
    if plan.parallel == "cp":
        from fitune.parallel.context import ContextEngine

        return ContextEngine(built, plan, group)
    if plan.parallel not in ("ddp", "streamed"):
        raise UserError(f"this run was planned for parallel: {plan.parallel}, one process",
                        f"{group.size} processes have come", "start it with --nproc 1")  # fmt: skip
    return Engine(built, plan, Replicated(group))
