"""Merge an adapter into the original weights and write a model folder, one tensor at a time."""

from __future__ import annotations

import copy
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.files import atomic_folder
from fitune.hardware.host import memory
from fitune.model import shards
from fitune.model.adapter_io import read_adapter
from fitune.model.cache import need_space
from fitune.model.checkpoint import SAFETENSORS_NAMES, TORCH_NAMES, torch_dtype
from fitune.model.source import ModelSource
from fitune.plan import Adapter
from fitune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    import torch

MERGE_ROWS_BYTES = 64 * MIB  # fp32 rows of one weight that are merged at once
FRUGAL_SHARE = 16  # a frugal merge takes so many times fewer
_PIECES = ".pieces"  # merged weights of a frugal merge, beside the files they go to
_SMALL_FILES_BYTES = 64 * MIB  # tokenizer, configuration, index
_COPIED = ("generation_config.json",)
_TORCH_TO_SAFETENSORS = {"int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL", "int8": "I8"}


@dataclass(frozen=True)
class Merged:
    """What was written. ``ram_bytes`` is the most memory tensors took at once, as planned before writing."""

    folder: Path
    num_files: int
    num_bytes: int
    ram_bytes: int


@dataclass(frozen=True)
class _Part:
    """Tensors that are written together: names and dtypes in the model, and what they become in the files."""

    dtypes: dict[str, torch.dtype]
    entries: tuple[shards.Entry, ...]


def merge(
    source: ModelSource,
    adapter_folder: Path,
    out_folder: Path,
    *,
    dtype: str = "bf16",
    max_shard_bytes: int = 2 * GIB,
    ram_cap_bytes: int | None = None,
    frugal: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Write ``source`` with the adapter merged into its original weights as a transformers model folder.

    The sum is taken in fp32 and rounded once to ``dtype`` (``bf16``, ``fp16``, ``fp32``). Files use the publisher's
    names (experts one by one), as `save_pretrained` does. The folder appears whole or not at all.

    Args:
        ram_cap_bytes: most memory that tensors may take at once.
        frugal: merged weights are put together on the disk, fewer rows at a time in RAM; the same but for the
            rounding of such sums. Taken by itself where the cap, or the RAM that is free, asks for it.
        progress: called with (bytes written, bytes in all) after every tensor.

    Raises:
        UserError: the adapter is of another model, the folder is not empty, too little disk or RAM.
    """
    adapter_folder, out_folder = Path(adapter_folder), Path(out_folder)
    if out_folder.exists() and (not out_folder.is_dir() or any(out_folder.iterdir())):
        raise UserError(
            f"cannot write the merged model to {out_folder}",
            "it exists and is not empty",
            "choose a new folder, or remove this one",
        )
    adapter, tensors = read_adapter(adapter_folder)
    model = _model_for_saving(source)
    _check_fit(model, adapter, tensors, adapter_folder)
    parts = list(_parts(source, model, dtype))
    entries = [entry for part in parts for entry in part.entries]
    num_bytes = sum(entry.num_bytes for entry in entries)
    ram_bytes = _ram_bytes(source, parts, tensors, frugal)
    free_bytes = memory(Path("/")).available_bytes
    if not frugal and ram_bytes > min(free_bytes, ram_cap_bytes or free_bytes):
        frugal, ram_bytes = True, _ram_bytes(source, parts, tensors, True)
    if ram_cap_bytes is not None and ram_bytes > ram_cap_bytes:
        raise UserError(
            "not enough RAM for the merge",
            f"it needs {format_bytes(ram_bytes)} for its largest tensors, the limit is {format_bytes(ram_cap_bytes)}",
            "raise the limit, or keep the adapter apart",
        )
    pieces_bytes = max(sum(entry.num_bytes for entry in part.entries) for part in parts) if frugal else 0
    need_space(out_folder.parent, num_bytes + pieces_bytes + _SMALL_FILES_BYTES, "the merged model")
    with atomic_folder(out_folder) as temporary:
        place = _Place(temporary / _PIECES if frugal else None)
        merged = _merged(source, model, parts, adapter, tensors, num_bytes, progress, place)
        num_files = shards.write(temporary, entries, merged, max_shard_bytes)
        place.clear()
        _write_small_files(source, model, dtype, temporary)
    return Merged(out_folder, num_files, num_bytes, ram_bytes)


class _Place:
    """Where merged weights are put together: in RAM, or in files of `folder` that are mapped into memory."""

    def __init__(self, folder: Path | None = None):
        self._folder, self._number = folder, 0
        self.rows_bytes = MERGE_ROWS_BYTES if folder is None else max(1, MERGE_ROWS_BYTES // FRUGAL_SHARE)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose content is not set."""
        import torch

        size = math.prod(shape)
        if self._folder is None or size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        self._folder.mkdir(exist_ok=True)
        self._number += 1
        return torch.from_file(str(self._folder / str(self._number)), shared=True, size=size, dtype=dtype).view(*shape)

    def converted(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in another dtype, itself where it has it already."""
        if self._folder is None or tensor.dtype == dtype:
            return tensor.to(dtype)
        return self.empty(tensor.shape, dtype).copy_(tensor)

    def clear(self) -> None:
        """Give the files up: what was put together in them is written."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def merged_weight(
    weight: torch.Tensor,
    adapter: Adapter,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor | None,
    dtype: torch.dtype,
    place: _Place | None = None,
) -> torch.Tensor:
    """``W + scaling * B A``, with DoRA ``m * (W + scaling * B A) / |row|`` (arXiv 2402.09353), as ``dtype``.

    Shapes: weight [out, in], a [r, in], b [out, r], magnitude [out]. Rows are summed in fp32, some at a time.
    """
    import torch

    place = place or _Place()
    result = place.empty(weight.shape, dtype)
    step = max(1, place.rows_bytes // (4 * weight.shape[1]))
    a = a.float()
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        total = torch.addmm(weight[rows].float(), b[rows].float(), a, alpha=adapter.scaling)  # never into the weight
        if magnitude is not None:
            total *= (magnitude[rows].float() / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
        result[rows] = total
    return result


def _model_for_saving(source: ModelSource) -> Any:
    """The model on meta, with transformers' conversions back to the publisher's names worked out once."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    model = source.meta_model()
    back = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
    model._weight_conversions = back or None
    return model


def _of_an_expert(
    model: Any, shapes: dict[str, tuple[int, ...]], path: str, adapter: Adapter, tensor: torch.Tensor, part: str
) -> tuple[int, ...] | None:  # fmt: skip
    """[out, in] of one expert of a fused weight, where the adapter has a rank for each of them."""
    shape = shapes.get(path, ())
    if len(shape) != 3 or tensor.shape[0 if part == "lora_A" else 1] != shape[0] * adapter.r:
        return None
    return shape[:0:-1] if _is_transposed(model, path) else shape[1:]


def _is_transposed(model: Any, path: str) -> bool:
    """Whether a class holds its fused experts as [experts, in, out]."""
    return bool(getattr(model.get_submodule(path.rpartition(".")[0]), "is_transposed", False))


def _check_fit(model: Any, adapter: Adapter, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Every tensor of the adapter has its place in the model."""
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    problems = []
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        shape = shapes.get(f"{path}.weight" if part in ("lora_A", "lora_B", "magnitude") else name)
        if shape is None and part in ("lora_A", "lora_B"):
            shape = _of_an_expert(model, shapes, path, adapter, tensor, part)
        if shape is not None and _is_conv1d(model, path):
            shape = shape[::-1]
        place = {"lora_A": -1, "lora_B": 0, "magnitude": 0}.get(part)
        if shape is None:
            problems.append(f"{name} has no place in it")
        elif len(shape) > 2 or (
            tuple(tensor.shape) != shape
            if place is None
            else tensor.shape[-1 if part == "lora_A" else 0] != shape[place]
        ):
            problems.append(f"{name} is {list(tensor.shape)}, the weight is {list(shape)}")
    if problems:
        raise UserError(
            f"the adapter in {folder} is not one of this model ({type(model).__name__})",
            f"{len(problems)} tensors do not fit: {'; '.join(problems[:3])}",
            "name the base model the adapter was trained on (adapter_config.json says which)",
        )


def _is_conv1d(model: Any, path: str) -> bool:
    """GPT-2's layers hold their weight as [in, out]."""
    from transformers.pytorch_utils import Conv1D

    module = dict(model.named_modules()).get(path)  # fused experts are no module
    return isinstance(module, Conv1D)


def _parts(source: ModelSource, model: Any, dtype: str) -> Iterator[_Part]:
    """What is written, in the order of the model; worked out on meta."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    shapes = source.weight_shapes()
    own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    together = {group.targets[0]: group.targets for group in source._weights.groups}
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        dtypes = {n: _out_dtype(n, own[n], model, dtype) for n in together.get(name, (name,))}
        done.update(dtypes)
        held = {n: torch.empty(shapes[n], dtype=dtypes[n], device="meta") for n in dtypes}
        stored = revert_weight_conversion(model, held).items()
        yield _Part(dtypes, tuple(shards.Entry(n, _safetensors_name(t.dtype), tuple(t.shape)) for n, t in stored))


def _out_dtype(name: str, own: torch.dtype, model: Any, dtype: str) -> torch.dtype:
    """``dtype`` for floating tensors, except those transformers keeps in fp32 (routers' corrections and the like)."""
    import torch

    if not own.is_floating_point:
        return own
    keep = set(model._keep_in_fp32_modules_strict or ()) | (
        set(model._keep_in_fp32_modules or ()) if dtype == "fp16" else set()
    )
    if any(re.search(rf"(^|\.){re.escape(key)}($|\.)", name) for key in keep):
        return torch.float32
    return torch_dtype(dtype)


def _safetensors_name(dtype: torch.dtype) -> str:
    plain = str(dtype).removeprefix("torch.")
    floating = {TORCH_NAMES[key]: name for key, name in SAFETENSORS_NAMES.items()}
    return floating.get(plain) or _TORCH_TO_SAFETENSORS[plain]


def _ram_bytes(source: ModelSource, parts: list[_Part], tensors: dict[str, torch.Tensor], frugal: bool) -> int:
    """The most that is held at once: the adapter, some rows in fp32, and of the largest part the weights as they are
    read and as they are written (each twice where experts are stacked and split again). A frugal merge holds no more
    of what it writes than such a split copies."""
    shapes = source.weight_shapes()
    wide = 4 if source.dtype == "fp32" or (source.path is not None and source.path.is_file()) else 2
    largest = 0
    for part in parts:
        read = sum(math.prod(shapes[name]) for name in part.dtypes) * wide
        written = sum(entry.num_bytes for entry in part.entries)
        several = len(part.entries) > 1
        if frugal:
            needed = 2 * read + written if several else read
        else:
            needed = (read + written) * (2 if several else 1)
        largest = max(largest, needed)
    rows_bytes = MERGE_ROWS_BYTES // (FRUGAL_SHARE if frugal else 1)
    return largest + 2 * rows_bytes + sum(t.numel() * t.element_size() for t in tensors.values())


def _merged(
    source: ModelSource,
    model: Any,
    parts: list[_Part],
    adapter: Adapter,
    tensors: dict[str, torch.Tensor],
    num_bytes: int,
    progress: Callable[[int, int], None] | None,
    place: _Place,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The written tensors, in the order of the parts' entries."""
    from transformers.core_model_loading import revert_weight_conversion

    stream = source.iter_weights()
    num_written = 0
    for part in parts:
        held: dict[str, torch.Tensor] = {}
        while len(held) < len(part.dtypes):  # both follow the order of the model
            name, tensor = next(stream)
            held[name] = _with_adapter(model, name, tensor, adapter, tensors, part.dtypes[name], place)
            del tensor
        stored = revert_weight_conversion(model, held)
        del held
        for entry in part.entries:
            yield entry.name, stored.pop(entry.name)
            num_written += entry.num_bytes
            if progress is not None:
                progress(num_written, num_bytes)
        place.clear()


def _with_adapter(
    model: Any,
    name: str,
    tensor: torch.Tensor,
    adapter: Adapter,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    place: _Place,
) -> torch.Tensor:
    if name in tensors:
        return tensors[name].to(dtype)
    path = name.removesuffix(".weight")
    a = tensors.get(f"{path}.lora_A")
    if a is None:
        return place.converted(tensor, dtype)
    if tensor.dim() == 3:
        return _merged_experts(tensor, adapter, a, tensors[f"{path}.lora_B"], _is_transposed(model, path), dtype, place)
    b, magnitude = tensors[f"{path}.lora_B"], tensors.get(f"{path}.magnitude")
    if _is_conv1d(model, path):
        return merged_weight(tensor.T, adapter, a, b, magnitude, dtype, place).T.contiguous()
    return merged_weight(tensor, adapter, a, b, magnitude, dtype, place)


def _merged_experts(
    weight: torch.Tensor, adapter: Adapter, a: torch.Tensor, b: torch.Tensor, transposed: bool, dtype: torch.dtype,
    place: _Place,
) -> torch.Tensor:  # fmt: skip
    """Fused experts one by one; a [E * r, in], b [out, r * E] (see `fitune.model.experts`)."""
    result = place.empty(weight.shape, dtype)
    a_ERI, b_ORE = a.view(weight.shape[0], -1, a.shape[1]), b.view(b.shape[0], -1, weight.shape[0])
    for expert in range(weight.shape[0]):
        own = weight[expert].T if transposed else weight[expert]
        merged = merged_weight(own, adapter, a_ERI[expert], b_ORE[..., expert], None, dtype)
        result[expert] = merged.T if transposed else merged
    return result


def _write_small_files(source: ModelSource, model: Any, dtype: str, folder: Path) -> None:
    config = copy.deepcopy(source.config)
    config.dtype = TORCH_NAMES[dtype]
    config.architectures = [type(model).__name__]
    config._name_or_path = ""
    config.save_pretrained(folder)
    for name in _COPIED:
        if source.path is not None and (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)
    if source.tokenizer_path is not None:
        source.tokenizer().save_pretrained(folder)
