"""A trainable model from a configuration and a plan: shapes first (on `meta`), then weights, one tensor at a time.

`build` makes any transformers causal LM whose decoder is a list of layers, with every linear layer of the decoder
replaced by `BaseLinear` (frozen base, optional adapter) unless all weights are trained. `fill` packs and places weights
as they stream in. The same two calls on `meta` give the model that the memory trace runs.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fitune.errors import UserError
from fitune.model import attention, fused
from fitune.model.ends import HostEmbedding, HostHead
from fitune.model.experts import PackedExperts, chooses_kernel, has_fused_experts
from fitune.model.formats import DENSE, Scratch
from fitune.model.linear import BaseLinear, StepContext
from fitune.model.outside import embedding_to_host, head_to_host, open_host, weight_at_hand
from fitune.model.replace import check_attention, check_layers, replace_linears, set_buffers
from fitune.model.streamed import StreamedLayers
from fitune.plan import Adapter, Plan

RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv")
# What each type of rope scaling must be told. `dynamic` is left out: its frequencies follow the longest row of a
# micro-batch, so that no accumulation would be exact, and it cannot be traced.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_UNSCALED = ("rope_theta", "partial_rotary_factor")


@dataclass
class Built:
    """A model ready to be filled and driven. `layers` are the decoder layers in order, under their own names."""

    model: nn.Module
    decoder: nn.Module
    layers: nn.ModuleList
    layers_name: str  # attribute of `decoder` that holds the layers
    layers_prefix: str  # e.g. "model.layers"
    context: StepContext
    linears: dict[str, BaseLinear]
    experts: list[PackedExperts]
    device: torch.device
    compute_dtype: torch.dtype
    host_embedding: HostEmbedding | None = None
    host_head: HostHead | None = None
    streamed: StreamedLayers | None = None  # layers whose frozen weights are not on the device
    host_opened: bool = False
    provided: frozenset[str] = frozenset()  # weights that another process puts into memory shared with this one
    source: Any = None  # the engine's weight source, one per model
    parts: Any = None  # how this process holds parts of weights: takes each as it comes (`fitune.parallel`)
    notes: list[str] = field(default_factory=list)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, each once (a tied head is its embedding)."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def experts_of(self, layer_index: int) -> list[PackedExperts]:
        prefix = f"{self.layers_prefix}.{layer_index}."
        return [e for e in self.experts if e.prefix.startswith(prefix)]

    def num_parameters(self) -> int:
        """All weights of the model, packed ones counted by their shape, adapters excluded."""
        if self.parts is not None:
            return int(self.parts.num_parameters)
        dense = sum(
            p.numel() for n, p in self.model.named_parameters() if ".lora_" not in n and not n.endswith("magnitude")
        )
        packed = [lin.in_features * lin.out_features for lin in self.linears.values()]
        fused = [torch.Size(shape).numel() for e in self.experts for shape in e.shapes.values()]
        host = self.host_embedding.weight.numel() if self.host_embedding is not None else 0
        if self.host_head is not None and not self.tied_on_host:
            host += self.host_head.weight.numel()
        return dense + sum(packed) + sum(fused) + host

    @property
    def tied_on_host(self) -> bool:
        """The embedding's table is the head's weight, and both are in host memory."""
        return self.host_head is not None and bool(self.model.config.tie_word_embeddings)


def compute_dtype(plan: Plan) -> torch.dtype:
    return DENSE[plan.precision]


def with_rope_scaling(config: Any, rope_scaling: dict[str, Any] | None) -> Any:
    """A copy of the configuration with longer positions (transformers' `rope_parameters`).

    What the model's own scaling says is kept when the type is the same one; another type replaces it, counted from the
    positions that the model reads as it is.

    Raises:
        UserError: the model has no rotary positions, or the type is missing, unknown or lacks its numbers.
    """
    if not rope_scaling:
        return config
    config = copy.deepcopy(config)
    current = getattr(config, "rope_parameters", None)
    if not current or any(isinstance(v, dict) for v in current.values()):
        raise UserError(
            "cannot scale this model's positions",
            f"{config.model_type} has no single set of rotary positions",
            "leave rope_scaling out",
        )
    wanted = dict(rope_scaling)
    kind = wanted.pop("type", wanted.pop("rope_type", None))
    example = "for example: --rope-scaling type=yarn,factor=4"
    if kind is None:
        raise UserError("cannot use rope_scaling", "it names no type", example)
    if kind not in _ROPE_NEEDS:
        raise UserError(
            f"cannot use rope_scaling of type {kind}", f"the types that can train are {', '.join(_ROPE_NEEDS)}", example
        )
    trained = config.max_position_embeddings
    if kind != current.get("rope_type"):
        current = {k: v for k, v in current.items() if k in _ROPE_UNSCALED} | {
            "original_max_position_embeddings": trained
        }
    parameters = {**current, "rope_type": kind, **wanted}
    missing = [name for name in _ROPE_NEEDS[kind] if name not in parameters]
    if missing:
        raise UserError(f"cannot use rope_scaling of type {kind}", f"it lacks {', '.join(missing)}", example)
    original = parameters.setdefault("original_max_position_embeddings", trained)
    config.rope_parameters = parameters
    config.max_position_embeddings = max(trained, int(original * float(parameters.get("factor", 1))))
    return config


def build(config: Any, plan: Plan, device: torch.device | str) -> Built:
    """The model's modules on `meta`, small buffers on `device`.

    Raises:
        UserError: no list of decoder layers, or an adapter target that matches nothing.
    """
    from transformers import AutoModelForCausalLM

    _check(plan)
    attention.register()
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # threads that copy set theirs by its index
        device = torch.device("cuda", torch.cuda.current_device())
    config = copy.deepcopy(config)
    config.use_cache = False
    config.dtype = dtype = compute_dtype(plan)
    if plan.attention == "native":
        check_attention(config)
    options: dict[str, Any] = {"attn_implementation": attention.NAME if plan.attention != "native" else "sdpa"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    if _is_moe(model) and chooses_kernel(type(model)):
        model.set_experts_implementation(_experts_kernel(plan, device))
    model.eval()  # the base model's own dropout is never applied; adapters have their own
    model.requires_grad_(False)
    decoder, layers_name, prefix = find_layers(model)
    check_layers(model, getattr(decoder, layers_name))
    context = StepContext(attention=plan.attention, on_cuda=plan.device == "cuda")
    built = Built(model, decoder, getattr(decoder, layers_name), layers_name, prefix, context, {}, [], device, dtype)
    for module in model.modules():
        module.__dict__["fitune_context"] = context
    if plan.method == "full":
        model.requires_grad_(True)
        if plan.streamed_layers() and plan.stream_from != "shards":
            built.streamed = StreamedLayers(built, plan)
    else:
        replace_linears(built)
        _pack_experts(built)
        if plan.head_place == "host":
            head_to_host(built, plan)
        if plan.embedding_place == "host" or built.tied_on_host:
            embedding_to_host(built)
        if plan.streamed_layers():
            built.streamed = StreamedLayers(built, plan)
    fused.apply(model, context)
    _place_buffers(built)
    return built


def _check(plan: Plan) -> None:
    """Raises UserError when the plan asks for something that its method does not have."""
    streams = plan.streamed_layers() and plan.stream_from != "shards"  # parts of what is trained: `fitune.parallel`
    if plan.method == "full" and plan.head_place == "host":
        raise UserError(
            "cannot keep the output head of full fine-tuning in host memory",
            "a head that is trained needs its gradient on the GPU",
            "leave head_place at device, or use --method lora or qlora",
        )
    if plan.method == "full" and streams and (plan.stream_from == "disk" or plan.optimizer_place == "device"):
        raise UserError(
            "cannot stream the weights of full fine-tuning like this",
            "they change in every step: they must be in RAM, with their fp32 masters beside them "
            f"(stream_from is {plan.stream_from}, optimizer_place is {plan.optimizer_place})",
            "use stream_from pinned or pageable and optimizer_place host or streamed",
        )
    if (plan.streamed_layers() or plan.head_place == "host") and plan.ring_buffers < 2:
        raise UserError(
            f"cannot stream through {plan.ring_buffers} buffer",
            "one is filled while the other computes",
            "use ring_buffers 2 or more",
        )


def find_layers(model: nn.Module) -> tuple[nn.Module, str, str]:
    """(decoder, attribute, full prefix) of the list of decoder layers.

    Raises:
        UserError: there is none of the configured length.
    """
    count = getattr(model.config, "num_hidden_layers", None)
    names = {module: name for name, module in model.named_modules()}
    for module in [model.get_decoder(), *model.modules()]:
        for attribute, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                prefix = f"{names[module]}.{attribute}" if names[module] else attribute
                return module, attribute, prefix
    raise UserError(
        f"cannot train {type(model).__name__}",
        "its decoder is not one list of layers",
        "use a decoder-only model such as Llama, Qwen, Mistral, Gemma, Phi, OLMo or GLM",
    )


def _is_moe(model: nn.Module) -> bool:
    return any(has_fused_experts(module) for module in model.modules())


def _experts_kernel(plan: Plan, device: torch.device) -> str:
    """grouped_mm needs CUDA and bf16; batched_mm is loop-free too, for `meta` and fp16; the CPU takes the loop."""
    if plan.device == "cuda" and plan.precision == "bf16":
        return "grouped_mm"
    return "eager" if device.type == "cpu" else "batched_mm"


def _pack_experts(built: Built) -> None:
    for name, module in built.model.named_modules():
        if name.startswith(built.layers_prefix + ".") and has_fused_experts(module):
            built.experts.append(PackedExperts(module, name))


def _place_buffers(built: Built) -> None:
    """Give buffers (rotary frequencies, embedding scales) their values on the device, by the model's own initialiser.

    Must run before weights are filled: the initialiser may touch the parameters beside a buffer, still on `meta` here.
    """
    modules = list(built.model.named_modules())
    if built.host_embedding is not None:
        modules.append((_name_of(built, built.host_embedding), built.host_embedding.inner))
    for path, module in modules:
        on_meta = {n: b for n, b in module.named_buffers(recurse=False) if b.device.type == "meta"}
        if not on_meta:
            continue
        if built.device.type == "meta":
            module._buffers.update({name: torch.empty_like(buffer) for name, buffer in on_meta.items()})
            continue
        set_buffers(built.model, path, module, on_meta)
        host = built.host_embedding is not None and module is built.host_embedding.inner
        target = torch.device("cpu") if host else built.device
        for name in on_meta:
            module._buffers[name] = module._buffers[name].to(target)


def wanted_weights(built: Built) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that `fill` expects, a tied head left out."""
    wanted = {}
    for name, parameter in built.model.named_parameters():  # named once each
        if ".lora_" not in name and not name.endswith(".magnitude"):
            wanted[name] = tuple(parameter.shape)
    if built.host_head is not None and not built.tied_on_host:
        wanted[f"{_name_of(built, built.host_head)}.weight"] = tuple(built.host_head.weight.shape)
    for name, linear in built.linears.items():
        shape = (linear.out_features, linear.in_features)
        wanted[f"{name}.weight"] = shape[::-1] if linear.transposed else shape
    for experts in built.experts:
        wanted |= {f"{experts.prefix}.{n}": shape for n, shape in experts.shapes.items()}
    if built.host_embedding is not None:
        wanted[_embedding_name(built)] = tuple(built.host_embedding.weight.shape)
    for name, buffer in built.model.named_buffers():
        if _persistent(built.model, name):
            wanted[name] = tuple(buffer.shape)
    return wanted


def _persistent(model: nn.Module, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(parent)._non_persistent_buffers_set


def _name_of(built: Built, wanted: nn.Module) -> str:
    return next(name for name, module in built.model.named_modules() if module is wanted)


def _embedding_name(built: Built) -> str:
    assert built.host_embedding is not None
    return f"{_name_of(built, built.host_embedding)}.weight"


def weights_to_read(built: Built) -> set[str]:
    """Names of `wanted_weights` less those that an earlier run's packed file holds already; after `open_host`."""
    return {name for name in wanted_weights(built) if not _is_there(built, name)}


def _is_there(built: Built, name: str) -> bool:
    return name in built.provided or (built.streamed is not None and built.streamed.is_there(name))


def fill(built: Built, weights: Iterable[tuple[str, torch.Tensor]], plan: Plan) -> None:
    """Pack and place weights as they arrive; names not wanted are passed over, missing ones are an error.

    Raises:
        UserError: a weight is missing or has another shape than the configuration says.
    """
    wanted = wanted_weights(built)
    open_host(built, plan)
    seen = _take(built, weights, plan, wanted)
    missing = sorted(name for name in set(wanted) - seen - _tied(built) if not _is_there(built, name))
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError("the model's files are incomplete", f"missing: {shown}", "download the model again")
    if built.streamed is not None and built.streamed.backing is not None:
        built.streamed.backing.finish()
    if not built.tied_on_host:
        built.model.tie_weights()
    if built.device.type == "cuda":
        # The blocks that weights came through lie between those that stay: kept, steps would have to fit into the gaps.
        torch.cuda.empty_cache()


@torch.no_grad()
def _take(
    built: Built, weights: Iterable[tuple[str, torch.Tensor]], plan: Plan, wanted: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """Place all that is wanted; returns their names. Nothing holds the last of them afterwards."""
    experts = {name: e for e in built.experts for name in e.names()}
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in wanted:
            continue
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(
                f"weight {name} does not fit this model",
                f"the file has shape {tuple(tensor.shape)}, config.json asks for {wanted[name]}",
                "download the model again, or use the config.json that belongs to it",
            )
        part = tensor if built.parts is None else built.parts.take(name, tensor)
        _place(built, plan, name, part, experts)
        seen.add(name)
    return seen


def _tied(built: Built) -> set[str]:
    head = built.model.get_output_embeddings()
    if head is None or not built.model.config.tie_word_embeddings:
        return set()
    return {f"{name}.weight" for name, module in built.model.named_modules() if module is head}


def _place(built: Built, plan: Plan, name: str, tensor: torch.Tensor, experts: dict[str, PackedExperts]) -> None:
    module_name, _, leaf = name.rpartition(".")
    device = built.device
    if built.streamed is not None and built.streamed.takes(name):
        built.streamed.put(name, tensor)
    elif leaf == "weight" and module_name in built.linears:
        built.linears[module_name].set_weight(tensor.to(device), plan.base_format, plan.double_quant)
    elif name in experts:
        experts[name].set_weight(name, tensor.to(device), plan.base_format, plan.double_quant)
    elif built.host_embedding is not None and name == _embedding_name(built):
        host = tensor.to("meta" if device.type == "meta" else "cpu", built.compute_dtype)
        if built.host_head is not None and built.tied_on_host:
            host = built.host_head.weight.copy_(host)
        built.host_embedding.inner.weight = nn.Parameter(host, requires_grad=False)
    elif built.host_head is not None and name == f"{_name_of(built, built.host_head)}.weight":
        built.host_head.weight.copy_(tensor)
    else:
        module = built.model.get_submodule(module_name)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor.to(device, module._buffers[leaf].dtype)
        else:
            old = module._parameters[leaf]
            assert old is not None
            # parameters keep the dtype the class gave them (some models hold fp32 gates in a 16-bit model)
            module._parameters[leaf] = nn.Parameter(tensor.to(device, old.dtype), requires_grad=old.requires_grad)


def make_scratch(built: Built, loss_chunk: int) -> Scratch | None:
    """The buffer that unpacked weights and a chunk's fp32 logits share; on a GPU only, where it saves fragmentation.
    A head in host memory has `tile_rows` columns of logits at once, set before."""
    if not built.context.on_cuda:
        return None
    dense = {lin.packed.format for lin in built.linears.values() if lin.packed is not None}
    width = torch.empty((), dtype=built.compute_dtype).element_size()
    unpacked = any(f not in DENSE or DENSE[f] != built.compute_dtype for f in dense)
    largest = max((lin.in_features * lin.out_features for lin in built.linears.values()), default=0) * width
    head = built.host_head
    columns = head.tile_rows if head is not None else built.model.get_output_embeddings().weight.shape[0]
    return Scratch(max(largest if unpacked else 0, loss_chunk * columns * 4), built.device)


def meta_weights(built: Built) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights without values, for a model on `meta`."""
    for name, shape in wanted_weights(built).items():
        yield name, torch.empty(shape, dtype=built.compute_dtype, device="meta")


def add_adapter(built: Built, plan: Plan) -> list[str]:
    """Put adapters on the targets (after `fill`), mark what trains; returns the adapted layers' names.

    The start of every adapter depends on (seed, its name) only.

    Raises:
        UserError: a target matches no linear layer of the decoder, or nothing is left to train.
    """
    spec = plan.adapter
    if spec is None:
        return []
    adapted = adapted_weights(built, spec)
    fused = {name: experts for experts in built.experts for name in experts.names()}
    if (spec.dora or spec.dropout > 0) and any(name in fused for name in adapted):
        raise UserError(
            "cannot adapt fused experts like this",
            "their weight is one tensor to which B A is added: it has no input to drop parts of, and no row norms",
            "use --lora-dropout 0 and no --dora, or other --lora-targets",
        )
    for name in adapted:
        key = zlib.crc32(name.encode())
        # hashed together: torch's CPU generator reads the low 32 bits of a seed only
        generator = torch.Generator().manual_seed(zlib.crc32(f"{plan.seed}/{name}".encode()))
        if name in fused:
            fused[name].add_lora(name, spec.r, spec.scaling, generator, built.device)
            continue
        linear = built.linears[name]
        with weight_at_hand(built, name) if spec.dora else nullcontext():
            linear.add_lora(spec.r, spec.scaling, spec.dropout, key, generator, built.device, spec.dora)
    for name, parameter in built.model.named_parameters():
        if name.endswith("bias") and spec.bias != "none":
            inside = name.rpartition(".")[0] in adapted
            parameter.requires_grad_(spec.bias == "all" or inside)
    return adapted


def adapted_weights(built: Built, spec: Adapter) -> list[str]:
    """Names of the linear layers and fused expert weights that get an adapter, each once.

    Raises:
        UserError: a target matches none.
    """
    return list(dict.fromkeys(name for target in spec.targets for name in _adapted_by(built, target)))


def _adapted_by(built: Built, target: str) -> list[str]:
    """Names of the weights that a target means: linear layers by the last part of their name, or all of them; fused
    experts by their module's name (`experts`) or with it (`experts.down_proj`).

    Raises:
        UserError: there is none.
    """
    hits = [n for n in built.linears if target == "all-linear" or n == target or n.endswith(f".{target}")]
    for experts in built.experts:
        for name in experts.names():
            module, leaf = experts.prefix.rpartition(".")[2], name.rpartition(".")[2]
            if target in (name, module, f"{module}.{leaf}"):
                hits.append(name)
    if not hits:
        available = sorted({name.rpartition(".")[2] for name in built.linears})
        available += sorted({experts.prefix.rpartition(".")[2] for experts in built.experts})
        raise UserError(
            f"no layer is called {target!r}",
            f"the linear layers of this model are {', '.join(available)}",
            "use --lora-targets all-linear, or names from that list",
        )
    return hits
