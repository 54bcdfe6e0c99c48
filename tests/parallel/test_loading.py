"""Host memory of loading on two ranks: one copy of the stored weights for both, nothing like one for each."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fitune.model.build import build, fill, weights_to_read
from fitune.model.source import resolve
from fitune.parallel.group import Group
from fitune.parallel.shared import close_shared, open_shared
from fitune.plan import Plan
from tests.parallel.jobs import plan_of
from tests.parallel.ranks import run_ranks
from tests.parallel.test_shared import STREAMED

LAYERS = 10


def pss_bytes() -> int:
    """This process' memory, shared pages divided by how many map them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 260 MB of bf16 weights on the disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=LAYERS, num_attention_heads=16,
                         num_key_value_heads=4, vocab_size=8192, tie_word_embeddings=False)  # fmt: skip
    with torch.device("meta"):
        made = LlamaForCausalLM(config).to(torch.bfloat16)
    made.to_empty(device="cpu")
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(0.01)
    made.save_pretrained(folder, max_shard_size="60MB")
    return folder


def load(group: Group, plan: Plan, model: str) -> tuple[int, int, int]:
    """(memory before, the highest while loading, size of one copy)."""
    source = resolve(model, weights=True)
    built = build(source.config, plan, "cpu")
    group.barrier()
    before, highest, over = pss_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            highest[0] = max(highest[0], pss_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    open_shared(built, plan, group)
    fill(built, source.iter_weights(weights_to_read(built)), plan)
    close_shared(built, group)
    highest[0] = max(highest[0], pss_bytes())
    over.set()
    watcher.join()
    assert built.streamed is not None and built.host_head is not None and built.host_embedding is not None
    ends = [built.host_head.weight, built.host_embedding.weight]
    return before, highest[0], built.streamed.total_bytes + sum(t.numel() * t.element_size() for t in ends)


@pytest.mark.parametrize("base_format", ["bf16", "nf4"])
def test_one_copy_for_two_ranks(model: Path, base_format: str):
    changes: dict[str, Any] = STREAMED | dict(base_format=base_format, precision="bf16", num_layers=LAYERS)
    told = run_ranks(2, load, plan_of(**changes), str(model))
    copy = told[0][2]
    used = sum(highest - before for before, highest, _ in told)
    assert copy > (40 << 20)
    # Packing a tensor takes a few times its size for a moment, whatever the model's size.
    allowed = 1.15 * copy if base_format == "bf16" else copy + (112 << 20)
    assert used <= allowed, f"{used / copy:.2f} copies of {copy / 2**20:.0f} MiB"
