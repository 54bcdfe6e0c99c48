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
    ("MLP", "MLP"),
    ("head", "输出头"),
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
    ("share", "份额"),
    ("none", "不并行"),
    ("{way} on {n} GPUs", "{way}，{n} 块 GPU"),
    ("{way} on {n} processes", "{way}，{n} 个进程"),
    ("{most} of {all} records", "{all} 条记录中的 {most} 条"),
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
    ("{n} pieces of tokens", "按 token 分为 {n} 块"),
    ("host RAM", "内存"),
    ("{name}, masters and state in RAM", "{name}，主权重和状态在内存中"),
    ("nothing simpler fits: inner activations of one piece exist at a time",
     "没有更简单的方案放得下：同一时刻只存在一块的内部激活值"),
    ("nothing simpler fits: it crosses the link in tiles of the vocabulary",
     "没有更简单的方案放得下：它按词表分块经总线传输"),
    ("nothing simpler fits: gradients leave layer by layer", "没有更简单的方案放得下：梯度逐层移出"),
    ("the same updates", "更新完全相同"),
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
    ("no T x T matrix is held: scores are made tile by tile", "不保存 T x T 矩阵：逐块计算注意力分数"),
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
    ("you asked for a simple plan (--effort simple): all of it is on the card",
     "你要求简单的计划（--effort simple）：全部放在显卡上"),
    # several GPUs
    ("one GPU alone", "只用一块 GPU"),
    ("every GPU holds the weights and works on its share of the records", "每块 GPU 持有全部权重，各算一部分记录"),
    ("all GPUs of a machine stream the same copy of the weights from its RAM",
     "同一台机器的所有 GPU 从内存中同一份权重流式加载"),
    ("every GPU holds its part of each layer's weights; a layer is put together when it runs",
     "每块 GPU 持有每层权重的一部分；轮到某层时再拼合"),
    ("every GPU holds the weights and its part of the optimizer's state (DeepSpeed)",
     "每块 GPU 持有全部权重和一部分优化器状态（DeepSpeed）"),
    ("every GPU holds the weights, and its part of the gradients and of the optimizer's state (DeepSpeed)",
     "每块 GPU 持有全部权重、一部分梯度和优化器状态（DeepSpeed）"),
    ("every GPU holds its part of weights, gradients and optimizer's state (DeepSpeed)",
     "每块 GPU 持有一部分权重、梯度和优化器状态（DeepSpeed）"),
    ("every GPU holds a part of each layer's heads and widths, and works on all records",
     "每块 GPU 持有每层的一部分注意力头和宽度，处理全部记录"),
    ("every GPU holds a range of the layers; micro-batches pass from one to the next",
     "每块 GPU 持有连续的若干层；微批依次经过各块 GPU"),
    ("every GPU works on a slice of each row's tokens; only attention sees all of them",
     "每块 GPU 处理每行 token 的一段；只有注意力看到全部"),
    ("{way} on {n} GPUs", "{way}，{n} 块 GPU"),
    ("none: {how}", "只用一块：{how}"),
    ("ddp: {how}", "数据并行 ddp：{how}"),
    ("streamed: {how}", "流式 streamed：{how}"),
    ("fsdp2: {how}", "分片 fsdp2：{how}"),
    ("{n} of {all} records", "{all} 条记录中的 {n} 条"),
    ("{n} cards with more memory: {name} ({size})", "{n} 块显存更大的显卡：{name}（{size}）"),
    ("{n} of {all} GPUs in use: more would not be faster", "使用 {all} 块 GPU 中的 {n} 块：再多也不会更快"),
    ("{source} + NCCL's buffers, assumed", "{source}，另加 NCCL 缓冲区（假设）"),
    ("state of {name} cannot be cut into parts: it belongs to whole matrices or blocks of them",
     "{name} 的优化器状态无法切分：它属于整个矩阵或其分块"),
    ("DeepSpeed updates lion's state on the GPU only", "DeepSpeed 只能在 GPU 上更新 lion 的状态"),
    ("its layers look from token to token elsewhere than in attention that can be given heads for tokens",
     "除可按头切分的注意力之外，它的层还在其他地方跨 token 计算"),
    ("its vocabulary is cut: every GPU holds its part", "词表被切分：每块 GPU 各持有一部分"),
    ("what each of {n} GPUs has of a step at most", "{n} 块 GPU 各自每步最多处理的记录"),
    ("{how}, and further up the ladder", "{how}，但更复杂"),
    ("only {n} % faster", "只快 {n} %"),
    ("only streamed", "只能流式加载"),
    ("a step has one record", "每步只有一条记录"),
    ("more effort: {what}", "更复杂的方式：{what}"),
    ("more than --effort {word} accepts", "超出 --effort {word} 的范围"),
    ("{other} needs at least {need} on each card, {room} of {budget} may be used",
     "{other} 每块卡至少需要 {need}，而 {budget} 中可用 {room}"),
    ("the GPUs are not alike, and all have equal shares of a step: {name} sets the memory, the slowest one the pace",
     "各 GPU 型号不同，但每步份额相同：显存由 {name} 决定，速度由最慢的一块决定"),
    ("the GPU with the least room sets the memory: {size}", "显存由空闲最少的一块 GPU 决定：{size}"),
    ("assumed: {n} GPUs over {between}, {peer} each in an exchange; from host memory {host} each while all copy (not "
     "measured)", "假设：{n} 块 GPU 经 {between} 互连，交换时各 {peer}；同时从内存拷贝时各 {host}（未实测）"),
    ("PCIe, through host memory", "PCIe（经过主机内存）"),
    ("PCIe (an NVLink bridge is not assumed)", "PCIe（不假设有 NVLink 桥）"),
    ("state of {name} cannot be cut into parts: it belongs to whole matrices or blocks of them",
     "{name} 的状态无法切分：它属于整个矩阵或其分块"),
    ("DeepSpeed updates lion's state on the GPU only", "DeepSpeed 只能在 GPU 上更新 lion 的状态"),
    ("its layers look from token to token elsewhere than in attention that can be given heads for tokens",
     "该模型各层在注意力之外（或在无法按头拆分的注意力中）也跨 token 计算"),
    ("only frozen weights are streamed", "只有冻结的权重可以流式加载"),
    ("DeepSpeed cannot shard packed weights", "DeepSpeed 无法切分打包的量化权重"),
    ("DoRA's start needs the weights of every layer", "DoRA 的初始化需要每一层的权重"),
    ("the head is the embedding: the first and the last GPU would train the same weights",
     "输出头与嵌入表共享：首尾两块 GPU 会训练同一份权重"),
    ("the model has {n} layers", "模型只有 {n} 层"),
    ("{most} heads cannot be shared by {n} GPUs", "{most} 个注意力头无法由 {n} 块 GPU 均分"),
    # what would fit
    ("weights streamed from RAM or inputs offloaded: {option}", "从内存流式加载权重或卸载层输入：{option}"),
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
    # changes that a prediction looks at, and where in a step its highest moments are
    ("accumulation: micro-batch 1 of {n}", "梯度累积：微批 1 / {n}"),
    ("activation checkpointing in every layer", "每层都重算激活值（检查点）"),
    ("bf16 instead of fp32", "bf16 代替 fp32"),
    ("LoRA r={n} instead of full fine-tuning", "LoRA r={n} 代替全参数微调"),
    ("LoRA on an int8 base", "int8 底座上的 LoRA"),
    ("QLoRA: LoRA on an nf4 base", "QLoRA：nf4 底座上的 LoRA"),
    ("double quantisation", "双重量化"),
    ("logits of 64 tokens at a time", "每次只算 64 个 token 的 logits"),
    ("half the length: {n} tokens", "长度减半：{n} 个 token"),
    ("LoRA rank 8", "LoRA 秩 8"),
    ("8-bit Adam", "8 位 Adam"),
    ("Adafactor instead of Adam", "Adafactor 代替 Adam"),
    ("Adam's state paged to RAM", "Adam 状态分页到内存"),
    ("8-bit Adam's state paged to RAM", "8 位 Adam 的状态分页到内存"),
    ("the batch on its way in", "输入批次传入时"),
    ("loading", "加载时"),
    ("the embedding", "嵌入"),
    ("the embedding's backward pass", "嵌入的反向"),
    ("room for the input", "存放输入时"),
    ("room for the input of layer {n}", "存放第 {n} 层输入时"),
    ("the forward pass", "前向"),
    ("the forward pass of layer {n}", "第 {n} 层的前向"),
    ("the loss", "损失"),
    ("the backward pass", "反向"),
    ("the backward pass of layer {n}", "第 {n} 层的反向"),
    ("the optimizer's update", "优化器更新"),
    # notes
    ("{names}: without effect, since full fine-tuning trains every weight and has no adapters",
     "{names}：不起作用，全参数微调训练全部权重，没有适配器"),
    ("PCIe {version} at {rate} GB/s", "PCIe {version}（{rate} GB/s）"),
    ("not measured on this architecture; taken from an H200", "该架构未实测，取自 H200"),
    ("measured on an H200, {date}", "{date} 在 H200 上实测"),
    ("under WSL: {size} of the RAM, {pinned} of it pinnable", "在 WSL 下：内存 {size}，其中 {pinned} 可锁页"),
    ("assumed: {cards} ({size} usable), {ram} RAM, {pinned} of it pinnable, {link}",
     "假设：{cards}（可用 {size}），内存 {ram}，其中 {pinned} 可锁页，{link}"),
    ("assumed: {cards} ({size} usable each), {ram} RAM, {pinned} of it pinnable, {link}",
     "假设：{cards}（每块可用 {size}），内存 {ram}，其中 {pinned} 可锁页，{link}"),
    ("assumed: {cards} ({size} usable), {ram} RAM (as given), {pinned} of it pinnable, {link}",
     "假设：{cards}（可用 {size}），内存 {ram}（按给定值），其中 {pinned} 可锁页，{link}"),
    ("assumed: {cards} ({size} usable each), {ram} RAM (as given), {pinned} of it pinnable, {link}",
     "假设：{cards}（每块可用 {size}），内存 {ram}（按给定值），其中 {pinned} 可锁页，{link}"),
    ("{name} exists with {sizes}: the smaller, {card}, is assumed.", "{name} 有 {sizes} 几种：按较小的 {card} 计算。"),
    ("{name} is also {others}: the slower, {card}, is assumed.", "{name} 也可指 {others}：按较慢的 {card} 计算。"),
    ("of the budget the driver's context takes about {size} ({source}), and {share} stay free for the allocator",
     "预算中驱动上下文约占 {size}（{source}），{share} 留给分配器"),
    ("{n} GPUs are there; one of them is used (GPU {index}, which has the most free memory)",
     "有 {n} 块 GPU；只用其中一块（GPU {index}，空闲显存最多）"),
    ("seq_len {n} is beyond the {most} positions this model was trained on; consider --rope-scaling",
     "seq_len {n} 超出该模型训练时的 {most} 个位置；可考虑 --rope-scaling"),
    ("this model has {most} learned positions: seq_len is {cut} instead of {n}",
     "该模型只有 {most} 个学习到的位置：seq_len 由 {n} 改为 {cut}"),
    ("--ram is not taken into account on a GPU: this version plans the GPU's memory only",
     "--ram 在 GPU 上不起作用：本版本只规划显存"),
    ("--vram {size} changes nothing: {name} has only {room}", "--vram {size} 不起作用：{name} 只有 {room}"),
    ("--vram {size} changes nothing: {name} has only {room} free", "--vram {size} 不起作用：{name} 只有 {room} 空闲"),
    ("--ram {size} changes nothing: {room} of RAM are available", "--ram {size} 不起作用：可用内存为 {room}"),
    ("--ram {size} changes nothing: {room} are {share} of the available RAM",
     "--ram {size} 不起作用：可用内存的 {share} 为 {room}"),
    ("--vram limits a GPU's memory; this plan is for the CPU, which --ram limits",
     "--vram 限制的是显存；本计划用于 CPU，应使用 --ram"),
    ("{n} GPUs are there; one of them is used (GPU {index}, which has the most free memory)",
     "有 {n} 块 GPU；使用其中一块（GPU {index}，空闲显存最多）"),
    ("{given} is taken as {name}, the card of that family with {size} GB.",
     "{given} 按同系列 {size} GB 的 {name} 处理。"),
    ("every record is taken to be {n} tokens long", "假设每条记录长 {n} 个 token"),
    ("{file} is not fetched for a prediction: {rest}", "预测时不下载 {file}：{rest}"),
    ("the data is not read ({source}): {rest}", "数据未读取（{source}）：{rest}"),
    ("fitune has no traces of this model's step: they are made first, once, which takes minutes",
     "fitune 没有该模型一步的记录：先生成一次，需要几分钟"),
    ("a control group ({source}) limits this process to {size} GiB of RAM",
     "控制组（{source}）把本进程的内存限制为 {size} GiB"),
    ("an NVIDIA card is in this machine, but no NVIDIA driver is loaded: it cannot be used",
     "本机有 NVIDIA 显卡，但未加载 NVIDIA 驱动：无法使用"),
    ("nvidia-ml-py is not installed: the cards' memory is not known", "未安装 nvidia-ml-py：不知道显卡的显存"),
    ("NVML does not answer ({source}): the cards' memory is not known", "NVML 没有应答（{source}）：不知道显卡的显存"),
    ("CUDA_VISIBLE_DEVICES names a MIG slice: its memory is not known",
     "CUDA_VISIBLE_DEVICES 指向 MIG 分区：不知道它的显存"),
    ("the calibration of {name} ({date}) is stale, {source}: run `fitune calibrate` again",
     "{name} 的校准（{date}）已过期（{source}）：请重新运行 `fitune calibrate`"),
    ("measured on this machine by fitune calibrate", "由 fitune calibrate 在本机实测"),
    ("no device context on the CPU", "CPU 没有设备上下文"),
    ("RAM is not computed: a {device} process was not measured on {name}",
     "未计算内存：没有在 {name} 上实测过 {device} 进程"),
    ("RAM is without the data's tokens (8 bytes each): they are counted when the data is read",
     "内存不含数据的 token（每个 8 字节）：读取数据时计入"),
    ("{model} has no class in transformers: planning uses the {name} class ({source}); training needs the publisher's "
     "remote code, or a native model of similar size: {other}",
     "{model} 在 transformers 中没有实现：计划按 {name} 类计算（{source}）；训练需要发布者的远程代码，"
     "或改用大小相近的原生模型：{other}"),
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
