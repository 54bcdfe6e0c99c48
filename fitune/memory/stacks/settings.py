"""What a run of another tool is described by: the model's shape and the settings that change its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fitune.errors import UserError

Method = Literal["full", "lora", "qlora", "qlora8"]
METRICS = ("allocated", "reserved", "nvidia-smi")
PARALLEL = ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "tp")
LOSSES = ("full_logits", "full_logits_fastce", "chunked", "fused")
CHECKPOINTING = ("yes", "no", "selective", "unsloth")
ATTENTION = ("eager", "sdpa", "flash", "flex")
TARGETS = ("q", "k", "v", "o", "gate", "up", "down", "lm_head")


@dataclass(frozen=True)
class StackShape:
    """A dense decoder as the other tools build it. Widths in elements.

    ``norm`` is the kind of normalisation (``rms`` computes in fp32, ``layer`` is the fused kernel), ``gated`` whether
    the MLP has a gate (three matrices) or not (two), ``norms_per_layer`` 2, or 4 with norms after attention and MLP.
    ``softcap``: attention scores are capped, so tools of 2024 can use no fused attention kernel. ``qk_norm``: queries
    and keys pass an RMSNorm of their own.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norms_per_layer: int = 2
    parallel_residual: bool = False
    shared_norm: bool = False
    softcap: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output width of each linear of one layer, by the short name of its target."""
        a, k, h, i = self.attention_width, self.kv_width, self.hidden, self.intermediate
        mlp = {"gate": (h, i), "up": (h, i), "down": (i, h)} if self.gated else {"up": (h, i), "down": (i, h)}
        return {"q": (h, a), "k": (h, k), "v": (h, k), "o": (a, h), **mlp}

    @property
    def linear_params(self) -> int:
        """Elements of the linears of all layers, without embedding and head."""
        return self.layers * sum(rows * columns for rows, columns in self.linears.values())

    @property
    def embedding_params(self) -> int:
        """Elements of the embedding matrix (the head has as many)."""
        return self.vocab * self.hidden

    @property
    def norm_params(self) -> int:
        """Elements of the norms and biases."""
        per_norm = self.hidden * (2 if self.norm == "layer" else 1)
        bias = self.attention_width + 2 * self.kv_width if self.qkv_bias else 0
        heads = 2 * self.head_dim if self.qk_norm else 0
        return self.layers * (self.norms_per_layer * per_norm + bias + heads) + per_norm

    @property
    def params(self) -> int:
        """All elements, tied embeddings once."""
        return self.linear_params + self.embedding_params * (1 if self.tied else 2) + self.norm_params


@dataclass(frozen=True)
class StackSettings:
    """One run of another tool. Every field is per GPU; token counts are ``micro_batch * seq_len``.

    ``base_dtype``: ``bf16``, ``fp16``, ``fp32``, ``fp32 weights, bf16-mixed`` (fp32 weights under autocast), ``fp32
    master + bf16 mixed`` (the same with optimizer states: 16 bytes a parameter), ``nf4``, ``nf4 (double quant)``,
    ``int8`` or ``gptq-int4``. ``optimizer`` is the tool's own name (``adamw_torch``, ``paged_adamw_8bit``,
    ``adamw_8bit in backward``). ``adapter_dropout`` None is the tool's default. ``released`` (``2024-11``) and
    ``transformers`` (major, minor) choose between behaviours that changed over time; left out, the current ones.
    ``kernels``: ``foak`` (fms-acceleration's fused kernels), ``liger``, ``unsloth``, or none. ``kbit_preparation``
    None: as the tool does. ``evaluation`` adds that phase, with ``eval_batch`` rows (None: the micro-batch).
    ``card_gib``: memory of the card, which bounds what is reserved. ``tool_version`` (major, minor) None: the current
    one. ``rest_in_fp32``: what a quantised base does not quantise was loaded in fp32.

    Raises:
        UserError: a value that is none of those above.
    """

    shape: StackShape
    method: Method = "lora"
    base_dtype: str = "bf16"
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    adapter_dropout: float | None = None
    optimizer: str = "adamw_torch"
    checkpointing: str = "yes"
    attention: str = "sdpa"
    loss: str = "full_logits"
    packing: bool = False
    micro_batch: int = 1
    seq_len: int = 1024
    grad_accum: int = 1
    parallel: str = "single"
    n_gpus: int = 1
    offload: str = "none"
    metric: str = "allocated"
    evaluation: bool = False
    eval_batch: int | None = None
    card_gib: float | None = None
    released: str = ""
    transformers: tuple[int, int] = (5, 8)
    torch_compile: bool = False
    kernels: str = ""
    kbit_preparation: bool | None = None
    tool_version: tuple[int, int] | None = None
    rest_in_fp32: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("method", self.method, ("full", "lora", "qlora", "qlora8")),
            ("checkpointing", self.checkpointing, CHECKPOINTING),
            ("attention", self.attention, ATTENTION),
            ("loss", self.loss, LOSSES),
            ("parallel", self.parallel, PARALLEL),
            ("metric", self.metric, METRICS),
        ):
            if value not in allowed:
                raise UserError(
                    f"cannot predict {name} = {value!r}",
                    "no tool's behaviour is known for this value",
                    f"one of: {', '.join(allowed)}",
                )
        if self.method != "full" and (self.adapter_rank < 1 or not self.adapter_targets):
            raise UserError(
                f"cannot predict {self.method} without adapters",
                f"rank {self.adapter_rank}, targets {list(self.adapter_targets)}",
                "give adapter_rank and adapter_targets, for instance 16 and q,k,v,o",
            )
        unknown = set(self.adapter_targets) - set(TARGETS)
        if unknown:
            raise UserError(
                f"cannot place adapters on {', '.join(sorted(unknown))}",
                "not a linear of a dense decoder layer",
                f"some of: {', '.join(TARGETS)}",
            )

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on one GPU."""
        return self.micro_batch * self.seq_len

    @property
    def targets(self) -> tuple[str, ...]:
        """The adapted linears that this shape has (a plain MLP has no gate)."""
        return tuple(t for t in self.adapter_targets if t in self.shape.linears or t == "lm_head")

    @property
    def quantised(self) -> bool:
        """Whether the linears are stored in 4 or 8 bits."""
        return self.method in ("qlora", "qlora8")

    @property
    def layer_adapter_params(self) -> int:
        """Elements of the adapters of one layer."""
        widths = (sum(self.shape.linears[t]) for t in self.targets if t != "lm_head")
        return self.adapter_rank * sum(widths)

    @property
    def adapter_params(self) -> int:
        """Elements of all adapters."""
        head = self.adapter_rank * (self.shape.hidden + self.shape.vocab) if "lm_head" in self.targets else 0
        return self.layer_adapter_params * self.shape.layers + head


# Names that stand for several linears, and what families other than Llama call them (transformers' models gpt_bigcode,
# falcon, phi, phi3 and opt; Qwen-1's remote code, whose w2 is the gate).
_GROUPS = {
    "mlp": ("gate", "up", "down"), "all-linear": TARGETS[:7], "all": TARGETS[:7],
    "qkv": ("q", "k", "v"), "c_attn": ("q", "k", "v"), "query_key_value": ("q", "k", "v"), "Wqkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"), "c_proj": ("o", "down"), "c_fc": ("up",), "w1": ("up",), "w2": ("gate",),
    "dense": ("o",), "out": ("o",), "dense_h_to_4h": ("up",), "dense_4h_to_h": ("down",),
    "fc1": ("up",), "fc2": ("down",),
}  # fmt: skip


def parse_targets(text: str) -> tuple[str, ...]:
    """``q,v,mlp`` or ``q_proj,down_proj`` or ``all-linear`` as short target names, in the order of a layer.

    Raises:
        UserError: a name that is none of a decoder layer's linears.
    """
    found: set[str] = set()
    for part in re.split(r"[,\s]+", text.strip()):
        name = part.removesuffix("_proj")
        if name in _GROUPS or part in _GROUPS:
            found.update(_GROUPS.get(part) or _GROUPS[name])
        elif name in TARGETS:
            found.add(name)
        elif part:
            raise UserError(
                f"cannot place adapters on {part}",
                "not a linear of a dense decoder layer",
                f"some of: {', '.join(TARGETS)}, mlp, all-linear",
            )
    return tuple(target for target in TARGETS if target in found)
