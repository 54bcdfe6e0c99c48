"""Host memory while several ranks of one machine load a model: what loading takes beside what stays.

    python benchmarks/load_memory.py                     Llama-3.2-3B's shape, two ranks, every layout and format;
                                                         to benchmarks/results/load-memory-cpu-<date>.json
    python benchmarks/load_memory.py --only streamed     the cases whose name has this in it, printed and not stored
    python benchmarks/load_memory.py --layers 4          a shorter model, printed and not stored

Each rank is a process that calls `fitune.train.session.load_model`, as a run does. The files hold zeros (a sparse file:
no disk is used). Measured is the sum over ranks of PSS (shared pages divided by who maps them) above what it was before
the loading, every 20 ms, from outside. The device is the CPU, so that what would be on the GPUs is in it (dense weights
stay in the file there, mapped, and are not). `extra_bytes` is the peak above what stays in the end; `host_ratio` is
that and all that stays and is on no device, as a share of one copy of the stored format: at most 1.15 is wanted.
Pages of libraries are in it: where other programs with the same libraries end meanwhile, the figures come out too high,
never too low. Linux only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RANKS = 2
SHAPE = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=3072, intermediate_size=8192,
    num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128, vocab_size=128256,
    max_position_embeddings=8192, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": dict(parallel="ddp"),
    "streamed": dict(parallel="streamed", stream_from="pageable", resident_layers=0, embedding_place="host",
                     head_place="host"),
    "fsdp2": dict(parallel="fsdp2", stream_from="shards", resident_layers=0),
}  # fmt: skip
FORMATS = ("bf16", "nf4")
EVERY_S = 0.02


def write_model(folder: Path, num_layers: int) -> None:
    """config.json, and a safetensors file whose data are a hole in the file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(SHAPE | dict(num_hidden_layers=num_layers)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, p in model.named_parameters():
        start, end = end, end + p.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(p.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def plan_of(case: str, num_layers: int) -> Any:
    from fitune.plan import Adapter, Plan

    layout, base_format = case.split()
    adapter = Adapter(r=8, alpha=16, dropout=0.0, bias="none", targets=("all-linear",))
    return Plan(
        model="zeros", num_layers=num_layers, method="lora", base_format=base_format, double_quant=True,
        adapter=adapter, device="cpu", device_name="cpu", precision="bf16", loss_scaling=False,
        attention="cpu", seq_len=512, batch=2, micro_batch=1, accumulation_order="micro-batch-major", packing=False,
        recompute_layers=num_layers, loss_chunk=256, optimizer="adamw", lr=1e-4, schedule="constant", warmup=0,
        weight_decay=0.0, clip=1.0, seed=0, budget_bytes=None, world_size=RANKS,
        **(dict(embedding_place="device") | LAYOUTS[layout]),
    )  # fmt: skip


def rank_main(case: str, folder: Path, num_layers: int) -> None:
    """One rank: load when told to, tell what stays."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  libraries are no part of loading

    from fitune.model.formats import load_bitsandbytes
    from fitune.model.source import resolve
    from fitune.parallel import world
    from fitune.parallel.group import Group
    from fitune.recipe import build as recipe_of
    from fitune.train.session import Session, load_model

    torch.set_num_threads(1)
    load_bitsandbytes()
    place = world.from_environment()
    assert place is not None
    group = Group(place, "cpu")
    source = resolve(str(folder), weights=True)
    recipe = recipe_of(dict(model=str(folder), data="demo", devices="cpu"))
    session = Session(recipe, source, source.config, None, None)  # type: ignore[arg-type]
    print("ready", flush=True)
    sys.stdin.readline()
    built = load_model(session, plan_of(case, num_layers), lambda name: None, group)
    print(json.dumps(stays(built, group)), flush=True)
    sys.stdin.readline()
    group.close()


def stays(built: Any, group: Any) -> dict[str, int]:
    """Bytes on this rank's device, and in the copy that the node shares (told by its first rank)."""
    tensors = [*built.model.parameters(), *built.model.buffers()]
    packed = [linear.packed for linear in built.linears.values() if linear.packed is not None]
    tensors += [tensor for each in packed for tensor in each.tensors.values()]
    shared: list[Any] = []
    backing = getattr(built.streamed, "backing", None)
    if hasattr(backing, "buffers"):
        shared = [buffer.tensor for buffer in backing.buffers.values()]
    elif backing is not None:
        tensors = [t for t in tensors if t.device.type != "meta"] + list(backing.parts.values())
    ends = [built.host_embedding.inner.weight] if built.host_embedding is not None else []
    ends += [built.host_head.weight] if built.host_head is not None else []
    sizes = lambda some: {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in some}  # noqa: E731
    on_host = sizes([*shared, *ends])
    on_device = {key: size for key, size in sizes(t for t in tensors if t.device.type == "cpu").items()
                 if key not in on_host}  # fmt: skip
    return {"device_bytes": sum(on_device.values()), "shared_bytes": sum(on_host.values()) if group.leads_node else 0}


def pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def measure(case: str, folder: Path, num_layers: int) -> dict[str, Any]:
    """One case, by processes of its own."""
    from fitune.parallel.launch import free_port
    from fitune.parallel.world import World

    port = free_port()
    command = [sys.executable, __file__, "--rank", case, "--folder", str(folder), "--layers", str(num_layers)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                         env=os.environ | World(rank, RANKS, rank, RANKS, port=port).environment())
        for rank in range(RANKS)
    ]  # fmt: skip
    lines = lambda: [process.stdout.readline() for process in processes]  # type: ignore[union-attr]  # noqa: E731
    total = lambda: sum(pss_bytes(process.pid) for process in processes)  # noqa: E731

    def tell() -> None:
        for process in processes:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

    assert lines() == ["ready\n"] * RANKS
    before, highest, over = total(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            highest[0] = max(highest[0], total())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    tell()
    told = [json.loads(line) for line in lines()]
    seconds = time.perf_counter() - started
    over.set()
    watcher.join()
    after = total() - before
    tell()
    for process in processes:
        assert process.wait() == 0
    device, shared = (sum(rank[key] for rank in told) for key in ("device_bytes", "shared_bytes"))
    peak = max(highest[0] - before, after)
    return {"peak_bytes": peak, "extra_bytes": peak - after, "after_bytes": after, "device_bytes": device,
            "shared_bytes": shared, "seconds": round(seconds, 1)}  # fmt: skip


def host_bytes(found: dict[str, Any]) -> int:
    """What loading takes on the host, by the figures of `measure`."""
    other = max(0, found["after_bytes"] - found["device_bytes"] - found["shared_bytes"])
    return int(found["extra_bytes"] + found["shared_bytes"] + other)


def copy_bytes(base_format: str, num_layers: int) -> int:
    """One copy of the model in the stored format: layers packed, the ends in bf16."""
    from transformers import LlamaConfig

    from fitune.model.build import build

    plan = plan_of(f"streamed {base_format}", num_layers)
    built = build(LlamaConfig(**{**SHAPE, "num_hidden_layers": num_layers}), plan, "meta")
    assert built.streamed is not None and built.host_head is not None
    return int(built.streamed.total_bytes + built.host_head.weight.numel() * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.folder, options.layers)
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from bench import Records, header

    whole = options.layers == SHAPE["num_hidden_layers"] and not options.only
    records = Records(RESULTS / f"load-memory-cpu-{datetime.date.today().isoformat()}.json")
    with tempfile.TemporaryDirectory() as temp:
        write_model(Path(temp), options.layers)
        for case in (f"{layout} {base_format}" for layout in LAYOUTS for base_format in FORMATS):
            if options.only not in case:
                continue
            copy = copy_bytes(case.split()[1], options.layers)
            found = measure(case, Path(temp), options.layers)
            ratio = host_bytes(found) / copy
            print(case, {key: round(value / 2**20) if "bytes" in key else value for key, value in found.items()},
                  f"copy {copy / 2**20:.0f} MiB, host ratio {ratio:.3f}", flush=True)  # fmt: skip
            if whole:
                model = SHAPE | dict(num_hidden_layers=options.layers)
                records.add(header(f"load {case}") | {"model": model, "ranks": RANKS, "copy_bytes": copy,
                                                      "measured": found, "host_ratio": round(ratio, 4)})  # fmt: skip


if __name__ == "__main__":
    main()
