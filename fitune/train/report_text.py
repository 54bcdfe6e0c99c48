"""The words of the report in English and Chinese, and numbers as each language writes them."""

# ruff: noqa: E501  both languages of a text stand on one line

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.groups import LANGUAGES
from fitune.planner.sentences import duration
from fitune.units import format_duration

# Key -> (English, Chinese), side by side so that neither can be forgotten.
_WORDS: dict[str, tuple[str, str]] = {
    "title": ("fitune run", "fitune 训练报告"),
    "contents": ("Contents", "目录"),
    # status
    "planned": ("Not started", "尚未开始"),
    "running": ("Running", "进行中"),
    "done": ("Done", "已完成"),
    "interrupted": ("Interrupted", "已中断"),
    "terminated": ("Terminated", "已终止"),
    "failed": ("Failed", "失败"),
    "killed": ("Killed", "被强制结束"),
    "planned_text": ("The plan is made; nothing has been trained yet.", "计划已生成，训练尚未开始。"),
    "running_text": ("This page shows the run as it was at {time}.", "本页显示 {time} 时的训练状态。"),
    "interrupted_text": ("Stopped with Ctrl-C after step {step}; the state was saved.", "在第 {step} 步之后被 Ctrl-C 中断，状态已保存。"),
    "terminated_text": ("Stopped by the system (SIGTERM) after step {step}; the state was saved.", "在第 {step} 步之后被系统终止（SIGTERM），状态已保存。"),
    "failed_text": ("Stopped by an error after step {step}.", "在第 {step} 步之后因错误停止。"),
    "killed_text": ("Ended without a word after step {step}: kill -9, a power cut, or the system ran out of memory.", "在第 {step} 步之后突然结束：可能是 kill -9、断电或系统内存耗尽。"),
    "recovered": ("On the way it {story}.", "训练途中：{story}。"),
    "last_checkpoint": ("The last checkpoint is of step {step}.", "最后一个检查点在第 {step} 步。"),
    "no_checkpoint": ("There is no checkpoint yet.", "还没有检查点。"),
    # tiles
    "held_out_loss": ("Held-out loss", "验证损失"),
    "train_loss": ("Training loss", "训练损失"),
    "last_step": ("last step", "最后一步"),
    "steps": ("Steps", "步数"),
    "of_total": ("of {total}", "共 {total}"),
    "speed": ("Speed", "速度"),
    "tokens_per_s": ("tokens/s", "词元/秒"),
    "median": ("median", "中位数"),
    "peak_memory": ("Peak memory", "内存峰值"),
    "of_budget": ("of a budget of {budget}", "预算 {budget}"),
    "time": ("Time", "用时"),
    "started": ("started {time}", "开始于 {time}"),
    "trained_weights": ("Trained weights", "可训练参数"),
    "share_of": ("{share} of {total}", "占 {total} 的 {share}"),
    "not_measured": ("not measured", "未测量"),
    "not_computed": ("not computed", "未计算"),
    "not_recorded": ("not recorded", "未记录"),
    "none": ("none", "无"),
    # loss
    "loss": ("Loss", "损失"),
    "loss_chart": ("Loss per step", "每步损失"),
    "train_each": ("training, each step", "训练（每步）"),
    "train_smooth": ("training, averaged over about {span} steps", "训练（约 {span} 步平均）"),
    "each_step": ("each step", "每步"),
    "averaged": ("averaged over about {span} steps", "约 {span} 步平均"),
    "eval_all": ("held-out", "验证"),
    "eval_language": ("held-out, {language}", "验证（{language}）"),
    "before": ("Before", "训练前"),
    "after": ("After", "训练后"),
    "change": ("Change", "变化"),
    "records": ("Records", "数据"),
    "all": ("all", "全部"),
    "no_steps": ("No step has been recorded yet.", "还没有记录任何训练步。"),
    "no_eval": ("Nothing was held out for validation, so there is no held-out loss.", "没有留出验证数据，因此没有验证损失。"),
    "not_finite": ("The loss was not a number in {count} of {total} steps, first in step {step}. Those steps are gaps in the curve.", "{total} 步中有 {count} 步的损失不是有效数值，首次出现在第 {step} 步；曲线在这些步处断开。"),
    "step": ("step", "步"),
    "table": ("Values as a table", "以表格显示数值"),
    "table_thinned": ("Every {stride}th point; all are in events.jsonl.", "每 {stride} 个点显示一个；完整数据见 events.jsonl。"),
    # samples
    "samples": ("Answers before and after", "训练前后的回答"),
    "samples_text": ("The same questions, put to the model before the first and after the last step.", "同样的问题，分别在第一步之前和最后一步之后向模型提出。"),
    "question": ("Question", "问题"),
    # next
    "next": ("What next", "下一步"),
    "do_resume": ("Continue exactly where it stopped", "从停止处精确继续"),
    "do_start": ("Start it", "开始训练"),
    "do_chat": ("Talk to it", "与模型对话"),
    "do_export": ("Export it", "导出"),
    "do_python": ("Load the adapter in Python", "在 Python 中加载适配器"),
    # memory
    "memory": ("Memory: predicted and measured", "内存：预测与实测"),
    "memory_text": ("The highest use in each phase of the run.", "训练各阶段的最高占用。"),
    "phase": ("Phase", "阶段"),
    "what": ("Memory", "内存"),
    "predicted": ("Predicted", "预测"),
    "measured": ("Measured", "实测"),
    "difference": ("Error", "误差"),
    "difference_text": ("Error is (predicted − measured) / measured: above zero, more was predicted than used.", "误差 = （预测 − 实测）/ 实测：大于零表示预测多于实际占用。"),
    "all_memory": ("All counters", "全部计数"),
    "predicted_owners": ("Predicted, by what it is for", "预测（按用途）"),
    "budget": ("Budget", "预算"),
    "budget_text": ("The plan may use {budget} of device memory, as the driver counts it.", "计划最多可用 {budget} 显存（以驱动程序统计为准）。"),
    "no_memory": ("Memory was neither predicted nor measured.", "内存既未预测也未测量。"),
    "peak_allocated_bytes": ("allocated by tensors", "张量分配"),
    "peak_reserved_bytes": ("reserved by the allocator", "分配器保留"),
    "device_bytes": ("on the device, as the driver counts it", "设备占用（驱动统计）"),
    "host_bytes": ("host (RAM)", "主机内存"),
    "phase_load": ("load", "加载"),
    "phase_first_step": ("first step", "第一步"),
    "phase_step": ("training step", "训练步"),
    "phase_eval": ("evaluation", "评估"),
    "phase_save": ("save", "保存"),
    "phase_merge": ("merge", "合并"),
    "phase_resume": ("resume", "恢复"),
    # plan
    "plan": ("The plan and its reasons", "计划与理由"),
    "plan_text": ("Exact: the same mathematics as the plain way. Approximate: it changes numbers, and says so.", "精确：与普通做法在数学上相同。近似：会改变数值，并明确标出。"),
    "decision": ("Decision", "决定"),
    "value": ("Value", "取值"),
    "why": ("Why", "理由"),
    "exact": ("exact", "精确"),
    "approximate": ("approximate", "近似"),
    "other": ("another method", "另一种方法"),
    "techniques": ("What makes it fit", "让任务放得下的技术"),
    "techniques_text": ("The techniques of the plan that the run began with. Without one of them alone the plan would need as much more; the figures do not add up. ~: by formula.", "训练开始时的计划用到的技术。仅去掉其中一项时会多需要的内存；各项不可相加。~：按公式计算。"),
    "technique": ("Technique", "技术"),
    "saves_here": ("Saves here", "在此节省"),
    "how_it_works": ("How it works", "原理"),
    "costs": ("What it costs", "代价"),
    "saves_none": ("no memory", "不省内存"),
    "exactness": ("Mathematics", "数学"),
    "whole_plan": ("Every field of the plan", "计划的全部字段"),
    "no_reasons": ("This plan gives no reasons.", "该计划没有给出理由。"),
    # speed
    "speed_title": ("Speed and optimizer", "速度与优化器"),
    "measured_median": ("Measured (median)", "实测（中位数）"),
    "speed_chart": ("Tokens per second", "每秒词元数"),
    "lr_chart": ("Learning rate", "学习率"),
    "grad_chart": ("Gradient norm before clipping", "裁剪前的梯度范数"),
    "step_time": ("Time per step", "每步用时"),
    "link_title": ("Streamed weights", "权重的流式传输"),
    "link_text": ("Weights that waited outside the device crossed the link shortly before they were used: {step} in a step (median), {total} in all, at {rate}. The computation stood still for them {share} of the time.", "暂存在设备之外的权重在使用前经总线传入：每步 {step}（中位数），共 {total}，速度 {rate}。计算因等待而停顿的时间占 {share}。"),
    "link_first": ("Of the first GPU.", "以第一块 GPU 计。"),
    "wait_chart": ("Share of the step spent waiting for weights", "每步等待权重的时间占比"),
    "rate_chart": ("Speed of the link", "传输速度"),
    # data
    "data": ("The data", "数据"),
    "layout": ("Layout", "格式"),
    "template": ("Template", "对话模板"),
    "lengths": ("Length in tokens", "长度（词元）"),
    "dropped": ("Dropped", "丢弃"),
    "truncated": ("Truncated", "截断"),
    "p95": ("95 % are at most", "95% 不超过"),
    "longest": ("longest", "最长"),
    "longest_record": ("longest record", "最长的记录"),
    # notices, recipe, versions
    "notices": ("Notices", "提示"),
    "error": ("The error", "错误信息"),
    "recipe": ("The recipe", "配方"),
    "recipe_text": ("To do it again: {command}", "重新运行：{command}"),
    "versions": ("Versions", "版本"),
    "device": ("Device", "设备"),
    "run_folder": ("Run folder", "运行目录"),
    "size": ("Size on disk", "磁盘占用"),
    "resumed_from": ("Resumed from step", "从以下步恢复"),
    "made": ("Made by fitune {version} on {time}. This page needs no network.", "由 fitune {version} 于 {time} 生成。本页不需要网络。"),
    # languages of samples and evaluations
    "lang_en": ("English", "英文"),
    "lang_zh": ("Chinese", "中文"),
}  # fmt: skip

# Plan fields and decisions: in English the name itself (underscores as spaces).
_DECISIONS_ZH = {
    "model": "模型", "num_layers": "层数", "method": "方法", "base_format": "底座格式", "double_quant": "双重量化",
    "adapter": "适配器", "device": "设备", "device_name": "设备名称", "precision": "计算精度", "loss_scaling": "损失缩放",
    "embedding_place": "嵌入表位置", "embedding": "嵌入表", "attention": "注意力", "seq_len": "序列长度", "batch": "批大小",
    "micro_batch": "微批大小", "accumulation_order": "梯度累积顺序", "packing": "打包", "recompute_layers": "重算的层数",
    "recompute": "重算", "loss_chunk": "损失分块", "optimizer": "优化器", "lr": "学习率", "schedule": "学习率计划",
    "warmup": "预热", "weight_decay": "权重衰减", "clip": "梯度裁剪", "seed": "随机种子", "budget_bytes": "显存预算",
    "budget": "显存预算", "version": "版本", "steps": "步数", "epochs": "轮数",
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """Looks up the report's words in one language."""

    lang: str

    def __call__(self, key: str, **values: object) -> str:
        text = _WORDS[key][LANGUAGES.index(self.lang)]
        return text.format(**values) if values else text

    def known(self, key: str, prefix: str = "") -> str:
        """The word for a name that comes from a file: the name itself when it is not one of ours."""
        pair = _WORDS.get(prefix + key)
        return pair[LANGUAGES.index(self.lang)] if pair else key.replace("_", " ")

    def decision(self, name: str) -> str:
        """The name of a decision or of a plan's field."""
        key = name.strip().lower().replace(" ", "_").replace("-", "_")
        if self.lang == "zh" and key in _DECISIONS_ZH:
            return _DECISIONS_ZH[key]
        return name.replace("_", " ")

    def duration(self, seconds: float) -> str:
        """`3 min 20 s`, or `3 分 20 秒`."""
        return duration(format_duration(seconds), self.lang)
