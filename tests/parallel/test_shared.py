"""One copy of the frozen weights per node: every rank reads what the first one wrote."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from fitune.engine.engine import Engine
from fitune.parallel.group import Group
from fitune.parallel.replicated import Replicated, share_of
from fitune.parallel.shared import SharedBacking, close_shared, open_shared
from fitune.plan import Plan
from tests.parallel.jobs import assert_same, make_built, on_one, plan_of, train
from tests.parallel.ranks import run_ranks

STREAMED = dict(parallel="streamed", stream_from="pageable", resident_layers=0, embedding_place="host",
                head_place="host", base_format="nf4")  # fmt: skip


def streamed(group: Group, plan: Plan) -> Any:
    built = make_built(plan, before_fill=lambda built: open_shared(built, plan, group))
    close_shared(built, group)
    read = sorted(built.provided)
    engine = Engine(built, plan, Replicated(group))
    result = train(engine, lambda some: share_of(some, group.rank, group.size))
    backing = built.streamed.backing
    assert isinstance(backing, SharedBacking)
    places = [backing.buffers[0].tensor, built.host_head.buffer.tensor, built.host_embedding.inner.weight.data]
    group.barrier()
    if group.rank == 0:  # what one process writes now is what the others read
        for place in places:
            place.view(-1).view(torch.uint8).fill_(7)
    group.barrier()
    seen = [hashlib.sha256(place.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for place in places]
    return result, read, seen, all(bool((p.view(-1).view(torch.uint8) == 7).all()) for p in places)


def test_as_one_process_from_one_copy():
    alone = on_one(plan_of(**STREAMED))
    results = run_ranks(2, streamed, plan_of(**STREAMED))
    for result, *_ in results:
        assert_same(result, alone)
    assert results[0][1] == [] and results[1][1] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert results[0][2] == results[1][2] and all(shown for *_, shown in results), "the same memory"


def test_nothing_is_left_in_the_file_system(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Where there is no memfd the memory is a file, unlinked when all have it."""
    from fitune.parallel.shared import shared_buffer
    from fitune.parallel.world import Single

    monkeypatch.delattr("os.memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    buffer = shared_buffer(Single(), 8192, pin=False)
    buffer.tensor.fill_(3)
    assert int(buffer.tensor.sum()) == 3 * 8192 and list(tmp_path.iterdir()) == []
