"""A realistic run folder without training: for the tests of the report, the run list and the loggers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from fitune.plan import Adapter, Plan, Reason
from fitune.recipe import build
from fitune.train.events import EventLog
from fitune.train.run_folder import RunFolder
from fitune.units import GIB, MIB

BEGIN_S = 1_780_000_000.0
PROMPTS = {
    "en": ("Why does training need more memory than inference?", "It is because the model is larger.",
           "Training also keeps the gradients, the optimizer state and the activations of every layer; "
           "inference keeps only the weights and a small cache."),
    "zh": ("为什么训练比推理占用更多显存？", "因为模型很大。",
           "训练除了权重，还要保存梯度、优化器状态和每一层的激活值；推理只需要权重和少量缓存。"),
}  # fmt: skip
REASONS = (
    Reason("method", "lora", "asked for: adapters on a frozen base"),
    Reason("base_format", "nf4", "bf16 weights (14.96 GiB) do not fit 9.20 GiB; nf4 takes 4.01 GiB", exact=False),
    Reason("precision", "bf16", "the card computes in bf16", exact=False),
    Reason("attention", "flash", "never holds the matrix of scores"),
    Reason("micro_batch", "1", "two records of 2048 tokens would need 10.41 GiB; 8 micro-batches make one step"),
    Reason("recompute_layers", "20 of 32", "keeping the activations of 12 layers fits, of 13 does not"),
    Reason("loss_chunk", "1024", "full logits would take 1.96 GiB"),
    Reason("optimizer", "adamw", "the states of 41.9 M trained weights take 0.31 GiB"),
)


def make_plan(device: str = "cuda", *, predicted: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """The plan of an 8B QLoRA run on a 10 GiB card, or of the demo on a CPU."""
    on_gpu = device == "cuda"
    if predicted is None:
        predicted = predictions(on_gpu)
    plan = Plan(
        model="meta-llama/Llama-3.1-8B" if on_gpu else "smollm2", num_layers=32 if on_gpu else 30, method="lora",
        base_format="nf4" if on_gpu else "fp32", double_quant=True,
        adapter=Adapter(16, 32.0, 0.0, "none", ("q_proj", "k_proj", "v_proj", "o_proj")),
        device=device, device_name="NVIDIA GeForce RTX 3080" if on_gpu else "Intel Xeon (2 cores)",
        precision="bf16" if on_gpu else "fp32", loss_scaling=False, embedding_place="device",
        attention="flash" if on_gpu else "sdpa", seq_len=2048, batch=8, micro_batch=1,
        accumulation_order="micro-batch-major",
        packing=False, recompute_layers=20, loss_chunk=1024, optimizer="adamw", lr=2e-4, schedule="cosine", warmup=0.03,
        weight_decay=0.0, clip=1.0, seed=0, budget_bytes=int(9.2 * GIB) if on_gpu else None, predicted=predicted,
        reasons=REASONS,
    )  # fmt: skip
    return plan.with_(**changes)


def predictions(on_gpu: bool) -> dict[str, Any]:
    if not on_gpu:
        size = int(2.1 * GIB)
        return {"host_bytes": size, "phases": {"step": {"peak_allocated_bytes": None, "host_bytes": size}}}
    gib = {"load": 5.61, "first_step": 8.64, "step": 8.71, "eval": 6.20, "save": None}
    phases = {
        phase: {
            "peak_allocated_bytes": None if size is None else int(size * GIB),
            "peak_reserved_bytes": None if size is None else int((size + 0.2) * GIB),
            "device_bytes": None if size is None else int((size + 0.45) * GIB),
            "host_bytes": None,
        }
        for phase, size in gib.items()
    }
    return {"peak_allocated_bytes": int(8.71 * GIB), "step_s": 2.5, "tokens_per_s": 6500.0, "phases": phases}


def make_run(
    out: Path,
    *,
    steps: int = 120,
    status: str | None = "done",
    stop_at: int | None = None,
    device: str = "cuda",
    evals: bool = True,
    samples: bool = True,
    nan_steps: tuple[int, ...] = (),
    resumed_from: int | None = None,
    begin: bool = True,
    prompts: dict[str, tuple[str, str, str]] = PROMPTS,
    notices: tuple[str, ...] = (),
    error: str | None = None,
    plan: Plan | None = None,
) -> RunFolder:
    """A run folder as training writes it, through the same classes.

    Args:
        status: of the end event; None leaves it out, as `kill -9` does.
        stop_at: the last step that ran (default: all).
        begin: False makes a run that was planned and never started.
    """
    plan = plan or make_plan(device)
    recipe = build({"model": plan.model, "data": "demo", "method": plan.method, "steps": steps, "out": str(out)})
    run = RunFolder.create(out, plan.model, recipe.to_yaml(), plan.to_json())
    if not begin:
        return run
    stop_at = steps if stop_at is None else stop_at
    events: list[dict[str, Any]] = [_start(steps, plan, None), _data(), _techniques()]
    events += [{"event": "notice", "text": text} for text in notices]
    if samples:
        events += [_sample("before", lang, prompt, answer) for lang, (prompt, answer, _) in prompts.items()]
    if evals:
        events.append(_eval(0, steps))
    events += _phases(device)[:2]
    for step in range(1, stop_at + 1):
        if resumed_from is not None and step == resumed_from + 1:
            events += [{"event": "end", "status": "interrupted", "step": resumed_from, "seconds": 100.0}]
            events += [_start(steps, plan, resumed_from)]
        events.append(_step(step, steps, device, step in nan_steps))
        if evals and steps >= 4 and step % (steps // 4) == 0:
            events.append(_eval(step, steps))
        if steps >= 10 and step % (steps // 10) == 0:
            events.append({"event": "checkpoint", "step": step, "path": f"checkpoints/step-{step}", "seconds": 1.2,
                           "bytes": 503 * MIB})  # fmt: skip
    events += _phases(device)[2:]
    if samples and status == "done":
        events += [_sample("after", lang, prompt, answer) for lang, (prompt, _, answer) in prompts.items()]
    if status is not None:
        events.append({"event": "end", "status": status, "step": stop_at, "seconds": stop_at * 2.52, "error": error})
    with EventLog(run.events_path) as log:
        for event in events:
            log.write(event.pop("event"), **event)
    _date_events(run)
    return run


def _techniques() -> dict[str, Any]:
    return {"event": "techniques", "used": [
        {"technique": "qlora", "used": True, "saves_bytes": 100 * GIB, "basis": "predicted"},
        {"technique": "flash_attention", "used": True, "saves_bytes": 7 * GIB // 2, "basis": "formula"},
        {"technique": "layer_major", "used": True, "saves_bytes": 0, "basis": "predicted"},
    ]}  # fmt: skip


def _date_events(run: RunFolder) -> None:
    """Spreads the events over the time that training would have taken."""
    now_s, lines = BEGIN_S, []
    for event in run.events():
        now_s += event.get("step_s") or (event.get("seconds") if event["event"] in ("eval", "checkpoint") else 0) or 0.5
        lines.append(json.dumps(event | {"time": round(now_s, 3)}, ensure_ascii=False))
    run.events_path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _start(steps: int, plan: Plan, resumed_from: int | None) -> dict[str, Any]:
    return {
        "event": "start", "fitune_version": "0.1.0", "torch_version": "2.13.0", "transformers_version": "5.24.0",
        "device_name": plan.device_name, "trainable": 41_943_040, "total": 8_072_204_288, "steps": steps,
        "resumed_from": resumed_from,
    }  # fmt: skip


def _data() -> dict[str, Any]:
    return {
        "event": "data", "layout": "messages", "template": "the model's own chat template",
        "lengths": {"records": 1024, "median": 231, "p95": 612, "longest": 1893, "longest_record": "demo.jsonl:417"},
        "dropped": {"empty answer": 2, "not text": 1}, "truncated": 0,
    }  # fmt: skip


def _loss(share: float) -> float:
    return 1.05 + 1.6 * math.exp(-5 * share)


def _step(step: int, steps: int, device: str, is_nan: bool) -> dict[str, Any]:
    noise = random.Random(step)
    tokens = noise.randint(1500, 3900)
    step_s = 2.4 + 0.25 * noise.random()
    return {
        "event": "step", "step": step, "loss": math.nan if is_nan else _loss(step / steps) + noise.gauss(0, 0.13),
        "tokens": tokens, "targets": int(tokens * 0.6), "step_s": step_s, "tokens_per_s": tokens / step_s * 4,
        "lr": 2e-4 * min(1.0, step / max(1, 0.03 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps)),
        "grad_norm": math.nan if is_nan else 0.6 + noise.random() * 0.4 + math.exp(-step / 10),
        "peak_allocated_bytes": int(8.69 * GIB) if device == "cuda" else None,
    }  # fmt: skip


def _eval(step: int, steps: int) -> dict[str, Any]:
    loss = _loss(step / steps) + 0.08
    return {"event": "eval", "step": step, "eval_loss": loss, "by_language": {"en": loss - 0.2, "zh": loss + 0.25},
            "seconds": 6.1}  # fmt: skip


def _sample(when: str, language: str, prompt: str, answer: str) -> dict[str, Any]:
    return {"event": "sample", "when": when, "language": language, "prompt": prompt, "answer": answer}


def _phases(device: str) -> list[dict[str, Any]]:
    gib = {"load": 5.60, "first_step": 8.66, "step": 8.69, "eval": 6.31, "save": 5.72}
    return [
        {
            "event": "phase", "phase": phase,
            "peak_allocated_bytes": int(size * GIB) if device == "cuda" else None,
            "peak_reserved_bytes": int((size + 0.23) * GIB) if device == "cuda" else None,
            "device_bytes": int((size + 0.47) * GIB) if device == "cuda" else None,
            "host_bytes": int((1.2 + size / 10) * GIB),
        }
        for phase, size in gib.items()
    ]  # fmt: skip
