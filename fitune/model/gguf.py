"""GGUF files: configuration and tokenizer through transformers, weights tensor by tensor from the mapped file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.files import atomic_folder, file_error
from fitune.model import shards
from fitune.model.cache import cache_dir, need_space
from fitune.model.checkpoint import TORCH_NAMES, Stored
from fitune.model.weights import groups, meta_model, stream, tensor_names
from fitune.units import MIB

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
# Up to this size a file is converted once to safetensors in fp32 (exact); larger ones are read in place as bf16.
CONVERT_BELOW_PARAMS = 1_000_000_000
CONTENT_KEY_BELOW_BYTES = 256 * MIB  # hashing that much takes a fraction of a second
CONVERSION = 1  # raise it when converted folders change
_FORMATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds. ``quantisation`` names its commonest type (Q4_1), ``folder`` its cached conversion."""

    path: Path
    folder: Path
    num_params: int
    quantisation: str

    @property
    def converted(self) -> bool:
        """Whether ``folder`` holds weights too, not only configuration and tokenizer."""
        return self.num_params < CONVERT_BELOW_PARAMS

    @property
    def format(self) -> str:
        """The dtype in which weights are handed out."""
        return "fp32" if self.converted else _FORMATS.get(self.quantisation, "bf16")

    @property
    def note(self) -> str:
        if self.quantisation in _FORMATS:
            return f"{self.path.name} holds {self.quantisation} weights"
        exact = "fp32, which holds every value exactly" if self.converted else "bf16, which rounds them"
        return f"{self.path.name} holds {self.quantisation} weights: they are dequantised to {exact}"


def open_gguf(path: Path) -> GgufFile:
    """The file's facts and its cache folder, converted when this is the first time (atomic; about 15 s for 135 M).

    Raises:
        UserError: not a GGUF file, damaged, of an architecture transformers cannot read, or no room in the cache.
    """
    path = Path(path)
    folder = _folder(path)
    facts = folder / "gguf.json"
    if not facts.is_file():
        _convert(path, folder)
    values = json.loads(facts.read_text(encoding="utf-8"))
    return GgufFile(path, folder, values["num_params"], values["quantisation"])


def _folder(path: Path) -> Path:
    """The cache folder of this very file. Small files are known by their content, so that another environment's copy of
    the bundled model is not converted again; large ones by place, size and time of change."""
    try:
        stat = path.stat()
        with path.open("rb") as handle:
            magic = handle.read(4)
            handle.seek(0)
            small = stat.st_size < CONTENT_KEY_BELOW_BYTES and magic == MAGIC
            content = hashlib.file_digest(handle, "sha256").hexdigest() if small else ""
    except OSError as error:
        raise file_error("read", path, error) from None
    if magic != MAGIC:
        raise UserError(f"{path} is not a GGUF file", "it does not begin with GGUF", "check it, or download it again")
    key = content or f"{path.resolve()}/{stat.st_size}/{stat.st_mtime_ns}"
    return cache_dir() / "gguf" / f"{path.stem}-{hashlib.sha256(f'{CONVERSION}/{key}'.encode()).hexdigest()[:16]}"


def _convert(path: Path, folder: Path) -> None:
    reader = _reader(path)
    num_params = sum(math.prod(int(n) for n in tensor.shape) for tensor in reader.tensors)
    file = GgufFile(path, folder, num_params, _commonest(reader))
    config, tokenizer = _config_and_tokenizer(path)
    _complete(config, reader)
    config.dtype = TORCH_NAMES[file.format]
    config._name_or_path = ""
    if file.converted:
        need_space(folder, 4 * num_params, f"the conversion of {path.name}")
    with atomic_folder(folder) as temporary:
        if file.converted:
            _convert_weights(path, config, temporary)
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        facts = {"num_params": num_params, "quantisation": file.quantisation, "file": str(path)}
        (temporary / "gguf.json").write_text(json.dumps(facts), encoding="utf-8")


def _convert_weights(path: Path, config: Any, folder: Path) -> None:
    import torch

    model = meta_model(config)
    checkpoint = open_tensors(path, model, torch.float32)
    plan = groups(checkpoint, model, None, path.name)
    shapes = tensor_names(model)
    entries = [shards.Entry(name, "F32", shapes[name]) for group in plan for name in group.targets]
    shards.write(folder, entries, stream(checkpoint, plan, model, None, "cpu", None, path.name), 1 << 62)


def _commonest(reader: Any) -> str:
    bytes_of: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        bytes_of[name] = bytes_of.get(name, 0) + int(tensor.n_bytes)
    return max(bytes_of, key=lambda name: bytes_of[name]) if bytes_of else "F32"


_LONGEST_LIST = 16 * 2**20  # values; vocabularies and their merges are far below a million


def _reader(path: Path) -> Any:
    try:
        import gguf
        import numpy as np
    except ImportError:
        raise UserError(f"cannot read {path}", "the package gguf is not installed", "pip install gguf") from None

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """The library's (seen with 0.19) reads nothing, over and over, past the end of a file: a list whose length is
        damaged fills all memory. Here that is an error, as is a list longer than any vocabulary."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("it ends in the middle of a value")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                length = int(self._get(orig_offs + 4, "u8")[0])
                if length > _LONGEST_LIST:
                    raise ValueError(f"it has a list of {length:,} values")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        return Reader(str(path))
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise UserError(
            f"{path} is damaged or of an unknown GGUF version",
            str(error) or type(error).__name__,
            "download the file again (an interrupted download leaves such a file)",
        ) from None


def _config_and_tokenizer(path: Path) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, NotImplementedError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read the model in {path}",
            f"transformers: {error}",
            "use the model's original safetensors files instead of the GGUF",
        ) from error
    return config.get_text_config(), tokenizer


def _complete(config: Any, reader: Any) -> None:
    """The width of experts, which transformers (5.17 to 5.24) leaves at the class's default for qwen3moe files."""
    field = reader.fields.get(f"{_architecture(reader)}.expert_feed_forward_length")
    if field is not None and hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = int(field.parts[-1][0])


def _architecture(reader: Any) -> str:
    return bytes(reader.fields["general.architecture"].parts[-1]).decode()


def open_tensors(path: Path, model: Any, dtype: torch.dtype) -> dict[str, Stored]:
    """The file's tensors under the names of ``model``, dequantised when read, as ``dtype``.

    Names and layout (llama's permuted heads, Gemma's shifted norms, fused experts) are those of transformers' own GGUF
    reader (`modeling_gguf_pytorch_utils`, 5.17 to 5.24), used piece by piece.

    Raises:
        UserError: damaged, or of an architecture transformers cannot read.
    """
    import torch
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = _reader(path)
    processor = TENSOR_PROCESSORS.get(_architecture(reader), TensorProcessor)(config=model.config.to_dict())
    try:
        names = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise UserError(
            f"cannot read the model in {path}",
            f"transformers: {error}",
            "use the model's original safetensors files instead of the GGUF",
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parts: dict[str, list] = {}
    for tensor in reader.tensors:
        target = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
        if target is not None:
            parts.setdefault(target, []).append(tensor)
        elif not tensor.name.startswith("rope_freqs"):  # computed from the configuration
            parts.setdefault(tensor.name, []).append(tensor)
    stored = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    return {
        target: Stored(
            shapes.get(target, tuple(reversed([int(n) for n in tensors[0].shape]))),
            stored,
            _tensor_reader(target, tensors, processor, names, dtype),
        )
        for target, tensors in parts.items()
    }


def _tensor_reader(target: str, tensors: list, processor: Any, names: dict, dtype: torch.dtype) -> Callable:
    def read() -> torch.Tensor:
        import numpy
        import torch
        from gguf import quants

        parsed: dict[str, dict] = {"tensors": {}}
        for tensor in tensors:
            wide = quants.dequantize(tensor.data, tensor.tensor_type)
            done = processor.process(weights=wide, name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed)
            if done.name is not None:
                parsed["tensors"][target] = torch.from_numpy(numpy.array(done.weights, dtype=numpy.float32))
        return parsed["tensors"][target].to(dtype)

    return read
