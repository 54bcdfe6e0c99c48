"""The engine on which older records were made, for tests that predict them again.

Up to 0.1 a gated MLP's backward pass held two tiles more, and autograd had a thread of its own, with a cuBLAS handle
and workspace (`fitune.model.fused`, `fitune.model.backward`). All those records are an H200's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fitune.memory import constants, sequence, shipped, trace_cache
from fitune.model import fused

_aten = torch.ops.aten
_TRACES: dict[str, Any] = {}  # of that engine


@contextmanager
def engine_of(record: Mapping[str, Any]) -> Iterator[None]:
    """Inside, steps are followed as the fitune that made the record ran them."""
    if record["versions"]["fitune"] != "0.1.0":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused._Gated, "backward", staticmethod(_backward))
        patch.setattr(sequence, "NUM_CUBLAS_THREADS", 2)
        hopper = constants.BY_CAPABILITY[9, 0]
        then = constants.Overheads(
            _more(hopper.context, constants.SECOND_HANDLE_BYTES), _more(hopper.workspace, hopper.workspace.num_bytes)
        )
        patch.setitem(constants.BY_CAPABILITY, (9, 0), then)
        patch.setattr(shipped, "find", lambda config, plan: None)
        patch.setattr(trace_cache, "load", _TRACES.get)
        patch.setattr(trace_cache, "store", _TRACES.__setitem__)
        yield


def _more(figure: constants.Figure, num_bytes: int) -> constants.Figure:
    return dataclasses.replace(
        figure, num_bytes=figure.num_bytes + num_bytes, low_bytes=figure.low_bytes + num_bytes,
        high_bytes=figure.high_bytes + num_bytes,
    )  # fmt: skip


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    d_up = fused._activate(gate, ctx.activation).mul_(grads[0])
    inner = grads[0] * up
    if ctx.activation == "silu":
        return _aten.silu_backward(inner, gate), d_up, None
    return _aten.gelu_backward(inner, gate, approximate="tanh"), d_up, None
