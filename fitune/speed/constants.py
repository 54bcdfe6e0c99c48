"""Efficiencies and fixed costs behind predicted step times: what was fitted, on what, when, and how to fit it again.

To fit again: `python scripts/fit_speed.py benchmarks/results/*.json --write`, which replaces the block between the
markers. Records come from `benchmarks/measure.py` and `benchmarks/gpu_records.py` on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """Constants of the roofline. Shares are of the catalog's dense rate or bandwidth.

    Attributes:
        gemm_share: what a large matrix product reaches; gemm_half_tiles: number of 128 x 128 output tiles at which a
            product reaches half of that (on a card of 989 TFLOP/s; fewer on a smaller one).
        grouped_share: of experts' and batched products, relative to gemm_share.
        attention_forward_share, attention_backward_share: of fused attention kernels.
        memory_share: elementwise kernels; unpack_share: unpacking the base; skinny_share: adapters' narrow products;
            update_share: the optimizer.
        score_bytes: memory traffic per attention score of the blockwise kernel (fp32 products, scale, soft-cap, mask,
            exponentials, the 16-bit copy); dropout_bytes: per element of counter dropout's kernel; wide_rotary_bytes:
            per element of queries and keys that a class rotates in fp32.
        kernel_s: time on the device that each kernel takes whatever it does.
        host_kernel_s: host time per kernel launched; host_call_s: of Python per module or autograd function entered.
        host_unpack_s: host time of bitsandbytes' own code per unpacked 4-bit weight.
        host_transfer_s: host time per layer or head tile that the ring brings, and per saved input that is sent away
            or fetched: bookkeeping, events, views.
        host_low, host_high: what other hosts' times were, relative to these (5 and 95 %).
        device_error: 95 % of the device-bound records lie within this relative error.
    """

    gemm_share: float
    gemm_half_tiles: float
    grouped_share: float
    attention_forward_share: float
    attention_backward_share: float
    memory_share: float
    unpack_share: float
    skinny_share: float
    update_share: float
    score_bytes: float
    dropout_bytes: float
    wide_rotary_bytes: float
    kernel_s: float
    host_kernel_s: float
    host_call_s: float
    host_unpack_s: float
    host_transfer_s: float
    host_low: float
    host_high: float
    device_error: float


PRIOR = Fitted(
    gemm_share=0.7,
    gemm_half_tiles=40.0,
    grouped_share=0.4,
    attention_forward_share=0.4,
    attention_backward_share=0.35,
    memory_share=0.75,
    unpack_share=0.6,
    skinny_share=0.5,
    update_share=0.6,
    score_bytes=72.0,
    dropout_bytes=12.0,
    wide_rotary_bytes=60.0,
    kernel_s=1.5e-6,
    host_kernel_s=7e-6,
    host_call_s=7e-5,
    host_unpack_s=2e-4,
    host_transfer_s=5e-4,
    host_low=0.6,
    host_high=1.5,
    device_error=0.15,
)
"""What one would guess before any record: where a fit starts, and what it is drawn to where records say nothing."""

# What follows is written by scripts/fit_speed.py. HOST_FACTORS: the host's time in each batch of records, relative to
# the middle of them all, at which an unknown host is put.
# fitted: begin
FITTED_ON = (
    "191 records of h200-2026-11-30.json, h200-matrix-2026-11-30.json, plan-points.json, "
    "stream-h200-2026-12-01.json, stream-h200-2026-12-01b.json; held-out half: median 5.3%, 95 % 23.2% on "
    "their hosts (4k tokens and more: 3.6%, 13.3%); 6.4%, 23.1% without knowing the host"
)
HOST_FACTORS = {
    "h200-2026-11-30.json": 1.078,
    "vm, Intel(R) Xeon(R) Processor at 05810c7": 1.13,
    "vm, Intel(R) Xeon(R) Processor at 06f34a0": 1.229,
    "vm, Intel(R) Xeon(R) Processor at 2ac21c6": 0.829,
    "vm, Intel(R) Xeon(R) Processor at 39af758": 1.038,
    "vm, Intel(R) Xeon(R) Processor at 72ebc63": 0.9277,
    "vm, Intel(R) Xeon(R) Processor at 73eaa5b": 0.6745,
    "vm, Intel(R) Xeon(R) Processor at b332f0a": 1.029,
    "vm, Intel(R) Xeon(R) Processor at c92073c": 1.119,
    "vm, Intel(R) Xeon(R) Processor at e58d968": 1.173,
    "vm, Intel(R) Xeon(R) Processor at fc2444a": 1.119,
}
FITTED = Fitted(
    gemm_share=0.7,
    gemm_half_tiles=52.5,
    grouped_share=0.3817,
    attention_forward_share=0.3781,
    attention_backward_share=0.2692,
    memory_share=0.5155,
    unpack_share=0.5213,
    skinny_share=0.6686,
    update_share=0.97,
    score_bytes=74.05,
    dropout_bytes=13.06,
    wide_rotary_bytes=76.56,
    kernel_s=1.726e-06,
    host_kernel_s=2.077e-05,
    host_call_s=6.255e-05,
    host_unpack_s=0.0001312,
    host_transfer_s=0.00018,
    host_low=0.6337,
    host_high=1.578,
    device_error=0.08757,
)
# fitted: end

REFERENCE_TFLOPS = 989.0  # dense bf16 rate of the card the constants were fitted on (NVIDIA H200, catalog)
REFERENCE_CARDS = ("h200-sxm",)  # catalog ids whose records the constants were fitted on
OVERLAP_POWER = 6.0
"""Host and device run beside each other within a phase; their times combine as (host^p + device^p)^(1/p), a maximum
with a rounded corner: where both are equal the phase takes 12 % longer than either."""
CPU_DROPOUT_BYTES = 160.0
"""Memory traffic per element of counter dropout on a processor: some 17 int32 passes, part of them in cache. Not
measured."""
EFFICIENT_ATTENTION = 0.6
"""The memory-efficient kernel's rate relative to flash attention's. A rule of thumb, not measured."""

SERVER_MEMORY = 2.0
"""How much faster than a desktop's (`speed.host_update.RAM_BYTES_PER_S`) the RAM beside a card with HBM updates
masters. From one run: 3B with fp32 state on an H200's host of 16 cores (`stream-h200-2026-12-01b.json`)."""
SOURCE_SHARE = {"none": 1.0, "pinned": 1.0, "pageable": 0.4, "disk": 0.1}
"""Share of the link's rate by where streamed weights wait. Pageable memory goes through small pinned buffers that a
thread fills (not measured); disk: an NVMe drive beside a PCIe 4 x16 link."""
DISK_BYTES_PER_S = 2.2e9
"""At most, from a disk: 1.9 and 2.2 GB/s in two runs of one host, whose page cache had been emptied."""

# ---- cards that were not measured ----

GEMM_SHARE_ELSEWHERE = {"gddr": 0.85, "gddr_ecc": 0.60, "hbm": 0.80, "shared": 0.60}
"""What large products reach of the catalog's dense rate, by memory kind. Not measured here: consumer cards hold or
exceed their boost clock (the catalog's rate is at boost, with fp32 accumulation); small data-centre cards (T4, L4, A10)
are held back by 70 to 150 W; A100-class cards reach about four fifths. H200: fitted above (it is power-limited too)."""
ATTENTION_ELSEWHERE = 1.25
"""Fused attention's share on Ampere and Ada relative to the H200's: FlashAttention-2 uses their tensor cores fully, and
Hopper's only in part (https://arxiv.org/abs/2407.08608 gives 35 % of an H100). Capped at 0.7 of the dense rate."""
ERROR_ELSEWHERE = {"kin": (0.80, 1.30), "catalog": (0.70, 1.50), "doubtful": (0.50, 2.20), "unknown": (0.20, 5.0)}
"""Interval of the device's time relative to the prediction (kin: the same compute capability as a measured card).
Wide on purpose: `docs/speed.md` lists the published figures they were checked against."""
HOST_ELSEWHERE = (0.6, 2.0)
LINK_ERROR = {"measured": (0.95, 1.10), "assumed": (0.8, 1.5)}
"""Factors on the time of copies: the link's rate was measured on such a machine, or comes from the catalog."""
CALIBRATED_ERROR = (0.85, 1.20)
ROUGH_ERROR = (0.5, 2.5)
"""Factor on the interval where a part of the work is only estimated (unknown family, plain-torch recurrences)."""

UNKNOWN_TFLOPS, UNKNOWN_MEMORY_GB_PER_S, UNKNOWN_LINK_GB_PER_S = 50.0, 400.0, 12.0
"""A card that the catalog does not know and that was not calibrated: good for ranking plans, not for a time."""

# ---- processors ----

CPU_GFLOPS_PER_CORE = {"bf16": 190.0, "fp16": 25.0, "fp32": 75.0}
"""Matrix products per physical core. From one figure each: the demo (SmolLM2-135M, LoRA on all linears) gave 376
tokens/s in bf16 and 237 in fp32 on two cores of an AMD EPYC with AVX512-BF16 (torch 2.13.0, 2026-11-30; read once, no
record); fp16 is a guess."""
CPU_MEMORY_GB_PER_S = 20.0  # of one process on a few cores; not measured
CPU_KERNEL_S = 8e-6
CPU_ERROR = (0.45, 2.5)

# ---- from a calibration's figures to the roofline's ----

STREAMING_KERNEL_SHARE = 0.9
"""What the calibration's elementwise kernel reaches of the bandwidth on the data sheet. A rule of thumb."""
UNPACK_BYTES_PER_VALUE = 2.5  # half a byte read, two written
LAUNCH_S = 5e-6
"""Host seconds per small operation launched from Python, as `fitune calibrate` measures them, on the hosts that the
constants were fitted on. Not measured there: a calibrated host's factor is its own figure over this one."""
CALIBRATED_HOST_ERROR = (0.6, 1.6)
"""One figure of launches stands for all of Python's part: checked on no host yet."""
