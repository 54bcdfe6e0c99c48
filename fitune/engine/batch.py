"""A micro-batch on its device, with what the layers and the loss need to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fitune.model import dropout
from fitune.model.linear import StepContext
from fitune.model.loss import IGNORED


class HostBatch(Protocol):
    """What the data floor hands over: numpy arrays [B, T] (targets shifted) and documents' lengths per row."""

    @property
    def input_ids(self) -> Any: ...
    @property
    def targets(self) -> Any: ...
    @property
    def position_ids(self) -> Any: ...
    @property
    def record_ids(self) -> Any: ...
    @property
    def doc_lengths(self) -> tuple[tuple[int, ...], ...]: ...


@dataclass
class Batch:
    """Tensors [B, T] on the device. `counted` are the flat positions that have a target, None when all have one;
    `host_ids` are the `input_ids` where they came from, None where there are no values."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    counted: torch.Tensor | None
    doc_lengths: tuple[tuple[int, ...], ...] | None
    cu_seqlens: torch.Tensor | None
    token_keys: torch.Tensor | None
    num_tokens: int
    num_targets: int
    host_ids: torch.Tensor | None = None

    def enter(self, context: StepContext) -> None:
        """Make this the running micro-batch of the model's layers."""
        context.token_keys = self.token_keys
        context.doc_lengths = self.doc_lengths
        context.cu_seqlens = self.cu_seqlens


def to_device(host: HostBatch, device: torch.device, *, dropout_seed: tuple[int, int] | None) -> Batch:
    """Copy a host micro-batch. `dropout_seed` is (seed, optimizer step), None without dropout or in evaluation."""
    targets = torch.from_numpy(host.targets)
    flags = (targets != IGNORED).reshape(-1)
    num_targets = int(flags.sum())
    counted = None if num_targets == flags.numel() else flags.nonzero().squeeze(1)
    num_tokens = sum(sum(row) for row in host.doc_lengths)
    packed = any(len(row) > 1 for row in host.doc_lengths)
    documents = host.doc_lengths if packed else None
    cu_seqlens = None
    if documents is not None and device.type != "cpu":
        cu_seqlens = torch.tensor(_boundaries(documents, targets.shape[1]), dtype=torch.int32)
    move = lambda t: t.to(device, non_blocking=True) if t is not None else None  # noqa: E731
    host_ids = torch.from_numpy(host.input_ids)
    position_ids, record_ids = torch.from_numpy(host.position_ids), torch.from_numpy(host.record_ids)
    keys = None
    if dropout_seed is not None:
        keys = dropout.token_keys(record_ids, position_ids, *dropout_seed)
    return Batch(
        move(host_ids),
        move(targets),
        move(position_ids),
        move(counted),
        documents,
        move(cu_seqlens),
        move(keys),
        num_tokens,
        num_targets,
        host_ids,
    )


def _boundaries(documents: tuple[tuple[int, ...], ...], num_columns: int) -> list[int]:
    """Cumulative lengths over the flattened rows; each row's padding counts as a document of its own."""
    bounds = [0]
    for row, lengths in enumerate(documents):
        for length in lengths:
            bounds.append(bounds[-1] + length)
        if bounds[-1] < (row + 1) * num_columns:
            bounds.append((row + 1) * num_columns)
    return bounds


def meta_batch(num_rows: int, num_columns: int, *, with_dropout: bool) -> Batch:
    """A full micro-batch of unpacked rows without values: every token is real and has a target."""
    ids = torch.empty(num_rows, num_columns, dtype=torch.long, device="meta")
    keys = torch.empty(num_rows * num_columns, dtype=torch.int32, device="meta") if with_dropout else None
    count = num_rows * num_columns
    return Batch(ids, torch.empty_like(ids), torch.empty_like(ids), None, None, None, keys, count, count)
