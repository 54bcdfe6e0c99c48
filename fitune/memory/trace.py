"""The engine's own step on the `meta` device, with every storage followed from birth to death.

Nothing is computed and nothing is allocated; what is measured is what the same code would allocate on the target. A few
layers of each kind are traced under both activation policies; `memory.replay` adds them up for the whole model.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fitune.engine.batch import Batch, meta_batch
from fitune.engine.driver import Driver
from fitune.engine.optimizers import Masters, abstract_state, update_peak_bytes
from fitune.engine.step import evaluate, forward_backward
from fitune.memory.replay import LayerParts, LayerTerms, Part, PassParts, StepTerms, with_gradients_there
from fitune.model.build import Built, add_adapter, build, fill, make_scratch, meta_weights
from fitune.plan import Plan

Marks = dict[tuple[str, int], Part]
"""(part of the step, layer) to its bytes."""

_CUDA_GRANULE = 512  # torch's CUDA caching allocator rounds every block up to this (c10/cuda/CUDACachingAllocator.cpp)


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of live `meta` storages that were created under it."""

    def __init__(self, granule: int):
        super().__init__()
        self.granule = granule
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granule) * self.granule

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that exist already are not counted again when an op returns a view of them."""
        self._known |= {t.untyped_storage()._cdata for t in tensors}

    def _born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = self.rounded(storage.nbytes())
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._died, key, size)

    def _died(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
                self._born(leaf)
        return out


@dataclass
class _Marks:
    """Live bytes at the start of each part and the peak inside it."""

    tracker: StorageTracker
    parts: Marks
    _open: tuple[tuple[str, int], int] | None = None

    def __call__(self, name: str, index: int) -> None:
        self.close()
        self._open = (name, index), self.tracker.live_bytes
        self.tracker.peak_bytes = self.tracker.live_bytes

    def close(self) -> None:
        if self._open is None:
            return
        key, start = self._open
        self.parts[key] = Part(self.tracker.peak_bytes - start, self.tracker.live_bytes - start)
        self._open = None


def _observed(tracker: StorageTracker, run: Callable[[Callable[[str, int], None]], None]) -> Marks:
    marks = _Marks(tracker, {})
    run(marks)
    marks.close()
    return marks.parts


def _few_chunks(batch: Batch, loss_chunk: int) -> Batch:
    """The batch with targets for at most three loss chunks: the others allocate and free the same again."""
    return replace(batch, num_targets=min(batch.num_targets, 3 * loss_chunk))


def layer_kinds(config: Any) -> tuple[str, ...]:
    """A name per decoder layer; layers of one name have the same shapes and the same kernels."""
    kinds = []
    types = getattr(config, "layer_types", None)
    mlp_types = getattr(config, "mlp_layer_types", None)
    for i in range(config.num_hidden_layers):
        kind = str(types[i]) if types else "layer"
        if mlp_types:
            kind += f"/{mlp_types[i]}"
        elif getattr(config, "first_k_dense_replace", None) is not None:
            kind += "/dense" if i < config.first_k_dense_replace else "/sparse"
        elif getattr(config, "decoder_sparse_step", None):
            dense = i in (getattr(config, "mlp_only_layers", None) or ()) or (i + 1) % config.decoder_sparse_step
            kind += "/dense" if dense else "/sparse"
        kinds.append(kind)
    return tuple(kinds)


def shortened(config: Any, kinds: tuple[str, ...]) -> Any:
    """The same configuration with just enough leading layers to hold every kind, and at least two."""
    count = min(len(kinds), max(2, max(kinds.index(kind) for kind in set(kinds)) + 1))
    config = copy.deepcopy(config)
    config.num_hidden_layers = count
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, list(getattr(config, name))[:count])
    return config


class Tracer:
    """Traces of one model under one plan's method, format and precision; micro-batch shapes vary by call."""

    def __init__(self, config: Any, plan: Plan):
        self.plan = plan
        self.kinds = layer_kinds(config)
        self.config = shortened(config, self.kinds)
        self.granule = _CUDA_GRANULE if plan.device == "cuda" else 1
        self.built = build(self.config, plan, "meta")
        fill(self.built, meta_weights(self.built), plan)
        add_adapter(self.built, plan)
        self.masters = Masters(self.built.trainable())
        self.driver = Driver(self.built)
        self.driver.check()
        embedding = self.built.model.get_input_embeddings()
        self.trains_embedding = any(p.requires_grad for p in embedding.parameters())
        self._terms: dict[tuple[int, int, int], StepTerms] = {}

    def terms(self, num_rows: int, num_columns: int, loss_chunk: int) -> StepTerms:
        """Terms of a step at micro-batches of [num_rows, num_columns]. Cached per shape."""
        key = (num_rows, num_columns, loss_chunk)
        if key not in self._terms:
            self._terms[key] = self._trace(*key)
        return self._terms[key]

    def _trace(self, num_rows: int, num_columns: int, loss_chunk: int) -> StepTerms:
        batch = dict(num_rows=num_rows, num_columns=num_columns, loss_chunk=loss_chunk)
        self.built.context.scratch = make_scratch(self.built, loss_chunk)
        evaluation = self._run_evaluation(**batch)
        layers = {}
        for index, kind in self._of_each_kind():
            layers[kind] = LayerTerms(*self._static(index), eval_forward=evaluation["forward", index])
        other_weights, other_trained, other_state = self._static(None)
        # Adapters' later passes follow from the first. Full fine-tuning adds gradients of the head chunk by chunk and
        # of 16-bit parameters to fp32 masters, so its second pass is traced.
        trains_all = self.plan.method == "full"
        recompute = self._run(recompute_layers=self.config.num_hidden_layers, passes=2 if trains_all else 1, **batch)
        keep = self._run(recompute_layers=0, passes=2 if trains_all else 1, **batch)
        first_pass = self._pass(recompute[0], keep[0])
        if trains_all:
            later_pass = self._pass(recompute[1], keep[1])
        else:
            trained = {kind: layer.trained_bytes for kind, layer in layers.items()}
            later_pass = with_gradients_there(first_pass, trained, self._static(0)[1])
        return StepTerms(
            kinds=self.kinds,
            layers=layers,
            other_weight_bytes=other_weights,
            other_trained_bytes=other_trained,
            other_state_bytes=other_state,
            first_pass=first_pass,
            later_pass=later_pass,
            optimizer_peak_bytes=update_peak_bytes(self.plan.optimizer, self.masters.parameters()),
            eval_embed=evaluation["embed", 0],
            eval_tail=evaluation["tail", 0],
            largest_weight_bytes=self._largest_weight(),
        )

    def _of_each_kind(self) -> list[tuple[int, str]]:
        """(index, kind): the last traced layer of every kind. The first layer is special, and stands for itself."""
        last = {kind: index for index, kind in enumerate(self.kinds[: self.config.num_hidden_layers])}
        return [(index, kind) for kind, index in last.items()]

    def _pass(self, recompute: Marks, keep: Marks) -> PassParts:
        def layer(index: int) -> LayerParts:
            return LayerParts(
                recompute["stash", index],
                (recompute["forward", index], recompute["backward", index]),
                (keep["forward", index], keep["backward", index]),
            )

        return PassParts(
            embed=recompute["embed", 0],
            first=layer(0),
            kinds={kind: layer(index) for index, kind in self._of_each_kind()},
            tail_after_recompute=recompute["tail", 0],
            tail_after_keep=keep["tail", 0],
            embed_backward=recompute.get(("backward", -1), Part(0, 0)),
        )

    def _run(
        self, *, num_rows: int, num_columns: int, loss_chunk: int, recompute_layers: int, passes: int
    ) -> list[Marks]:
        """The parts of each of `passes` forward and backward passes over which gradients accumulate."""
        with_dropout = bool(self.plan.adapter and self.plan.adapter.dropout)

        def step(marks: Callable[[str, int], None]) -> None:
            forward_backward(
                self.driver,
                [_few_chunks(meta_batch(num_rows, num_columns, with_dropout=with_dropout), loss_chunk)],
                recompute_layers=recompute_layers,
                loss_chunk=loss_chunk,
                grad_scale=1.0,
                trains_embedding=self.trains_embedding,
                observe=marks,
                grads_ready=lambda part, index: self.masters.collect(self._names(part, index)),
            )

        tracker = self._tracker()
        found = []
        with tracker:
            for _ in range(passes):
                found.append(_observed(tracker, step))
        for parameter, master in self.masters.pairs.values():
            parameter.grad = master.grad = None
        return found

    def _run_evaluation(self, *, num_rows: int, num_columns: int, loss_chunk: int) -> Marks:
        def run(marks: Callable[[str, int], None]) -> None:
            batch = _few_chunks(meta_batch(num_rows, num_columns, with_dropout=False), loss_chunk)
            evaluate(self.driver, batch, loss_chunk, observe=marks)

        tracker = self._tracker()
        with tracker:
            return _observed(tracker, run)

    def _tracker(self) -> StorageTracker:
        tracker = StorageTracker(self.granule)
        tracker.ignore(self._existing())
        return tracker

    def _names(self, part: str, index: int) -> list[str]:
        prefix = f"{self.built.layers_prefix}."
        if part == "layer":
            return [n for n in self.masters.pairs if n.startswith(f"{prefix}{index}.")]
        return [n for n in self.masters.pairs if not n.startswith(prefix)]

    def _existing(self) -> list[torch.Tensor]:
        return [t for _, t in _device_tensors(self.built)] + list(self.masters.parameters())

    def _static(self, index: int | None) -> tuple[int, int, int]:
        """(weights, trained masters, optimizer state) in bytes of one layer, or of everything outside the layers."""
        prefix = f"{self.built.layers_prefix}."
        mine = f"{prefix}{index}." if index is not None else None

        def belongs(name: str) -> bool:
            return name.startswith(mine) if mine else not name.startswith(prefix)

        rounded = StorageTracker(self.granule).rounded
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for name, t in _device_tensors(self.built)
            if belongs(name)
        }
        weights = sum(rounded(size) for size in storages.values())
        pairs = [(p, master) for name, (p, master) in self.masters.pairs.items() if belongs(name)]
        masters = sum(rounded(m.numel() * 4) for p, m in pairs if m is not p)
        trained = sum(rounded(m.numel() * 4) for _, m in pairs)
        state = (
            sum(
                rounded(t.numel() * t.element_size())
                for t in abstract_state(self.plan.optimizer, [m for _, m in pairs])
            )
            if pairs
            else 0
        )
        return weights + masters, trained, state

    def _largest_weight(self) -> int:
        sizes = [lin.in_features * lin.out_features for lin in self.built.linears.values()]
        sizes += [torch.Size(shape).numel() for e in self.built.experts for shape in e.shapes.values()]
        width = torch.empty((), dtype=self.built.compute_dtype).element_size()
        return max(sizes, default=0) * width


def _device_tensors(built: Built) -> list[tuple[str, torch.Tensor]]:
    """Everything a built model holds on its device, by name."""
    tensors = [*built.model.named_parameters(), *built.model.named_buffers()]
    for name, linear in built.linears.items():
        assert linear.packed is not None
        tensors += [(f"{name}.{key}", t) for key, t in linear.packed.tensors.items()]
    for experts in built.experts:
        for name, packed in experts.packed.items():
            tensors += [(f"{experts.prefix}.{name}.{key}", t) for key, t in packed.tensors.items()]
    if built.context.scratch is not None:
        tensors.append(("scratch", built.context.scratch.buffer))
    return tensors
