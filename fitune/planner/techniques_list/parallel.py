"""Several GPUs."""

from __future__ import annotations

from fitune.planner.techniques_list.entry import Technique

ZERO_PAPER = ("Rajbhandari et al. 2019, ZeRO", "https://arxiv.org/abs/1910.02054")

TECHNIQUES = (
    Technique(
        "data_parallel", ("data parallel (DDP)", "数据并行（DDP）"),
        ("Every GPU holds all of the model and works on its share of a step's records; gradients are added "
         "up.",
         "每块 GPU 持有完整模型，各算一部分记录，再把梯度相加。"),
        ("No memory: time, by nearly the number of GPUs.", "不省显存：时间几乎按 GPU 数量缩短。"),
        "0",
        ("An exchange of gradients per step: small with LoRA, as large as the model in full fine-tuning.",
         "每步交换一次梯度：LoRA 时很小，全参数时与模型同大。"),
        ("When one card holds the job and there are several.", "单卡放得下而有多卡时。"),
        "exact", "--parallel ddp", True,
        ("Li et al. 2020, PyTorch Distributed", "https://arxiv.org/abs/2006.15704"),
    ),
    Technique(
        "zero1", ("ZeRO stage 1", "ZeRO 第 1 阶段"),
        ("Data parallel, with each GPU keeping the optimizer's state and master weights of its own part only.",
         "数据并行，但每块 GPU 只保存自己那部分的优化器状态和主权重。"),
        ("State and master weights of the others' parts.", "其他部分的状态和主权重。"),
        "12 T (1 - 1/n)",
        ("Updated weights are gathered after each step: no more traffic than DDP.",
         "每步之后收集新权重：通信量不多于 DDP。"),
        ("In full fine-tuning on several cards. With LoRA there is little to share out.",
         "多卡全参数微调。LoRA 时可分的很少。"),
        "exact", "", False,
        ZERO_PAPER,
    ),
    Technique(
        "zero2", ("ZeRO stage 2", "ZeRO 第 2 阶段"),
        ("Stage 1, and each GPU keeps the summed gradients of its own part only.",
         "在第 1 阶段基础上，每块 GPU 只保留自己那部分的梯度和。"),
        ("Stage 1's, and gradients of the others' parts.", "第 1 阶段所省，加上其他部分的梯度。"),
        "(12 + 4) T (1 - 1/n)",
        ("As stage 1; with accumulation gradients are reduced once per micro-batch.",
         "同第 1 阶段；累积时每个微批都要归约梯度。"),
        ("In full fine-tuning on several cards.", "多卡全参数微调。"),
        "exact", "", False,
        ZERO_PAPER,
    ),
    Technique(
        "zero3", ("ZeRO stage 3", "ZeRO 第 3 阶段"),
        ("Weights are shared out too: a layer is put together when it runs and let go again.",
         "权重也分片：某层运行时临时拼齐，用完释放。"),
        ("Everything but a layer or two, by the number of GPUs.", "除一两层外，一切按 GPU 数量均分。"),
        "(2 P + 16 T) (1 - 1/n)",
        ("Half as much traffic again as DDP; slow without NVLink at small batches.",
         "通信量比 DDP 多一半；无 NVLink 且批量小时较慢。"),
        ("When one card cannot hold the model.", "单卡放不下模型时。"),
        "exact", "", False,
        ZERO_PAPER,
    ),
    Technique(
        "fsdp", ("FSDP", "FSDP（全分片数据并行）"),
        ("ZeRO stage 3 in PyTorch's own way; here layers' packed bytes are sharded, so that 4-bit bases are "
         "too.",
         "PyTorch 的 ZeRO 第 3 阶段；这里按层的打包字节分片，因此 4 位底座也能分片。"),
        ("Everything but a layer or two, by the number of GPUs.", "除一两层外，一切按 GPU 数量均分。"),
        "(base + 16 T) (1 - 1/n)",
        ("As ZeRO stage 3.", "同 ZeRO 第 3 阶段。"),
        ("When one card cannot hold the model.", "单卡放不下模型时。"),
        "exact", "--parallel fsdp2", False,
        ("Zhao et al. 2023, PyTorch FSDP", "https://arxiv.org/abs/2304.11277"),
    ),
    Technique(
        "tensor_parallel", ("tensor parallel", "张量并行"),
        ("Each matrix is cut among the GPUs; partial results are added within every layer.",
         "每个矩阵切分到各 GPU，层内把部分结果相加。"),
        ("Weights, state and most activations, by the number of GPUs.", "权重、状态和大部分激活值按 GPU 数量均分。"),
        "(base + 16 T + K A) (1 - 1/n)",
        ("Four exchanges per layer and step: only with NVLink.", "每层每步四次交换：只适合 NVLink。"),
        ("For layers too large for one card, within one machine.",
         "单层大到一卡放不下、且在同一机器内时。"),
        "exact", "", False,
        ("Shoeybi et al. 2019, Megatron-LM", "https://arxiv.org/abs/1909.08053"),
    ),
    Technique(
        "pipeline_parallel", ("pipeline parallel", "流水线并行"),
        ("Each GPU holds a run of layers; micro-batches follow one another through them.",
         "每块 GPU 持有连续的若干层，微批依次流过。"),
        ("Weights and state, by the number of GPUs.", "权重和状态按 GPU 数量均分。"),
        "(base + 16 T) (1 - 1/n)",
        ("GPUs wait at the beginning and the end of a step: (n - 1) / (micro-batches + n - 1) of the time.",
         "每步首尾有空等：占时间的 (n - 1) / (微批数 + n - 1)。"),
        ("Over slow links, with many micro-batches.", "链路慢、微批多时。"),
        "exact", "--parallel pp", False,
        ("Huang et al. 2018, GPipe", "https://arxiv.org/abs/1811.06965"),
    ),
)  # fmt: skip
