"""Tensors as they are stored: a mapping from names to shape, dtype and a way to read each one.

Most come from safetensors files, whose headers are read and checked here without torch; `fitune.model.gguf` makes the
same mapping from a GGUF file, so that everything above (names, conversions, checks) is one path.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.files import file_error, parse_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
# safetensors dtype -> bytes of one element (https://github.com/huggingface/safetensors, format specification)
ELEMENT_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp32", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SAFETENSORS_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
# Values of the 4-bit E2M1 codes of MXFP4 (OCP Microscaling Formats 1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Stored:
    """One stored tensor. ``dtype`` is the safetensors name (``BF16``); ``read`` gives it on the CPU."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def torch_dtype(name: str) -> torch.dtype:
    """``bf16``, ``fp16`` or ``fp32`` as a torch dtype."""
    import torch

    return getattr(torch, TORCH_NAMES[name])


def open_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint folder, in the order of its files; nothing is read but the headers.

    Raises:
        UserError: no safetensors files (pickles are refused), a missing shard, or a damaged file.
    """
    checkpoint: dict[str, Stored] = {}
    for path in _files(Path(folder)):
        for name, (dtype, shape) in read_header(path).items():
            checkpoint[name] = Stored(shape, dtype, _reader(path, name))
    return _with_mxfp4_joined(checkpoint)


def stored_format(checkpoint: dict[str, Stored]) -> str:
    """``bf16``, ``fp16``, ``fp32`` or ``fp8``: the dtype that most bytes have."""
    bytes_of: dict[str, int] = {}
    for tensor in checkpoint.values():
        if tensor.dtype in FORMATS:
            bytes_of[FORMATS[tensor.dtype]] = bytes_of.get(FORMATS[tensor.dtype], 0) + tensor.num_bytes
    return max(bytes_of, key=lambda name: bytes_of[name]) if bytes_of else "fp32"


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (dtype, shape) of every tensor in a safetensors file, checked against the size of the file.

    Raises:
        UserError: unreadable, truncated, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                promised = f"it has {size} bytes and its header promises {length}"
                raise _damaged(path, promised if len(start) == 8 else "it is nearly empty")
            header = parse_json(handle.read(length))
    except OSError as error:
        raise file_error("read", path, error) from None
    except ValueError:
        raise _damaged(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    ends = []
    for name, entry in header.items():
        _check_entry(path, name, entry)
        ends.append(entry["data_offsets"][1])
    end = max(ends, default=0)
    if 8 + length + end != size:
        raise _damaged(path, f"its header promises {8 + length + end} bytes, the file has {size}")
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    for (_, before), (name, after) in zip(ordered, ordered[1:], strict=False):
        if after["data_offsets"][0] < before["data_offsets"][1]:
            raise _damaged(path, f"the bytes of {name} overlap another tensor's")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in ordered}


def _check_entry(path: Path, name: str, entry: Any) -> None:
    """Raises UserError when a header's entry is not what the format says: a dtype, a shape, and as many bytes."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"its header's entry for {name[:80]} is not that of a tensor")
    if dtype in ELEMENT_BYTES and offsets[1] - offsets[0] != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise _damaged(path, f"{name[:80]} has {offsets[1] - offsets[0]} bytes, which do not make its shape {shape}")
    if dtype not in ELEMENT_BYTES:
        raise _damaged(path, f"{name[:80]} is of an unknown type {dtype[:20]!r}")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged or not a safetensors file",
        why,
        "download or copy this file again (an interrupted download leaves such a file)",
    )


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of the index, else the single one, else all (without an index)."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a file's name is not a text")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"cannot read {index}",
                f"it is not an index of safetensors files ({error})",
                "download or copy this file again",
            ) from None
        away = next((name for name in names if Path(name).name != name), None)
        if away is not None:
            raise UserError(
                f"cannot use {index}",
                f"{away!r} leaves the model's folder",
                "download the model again from a source you trust",
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"model folder {folder} is incomplete",
                f"{len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:4])}",
                "download or copy the missing files",
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    # Mistral ships a second copy of its weights as consolidated.safetensors, adapters sit beside models.
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter_")))
    if files:
        return files
    raise _no_weights(folder)


def _no_weights(folder: Path) -> UserError:
    pickles = sorted(p.name for p in folder.glob("*.bin") if p.name.startswith("pytorch_model")) or sorted(
        p.name for p in folder.glob("*.pth")
    )
    if pickles:
        return UserError(
            f"model folder {folder} has its weights only as pickle ({pickles[0]})",
            "loading a pickle can run any code, so fitune does not",
            'convert it, if you trust it: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\"",
        )
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    if ggufs:
        return UserError(
            f"model folder {folder} has no *.safetensors file",
            f"it has GGUF files: {', '.join(ggufs[:4])}",
            f"name the file: {folder / ggufs[0]}",
        )
    return UserError(
        f"model folder {folder} has no weights",
        "there is no *.safetensors file in it",
        "point to the folder that has config.json and the *.safetensors files",
    )


def _reader(path: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            # Memory-mapped: pages come in when touched and do not count as ours. Opening costs the header's parsing.
            with safe_open(str(path), framework="pt", device="cpu") as handle:
                return handle.get_tensor(name)
        except SafetensorError as error:
            raise _damaged(path, str(error)) from None
        except OSError as error:
            raise file_error("read", path, error) from None

    return read


def _with_mxfp4_joined(checkpoint: dict[str, Stored]) -> dict[str, Stored]:
    """Each pair ``X_blocks`` [E, rows, groups, 16] and ``X_scales`` [E, rows, groups] as one bf16 tensor
    ``X`` [E, groups * 32, rows], as gpt-oss's experts hold it. Exact: bf16 has every value MXFP4 has."""
    joined: dict[str, Stored] = {}
    for name, tensor in checkpoint.items():
        stem = name.removesuffix("_blocks").removesuffix("_scales")
        blocks, scales = checkpoint.get(f"{stem}_blocks"), checkpoint.get(f"{stem}_scales")
        if stem == name or blocks is None or scales is None:
            joined[name] = tensor
        elif name.endswith("_blocks"):
            experts, rows, groups, width = blocks.shape
            joined[stem] = Stored((experts, groups * width * 2, rows), "BF16", _mxfp4_reader(blocks, scales))
    return joined


def _mxfp4_reader(blocks: Stored, scales: Stored) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        import torch

        codes, exponents = blocks.read(), scales.read()
        values = torch.tensor(_E2M1, dtype=torch.bfloat16)
        experts, rows, groups, width = codes.shape
        result = torch.empty(experts, groups * width * 2, rows, dtype=torch.bfloat16)
        for expert in range(experts):  # one expert at a time: the wide intermediate stays small
            pair = torch.stack((values[(codes[expert] & 15).long()], values[(codes[expert] >> 4).long()]), dim=-1)
            scale = (exponents[expert].to(torch.int32) - 127)[..., None]
            result[expert] = torch.ldexp(pair.flatten(-2), scale).reshape(rows, -1).T
        return result

    return read
