"""Host memory of loading on two ranks: one copy of the stored weights for both, nothing like one for each."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fitune.model.build import build, fill, weights_to_read
from fitune.model.source import resolve
from fitune.parallel.group import Group
from fitune.parallel.setup import finish_host_together, open_host_together
from fitune.plan import Plan
from tests.conftest import ROOT
from tests.parallel.jobs import plan_of
from tests.parallel.ranks import run_ranks
from tests.parallel.test_sharded import SHARDED
from tests.parallel.test_shared import STREAMED

LAYERS, HIDDEN, VOCABULARY = 10, 1024, 8192


def pss_bytes() -> int:
    """This process' memory, shared pages divided by how many map them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 260 MB of bf16 weights on the disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=2816, num_hidden_layers=LAYERS, num_attention_heads=16,
                         num_key_value_heads=4, vocab_size=VOCABULARY, tie_word_embeddings=False)  # fmt: skip
    with torch.device("meta"):
        made = LlamaForCausalLM(config).to(torch.bfloat16)
    made.to_empty(device="cpu")
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(0.01)
    made.save_pretrained(folder, max_shard_size="60MB")
    return folder


def load(group: Group, plan: Plan, model: str) -> tuple[int, int, int]:
    """Memory of loading above what was there before: at its highest, and what stays; size of one copy."""
    source = resolve(model, weights=True)
    built = build(source.config, plan, "cpu")
    group.barrier()
    before, highest, over = pss_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            highest[0] = max(highest[0], pss_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    open_host_together(built, plan, group, None)
    fill(built, source.iter_weights(weights_to_read(built)), plan)
    finish_host_together(built, plan, group)
    over.set()
    watcher.join()
    group.barrier()
    after = pss_bytes()
    group.barrier()
    layers = build(source.config, plan.with_(**STREAMED | dict(base_format=plan.base_format)), "meta").streamed
    assert layers is not None
    ends = 2 * source.config.vocab_size * source.config.hidden_size * 2
    return max(highest[0], after) - before, after - before, layers.total_bytes + ends


@pytest.mark.parametrize(("way", "base_format"), [("streamed", "bf16"), ("streamed", "nf4"), ("fsdp2", "nf4")])
def test_loading_takes_little_beside_what_stays(model: Path, way: str, base_format: str):
    """What stays is, on the host, one copy for both ranks, or nothing: parts are on the devices (here the CPU too).
    `benchmarks/load_memory.py` does it with 3B weights."""
    where = STREAMED if way == "streamed" else SHARDED
    changes: dict[str, Any] = where | dict(base_format=base_format, precision="bf16", num_layers=LAYERS)
    told = run_ranks(2, load, plan_of(**changes, world_size=2), str(model))
    copy = told[0][2]
    peak, stays = (sum(rank[i] for rank in told) for i in (0, 1))
    assert copy > (80 << 20)
    figures = f"peak {peak / copy:.2f}, stays {stays / copy:.2f} copies of {copy / 2**20:.0f} MiB"
    # A tensor as it is read and one piece of it being packed (20 bytes a value), on each rank: no share of the model.
    largest, piece = 2 * VOCABULARY * HIDDEN, 20 << 19
    assert peak - stays <= 2 * (largest + piece), figures
    if way == "streamed":
        assert stays <= 1.05 * copy + (24 << 20), figures  # the ranks' own libraries, first used here
        if base_format == "bf16":
            assert peak <= 1.15 * copy, figures


def test_a_3b_model_was_loaded_once_per_machine():
    files = sorted((ROOT / "benchmarks" / "results").glob("load-memory-cpu-*.json"))
    records = {record["name"]: record for record in json.loads(files[-1].read_text())}
    ways, formats = ("ddp", "streamed", "fsdp2"), ("bf16", "nf4")
    assert records.keys() == {f"load {way} {base_format}" for way in ways for base_format in formats}
    assert all(record["host_ratio"] <= 1.15 for record in records.values())
