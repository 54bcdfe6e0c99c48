"""Number formats and adapters."""

from __future__ import annotations

from fitune.planner.techniques_list.entry import Technique

QLORA_PAPER = ("Dettmers et al. 2023, QLoRA", "https://arxiv.org/abs/2305.14314")

TECHNIQUES = (
    Technique(
        "bf16", ("bf16 arithmetic", "bf16 运算"),
        ("Weights and activations are 16 bits wide with the range of fp32 and 8 bits of precision; sums in "
         "matrix products, norms, the loss and the optimizer's state stay fp32.",
         "权重和激活值用 16 位表示，数值范围与 fp32 相同，精度 8 位；矩阵乘的累加、归一化、损失和优化器状态"
         "仍为 fp32。"),
        ("Half of every weight and activation that would be fp32.", "相对 fp32，权重和激活值减半。"),
        "2 P + K A",
        ("Nothing in speed, on the contrary: tensor cores run at full rate. Rounding of 3 decimal digits.",
         "速度不降反升：张量核心全速运行。舍入精度约 3 位十进制。"),
        ("Always, on cards that have it (NVIDIA from Ampere on, MI200 and newer).",
         "凡支持的显卡都应使用（NVIDIA Ampere 及更新、MI200 及更新）。"),
        "exact", "--precision bf16", True,
        ("Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training", "https://arxiv.org/abs/1905.12322"),
    ),
    Technique(
        "fp16", ("fp16 arithmetic with loss scaling", "fp16 运算与损失缩放"),
        ("16 bits with more precision and much less range than bf16. The loss is multiplied before the "
         "backward pass so that small gradients do not vanish; steps whose gradients overflow are left out "
         "and the factor is lowered.",
         "16 位，精度高于 bf16 而范围小得多。反向传播前把损失放大，以免小梯度变成零；梯度溢出的步被跳过并降"
         "低倍数。"),
        ("Half of every weight and activation that would be fp32.", "相对 fp32，权重和激活值减半。"),
        "2 P + K A",
        ("A step is lost now and then; some models (Gemma, T5 kin) overflow in fp16.",
         "偶尔丢弃一步；有些模型（Gemma、T5 一类）在 fp16 下会溢出。"),
        ("On cards without bf16: T4, V100, RTX 20xx.", "没有 bf16 的显卡：T4、V100、RTX 20 系。"),
        "approximate", "--precision fp16", True,
        ("Micikevicius et al. 2017, Mixed Precision Training", "https://arxiv.org/abs/1710.03740"),
    ),
    Technique(
        "int8", ("int8 base", "int8 底座"),
        ("The frozen base is stored in 8 bits, one scale per row of a weight, and unpacked to 16 bits when a "
         "layer runs.",
         "冻结的底座权重用 8 位存储，每行一个缩放因子，某层运行时再还原成 16 位。"),
        ("About half of a 16-bit base.", "约为 16 位底座的一半。"),
        "1 P",
        ("Unpacking in every pass; rounding of about 0.4 % of a row's largest weight.",
         "每次前向和反向都要还原；舍入误差约为该行最大权重的 0.4 %。"),
        ("When bf16 does not fit and nf4 is too coarse for the task.", "bf16 放不下而 nf4 又过于粗糙时。"),
        "approximate", "--method lora --base-format int8", False,
        ("Dettmers et al. 2022, LLM.int8()", "https://arxiv.org/abs/2208.07339"),
    ),
    Technique(
        "nf4", ("nf4 base", "nf4 底座"),
        ("The frozen base is stored in 4 bits: 16 levels placed where normally distributed weights are, one "
         "scale per block of 64. A layer is unpacked to 16 bits when it runs.",
         "冻结的底座权重用 4 位存储：16 个取值按正态分布的权重安排，每 64 个一块、一个缩放因子。某层运行时还"
         "原成 16 位。"),
        ("Three quarters of a 16-bit base, less the scales.", "16 位底座的四分之三，减去缩放因子。"),
        "2 P - (0.5 + 4/64) P",
        ("Unpacking in every pass (seldom over 10 % of the time); weights are rounded, which adapters partly "
         "make good.",
         "每次前向和反向都要还原（很少超过 10 % 的时间）；权重有舍入，适配器能部分弥补。"),
        ("When a 16-bit base neither fits nor can be streamed at speed.", "16 位底座放不下、流式加载又不够快时。"),
        "approximate", "--method qlora", True,
        QLORA_PAPER,
    ),
    Technique(
        "fp4", ("fp4 base", "fp4 底座"),
        ("As nf4, with the levels of a 4-bit floating-point number in place of a normal distribution's.",
         "与 nf4 相同，但 16 个取值来自 4 位浮点数而非正态分布。"),
        ("As much as nf4.", "与 nf4 相同。"),
        "2 P - (0.5 + 4/64) P",
        ("As nf4, with slightly larger rounding errors on usual weights.", "与 nf4 相同，对常见权重的舍入误差略大。"),
        ("To go on with what was trained on an fp4 base; otherwise nf4.", "延续以 fp4 底座训练的结果时；否则用 nf4。"),
        "approximate", "--method qlora --base-format fp4", False,
        QLORA_PAPER,
    ),
    Technique(
        "double_quant", ("double quantisation", "双重量化"),
        ("The scales of nf4 and fp4 blocks are themselves stored in 8 bits, with one fp32 scale per 256 of "
         "them.",
         "nf4 和 fp4 各块的缩放因子本身也用 8 位存储，每 256 个共用一个 fp32 缩放因子。"),
        ("0.37 bits per weight.", "每个权重 0.37 位。"),
        "(4/64 - (1 + 4/256)/64) P",
        ("One small kernel more per unpacked weight.", "每个还原的权重多一个小内核。"),
        ("With every 4-bit base; it is on by default.", "凡 4 位底座都用；默认开启。"),
        "approximate", "--double-quant", True,
        QLORA_PAPER,
    ),
    Technique(
        "lora", ("LoRA", "LoRA"),
        ("The base is frozen; beside each adapted weight a product of two thin matrices of rank r is trained "
         "and added.",
         "底座冻结；在每个被适配的权重旁训练两个秩为 r 的瘦矩阵之积并相加。"),
        ("Gradients, fp32 master weights and optimizer state of the whole model; only the adapters' remain.",
         "省去整个模型的梯度、fp32 主权重和优化器状态，只剩适配器的。"),
        "16 (P - T)",
        ("Less freedom than training every weight: enough for style, format and most tasks, less for much "
         "new knowledge.",
         "自由度低于全参数：足以学习风格、格式和大多数任务，大量新知识则较弱。"),
        ("By default. Raise r before giving it up.", "默认使用。放弃之前先提高 r。"),
        "other", "--method lora", True,
        ("Hu et al. 2021, LoRA", "https://arxiv.org/abs/2106.09685"),
    ),
    Technique(
        "qlora", ("QLoRA", "QLoRA"),
        ("LoRA on a frozen 4-bit base: nf4, double quantisation, adapters in 16 bits with fp32 master "
         "weights.",
         "在冻结的 4 位底座上做 LoRA：nf4、双重量化，适配器为 16 位并保留 fp32 主权重。"),
        ("What LoRA and nf4 save together.", "LoRA 与 nf4 所省之和。"),
        "16 (P - T) + 1.5 P",
        ("Those of LoRA and of nf4.", "LoRA 与 nf4 的代价之和。"),
        ("When LoRA on a 16-bit base does not fit.", "16 位底座的 LoRA 放不下时。"),
        "approximate", "--method qlora", True,
        QLORA_PAPER,
    ),
)  # fmt: skip
