"""What a plan asks of a person beside the card: download, disk, RAM, time; how an alternative differs; what to type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from fitune.cli.words import Table, Words
from fitune.parallel.world import SAME_RECORDS
from fitune.planner.sentences import duration
from fitune.units import format_bytes, format_duration

NEEDS: Table = {
    "download": ("download {size}", "下载 {size}"),
    "disk": ("disk {size}", "磁盘 {size}"),
    "merged": (" ({size} more for a merged model)", "（合并后的模型另需 {size}）"),
    "ram": ("RAM {size}", "内存 {size}"),
    "pinned": (" ({size} of it pinned)", "（其中锁页 {size}）"),
    "step": ("about {time} a step ({low} to {high}), {rate} tokens/s{basis}",
             "每步约 {time}（{low} 至 {high}），每秒 {rate} 个 token{basis}"),
    "comma": (", ", "，"),
    "needs": ("Besides: ", "此外需要："),
    "next": ("To train it there: {command}", "在该机器上训练：{command}"),
    "recompute": ("{n} of {all} layers recomputed", "重算 {all} 层中的 {n} 层"),
    "streamed": ("{n} streamed", "流式加载 {n} 层"),
    "offloaded": ("inputs in RAM", "层输入放在内存"),
    "batch_whole": ("batch {all}", "批大小 {all}"),
    "batch": ("batch {all} as {n} x {times}", "批大小 {all}（{n} x {times}）"),
    "batch_each": ("batch {all} as {n} x {times} on each of {gpus} GPUs",
                   "批大小 {all}（{gpus} 块 GPU，每块 {n} x {times}）"),
    "batch_process": ("batch {all} as {n} x {times} on each of {gpus} processes",
                      "批大小 {all}（{gpus} 个进程，每个 {n} x {times}）"),
    "batch_as": ("batch {all} as {parts}", "批大小 {all}（{parts}）"),
    "a_step": ("{time} a step", "每步 {time}"),
    # where a time comes from; what was measured or calibrated needs no word
    "kin": ("; not verified on this card", "；未在此卡上验证"),
    "catalog": ("; from the card's data sheet, not verified", "；据显卡参数估计，未验证"),
    "doubtful": ("; from doubtful data, not verified", "；据存疑的数据估计，未验证"),
    "cpu": ("; a rough guess", "；粗略估计"),
    "measured": ("", ""), "calibrated": ("", ""), "None": ("", ""),
}  # fmt: skip


def needs_line(result: Mapping[str, Any], lang: str) -> str:
    """Download, disk and RAM; empty where none of them is known."""
    words = Words(lang, NEEDS)
    predicted = result.get("predicted") or {}
    phases = predicted.get("phases") or {}
    load = (phases.get("load") or {}).get("disk") or {}
    saved, merged = (sum(((phases.get(name) or {}).get("disk") or {}).values()) for name in ("save", "merge"))
    parts = []
    if load.get("model files"):
        parts.append(words("download", size=format_bytes(load["model files"])))
    if load or saved:
        more = words("merged", size=format_bytes(merged)) if merged else ""
        parts.append(words("disk", size=format_bytes(sum(load.values()) + saved)) + more)
    if predicted.get("host_bytes") and (result.get("plan") or {}).get("device") == "cuda":
        pinned = predicted.get("pinned_bytes")
        part = words("pinned", size=format_bytes(pinned)) if pinned else ""
        parts.append(words("ram", size=format_bytes(predicted["host_bytes"])) + part)
    return words("needs") + words("comma").join(parts) if parts else ""


def speed_line(predicted: Mapping[str, Any], lang: str) -> str:
    """Step time with its interval, tokens/s, and whether that was measured; empty where no time is predicted."""
    words = Words(lang, NEEDS)
    if predicted.get("step_s") is None or predicted.get("step_low_s") is None:
        return ""
    times = {key: duration(format_duration(predicted[name]), lang)
             for key, name in (("time", "step_s"), ("low", "step_low_s"), ("high", "step_high_s"))}  # fmt: skip
    return words("step", **times, rate=f"{predicted['tokens_per_s']:,.0f}", basis=words(str(predicted["step_basis"])))


def batch_text(plan: Mapping[str, Any], lang: str) -> str:
    """A step's records: the micro-batch x how often, on each GPU where they share the records."""
    words, micro, batch = Words(lang, NEEDS), plan["micro_batch"], plan["batch"]
    parts = [share["records"] for share in plan.get("shares") or []]
    if parts and sum(parts) == batch:
        return words("batch_as", all=batch, parts=" + ".join(map(str, parts)))
    gpus = (plan.get("world_size") or 1) if plan.get("parallel") not in SAME_RECORDS else 1
    share = -(-batch // gpus)
    if gpus > 1:
        key = "batch_process" if plan.get("device") == "cpu" else "batch_each"
        return words(key, all=batch, n=micro, times=-(-share // micro), gpus=gpus)
    return words("batch_whole" if micro == batch else "batch", all=batch, n=micro, times=-(-batch // micro))


def how_line(entry: Mapping[str, Any], lang: str) -> str:
    """An alternative: what it does with the card, its peak and its time."""
    words, plan, predicted = Words(lang, NEEDS), entry["plan"], entry.get("predicted") or {}
    layers = plan["num_layers"]
    parts = [str(plan["base_format"]), batch_text(plan, lang),
             words("recompute", n=plan["recompute_layers"], all=layers)]  # fmt: skip
    if plan.get("stream_from", "none") != "none" and plan.get("resident_layers") is not None:
        parts.append(words("streamed", n=layers - plan["resident_layers"]))
    parts += [words("offloaded")] * bool(plan.get("offload_inputs"))
    peak = next((predicted[k] for k in ("device_bytes", "peak_allocated_bytes") if predicted.get(k) is not None), None)
    found = [format_bytes(peak)] if peak is not None else []
    if predicted.get("step_s") is not None:
        found.append(words("a_step", time=duration(format_duration(predicted["step_s"]), lang)))
    end = (": " if lang == "en" else "：") + words("comma").join(found) if found else ""
    return words("comma").join(parts) + end


def next_line(settings: Mapping[str, Any], lang: str) -> str:
    """The command that trains what was planned.

    Args:
        settings: what was asked for (`Recipe.as_dict()`).
    """
    options = ["fitune", "train", str(settings["model"])]
    for name, value in settings.items():
        if name in ("model", "gpu", "ram", "wsl", "nproc", "lang"):  # of the machine that was imagined
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            options += [flag, ",".join(f"{k}={v}" for k, v in value.items())]
        else:
            options += [flag, ",".join(map(str, value)) if isinstance(value, list) else f"{value:g}"
                        if isinstance(value, float) else str(value)]  # fmt: skip
    command = shlex.join(options) + ("" if "data" in settings else " --data FILE")
    return Words(lang, NEEDS)("next", command=command)
