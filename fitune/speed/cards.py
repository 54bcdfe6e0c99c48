"""What a device does per second: from this machine's calibration where there is one, else from the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fitune.catalog import gpus
from fitune.errors import UserError
from fitune.speed import constants


@dataclass(frozen=True)
class CardRates:
    """Achievable rates of one device. Shares are already applied.

    Attributes:
        flops: per precision, a large matrix product's FLOP/s; attention_flops: the fused kernel's, forward.
        dense_flops: the catalog's rate of bf16 or fp16, which sizes small products' losses.
        memory_bytes_per_s: peak bandwidth; link_bytes_per_s: a pinned copy in one direction.
        host_factor: host time relative to the fitted constants.
        basis: measured | calibrated | kin | catalog | doubtful | unknown | cpu.
        error: (low, high) factors on the device's time; host_error and link_error the same for the others'.
        host_memory: how much faster the RAM beside it is than a desktop's (`speed.host_update`).
        sources: measured bytes/s of streamed weights by where they wait (pageable, disk); unpack_bytes_per_s: measured.
    """

    name: str
    kind: str
    flops: Mapping[str, float]
    attention_share: float
    dense_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_factor: float
    basis: str
    error: tuple[float, float]
    host_error: tuple[float, float]
    link_error: tuple[float, float] = constants.LINK_ERROR["assumed"]
    host_memory: float = 1.0
    sources: Mapping[str, float] = field(default_factory=dict)
    unpack_bytes_per_s: float | None = None

    def with_link(self, bytes_per_s: float) -> CardRates:
        """The same device behind another link (a narrower slot, a throttle)."""
        return replace(self, link_bytes_per_s=bytes_per_s)

    def copy_bytes_per_s(self, source: str) -> float:
        """Of streamed weights that wait in `source`: never faster than the link."""
        known = self.sources.get(source)  # shards have no share of their own: `speed.together` gives their rate
        if known is not None:
            return min(known, self.link_bytes_per_s)
        rate = self.link_bytes_per_s * constants.SOURCE_SHARE.get(source, 1.0)
        return min(rate, constants.DISK_BYTES_PER_S) if source == "disk" else rate


def card_rates(
    device: str,
    name: str,
    calibration: Mapping[str, Any] | None = None,
    num_cores: float | None = None,
    fitted: constants.Fitted | None = None,
) -> CardRates:
    """Rates of a plan's device.

    Args:
        device: cuda | cpu.
        name: the card's name, as a driver or the catalog spells it.
        calibration: measured rates of this machine and card; see :func:`calibrated`.
        num_cores: processor cores, for `cpu`; 2 when not given.
        fitted: other constants than those that ship (for fitting them).
    """
    if device == "cpu":
        rates = _cpu(num_cores or 2.0)
    else:
        rates = _catalog(name, fitted or constants.FITTED)
    return calibrated(rates, calibration) if calibration else rates


def _catalog(name: str, fitted: constants.Fitted) -> CardRates:
    try:
        gpu = gpus.find(name)[0]
    except UserError:
        return _unknown(name)
    dense = (gpu.bf16_tflops or gpu.fp16_tflops or gpu.fp32_tflops or constants.UNKNOWN_TFLOPS) * 1e12
    measured = gpu.id in constants.REFERENCE_CARDS
    kin = not measured and gpu.vendor == "NVIDIA" and gpu.compute_capability == "9.0"
    share = fitted.gemm_share if measured or kin else constants.GEMM_SHARE_ELSEWHERE[gpu.memory_kind]
    attention = fitted.attention_forward_share
    if not (measured or kin):
        attention = min(0.7, attention * constants.ATTENTION_ELSEWHERE)
    half = share * 1e12
    flops = {
        "bf16": (gpu.bf16_tflops or gpu.fp32_tflops or gpu.fp16_tflops or constants.UNKNOWN_TFLOPS) * half,
        "fp16": (gpu.fp16_tflops or gpu.fp32_tflops or constants.UNKNOWN_TFLOPS) * half,
        "fp32": (gpu.fp32_tflops or constants.UNKNOWN_TFLOPS / 4) * half,
    }
    if measured:
        basis, error = "measured", (1 - fitted.device_error, 1 + fitted.device_error)
    else:
        basis = "kin" if kin else "doubtful" if gpu.doubt or gpu.vendor != "NVIDIA" else "catalog"
        error = constants.ERROR_ELSEWHERE[basis]
    host = (fitted.host_low, fitted.host_high)
    return CardRates(
        gpu.name, "cuda", flops, attention, dense, gpu.memory_bytes_per_s, gpu.link_bytes_per_s, 1.0, basis, error,
        host if measured else (min(host[0], constants.HOST_ELSEWHERE[0]), max(host[1], constants.HOST_ELSEWHERE[1])),
        constants.LINK_ERROR["measured" if measured else "assumed"],
        constants.SERVER_MEMORY if gpu.memory_kind == "hbm" else 1.0,
    )  # fmt: skip


def _unknown(name: str) -> CardRates:
    rate = constants.UNKNOWN_TFLOPS * 1e12
    return CardRates(
        name, "cuda", {"bf16": rate * 0.7, "fp16": rate * 0.7, "fp32": rate * 0.2},
        constants.FITTED.attention_forward_share, rate, constants.UNKNOWN_MEMORY_GB_PER_S * 1e9,
        constants.UNKNOWN_LINK_GB_PER_S * 1e9, 1.0, "unknown", constants.ERROR_ELSEWHERE["unknown"],
        constants.HOST_ELSEWHERE,
    )  # fmt: skip


def _cpu(num_cores: float) -> CardRates:
    flops = {name: rate * 1e9 * num_cores for name, rate in constants.CPU_GFLOPS_PER_CORE.items()}
    memory = constants.CPU_MEMORY_GB_PER_S * 1e9
    return CardRates(
        "CPU", "cpu", flops, 0.5, flops["bf16"], memory, memory, 1.0, "cpu", constants.CPU_ERROR, (0.5, 2.0)
    )


def calibrated(rates: CardRates, values: Mapping[str, Any]) -> CardRates:
    """Rates with what was measured on this machine in their place. `values` are the `rates` of a
    `fitune.hardware.calibration.Calibration`; keys that are missing or None change nothing."""
    changes: dict[str, Any] = {}
    gemm = {precision: float(flops) for precision, flops in (values.get("gemm_flops_per_s") or {}).items() if flops}
    if gemm:
        changes["flops"] = {**rates.flops, **gemm}
        if rates.basis != "measured":
            changes |= {"basis": "calibrated", "error": constants.CALIBRATED_ERROR}
    links = [values.get(f"{way}_bytes_per_s") for way in ("host_to_device", "device_to_host")]
    if any(links):
        changes["link_bytes_per_s"] = min(float(rate) for rate in links if rate)
        changes["link_error"] = constants.LINK_ERROR["measured"]
    waits = {"pageable": "pageable_host_to_device_bytes_per_s", "disk": "disk_read_bytes_per_s"}
    sources = {source: float(values[key]) for source, key in waits.items() if values.get(key)}
    if sources:
        changes["sources"] = {**rates.sources, **sources}
    if values.get("memory_bytes_per_s"):  # measured is what a kernel reaches: the share is taken back out
        changes["memory_bytes_per_s"] = float(values["memory_bytes_per_s"]) / constants.STREAMING_KERNEL_SHARE
    if values.get("dequantise_values_per_s"):
        changes["unpack_bytes_per_s"] = float(values["dequantise_values_per_s"]) * constants.UNPACK_BYTES_PER_VALUE
    if values.get("host_kernel_s") and rates.kind != "cpu":
        factor = float(values["host_kernel_s"]) / constants.LAUNCH_S
        changes |= {"host_factor": factor, "host_error": constants.CALIBRATED_HOST_ERROR}
    return replace(rates, **changes)
