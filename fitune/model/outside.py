"""What of a built model is not on its device: embedding table, head, the frozen weights of streamed layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from fitune.model.ends import HostEmbedding, HostHead
from fitune.model.formats import load_bitsandbytes
from fitune.plan import Plan

if TYPE_CHECKING:
    from fitune.model.build import Built


def head_to_host(built: Built, plan: Plan) -> None:
    head = built.model.get_output_embeddings()
    trains_bias = plan.adapter is not None and plan.adapter.bias == "all"
    if type(head) is not nn.Linear or (head.bias is not None and trains_bias):
        built.notes.append("the output head stays on the device: it is no plain linear layer, or its bias is trained")
        return
    if built.model.config.tie_word_embeddings and not isinstance(built.model.get_input_embeddings(), nn.Embedding):
        built.notes.append("the output head stays on the device: it is tied to an embedding of another kind")
        return
    built.host_head = HostHead(head, built.compute_dtype, plan.ring_buffers)
    built.model.set_output_embeddings(built.host_head)


def embedding_to_host(built: Built) -> None:
    embedding = built.model.get_input_embeddings()
    tied = built.model.config.tie_word_embeddings and not built.tied_on_host
    if tied or not isinstance(embedding, nn.Embedding):
        built.notes.append("the embedding stays on the device: it is tied to the head")
        return
    built.host_embedding = HostEmbedding(embedding, built.device)
    built.model.set_input_embeddings(built.host_embedding)


def open_host(built: Built, plan: Plan, identity: str | None = None) -> None:
    """Room for what is not on the device, all of it before the first weight is read: a refusal comes early. `fill`
    calls it where nobody has.

    Args:
        identity: of the model's weights, for a packed file that later runs may use (`packed_file.identity`).

    Raises:
        UserError: not enough RAM or disk space.
    """
    if plan.base_format in ("nf4", "fp4") and built.device.type != "meta":
        load_bitsandbytes()  # its operators unpack; where an earlier run has packed, nobody else asks for it
    if built.host_opened or built.device.type == "meta":
        _share_packed(built)
        return
    built.host_opened = True
    pin = built.device.type == "cuda" and plan.stream_from != "pageable"
    if built.host_head is not None:
        built.host_head.allocate(pin)
    if built.streamed is not None:
        built.streamed.open(plan.stream_from, identity)
        if pin and plan.stream_from == "pinned":
            built.notes += built.streamed.refusals()
    _share_packed(built)


def _share_packed(built: Built) -> None:
    """Streamed weights belong to the store and to their modules."""
    if built.streamed is None:
        return
    for name, linear in built.linears.items():
        if built.streamed.takes(f"{name}.weight"):
            linear.packed = built.streamed.packed(name)
    for experts in built.experts:
        for name in filter(built.streamed.takes, experts.names()):
            experts.packed[name.removeprefix(f"{experts.prefix}.")] = built.streamed.packed(name)


@contextmanager
def weight_at_hand(built: Built, name: str) -> Iterator[None]:
    """A streamed linear layer's weight on the device for a moment."""
    linear = built.linears[name]
    shared = linear.packed
    if built.streamed is not None and built.streamed.takes(f"{name}.weight"):
        linear.packed = built.streamed.on_device(name)
    try:
        yield
    finally:
        linear.packed = shared
