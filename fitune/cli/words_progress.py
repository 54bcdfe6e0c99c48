"""The words of a run that goes on, in English and Chinese, side by side so that neither can be forgotten."""

# ruff: noqa: E501  both languages of a text stand on one line

from __future__ import annotations

from fitune.cli.words import Table

PROGRESS: Table = {
    "run_folder": ("run folder: {path}", "运行目录：{path}"),
    "trained": ("training {n} of {all} parameters ({share})", "训练 {all} 个参数中的 {n} 个（{share}）"),
    "num_steps": ("{n} steps", "共 {n} 步"),
    "continuing": ("continuing after step {n}", "从第 {n} 步之后继续"),
    "on": ("{what} on {place}", "{what}，设备：{place}"),
    "loaded": ("model loaded", "模型已加载"),
    "loaded_with": ("model loaded: {memory}", "模型已加载：{memory}"),
    "host": ("host RAM {size}", "主机内存 {size}"),
    "step": ("step", "步"),
    "loss": ("loss {value}", "损失 {value}"),
    "tokens_per_s": ("{n} tokens/s", "每秒 {n} 个 token"),
    "link": ("{size} streamed at {rate}, waiting {share}", "流式传输 {size}，{rate}，等待 {share}"),
    "not_moved": ("nothing streamed, waiting {share}", "未传输权重，等待 {share}"),
    "left": ("{time} left", "剩余 {time}"),
    "evaluation": ("evaluation at step {n}: loss {value}", "第 {n} 步评估：损失 {value}"),
    "of_languages": (" ({parts})", "（{parts}）"),
    "before": ("before", "训练前"),
    "after": ("after", "训练后"),
    "checkpoint": ("checkpoint at step {n}", "第 {n} 步的检查点已保存"),
    "note": ("note: {text}", "注：{text}"),
    "done": ("done", "完成"),
    "interrupted": ("interrupted", "已中断"),
    "terminated": ("terminated", "已终止"),
    "failed": ("failed", "失败"),
    "ended": ("{status} after {time}", "{status}，用时 {time}"),
    "not_a_number": ("not a number", "不是数值"),
    "data": ("data: {layout}", "数据：{layout}"),
    "lengths": ("lengths: {parts}", "长度：{parts}"),
    "records": ("{n} records", "{n} 条"),
    "tokens": ("{n} tokens", "{n} 个 token"),
    "median": ("median {n}", "中位数 {n}"),
    "p95": ("95 % within {n}", "95 % 不超过 {n}"),
    "longest": ("longest {n}", "最长 {n}"),
    "longest_record": ("in row {n}", "在第 {n} 行"),
    "left_out": ("left out: {n} ({reason})", "丢弃：{n}（{reason}）"),
    "cut": ("cut at the sequence length: {n}", "按序列长度截断：{n}"),
    # after the run
    "streamed": ("streamed: {size} of weights at {rate}; {share} of the steps' time spent waiting for them", "流式传输：共 {size} 权重，{rate}；等待占各步时间的 {share}"),
    "report": ("report: {path}", "报告：{path}"),
    "next": ("next:   {commands}", "下一步：{commands}"),
    "continue": ("continue with: {command}", "继续训练：{command}"),
}  # fmt: skip

# `fitune runs`
RUNS: Table = {
    "none": ("no runs in {folder}; `fitune train` starts one, `fitune runs FOLDER` looks elsewhere", "{folder} 中没有训练；`fitune train` 开始一个，`fitune runs FOLDER` 查看别处"),
    "run": ("run", "训练"),
    "status": ("status", "状态"),
    "model": ("model", "模型"),
    "method": ("method", "方法"),
    "steps": ("steps", "步数"),
    "loss": ("loss", "损失"),
    "held_out": ("held out", "验证损失"),
    "from_to": ("{before} to {after}", "{before} 到 {after}"),
    "time": ("time", "用时"),
    "size": ("size", "大小"),
    "planned": ("planned", "尚未开始"),
    "running": ("running", "进行中"),
    "done": ("done", "已完成"),
    "interrupted": ("interrupted", "已中断"),
    "terminated": ("terminated", "已终止"),
    "failed": ("failed", "失败"),
    "killed": ("killed", "被强制结束"),
    "unreadable": ("unreadable", "无法读取"),
    "line": ("{name}: {text}", "{name}：{text}"),
}  # fmt: skip
