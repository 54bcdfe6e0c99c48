"""The words of a plan on the terminal, in English and Chinese, side by side so that neither can be forgotten."""

from __future__ import annotations

from fitune.cli.words import Table

PLAN: Table = {
    "fits": ("{model} fits on {place}", "{model} 可以放入 {place}"),
    "not_fits": ("{model} does not fit on {place}", "{model} 放不进 {place}"),
    "peak": (": {needed} at the peak", "：峰值 {needed}"),
    "peak_of": (": {needed} of {budget}{each} at the peak", "：{each}峰值 {needed}，预算 {budget}"),
    "needs": (": it needs {needed}{each}", "：{each}需要 {needed}"),
    "needs_of": (": it needs {needed}{each}, there are {budget}", "：{each}需要 {needed}，只有 {budget}"),
    "each": (" on each", "每块"),
    "full": ("full fine-tuning", "全参数微调"),
    "double": (" (double quantisation)", "（双重量化）"),
    "job": ("{method} on {article} {base} base, {precision}, {steps}, up to {seq_len} tokens",
            "{method}，底座 {base}，{precision}，{steps}，最长 {seq_len} 个 token"),
    "batch": ("batch {batch}", "批大小 {batch}"),
    "note": ("note: {note}", "注：{note}"),
    "decision": ("decision", "决定"),
    "value": ("value", "取值"),
    "exact": ("exact", "精确"),
    "yes": ("yes", "是"),
    "approximate": ("approx.", "近似"),
    "phase": ("phase", "阶段"),
    "memory": ("memory", "显存"),
    "of": ("of {budget}", "预算 {budget}"),
    "host": ("host RAM", "内存"),
    "a_step": ("about {time} a step", "每步约 {time}"),
    "rate": (", {rate} tokens/s", "，每秒 {rate} 个 token"),
    "would_fit": ("Would fit: {text}", "可行的改动：{text}"),
    "also_fits": ("Also fits: {text}", "另一可行计划：{text}"),
}  # fmt: skip
