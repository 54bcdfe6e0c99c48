"""Optimizers and their state; what waits outside the card."""

from __future__ import annotations

from fitune.planner.techniques_list.entry import Technique

OFFLOAD_PAPER = ("Ren et al. 2021, ZeRO-Offload", "https://arxiv.org/abs/2101.06840")
INFINITY_PAPER = ("Rajbhandari et al. 2021, ZeRO-Infinity", "https://arxiv.org/abs/2104.07857")

TECHNIQUES = (
    Technique(
        "adam8bit", ("8-bit optimizer", "8 位优化器"),
        ("Adam's two moments are stored in 8 bits with a scale per block of 256.",
         "Adam 的两个动量用 8 位存储，每 256 个一个缩放因子。"),
        ("Three quarters of the optimizer's state.", "优化器状态的四分之三。"),
        "6 T",
        ("Rounded moments; in practice the same loss, not bit by bit.",
         "动量有舍入；实际损失基本一致，但不逐位相同。"),
        ("In full fine-tuning. With LoRA the state is small and exact state costs little.",
         "全参数微调时。LoRA 的状态很小，用精确状态即可。"),
        "approximate", "--optimizer adamw8bit", False,
        ("Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization", "https://arxiv.org/abs/2110.02861"),
    ),
    Technique(
        "paged_optimizer", ("paged optimizer", "分页优化器"),
        ("The state lives in memory that the driver moves between RAM and card as needed.",
         "状态放在由驱动按需在内存与显存之间搬移的统一内存中。"),
        ("The optimizer's state, where the card is full.", "显存不足时的优化器状态。"),
        "8 T",
        ("The state crosses the link at every update.", "每次更新都要经过链路传输。"),
        ("When only the state does not fit.", "只差优化器状态放不下时。"),
        "exact", "--optimizer paged_adamw", False,
        ("Dettmers et al. 2023, QLoRA", "https://arxiv.org/abs/2305.14314"),
    ),
    Technique(
        "cpu_optimizer", ("optimizer on the CPU", "CPU 优化器"),
        ("Master weights and moments stay in RAM and the processor makes the update; gradients go there, new "
         "weights come back.",
         "主权重和动量留在内存，由处理器更新；梯度传过去，新权重传回来。"),
        ("Master weights and the optimizer's state.", "主权重和优化器状态。"),
        "12 T",
        ("The processor's memory bandwidth: about a second per billion weights on a desktop.",
         "受内存带宽限制：台式机上每十亿权重约一秒。"),
        ("Where masters and state do not fit: on one GPU a plan does so itself where nothing else fits; on several "
         "full fine-tuning can with ZeRO (--offload-optimizer cpu; nvme with zero3: on a disk).",
         "主权重和状态放不下时。单卡：别无他法时计划自动采用；多卡全参数微调：配合 ZeRO"
         "（--offload-optimizer cpu；zero3 可用 nvme 放到磁盘）。"),
        "exact", "", True,
        OFFLOAD_PAPER,
    ),
    Technique(
        "adafactor", ("Adafactor", "Adafactor"),
        ("The second moment of a matrix is kept as one value per row and one per column; no first moment.",
         "矩阵的二阶动量只按行、按列各存一个值，没有一阶动量。"),
        ("Nearly all of the optimizer's state.", "几乎全部优化器状态。"),
        "8 T",
        ("Another optimizer: it needs a learning rate of its own.", "是另一种优化器，学习率需另行调整。"),
        ("In full fine-tuning on a small card.", "小显存全参数微调时。"),
        "other", "--optimizer adafactor", False,
        ("Shazeer and Stern 2018, Adafactor", "https://arxiv.org/abs/1804.04235"),
    ),
    Technique(
        "lion", ("Lion", "Lion"),
        ("Updates by the sign of one moment.", "按单个动量的符号更新。"),
        ("Half of Adam's state.", "Adam 状态的一半。"),
        "4 T",
        ("Another optimizer: a learning rate 3 to 10 times smaller, more weight decay.",
         "是另一种优化器：学习率小 3 至 10 倍，权重衰减更大。"),
        ("When you know that it suits the task.", "已知适合该任务时。"),
        "other", "--optimizer lion", False,
        ("Chen et al. 2023, Symbolic Discovery of Optimization Algorithms", "https://arxiv.org/abs/2302.06675"),
    ),
    Technique(
        "host_embedding", ("embedding in RAM", "嵌入表放在内存"),
        ("A frozen embedding table stays in RAM; only the rows of a step's tokens are copied to the card.",
         "冻结的嵌入表留在内存，只把本步 token 对应的行拷到显卡。"),
        ("The whole table, where it is not tied to the head.", "整张表（未与输出头共享时）。"),
        "2 V h",
        ("A small copy per micro-batch.", "每个微批一次小拷贝。"),
        ("With LoRA, always.", "LoRA 时始终使用。"),
        "exact", "", True,
        OFFLOAD_PAPER,
    ),
    Technique(
        "offload", ("offload of layer inputs", "层输入卸载"),
        ("The inputs that recomputed layers keep wait in RAM and come back ahead of the backward pass.",
         "重算层保留的输入放到内存，在反向传播之前取回。"),
        ("One hidden state per recomputed layer.", "每个重算层一份隐藏状态。"),
        "2 b s h L",
        ("Link traffic beside the compute; pinned RAM.", "与计算并行的链路传输；占用锁页内存。"),
        ("For long records and large batches on small cards.", "小显存上的长记录和大批量。"),
        "exact", "", True,
        INFINITY_PAPER,
    ),
    Technique(
        "streaming", ("streaming of frozen weights", "冻结权重流式加载"),
        ("Frozen layers wait in RAM (or on disk) and pass through a ring of buffers on the card, copied "
         "ahead of their turn.",
         "冻结的层留在内存（或磁盘），提前拷入显卡上的环形缓冲，轮到时使用。"),
        ("The base of all layers but two buffers'.", "除两个缓冲外所有层的底座权重。"),
        "base bytes x (L - 2) / L",
        ("None where compute is longer than the copy (about 400 tokens per pass for nf4, 1,500 for bf16 on a "
         "3080); below that the card waits. RAM for the whole base.",
         "计算比拷贝久时没有代价（3080 上 nf4 约 400、bf16 约 1500 个 token）；更小则显卡等待。内存要放下整"
         "个底座。"),
        ("When a 16-bit base does not fit: it is exact, where quantising it is not.",
         "16 位底座放不下时：它是精确的，而量化不是。"),
        "exact", "", True,
        INFINITY_PAPER,
    ),
)  # fmt: skip
