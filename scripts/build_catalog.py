"""Regenerate fitune/catalog/{gpus.csv,clouds.csv,models.json} from a folder of collected facts.

    python scripts/build_catalog.py FACTS_FOLDER [--out fitune/catalog]

The folder holds ``gpus.csv``, ``clouds.csv`` and ``models/*.json`` with the columns read below. What this script adds
to the facts stands in the tables at the top of this file, each entry with its reason; nothing else is invented.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from pathlib import Path

GPU_COLUMNS = [
    "id", "name", "aliases", "vendor", "memory_kind", "cuda_total_gib", "driver_total_mib", "marketing_gb",
    "memory_gb_per_s", "fp16_tflops", "bf16_tflops", "fp32_tflops", "compute_capability", "bf16", "flash_attention",
    "pcie_gen", "pcie_lanes", "nvlink_gb_per_s", "tdp_w", "launch_year", "launch_price_usd", "source", "date",
    "tensor_basis", "doubt", "note",
]  # fmt: skip
CLOUD_COLUMNS = [
    "provider", "instance", "gpu_id", "num_gpus", "host_vcpus", "host_ram_gib", "usd_per_hour", "usd_per_hour_spot",
    "region", "status", "source", "date", "note",
]  # fmt: skip

# Names the driver prints which the facts do not list.
EXTRA_ALIASES = {
    "rtx-pro-6000-blackwell": ["RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition"],
    "rtx-pro-6000-blackwell-maxq": ["RTX PRO 6000 Blackwell Max-Q Workstation Edition"],
    "rtx-3050-ti-laptop": ["RTX 3050 Ti Laptop"],
    "v100-pcie-16gb": ["V100 PCIE"],
    "mi250x": ["MI250X"],
}

# HBM cards: the CUDA total lies closer to the driver total than on GDDR cards.
HBM = re.compile(r"^(tesla-p100|v100|a100|a800|a30$|h100|h800|h20$|h200|b200|mi\d|ascend)")
SHARED = re.compile(r"^(jetson|gb10)")
# Data-centre GDDR cards report with ECC on, which takes 1/16 of the memory (16 GB T4: 15360 MiB, 24 GB L4: 23034).
GDDR_ECC = {"t4", "a10", "a10g", "a16", "a40", "l4", "l20", "l40", "l40s"}

# The driver shows an MI250X as two devices, and training code sees devices: half of the card each.
HALVED = {"mi250x": "one of the two devices that the driver shows; the facts give the whole card"}

# Fields of config.json that change the mathematics (not the parameter count) and are absent from the collected facts.
# Recalled from the published configurations on 2026-11-30; where the class default is right nothing stands here.
EXTRA_CONFIG: dict[str, dict[str, object]] = {
    "google/gemma-2-27b": {"query_pre_attn_scalar": 144},
    "google/gemma-2-9b": {"query_pre_attn_scalar": 256},
    "google/gemma-2-2b": {"query_pre_attn_scalar": 256},
    "google/gemma-3-27b-it": {"query_pre_attn_scalar": 168},
    "microsoft/Phi-4-mini-instruct": {"partial_rotary_factor": 0.75},
    "facebook/opt-350m": {"do_layer_norm_before": False},
    "deepseek-ai/DeepSeek-V2-Lite": {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "topk_method": "greedy"},
    "Qwen/Qwen3-30B-A3B": {"norm_topk_prob": True},
    "Qwen/Qwen3-235B-A22B": {"norm_topk_prob": True},
}
EPSILON = {"llama": 1e-5, "mistral": 1e-5, "mixtral": 1e-5, "qwen2": 1e-6, "qwen3": 1e-6, "qwen3_moe": 1e-6}
EPSILON_BY_ID = {"01-ai/Yi-1.5-34B": 1e-6, "01-ai/Yi-1.5-6B": 1e-6, "01-ai/Yi-1.5-9B": 1e-6,
                 "deepseek-ai/deepseek-llm-7b-base": 1e-6}  # fmt: skip

# Models whose architecture transformers has no class for: the class with the same tensors, what it gets wrong, and a
# native model of similar size to train instead.
FOREIGN = {
    "internlm/internlm-7b": ("llama", "same tensors; q, k, v and o carry biases", "Qwen/Qwen2.5-7B"),
    "internlm/internlm2-7b": ("llama", "q, k and v are stored as one matrix", "Qwen/Qwen2.5-7B"),
    "internlm/internlm2_5-7b": ("llama", "q, k and v are stored as one matrix", "Qwen/Qwen2.5-7B"),
    "baichuan-inc/Baichuan2-7B-Base": ("llama", "q, k and v are stored as one matrix; the head is normalised",
                                       "Qwen/Qwen2.5-7B"),
    "baichuan-inc/Baichuan2-13B-Base": ("llama", "it uses ALiBi positions where the class uses rotary ones",
                                        "Qwen/Qwen2.5-14B"),
    "THUDM/chatglm3-6b": ("glm", "q, k and v are stored as one matrix", "01-ai/Yi-1.5-6B"),
    "THUDM/glm-4-9b": ("glm", "q, k and v are stored as one matrix", "THUDM/glm-4-9b-chat-hf"),
}  # fmt: skip
# Aliases of those that were converted to a native class by their publisher.
CONVERTED = {"THUDM/glm-4-9b": ["THUDM/glm-4-9b-chat-hf"]}

MODEL_FIELDS = [
    "id", "aliases", "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window",
    "sliding_pattern", "attention_bias", "qk_norm", "norms_per_layer", "mlp", "moe", "mla", "linear_attention",
    "word_embed_proj_dim", "dtype", "params_total", "params_active", "params_published", "params_published_source",
    "params_check",
    "params_outside_scope", "scope", "status", "licence", "licence_source", "chat_template", "chat_template_source",
    "note", "unconfirmed_fields",
]  # fmt: skip


def memory_kind(gpu_id: str) -> str:
    """``hbm``, ``shared`` (with the CPU), ``gddr_ecc`` or ``gddr``."""
    if HBM.match(gpu_id):
        return "hbm"
    if SHARED.match(gpu_id):
        return "shared"
    return "gddr_ecc" if gpu_id in GDDR_ECC else "gddr"


def gpu_row(fact: dict[str, str]) -> dict[str, str]:
    """One row of our gpus.csv; the memory figure goes to the column that its basis names."""
    gpu_id = fact["id"]
    aliases = [part for part in fact["aliases"].split(";") if part] + EXTRA_ALIASES.get(gpu_id, [])
    row = {
        "id": gpu_id, "name": fact["name"], "aliases": ";".join(dict.fromkeys(aliases)), "vendor": fact["vendor"],
        "memory_kind": memory_kind(gpu_id),
        "cuda_total_gib": fact["memory_gib"] if fact["memory_basis"] == "cuda total" else "",
        "driver_total_mib": fact["memory_driver_mib"], "marketing_gb": fact["memory_marketing_gb"],
        "memory_gb_per_s": fact["memory_gbps"], "fp16_tflops": fact["fp16_tensor_tflops_dense"],
        "bf16_tflops": fact["bf16_tensor_tflops_dense"], "fp32_tflops": fact["fp32_tflops"],
        "compute_capability": fact["compute_capability"], "bf16": fact["bf16"],
        "flash_attention": fact["flash_attention"], "pcie_gen": fact["pcie_gen"], "pcie_lanes": fact["pcie_lanes"],
        "nvlink_gb_per_s": "" if fact["nvlink"] == "none" else fact["nvlink"], "tdp_w": fact["tdp_w"],
        "launch_year": fact["launch_year"], "launch_price_usd": fact["launch_price_usd"], "source": fact["source"],
        "date": fact["date"], "tensor_basis": fact["tensor_basis"], "doubt": fact["doubt"], "note": fact["notes"],
    }  # fmt: skip
    if fact["memory_basis"] == "driver total" and not row["driver_total_mib"]:
        raise SystemExit(f"{gpu_id}: basis is the driver total, but the column is empty")
    if gpu_id in HALVED:
        for column in ("marketing_gb", "memory_gb_per_s", "fp16_tflops", "bf16_tflops", "fp32_tflops", "tdp_w"):
            row[column] = f"{float(row[column]) / 2:g}"
        row["name"] = "Instinct MI250X 64GB (one of two devices)"
        row["note"] = "; ".join([HALVED[gpu_id], row["note"]])
    return row


def cloud_row(fact: dict[str, str], marketing_gb: dict[str, float]) -> dict[str, str]:
    """One row of our clouds.csv; a host size that is the GPU memory repeated is left blank."""
    ram, note = fact["host_ram_gib"], fact["notes"]
    gpu_memory = int(fact["gpu_count"]) * marketing_gb[fact["gpu_id"]]
    if fact["provider"] in ("RunPod", "Paperspace") and ram and abs(float(ram) - gpu_memory) < 1:
        ram, note = "", "; ".join(filter(None, [note, "the source repeats the GPU memory as host RAM"]))
    return {
        "provider": fact["provider"], "instance": fact["instance"], "gpu_id": fact["gpu_id"],
        "num_gpus": fact["gpu_count"], "host_vcpus": fact["host_vcpu"], "host_ram_gib": ram,
        "usd_per_hour": fact["usd_per_hour_on_demand"], "usd_per_hour_spot": fact["usd_per_hour_spot"],
        "region": fact["region"], "status": fact["status"], "source": fact["source"], "date": fact["date"],
        "note": note,
    }  # fmt: skip


def model_row(fact: dict) -> dict:
    """One model without empty fields, its sources cut to ``repository@commit date (kind)``."""
    row = {field: fact[field] for field in MODEL_FIELDS if fact.get(field) not in (None, [], {}, "")}
    model_id = row["id"]
    extra: dict[str, object] = {**EXTRA_CONFIG.get(model_id, {})}
    epsilon = EPSILON_BY_ID.get(model_id, EPSILON.get(row["model_type"]))
    if epsilon:
        extra["rms_norm_eps"] = epsilon
    if extra:
        row["extra_config"] = extra
    if model_id in FOREIGN:
        row["nearest_class"], row["nearest_class_note"], row["native_alternative"] = FOREIGN[model_id]
        if model_id in CONVERTED:
            row["native_aliases"] = CONVERTED[model_id]
    lines = [source_line(source) for source in fact["sources"]]
    if fact.get("shape_taken_from"):
        lines.append(f"shape of {fact['shape_taken_from']}, its base model")
    row["sources"] = list(dict.fromkeys(lines)) or ["shape recalled on 2026-11-30; the parameter count confirms it"]
    return row


def source_line(source: dict) -> str:
    """``repository@commit date (kind)``, as far as known."""
    place = source.get("repo") or source.get("repository") or "unnamed"
    commit = (source.get("commit") or "")[:12]
    return f"{place}{'@' + commit if commit else ''} {source.get('date') or 'undated'} ({source.get('kind')})"


def write_csv(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    """Write rows with Unix line ends."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Read the facts, write the three files and print how many rows each has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "fitune" / "catalog")
    args = parser.parse_args()
    with (args.facts / "gpus.csv").open(encoding="utf-8") as handle:
        gpus = [gpu_row(fact) for fact in csv.DictReader(handle)]
    marketing_gb = {row["id"]: float(row["marketing_gb"]) for row in gpus}
    with (args.facts / "clouds.csv").open(encoding="utf-8") as handle:
        clouds = [cloud_row(fact, marketing_gb) for fact in csv.DictReader(handle)]
    files = sorted((args.facts / "models").glob("*.json"))
    models = [model_row(json.loads(file.read_text(encoding="utf-8"))) for file in files]
    write_csv(args.out / "gpus.csv", GPU_COLUMNS, gpus)
    write_csv(args.out / "clouds.csv", CLOUD_COLUMNS, clouds)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in models)
    text = f'{{"collected": "2026-11-30", "models": [\n{lines}\n]}}\n'
    (args.out / "models.json").write_text(text, encoding="utf-8")
    print(f"{len(gpus)} GPUs, {len(clouds)} instances, {len(models)} models")


if __name__ == "__main__":
    main()
