"""Host memory of loading on two ranks: one copy of the stored weights for both, nothing like one for each."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import threading
from collections.abc import Iterator
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

LAYERS, HIDDEN, VOCABULARY = 6, 1024, 8192
M_MMAP_THRESHOLD = -3  # of malloc.h


def held_bytes() -> int:
    """This process' own and shared memory, shared pages divided by how many map them. Without pages of files: of the
    libraries' a process has a larger share whenever another one ends."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024


def settled_bytes() -> int:
    """What is in use: without what waits for the collector, or is kept by malloc for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return held_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 170 MB of bf16 weights on the disk."""
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


def load(group: Group, plan: Plan, model: str) -> tuple[int, int, int, int]:
    """Memory of loading above what was there before: at its highest, and what stays; size of one copy; the most pieces
    of the files that were mapped at once."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # larger blocks go back to the system when they are let go
    source = resolve(model, weights=True)
    # What is used for the first time is no part of it, nor are pages shared with the process this one was forked from,
    # which the first collection takes copies of.
    one_layer = copy.deepcopy(source.config)
    one_layer.num_hidden_layers = 1
    filled(build(one_layer, plan.with_(num_layers=1), "cpu"), source, plan, group, [])
    built, mapped = build(source.config, plan, "cpu"), [0]
    group.barrier()
    before, highest, over = settled_bytes(), [0], threading.Event()
    group.barrier()

    def watch() -> None:
        while not over.wait(0.01):
            highest[0] = max(highest[0], held_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    filled(built, source, plan, group, mapped)
    over.set()
    watcher.join()
    group.barrier()
    after = settled_bytes()
    group.barrier()
    layers = build(source.config, plan.with_(**STREAMED | dict(base_format=plan.base_format)), "meta").streamed
    assert layers is not None
    ends = 2 * source.config.vocab_size * source.config.hidden_size * 2
    return max(highest[0], after) - before, after - before, layers.total_bytes + ends, max(mapped)


def filled(built: Any, source: Any, plan: Plan, group: Group, mapped: list[int]) -> None:
    """Load as a run does; `mapped` gets how often the model's files are mapped, as each weight comes."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for each in source.iter_weights(weights_to_read(built)):
            mapped.append(Path("/proc/self/maps").read_text().count(".safetensors"))
            yield each

    open_host_together(built, plan, group, None)
    fill(built, weights(), plan)
    finish_host_together(built, plan, group)


@pytest.mark.parametrize(("way", "base_format"), [("streamed", "bf16"), ("streamed", "nf4"), ("fsdp2", "nf4")])
def test_loading_takes_little_beside_what_stays(model: Path, way: str, base_format: str):
    """What stays is, on the host, one copy for both ranks, or nothing: parts are on the devices (here the CPU too).
    `benchmarks/load_memory.py` does it with 3B weights."""
    where = STREAMED if way == "streamed" else SHARDED
    changes: dict[str, Any] = where | dict(base_format=base_format, precision="bf16", num_layers=LAYERS)
    told = run_ranks(2, load, plan_of(**changes, world_size=2), str(model))
    copy = told[0][2]
    peak, stays = (sum(rank[i] for rank in told) for i in (0, 1))
    assert copy > (60 << 20)
    figures = f"peak {peak / copy:.2f}, stays {stays / copy:.2f} copies of {copy / 2**20:.0f} MiB"
    # A tensor as it is read and one piece of it being packed (20 bytes a value), on each rank: no share of the model.
    largest, piece = 2 * VOCABULARY * HIDDEN, 20 << 19
    assert peak - stays <= 2 * (largest + piece), figures
    assert all(mapped <= 4 for *_, mapped in told), "weights that were read before are still there"
    once = copy if way == "streamed" else copy - 2 * largest  # dense weights on a CPU stay in the files, mapped
    assert stays <= 1.05 * once + (2 << 20), figures
    if base_format == "bf16":
        assert peak <= 1.15 * copy, figures


def test_a_3b_model_was_loaded_once_per_machine():
    files = sorted((ROOT / "benchmarks" / "results").glob("load-memory-cpu-*.json"))
    records = {record["name"]: record for record in json.loads(files[-1].read_text())}
    ways, formats = ("ddp", "streamed", "fsdp2"), ("bf16", "nf4")
    assert records.keys() == {f"load {way} {base_format}" for way in ways for base_format in formats}
    assert all(record["host_ratio"] <= 1.15 for record in records.values())
