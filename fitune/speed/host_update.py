"""The update of full fine-tuning whose masters and optimizer state are in host memory: copies, the CPU's work, the
GPU's.

Gradients leave in the backward pass, and the CPU takes their norms and adds up what several groups send. With clipping
or loss scaling the update then runs layer by layer ahead of the next forward pass, else beside the backward pass; that
of the ends (embedding, final norm, head) comes by itself: the next step begins with what it gives. On the CPU it is
bound by the RAM (or, with 8-bit state, by bitsandbytes' code); on the GPU by the link, where master, gradient and
state come and master, state and streamed working copies go back.
"""

from __future__ import annotations

from dataclasses import replace

from fitune.speed.layer_work import LayerWork
from fitune.speed.segments import Segment

RAM_BYTES_PER_S = 40e9
"""What an update on the CPU reads and writes a second. Two channels of DDR4-3200 have 51 GB/s, of DDR5-5600 90, and a
server's eight more (`constants.SERVER_MEMORY`); torch's fused AdamW updates 1,770 million elements a second (50 GB/s)
on two cores of an AMD EPYC."""
CPU_8BIT_PER_S = 8 * 12.5e6
"""Elements a second of bitsandbytes' 8-bit update on the CPU: 25 million on two such cores, here on eight."""
_CPU_BYTES = {"adamw": 28, "adafactor": 40, "lion": 20, "sgd": 12}  # fp32 state, master, gradient; read and written
_DEVICE_BYTES = {"adamw": 28, "adamw8bit": 16}
_STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2 + 8 / 256}
_PIECE_ELEMENTS, _PIECE_KERNELS = 4 * 2**20, 24  # of fitune.engine.streamed_update; kernels with copies and events


def segments(counter: LayerWork) -> list[Segment]:
    """What a step has of them, in place of an update on the device."""
    plan, params = counter.plan, counter.trained_params()
    layers = float(sum(layer.params * count for layer, count in counter.decoder.kinds))
    groups = 1 if counter.layer_major else counter.micro_batches
    width = 4 if counter.layer_major and counter.micro_batches > 1 else counter.element
    # a norm reads what has come (in 16 bits by way of a copy in fp32); each further group is added to a sum in fp32
    cpu = params * (4 if width == 4 or groups > 1 else 10) + params * (groups - 1) * (8 + width)
    out = params * width * groups
    sent = Segment("backward", "gradients leave", 1, link_out_bytes=out, cpu_s=cpu / RAM_BYTES_PER_S)
    whole = _update(counter, width if groups == 1 else 4)
    return [
        sent,
        _part(whole, "forward" if plan.update_waits else "backward", layers),
        _part(whole, "optimizer", params - layers),
    ]


def _part(one: Segment, phase: str, params: float) -> Segment:
    """The update of so many elements."""
    return replace(
        one, phase=phase, memory_bytes=one.memory_bytes * params, kernels=one.kernels * params,
        link_in_bytes=one.link_in_bytes * params, link_out_bytes=one.link_out_bytes * params,
        cpu_s=one.cpu_s * params, code_s=one.code_s * params,
    )  # fmt: skip


def _update(counter: LayerWork, width: int) -> Segment:
    """Of one element. `width`: bytes of its gradient."""
    plan, element = counter.plan, counter.element
    streamed = sum(counter.decoder.layers[i].params for i in plan.streamed_layers()) / counter.trained_params()
    if plan.optimizer_place == "streamed":
        state = _STATE_BYTES[plan.optimizer]
        back = element * streamed if element < 4 else 0.0
        return Segment(
            "optimizer", plan.optimizer, 1, memory_bytes=_DEVICE_BYTES[plan.optimizer] + 12.0,
            kernels=_PIECE_KERNELS / _PIECE_ELEMENTS,
            link_in_bytes=4 + width + state, link_out_bytes=4 + state + back,
        )  # fmt: skip
    factors = 8.0 if plan.update_waits else 0.0
    wide = 6.0 if width < 4 else 0.0
    rounding = 4.0 + element if element < 4 else 0.0
    moved = _CPU_BYTES.get(plan.optimizer.removesuffix("8bit"), 28) + factors + wide + rounding
    code = 1 / CPU_8BIT_PER_S if plan.optimizer.endswith("8bit") else 0.0
    return Segment("optimizer", plan.optimizer, 1, link_in_bytes=element * (1 - streamed),
                   cpu_s=moved / RAM_BYTES_PER_S, code_s=code)  # fmt: skip
