"""The words of `fitune predict` in English and Chinese, side by side so that neither can be forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.groups import LANGUAGES

_WORDS: dict[str, tuple[str, str]] = {
    "fits": ("fits on", "可以放入"),
    "fits_then": ("fits", "放得下"),
    "not_fits": ("does not fit on", "放不进"),
    "needs": ("needs {needed} of {budget}", "需要 {needed}，预算 {budget}"),
    "too_much": ("{excess} too much", "超出 {excess}"),
    "left": ("{left} to spare", "剩余 {left}"),
    "between": ("between {low} and {high}", "在 {low} 与 {high} 之间"),
    "may_not_fit": ("it may not fit", "可能放不下"),
    "may_fit": ("it may fit after all", "也可能放得下"),
    "where": ("Where it goes", "内存用在哪里"),
    "at_most": ("at most", "最多"),
    "at_peak": ("at the peak", "峰值时"),
    "total": ("together", "合计"),
    "budget": ("budget", "预算"),
    "budget_far": ("(the budget of {budget} is far to the right)", "（预算 {budget} 远在右侧之外）"),
    "phases": ("Each phase against the budget", "各阶段与预算"),
    "timeline": ("One training step, part by part", "一个训练步的各个部分"),
    "highest": ("highest: {size} in use, {place}", "最高：使用 {size}，{place}"),
    "stack_parts": ("What torch allocates in each part", "torch 在各部分分配的内存"),
    "techniques": ("What each technique takes off", "各项技术能省多少"),
    "no_help": ("No help here", "在此无效"),
    "fitting": ("The plan that fits", "放得下的计划"),
    "recomputed": ("{n} of {all} layers recomputed", "重算 {all} 层中的 {n} 层"),
    "streamed": ("weights of {n} of {all} layers streamed from RAM", "{all} 层中 {n} 层的权重从内存流式加载"),
    "head_streamed": ("head streamed from RAM", "输出层从内存流式加载"),
    "inputs_offloaded": ("layer inputs in RAM", "各层输入存于内存"),
    "fitting_fitune": ("What fits with fitune", "用 fitune 可行的计划"),
    "nearest": ("Would fit", "可行的改动"),
    "none_fits": ("No plan of this job fits.", "这项任务没有放得下的计划。"),
    "approximate": ("approximate", "近似"),
    "saves": ("takes off", "节省"),
    "then": ("then needs", "之后需要"),
    "step_time": ("about {step} a step", "每步约 {step}"),
    "ram": ("RAM", "内存（RAM）"),
    "disk": ("disk", "磁盘"),
    "pinned": ("pinned RAM", "锁页内存"),
    "load": ("load", "加载"),
    "first_step": ("first step", "第一步"),
    "step": ("step", "训练步"),
    "eval": ("evaluation", "评估"),
    "save": ("save", "保存"),
    "merge": ("merge", "合并"),
    "resume": ("resume", "恢复"),
    "embed": ("embed", "嵌入"),
    "forward": ("forward", "前向"),
    "tail": ("loss", "损失"),
    "backward": ("backward", "反向"),
    "update": ("update", "更新"),
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """Looks up a word in one language; a key that is none is shown as it is."""

    lang: str = "en"

    def __call__(self, key: str, **values: object) -> str:
        pair = _WORDS.get(key)
        text = pair[LANGUAGES.index(self.lang)] if pair else key.replace("_", " ")
        return text.format(**values) if values else text
