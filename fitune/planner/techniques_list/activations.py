"""What a step holds besides weights: activations, attention, logits, padding."""

from __future__ import annotations

from fitune.planner.techniques_list.entry import Technique

TECHNIQUES = (
    Technique(
        "accumulation", ("gradient accumulation", "梯度累积"),
        ("A step's records are run as several micro-batches; their gradients are added, weighted by tokens, "
         "before one update.",
         "一步的记录分成几个微批依次计算，梯度按 token 加权相加，最后更新一次。"),
        ("Activations of all records but one micro-batch's.", "只需一个微批的激活值。"),
        "A K (batch / b - 1)",
        ("Small micro-batches use the card less well; gradients of earlier ones are kept.",
         "微批过小则显卡利用率下降；需保留已算出的梯度。"),
        ("Whenever the whole batch does not fit at once; the batch itself stays what you asked for.",
         "整批一次放不下时；有效批大小保持不变。"),
        "exact", "--micro-batch 1", True,
        ("Ott et al. 2018, Scaling Neural Machine Translation", "https://arxiv.org/abs/1806.00187"),
    ),
    Technique(
        "layer_major", ("layer-major accumulation", "逐层累积"),
        ("All micro-batches of a step go through a layer before the next layer is looked at, so that "
         "streamed weights cross the link twice per step, not twice per micro-batch.",
         "一步的所有微批先通过同一层再进入下一层，流式权重每步只需传两次，而不是每个微批传两次。"),
        ("No memory: link traffic, by the number of micro-batches.", "不省显存：按微批数减少链路传输。"),
        "0",
        ("Inputs of every layer are kept for all micro-batches, in RAM if need be.",
         "要保留所有微批的各层输入，必要时放在内存。"),
        ("With streaming, where a micro-batch is too small to hide a copy.", "流式加载且微批太小、无法掩盖传输时。"),
        "exact", "", True,
        ("Pudipeddi et al. 2020, Training Large Neural Networks with Constant Memory (L2L)",
         "https://arxiv.org/abs/2002.05645"),
    ),
    Technique(
        "checkpointing", ("activation checkpointing", "激活重算（检查点）"),
        ("A layer keeps only its input; its activations are computed again when the backward pass reaches it.",
         "一层只保留输入，反向传播到达时再重新计算激活值。"),
        ("The activations of every recomputed layer but one.", "除一层外，所有重算层的激活值。"),
        "(A - 2 b s h) per recomputed layer",
        ("A second forward pass of those layers: at most a third more compute.",
         "这些层多一次前向：最多增加三分之一计算量。"),
        ("In as few layers as memory forces; fitune chooses the number.", "层数以放得下为限；fitune 自动选择。"),
        "exact", "--recompute all", True,
        ("Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost", "https://arxiv.org/abs/1604.06174"),
    ),
    Technique(
        "flash_attention", ("flash attention", "flash attention（分块注意力）"),
        ("Attention is computed in tiles that stay on the chip; the s x s matrix of scores never exists in "
         "memory, and is computed again tile by tile in the backward pass.",
         "注意力在片上分块计算，s x s 的分数矩阵从不写入显存，反向时再逐块重算。"),
        ("The scores: quadratic in the length.", "分数矩阵：随长度平方增长。"),
        "8 b a s^2 + 2 b a s^2 K",
        ("Nothing: it is faster too. Needs 16 bits and compute capability 8.0; older cards get the "
         "memory-efficient kernel.",
         "没有代价，而且更快。需要 16 位和计算能力 8.0；更老的显卡用省显存内核。"),
        ("Always.", "始终使用。"),
        "exact", "", True,
        ("Dao et al. 2022, FlashAttention", "https://arxiv.org/abs/2205.14135"),
    ),
    Technique(
        "chunked_loss", ("chunked loss", "分块损失"),
        ("Logits are made, and their gradient taken, for a few hundred tokens at a time; those of all tokens "
         "never exist.",
         "每次只为几百个 token 计算 logits 及其梯度，所有 token 的 logits 从不同时存在。"),
        ("Logits of all other tokens and their gradients.", "其余 token 的 logits 及其梯度。"),
        "8 V (b s - c)",
        ("Hardly any: a few launches more.", "几乎没有：多几次内核启动。"),
        ("Always; most of all with vocabularies of over 100,000 entries.", "始终使用；词表超过十万时尤其重要。"),
        "exact", "--loss-chunk 64", True,
        ("Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models",
         "https://arxiv.org/abs/2411.09009"),
    ),
    Technique(
        "mlp_tiles", ("tiled MLP", "MLP 分块"),
        ("A recomputed layer's MLP runs on pieces of the tokens, one after the other.",
         "重算层的 MLP 按 token 分段依次计算。"),
        ("The MLP's inner activations of all pieces but one.", "除一段外的 MLP 内部激活值。"),
        "6 b s f (1 - 1/tiles)",
        ("A frozen 4-bit weight is unpacked once per piece.", "4 位冻结权重每段都要还原一次。"),
        ("For very long records on small cards.", "小显存训练超长记录时。"),
        "exact", "", True,
        ("Bekman et al. 2025, Arctic Long Sequence Training", "https://arxiv.org/abs/2506.13996"),
    ),
    Technique(
        "packing", ("packing", "打包"),
        ("Rows are filled with whole records, positions and attention kept apart for each.",
         "一行内放入多条完整记录，各自的位置和注意力互不相通。"),
        ("No memory: the work of padding. 1.6 means that 60 % more would be computed without it.",
         "不省显存：省去填充的计算。1.6 表示不打包要多算 60 %。"),
        "0",
        ("Needs attention that knows where records end.", "注意力需要知道记录的边界。"),
        ("When records are short and of very different lengths.", "记录较短且长短不一时。"),
        "exact", "--packing", True,
        ("Krell et al. 2021, Efficient Sequence Packing without Cross-contamination",
         "https://arxiv.org/abs/2107.02027"),
    ),
)  # fmt: skip
