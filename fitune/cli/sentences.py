"""The planner's sentences in Chinese. The planner writes English (it is what `--json` and `plan.json` hold); here each
kind of sentence has its translation, side by side. A sentence that is not here is shown in English."""

from __future__ import annotations

import functools
import re

_TABLE: tuple[tuple[str, str], ...] = (
    # decisions
    ("method", "方法"),
    ("base format", "底座格式"),
    ("precision", "精度"),
    ("attention", "注意力"),
    ("embedding", "嵌入表"),
    ("loss", "损失"),
    ("packing", "打包"),
    ("micro-batch", "微批"),
    ("recomputation", "重算"),
    ("optimizer", "优化器"),
    ("parallel", "并行"),
    ("streaming", "流式加载"),
    ("layer inputs", "层输入"),
    ("accumulation", "累积方式"),
    # values
    ("full", "全参数"),
    ("{kind} r={r}, alpha={alpha}, {targets}", "{kind} r={r}，alpha={alpha}，{targets}"),
    ("{base} with double quantisation", "{base}，双重量化"),
    ("host", "内存"),
    ("device", "显卡"),
    ("native", "模型自带"),
    ("on", "开"),
    ("off", "关"),
    ("{n} tokens at a time", "每次 {n} 个 token"),
    ("{n} of {all} layers", "{all} 层中的 {n} 层"),
    ("{n} of {all} (rows)", "{n} / {all}（行）"),
    ("{n} of {all}", "{n} / {all}"),
    ("{n} of {all} layers from {place}", "{all} 层中的 {n} 层，来自{place}"),
    ("pinned RAM", "锁页内存"),
    ("pageable RAM", "可分页内存"),
    ("the disk", "磁盘"),
    ("layer by layer", "逐层"),
    # whys
    ("{base} on the card", "{base} 全部放在显卡上"),
    ("{n} % slower", "慢 {n} %"),
    ("{n} % faster", "快 {n} %"),
    ("as fast", "一样快"),
    ("streamed it would be {how}", "若流式加载则{how}"),
    ("with all weights on the card it would be {how}", "若权重全部放在显卡上则{how}"),
    ("what they leave free is worth more", "腾出的显存更有用"),
    ("the same mathematics", "数学上等价"),
    ("saves {size} on the card", "在显卡上节省 {size}"),
    ("they are copied while layers compute", "在各层计算时并行拷贝"),
    ("all {n} micro-batches pass a layer before the next: its weights are copied once, not {most} times",
     "{n} 个微批先都通过一层再进入下一层：其权重只拷贝一次，而不是 {most} 次"),
    ("its fp32 state fits", "其 fp32 状态放得下"),
    ("you asked for it", "按你的要求"),
    ("you asked for it; the rest is accumulated", "按你的要求；其余用梯度累积"),
    ("you asked for full fine-tuning: every weight is trained", "你要求全参数微调：训练全部权重"),
    ("adapters train well in little memory; full only when asked", "适配器占用少、效果好；全参数仅在要求时使用"),
    ("{other} needs at least {need} and tensors have {room} of {budget}",
     "{other} 至少需要 {need}，而 {budget} 中可用于张量的只有 {room}"),
    ("the smallest there is", "最小的一种"),
    ("that of method {method}", "方法 {method} 的格式"),
    ("the widest base that fits", "放得下的最宽格式"),
    ("this processor has no bf16 instructions: fp32 is its fastest arithmetic", "本处理器没有 bf16 指令：fp32 最快"),
    ("it is computed at full rate here, and needs no loss scaling", "此处可全速计算，且无需损失缩放"),
    ("{name} has no bf16; fp16 runs with loss scaling", "{name} 不支持 bf16；用 fp16 加损失缩放"),
    ("no T x T matrix is held; needs 16-bit and compute capability 8.0",
     "不保存 T x T 矩阵；需要 16 位和计算能力 8.0"),
    ("no T x T matrix is held; the flash kernel does not run here", "不保存 T x T 矩阵；flash 内核在此不可用"),
    ("torch's fused kernel for processors", "torch 的 CPU 融合内核"),
    ("the model brings its own attention, which is left as it is", "使用模型自带的注意力"),
    ("it is frozen: rows are gathered in RAM and only they are copied", "冻结：在内存中取出所需的行，只拷贝这些行"),
    ("the device is the processor: it is in RAM already", "设备就是处理器：本来就在内存中"),
    ("it is trained", "需要训练"),
    ("it is tied to the head, which is needed on the card", "与输出头共享，输出头须在显卡上"),
    ("full logits never exist, in training or evaluation", "训练和评估中都不产生完整 logits"),
    ("decided when the data is read", "读取数据时决定"),
    ("padding would cost {gain} times the tokens", "填充会使 token 数变为 {gain} 倍"),
    ("the smallest need there is", "需求最小"),
    ("the whole batch fits at once", "整批一次放得下"),
    ("the fastest split that fits; gradients are accumulated, weighted by tokens",
     "放得下的最快划分；梯度按 token 加权累积"),
    ("all activations fit: nothing is computed twice", "激活值全部放得下：无需重算"),
    ("the fewest that fit; each costs a second forward pass of its layer", "放得下的最少层数；每层多一次前向"),
    ("the standard choice; its fp32 state fits", "标准选择；其 fp32 状态放得下"),
    ("the standard choice", "标准选择"),
    # what would fit
    ("let fitune choose: leave out {names}", "让 fitune 选择：去掉 {names}"),
    ("QLoRA: a frozen nf4 base (approximate)", "QLoRA：冻结的 nf4 底座（近似）"),
    ("another optimizer: {what}", "换优化器：{what}"),
    ("shorter records: {option}", "缩短记录：{option}"),
    ("a higher limit: {option}", "提高上限：{option}"),
    ("a card with more memory: {name} ({size} GiB)", "显存更大的显卡：{name}（{size} GiB）"),
    ("a smaller model of the same family: {model}", "同系列的较小模型：{model}"),
    ("AdamW with 8-bit state (approximate)", "AdamW，8 位状态（近似）"),
    ("AdamW whose state is paged out to RAM (slower)", "AdamW，状态分页到内存（较慢）"),
    ("AdamW with 8-bit state, paged out to RAM (approximate, slower)", "AdamW，8 位状态并分页到内存（近似，较慢）"),
    ("Adafactor, whose second moment is factored (another optimizer)", "Adafactor，二阶动量分解（另一种优化器）"),
    ("plain SGD, which keeps no state (another optimizer: --lr must be much higher)",
     "普通 SGD，无状态（另一种优化器：--lr 要大得多）"),
    # of cards
    ("AMD: ROCm build of torch, not tested with fitune", "AMD：需 ROCm 版 torch，未用 fitune 测试"),
    ("needs torch's CUDA 12.6 build, the last one for this card", "需要 CUDA 12.6 版 torch（支持此卡的最后一版）"),
    ("fp16 with loss scaling", "fp16（损失缩放）"),
    ("memory shared with the processor; not tested", "与处理器共享内存；未测试"),
    ("laptop: clock and speed depend on its power limit", "笔记本：频率和速度取决于功耗限制"),
    ("streamed weights: about {size} of RAM", "流式权重：约需 {size} 内存"),
    ("{n} of {all} cards stay idle: a step has {most} records", "{all} 块卡中 {n} 块空闲：每步只有 {most} 条记录"),
    # notes
    ("not measured on this architecture; taken from an H200", "该架构未实测，取自 H200"),
    ("measured on an H200, {date}", "{date} 在 H200 上实测"),
    ("assumed: {cards} ({size} usable), {ram} RAM, {pinned} of it pinnable, {link}",
     "假设：{cards}（可用 {size}），内存 {ram}，其中 {pinned} 可锁页，{link}"),
    ("assumed: {cards} ({size} usable each), {ram} RAM, {pinned} of it pinnable, {link}",
     "假设：{cards}（每块可用 {size}），内存 {ram}，其中 {pinned} 可锁页，{link}"),
    ("assumed: {cards} ({size} usable), {ram} RAM (as given), {pinned} of it pinnable, {link}",
     "假设：{cards}（可用 {size}），内存 {ram}（按给定值），其中 {pinned} 可锁页，{link}"),
    ("{name} exists with {sizes}: the smaller, {card}, is assumed.", "{name} 有 {sizes} 几种：按较小的 {card} 计算。"),
    ("{name} is also {others}: the slower, {card}, is assumed.", "{name} 也可指 {others}：按较慢的 {card} 计算。"),
    ("besides what is shown the driver's context takes about {size} ({source}), and {share} of the budget stay free "
     "for the allocator", "此外驱动上下文约占 {size}（{source}），预算的 {share} 留给分配器"),
    ("{n} GPUs are there; this version trains on one of them (GPU {index}, which has the most free memory)",
     "有 {n} 块 GPU；本版本只用其中一块（GPU {index}，空闲显存最多）"),
    ("this version plans for one GPU of those named", "本版本只为所列 GPU 中的一块做计划"),
    ("seq_len {n} is beyond the {most} positions this model was trained on; consider --rope-scaling",
     "seq_len {n} 超出该模型训练时的 {most} 个位置；可考虑 --rope-scaling"),
    ("this model has {most} learned positions: seq_len is {cut} instead of {n}",
     "该模型只有 {most} 个学习到的位置：seq_len 由 {n} 改为 {cut}"),
    ("--ram is not taken into account on a GPU: this version plans the GPU's memory only",
     "--ram 在 GPU 上不起作用：本版本只规划显存"),
    ("--vram {size} changes nothing: {name} has only {room}", "--vram {size} 不起作用：{name} 只有 {room}"),
    ("random weights with seed {seed}: for measuring and testing, not for use",
     "随机权重（种子 {seed}）：仅供测量和测试"),
)  # fmt: skip


# What a gap may hold; others hold anything up to the next part of the sentence.
_GAPS = dict.fromkeys(("n", "all", "cut", "most", "seed"), "[0-9]+") | {"source": ".+?"}


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Sentences with gaps, those with the most words of their own first."""
    made = []
    for english, chinese in sorted(_TABLE, key=lambda pair: -len(re.sub(r"{\w+}", "", pair[0]))):
        if "{" in english:
            gaps = r"\\{(\w+)\\}"
            pattern = re.sub(gaps, lambda gap: f"(?P<{gap[1]}>{_GAPS.get(gap[1], '[^;]+?')})",
                             re.escape(english))  # fmt: skip
            made.append((re.compile(pattern), chinese))
    return tuple(made)


@functools.cache
def _whole() -> dict[str, str]:
    return {english: chinese for english, chinese in _TABLE if "{" not in english}


def translated(text: str, lang: str) -> str:
    """A sentence of the planner in a language; in English where it has no translation."""
    if lang == "en" or not text:
        return text
    if text in _whole():
        return _whole()[text]
    for pattern, chinese in _patterns():
        found = pattern.fullmatch(text)
        if found:
            gaps = {name: translated(value, lang) for name, value in found.groupdict().items()}
            return chinese.format(**{name: value.replace(" and ", "、") for name, value in gaps.items()})
    first, semicolon, rest = text.partition("; ")
    return f"{translated(first, lang)}；{translated(rest, lang)}" if semicolon else text


def duration(text: str, lang: str) -> str:
    """What `units.format_duration` gives, in a language: `1 小时 05 分`."""
    if lang == "en":
        return text
    for short, word in ((" min", " 分"), (" h", " 小时"), (" s", " 秒")):
        text = re.sub(rf"(?<=\d){short}\b", word, text)
    return text
