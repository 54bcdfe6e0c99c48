"""Follow every storage of a running program from birth to death, with identity. Works on meta, cpu and cuda tensors."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "int64",
    torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool",
    torch.uint64: "uint64", torch.complex64: "complex64",
}  # fmt: skip


@dataclass(slots=True)
class Block:
    """A storage: `part` is the number of the mark under which it was born, `died` of the one under which it died."""

    number: int
    num_bytes: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    part: int
    died: int | None = None
    owner: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of the step begins: `at` is the number of events before it."""

    name: str
    index: int
    at: int


class Follower(TorchDispatchMode):
    """Notes births and deaths of storages on one type of device.

    On `meta`, values that the program reads (a loss, a norm) are ones. What a kernel allocates inside itself is not
    seen: an op that does so on the target needs a meta implementation that allocates the same.

    Attributes:
        blocks: every storage born, by number.
        events: +number + 1 for a birth, -(number + 1) for a death, in order.
        marks: the parts, in order.
    """

    def __init__(self, device_type: str):
        super().__init__()
        self.device_type = device_type
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.marks: list[Mark] = [Mark("start", 0, 0)]
        self._alive: dict[int, int] = {}  # storage to block; -1: it was there before
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._sole_owner = _sole_owner()

    def __exit__(self, *error: Any) -> None:
        """What is let go afterwards is no part of the run."""
        self._watched.clear()
        super().__exit__(*error)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that exist already are not counted again when an op returns a view of them."""
        for tensor in tensors:
            self._alive.setdefault(tensor.untyped_storage()._cdata, -1)

    def mark(self, name: str, index: int) -> None:
        """A part begins here."""
        self.marks.append(Mark(name, index, len(self.events)))

    def mark_before(self, tensor: torch.Tensor, name: str, index: int) -> None:
        """A part begins with the birth of this tensor's storage; here, when that is of an earlier part."""
        block = self.block_of(tensor)
        at = len(self.events)
        if block is not None and block.part == len(self.marks) - 1:
            at = self.events.index(block.number + 1, self.marks[-1].at)
        self.marks.append(Mark(name, index, at))
        for event in self.events[at:]:
            moved = self.blocks[abs(event) - 1]
            if event > 0:
                moved.part = len(self.marks) - 1
            else:
                moved.died = len(self.marks) - 1

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block a tensor lives in; None when it was not born here."""
        number = self._alive.get(tensor.untyped_storage()._cdata, -1)
        return self.blocks[number] if number >= 0 else None

    def claim(self, tensor: torch.Tensor, owner: str, name: str) -> None:
        """Say whose the block is."""
        block = self.block_of(tensor)
        if block is not None and not block.owner:
            block.owner, block.name = owner, name

    def _born(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or storage.nbytes() == 0:  # no allocator is asked for nothing
            return
        number = len(self.blocks)
        part = len(self.marks) - 1
        dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
        self.blocks.append(Block(number, storage.nbytes(), op, tuple(tensor.shape), dtype, part))
        self.events.append(number + 1)
        self._alive[key] = number

        def died(_: Any) -> None:
            del self._watched[key]
            del self._alive[key]
            self.blocks[number].died = len(self.marks) - 1
            self.events.append(-number - 1)

        self._watched[key] = weakref.ref(storage, died)

    def _note_inputs(self, args: Any) -> None:
        """Memory that no op has made, such as a numpy array's: a view of it is no birth."""
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device_type:
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    self._alive[key] = -1
                    self._watched[key] = weakref.ref(storage, self._forgetting(key))

    def _forgetting(self, key: int) -> Any:
        def forget(_: Any) -> None:
            self._alive.pop(key, None)

        return forget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device_type == "meta" and func in _READS and _reads_meta(func, args, kwargs):
            return _ones(func, args[0])
        if self.device_type != "meta":
            self._note_inputs(args)
        if func is _aten.add.Tensor and _accumulates(args) and _counts(args) == self._sole_owner:
            return args[0].add_(args[1])
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            if out.device.type == self.device_type:
                self._born(out, func._opname)
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device_type:
                self._born(leaf, func._opname)
        return out


# Where autograd adds up the gradients of a tensor that was used several times, it adds into the first of them when
# nobody else holds that (torch 2.11 and 2.13, torch/csrc/autograd/input_buffer.cpp: `accumulate`), but not while a
# dispatch mode is active or on meta tensors: there it would make a new one.


def _accumulates(args: Any) -> bool:
    """Whether autograd's engine asks for this sum, not a backward function in Python (which would be the caller)."""
    if torch.is_grad_enabled() or not all(isinstance(a, torch.Tensor) for a in args[:2]):
        return False
    frame = sys._getframe(2)  # the caller of `__torch_dispatch__`, maybe torch's wrapper of it
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_name == "_engine_run_backward" and _is_dense(args[0])


_WRAPPERS = ("_compile.py", "eval_frame.py")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: a permutation of its dimensions is contiguous."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _counts(args: Any) -> tuple[int, int]:
    """Owners of the first operand and of its storage, those on the way here included."""
    return args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)


class _OwnersOfASum(TorchDispatchMode):
    """What `_counts` says where autograd's buffer is the only owner."""

    found: tuple[int, int] = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.add.Tensor and _accumulates(args):
            self.found = _counts(args)
        return func(*args, **(kwargs or {}))


@functools.cache
def _sole_owner() -> tuple[int, int]:
    with torch.enable_grad():
        x = torch.zeros(2, 2, requires_grad=True)
        total = (x.cos() + x.sin()).sum()
        with _OwnersOfASum() as mode:
            total.backward()
    assert mode.found != (0, 0), "autograd has not added two gradients"
    return mode.found


_READS = (_aten._local_scalar_dense.default, _aten._to_copy.default)


def _reads_meta(func: Any, args: Any, kwargs: Any) -> bool:
    if args[0].device.type != "meta":
        return False
    return func is _aten._local_scalar_dense.default or str((kwargs or {}).get("device")) == "cpu"


def _ones(func: Any, tensor: torch.Tensor) -> Any:
    if func is _aten._local_scalar_dense.default:
        return 1.0 if tensor.dtype.is_floating_point else 1
    return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
