"""LoRA adapters in PEFT's files, written and read without peft (format of peft 0.17 to 0.21, checked by the tests).

Names here are module paths: ``model.layers.0.self_attn.q_proj.lora_A`` [r, in], ``.lora_B`` [out, r], ``.magnitude``
[out] for DoRA, and full names of trained biases. PEFT says ``base_model.model.<path>.lora_A.weight``,
``.lora_magnitude_vector``, and ``<path>.base_layer.bias`` for the bias of an adapted layer. Adapters of fused experts
(A [E * r, in], B [out, r * E]) are called after their weight here, ``...experts.gate_up_proj.lora_A``; PEFT wraps the
module once per weight and says ``...experts.base_layer.lora_A.weight`` of the first and ``...experts.lora_A.weight`` of
the last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.files import atomic_folder, clean_leftovers, file_error
from fitune.model.checkpoint import read_header
from fitune.plan import Adapter

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {".lora_A": ".lora_A.weight", ".lora_B": ".lora_B.weight", ".magnitude": ".lora_magnitude_vector"}
# Settings of PEFT that change what an adapter computes and that this package does not have; each must be unset.
_UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
    "trainable_token_indices",
    "megatron_config",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "alora_invocation_tokens",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)


def write_adapter(
    folder: Path, adapter: Adapter, tensors: dict[str, torch.Tensor], *, base_model: str, task: str = "CAUSAL_LM"
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` as a whole: on failure what was there stays.

    Args:
        tensors: by the names above, any device and floating dtype.
        base_model: hub id or path under which others find the base model (`ModelSource.reference`).

    Raises:
        UserError: the folder cannot be written, for example on a full disk.
    """
    from safetensors.torch import save_file

    adapted = {name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")}
    fused = {path for path in adapted if tensors[f"{path}.lora_A"].shape[0] != adapter.r}
    stored = {
        _peft_name(name, adapted, fused): t.detach().to("cpu").contiguous() for name, t in sorted(tensors.items())
    }
    with atomic_folder(Path(folder)) as temporary:
        save_file(stored, str(temporary / WEIGHTS), metadata={"format": "pt"})
        config = _config(adapter, adapted - fused, fused, base_model, task)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """An adapter that `write_adapter` or PEFT wrote, its tensors on the CPU under the names above.

    Raises:
        UserError: no adapter there, a pickle, not LoRA, settings this package does not have, or damaged files.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    clean_leftovers(folder.parent)  # a process killed in the middle of a swap leaves the earlier folder beside it
    adapter = _adapter(_read_config(folder), folder)
    path = folder / WEIGHTS
    if not path.is_file():
        pickle = (folder / "adapter_model.bin").is_file()
        pickled = "its weights are a pickle (adapter_model.bin), which can run any code"
        raise UserError(
            f"cannot read the adapter in {folder}",
            pickled if pickle else f"there is no {WEIGHTS}",
            "save it again as safetensors with a newer peft",
        )
    read_header(path)
    parameters = [target for target in adapter.targets if "." in target]
    tensors = {_our_name(name, path, parameters): tensor for name, tensor in load_file(str(path)).items()}
    _check(adapter, tensors, path)
    return adapter, tensors


def _config(adapter: Adapter, adapted: set[str], fused: set[str], base_model: str, task: str) -> dict[str, Any]:
    targets = sorted({path.rpartition(".")[2] for path in adapted}) or ([] if fused else list(adapter.targets))
    parameters = sorted({".".join(path.split(".")[-2:]) for path in fused}, key=_wrapped_order)
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_model,
        "revision": None,
        "r": adapter.r,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "bias": adapter.bias,
        "target_modules": targets,
        **({"target_parameters": parameters} if parameters else {}),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _wrapped_order(parameter: str) -> tuple[bool, str]:
    """PEFT wraps fused weights in the order of their class, which in transformers 5 has `down_proj` last."""
    return parameter.endswith("down_proj"), parameter


def _peft_name(name: str, adapted: set[str], fused: set[str]) -> str:
    for ours, theirs in _PARTS.items():
        path = name.removesuffix(ours)
        if path == name:
            continue
        if path in fused:
            module = path.rpartition(".")[0]
            wrapped = sorted((p for p in fused if p.rpartition(".")[0] == module), key=_wrapped_order)
            path = module + ".base_layer" * (len(wrapped) - 1 - wrapped.index(path))
        return _PREFIX + path + theirs
    path, _, last = name.rpartition(".")
    return f"{_PREFIX}{path}.base_layer.{last}" if path in adapted else _PREFIX + name


def _our_name(name: str, path: Path, parameters: list[str]) -> str:
    inner = name.removeprefix(_PREFIX).replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
    for ours, theirs in _PARTS.items():
        if inner.endswith(theirs):
            module = inner.removesuffix(theirs)
            depth = module.count(".base_layer")
            module = module.replace(".base_layer", "")
            wrapped = sorted((p for p in parameters if f".{module}".endswith(f".{p.rpartition('.')[0]}")),
                             key=_wrapped_order)  # fmt: skip
            if len(wrapped) > depth:
                module += "." + wrapped[-1 - depth].rpartition(".")[2]
            return module + ours
    if "bias" in inner.rpartition(".")[2] and inner != name:
        return inner.replace(".base_layer.", ".")
    raise UserError(
        f"cannot use the adapter {path}",
        f"it holds {name}, which is not part of LoRA on linear layers",
        "train an adapter with linear layers as targets, and no modules_to_save",
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no adapter in {folder}",
            f"there is no {CONFIG}",
            "give the folder that holds adapter_config.json, for example runs/NAME/adapter",
        ) from None
    except OSError as error:
        raise file_error("read", path, error) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path}", f"it is not JSON ({error})", "copy the adapter again") from None
    if not isinstance(values, dict):
        raise UserError(f"cannot read {path}", "it is not the configuration of an adapter", "copy the adapter again")
    return values


def _adapter(values: dict[str, Any], folder: Path) -> Adapter:
    what = f"cannot use the adapter in {folder}"
    if values.get("peft_type") != "LORA":
        raise UserError(what, f"it is of type {values.get('peft_type')}, not LORA", "use a LoRA adapter")
    unsupported = [f"{key} = {values[key]}" for key in _UNSUPPORTED if values.get(key)]
    if unsupported:
        raise UserError(
            what,
            f"it has settings fitune does not have: {', '.join(unsupported)}",
            "merge it with peft (merge_and_unload) and use the merged model",
        )
    try:
        targets = values.get("target_modules") or ()
        parameters = tuple(values.get("target_parameters") or ())
        return Adapter(
            r=int(values["r"]),
            alpha=float(values["lora_alpha"]),
            dropout=float(values.get("lora_dropout") or 0.0),
            bias=str(values.get("bias") or "none"),
            targets=((targets,) if isinstance(targets, str) else tuple(targets)) + parameters,
            rslora=bool(values.get("use_rslora")),
            dora=bool(values.get("use_dora")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(what, f"{CONFIG} lacks or misstates a field: {error}", "copy the adapter again") from None


def _check(adapter: Adapter, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Every adapted layer has its parts, in matching shapes."""
    parts = ("lora_A", "lora_B", "magnitude")
    for layer in sorted({name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in parts}):
        a, b, magnitude = (tensors.get(f"{layer}.{part}") for part in parts)
        fits = a is not None and b is not None and a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1]
        if fits and a is not None:
            is_fused = any(f".{layer}".endswith(f".{target}") for target in adapter.targets if "." in target)
            fits = a.shape[0] == adapter.r or (is_fused and a.shape[0] % adapter.r == 0)
        if fits and b is not None:
            fits = magnitude is None if not adapter.dora else magnitude is not None and magnitude.numel() == b.shape[0]
        if not fits:
            wanted = f"lora_A and lora_B of rank {adapter.r}{' and a magnitude' if adapter.dora else ''}"
            raise UserError(
                f"the adapter {path} is incomplete or of another rank",
                f"{layer} does not have matching {wanted}",
                "copy the adapter again",
            )
