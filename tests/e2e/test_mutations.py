"""A corpus of damaged files, made by flipping, cutting, repeating and inserting bytes, the same one each time: every
reader either reads such a file or refuses it with a message."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fitune import plan as plans
from fitune import recipe as recipes
from fitune.data import readers
from fitune.errors import UserError
from fitune.model import checkpoint as weights
from fitune.model import configs, gguf
from fitune.train import checkpoint, events
from fitune.train.run_folder import RunFolder
from tests import tiny
from tests.train.tiny_run import questions

SHORT = 60  # mutations of each file


def mutate(content: bytes, seed: int) -> bytes:
    """One to eight changes, each of a kind and at a place that `seed` gives."""
    chance, data = random.Random(seed), bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(max(1, len(data)))
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and data:
            data[at] = chance.choice((0, 0x22, 0x5B, 0x7B, 0x2D, 0x39, 0x7F, 0xFF))
        elif kind == 2:
            del data[at : at + chance.choice((1, 4, 64))]
        elif kind == 3:
            data[at:at] = data[at : at + chance.choice((1, 8, 200))]
        elif kind == 4:
            data[at:at] = chance.randbytes(chance.choice((1, 4, 16)))
        else:
            del data[at:]
    return bytes(data)


def weights_file(folder: Path, base: Path) -> Path:
    shutil.copyfile(base / "model.safetensors", folder / "model.safetensors")
    return folder / "model.safetensors"


def read_weights(path: Path) -> None:
    for tensor in weights.open_folder(path.parent).values():
        tensor.read()


def index_file(folder: Path, base: Path) -> Path:
    weights_file(folder, base)
    names = dict.fromkeys(("a", "b", "c"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder / "model.safetensors.index.json"


def config_file(folder: Path, base: Path) -> Path:
    shutil.copyfile(base / "config.json", folder / "config.json")
    return folder / "config.json"


def read_config(path: Path) -> None:
    from fitune.model.source import resolve

    configs.read(path)
    resolve(str(path.parent), weights=False)


def gguf_file(folder: Path, base: Path) -> Path:
    import gguf as library

    writer = library.GGUFWriter(str(folder / "x.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "x.gguf"


def read_gguf(path: Path) -> None:
    gguf._folder(path)
    gguf._commonest(gguf._reader(path))


def data_file(suffix: str) -> Callable[[Path, Path], Path]:
    def make(folder: Path, base: Path) -> Path:
        path, rows = folder / f"data{suffix}", questions(6)
        if suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), path)
        elif suffix == ".csv":
            path.write_text("prompt,response\n" + "".join(f'"{r["prompt"]}","{r["response"]}"\n' for r in rows))
        elif suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return make


def read_data(path: Path) -> None:
    readers.read_file(path)


def plan_file(folder: Path, base: Path) -> Path:
    (folder / "plan.json").write_text(tiny.make_plan().to_json())
    return folder / "plan.json"


def recipe_file(folder: Path, base: Path) -> Path:
    text = "model: smollm2\ndata: demo\nlr: 1e-3\nlora_targets: [q_proj, v_proj]\nbatch: 4\n"
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


def events_file(folder: Path, base: Path) -> Path:
    plan_file(folder, base)
    recipe_file(folder, base)
    with events.EventLog(folder / "events.jsonl") as log:
        log.write("start", steps=3, device_name="CPU")
        for step in (1, 2, 3):
            log.write("step", step=step, loss=1.0 / step, tokens=5)
        log.write("end", status="done", step=3, seconds=1.0)
    return folder / "events.jsonl"


def checkpoint_file(name: str) -> Callable[[Path, Path], Path]:
    def make(folder: Path, base: Path) -> Path:
        import torch

        tensors = {"parameter|a": torch.ones(4, 3), "optimizer|a|exp": torch.zeros(4, 3)}
        path, _ = checkpoint.save(folder, 3, tensors, {"scale": 1.0}, keep=2)
        return path / name

    return make


def read_checkpoint(path: Path) -> None:
    checkpoint.load_latest(path.parent.parent)


FILES: dict[str, tuple[Callable[[Path, Path], Path], Callable[[Path], object]]] = {
    "safetensors": (weights_file, read_weights),
    "index": (index_file, read_weights),
    "config": (config_file, read_config),
    "gguf": (gguf_file, read_gguf),
    "jsonl": (data_file(".jsonl"), read_data),
    "json": (data_file(".json"), read_data),
    "csv": (data_file(".csv"), read_data),
    "parquet": (data_file(".parquet"), read_data),
    "plan": (plan_file, lambda path: plans.from_json(path.read_bytes().decode("utf-8", "replace"))),
    "recipe": (recipe_file, lambda path: recipes.build(recipes.load(path))),
    "events": (events_file, lambda path: RunFolder(path.parent).info()),
    "parameters of a checkpoint": (checkpoint_file("parameters.safetensors"), read_checkpoint),
    "numbers of a checkpoint": (checkpoint_file("state.json"), read_checkpoint),
    "manifest of a checkpoint": (checkpoint_file("manifest.json"), read_checkpoint),
}  # fmt: skip


def survey(kind: str, folder: Path, base: Path, count: int, first_seed: int) -> tuple[int, int]:
    """(files that were read, files that were refused) of `count` mutations; anything else than these fails."""
    make, read = FILES[kind]
    path = make(folder, base)
    whole = path.read_bytes()
    read(path)
    taken = refused = 0
    for seed in range(first_seed, first_seed + count):
        path.write_bytes(mutate(whole, seed))
        try:
            read(path)
            taken += 1
        except UserError as error:
            assert error.what and (error.why or error.fix), seed
            refused += 1
    return taken, refused


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(kind: str, tmp_path: Path, base: Path):
    taken, refused = survey(kind, tmp_path, base, SHORT, first_seed=0)
    assert taken + refused == SHORT and refused >= (0 if kind in ("events", "recipe", "csv") else 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", FILES)
def test_many_damaged_files(kind: str, tmp_path: Path, base: Path):
    assert sum(survey(kind, tmp_path, base, 3000, first_seed=1000)) == 3000
