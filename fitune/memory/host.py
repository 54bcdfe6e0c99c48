"""What a run needs of RAM and of the disk, phase by phase. Plain Python.

RAM is the process' resident set. To measure again: `python benchmarks/host_memory.py` (Linux); the record it writes is
what the constants come from and what a test holds the sums to.
"""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.in_host import InHost, held_bytes
from fitune.memory.zero import ZeroBytes, zero_bytes
from fitune.plan import Plan
from fitune.units import MIB

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
TOKEN_BYTES = 8  # int32 input id and int32 label (fitune.data.records)
MERGE_ROWS_BYTES = 2 * 64 * MIB  # fp32 rows of one weight that a merge holds (fitune.model.merge)
STAGING_BYTES = 2 * 32 * MIB  # two pinned buffers of the thread that feeds the card (fitune.engine.feeder)
EXPORT_SHARD_BYTES = 2 * 2**30  # of one file of a model trained in full (fitune.train.result)
OFFLOADED = "offloaded state"  # of each rank on the disk
SMALL_FILES_BYTES = 16 * MIB  # tokenizer, configuration, events: an upper bound, they are a few MiB

# Measured on Linux x86_64 (AMD EPYC, glibc), Python 3.11, torch 2.13 (CPU build), transformers 5.24, 2026-11-30, one
# thread, with `benchmarks/host_memory.py`: the resident set once a run has imported what it needs and read its data;
# and of a merge's process. Beside a card: NVIDIA H200, Python 3.12, torch 2.11, 2026-11-30, with the context and the
# libraries' kernels in it; the steps of the 22 runs without tables in RAM hold 1.375 to 1.536 GiB
# (`benchmarks/results/h200-matrix-2026-11-30.json`), after another run in the same process.
PROCESS_BYTES: dict[tuple[str, str], int] = {
    ("linux", "cpu"): 408 * MIB,
    ("linux", "cuda"): 1440 * MIB,
    ("linux", "merge"): 352 * MIB,
}
# The same runs: what glibc's heap holds beside the blocks in use, for blocks below its mmap threshold (32 MiB): 13 to
# 40 MiB, and 0.38 to 0.48 of the activations that a step keeps, with all layers kept and with all recomputed.
HEAP_BYTES = 30 * MIB
HEAP_SHARE = 0.4


@dataclass(frozen=True)
class Facts:
    """What RAM and disk depend on besides the plan. None: not known.

    Attributes:
        num_parameters: weights of the model, a tied head once.
        num_trained: trained parameters.
        state_bytes: the optimizer's state, wherever it lives.
        vocab_size, hidden_size: of the embedding; `has_head`: the head is not the embedding itself.
        largest_values, largest_linear_values: elements of the largest tensor in the model's files, and of the layers.
        stored_width: bytes of one element there.
        download_bytes: what must be fetched first; 0 where the files are here, None where that is not known.
        data_tokens: tokens of all records.
        keep_checkpoints: how many checkpoints stay.
        platform: as in `sys.platform`.
        row_width: tokens of the widest row.
        streamed_bytes: packed weights of the layers that are streamed to the card.
        makes_weights: seeded weights are made tensor by tensor, on the device they are for; nothing is read.
        stored_format: fp32, bf16 or fp16, as the weights are stored; None: only its width is known.
        in_host: what is trained, where all weights are and their masters are in RAM; None elsewhere.
        num_rows: most rows of a step; 0: the plan's batch.
    """

    num_parameters: int
    num_trained: int
    state_bytes: int
    vocab_size: int
    hidden_size: int
    largest_values: int
    largest_linear_values: int
    stored_width: int
    download_bytes: int | None
    data_tokens: int | None
    keep_checkpoints: int
    platform: str
    has_head: bool = True
    row_width: int = 0
    streamed_bytes: int = 0
    makes_weights: bool = False
    stored_format: str | None = None
    in_host: InHost | None = None
    num_rows: int = 0

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint: fp32 masters of what is trained and the optimizer's state."""
        return 4 * self.num_trained + self.state_bytes


def process_bytes(plan: Plan, facts: Facts) -> int | None:
    """Python, torch and the libraries a run imports; None on a platform where that was not measured."""
    return PROCESS_BYTES.get((facts.platform, plan.device))


def ram(
    phase: str, plan: Plan, facts: Facts, tensors: dict[str, int], kept_bytes: int = 0
) -> dict[str, int] | None:  # fmt: skip
    """Owner to bytes of RAM in a phase.

    Args:
        tensors: the device's, where the device is the CPU.
        kept_bytes: activations that a step keeps there; after the first step the heap keeps their room.
    Returns:
        None where the process itself was not measured on this platform.
    """
    process = process_bytes(plan, facts)
    if process is None:
        return None
    owners = {"process": process, **tensors}
    if facts.data_tokens is not None:
        owners["data"] = facts.data_tokens * TOKEN_BYTES
    for owner, size in beside_card(plan, facts, phase).items():
        owners[owner] = owners.get(owner, 0) + size
    if plan.device == "cpu" and phase not in ("load", "resume"):
        room = 0 if phase in ("first_step", "step") else kept_bytes
        owners["heap"] = room + HEAP_BYTES + int(HEAP_SHARE * kept_bytes)
    if phase in ("load", "resume"):
        owners["loader"] = loader_bytes(plan, facts)
    if phase in ("save", "resume"):
        owners["checkpoint"] = staging_bytes(phase, plan, facts)
    if plan.optimizer.startswith("paged_"):
        owners["paged optimizer state"] = facts.state_bytes  # managed memory: at most all of it is in RAM
    return {owner: size for owner, size in owners.items() if size}


def loader_bytes(plan: Plan, facts: Facts) -> int:
    """The largest tensor as it is stored, memory-mapped, and, where it is converted on the CPU, once more."""
    if facts.makes_weights and plan.device == "cuda":
        return 0
    return facts.largest_values * facts.stored_width


def staging_bytes(phase: str, plan: Plan, facts: Facts) -> int:
    """What is trained and the optimizer's state on their way to a file (one copy in RAM, which is written in the
    background) or back. Masters that are in RAM are saved from where they are, unless a copy takes a quarter of the
    free RAM at most (which is not counted: there is room), and read tensor by tensor, as their state is; what is left
    is a file of the trained model."""
    if facts.in_host is None:
        return facts.checkpoint_bytes
    if phase != "save":
        return 4 * facts.largest_values
    width = WIDTHS[plan.precision]
    return min(width * facts.num_parameters, max(EXPORT_SHARD_BYTES, width * facts.largest_values))


def beside_card(plan: Plan, facts: Facts, phase: str = "step") -> dict[str, int]:
    """What of the model and of a step is in RAM though a card computes: all the time, but for what full fine-tuning
    with masters there makes in its first step."""
    width = WIDTHS[plan.precision]
    table = facts.vocab_size * facts.hidden_size * width
    owners = {
        "embedding": table if plan.embedding_place == "host" else 0,
        "head": table if plan.head_place == "host" and facts.has_head else 0,
        "streamed weights": facts.streamed_bytes if plan.stream_from in ("pinned", "pageable") else 0,
        "staging": STAGING_BYTES if plan.stream_from in ("pageable", "disk") and plan.device == "cuda" else 0,
    }
    if facts.in_host is not None:
        targets = plan.micro_batch * max(1, facts.row_width - 1)
        found = held_bytes(facts.in_host, plan, facts.num_rows or plan.batch, targets)
        there = {"load": ("masters",), "resume": ("masters", "optimizer state", "working copies")}.get(phase, found)
        owners |= {owner: found[owner] for owner in found if owner in there}
    elif plan.optimizer_place != "device":
        owners |= {"masters and state": 4 * facts.num_trained + facts.state_bytes, "gradients": 4 * facts.num_trained}
    owners |= _offloaded_by_zero(plan, facts)
    if plan.offload_inputs and not (facts.in_host is not None and phase in ("load", "resume")):
        num_rows = plan.batch if plan.accumulation_order == "layer-major" else plan.micro_batch
        rows = num_rows * facts.row_width
        owners["inputs"] = plan.recompute_layers * rows * facts.hidden_size * width
    return {owner: size for owner, size in owners.items() if size}


def _offloaded_by_zero(plan: Plan, facts: Facts) -> dict[str, int]:
    """What DeepSpeed keeps in a rank's host memory; of the weights only those that are trained."""
    found = _zero(plan, facts)
    if found is None:
        return {}
    return {"DeepSpeed's offload": found.host, "disk buffers": found.buffers}


def _zero(plan: Plan, facts: Facts) -> ZeroBytes | None:
    if plan.offload_optimizer == "none" and plan.offload_params == "none":
        return None
    return zero_bytes(plan, trained=facts.num_trained, frozen_bytes=0, state_bytes=facts.state_bytes,
                      unit=facts.largest_values)  # fmt: skip


def pinned(plan: Plan, facts: Facts, phase: str = "step") -> dict[str, int]:
    """The part of it that is pinned, which the card's driver copies on its own."""
    if plan.device != "cuda":
        return {}
    wanted = {"inputs", "staging", "gradients", "working copies", "disk buffers"}
    wanted |= {"DeepSpeed's offload"} if plan.offload_optimizer == "nvme" else set()  # gradients
    wanted |= {"masters and state", "masters", "optimizer state"} if plan.optimizer_place == "streamed" else set()
    wanted |= {"streamed weights"} if plan.stream_from == "pinned" else set()
    wanted |= {"head"} if plan.stream_from != "pageable" else set()
    return {owner: size for owner, size in beside_card(plan, facts, phase).items() if owner in wanted}


def merge_ram(facts: Facts) -> dict[str, int] | None:
    """RAM of `fitune export --merged`: the adapter, some rows in fp32, and the largest tensor read and written."""
    process = PROCESS_BYTES.get((facts.platform, "merge"))
    if process is None:
        return None
    largest = facts.largest_values * (facts.stored_width + WIDTHS["bf16"])
    rows = min(MERGE_ROWS_BYTES, 2 * 4 * facts.largest_linear_values)
    return {"process": process, "adapter": 4 * facts.num_trained, "largest tensor": largest, "rows": rows}


def disk(phase: str, plan: Plan, facts: Facts) -> dict[str, int] | None:
    """Owner to bytes that a phase needs on the disk.

    Checkpoints are written whole before the oldest goes, so that one more than are kept is there for a moment.
    """
    owners: dict[str, int] = {}
    if phase == "load":
        if facts.download_bytes is None:
            return None
        owners["model files"] = facts.download_bytes
        if plan.stream_from == "disk":
            owners["packed weights"] = facts.streamed_bytes
    zero = _zero(plan, facts)
    if zero is not None and phase not in ("load", "merge"):
        owners[OFFLOADED] = zero.disk
    if phase in ("save", "resume"):
        owners["checkpoints"] = facts.checkpoint_bytes * (facts.keep_checkpoints + (phase == "save"))
    if phase == "save":
        if plan.method == "full":
            owners["model"] = facts.num_parameters * WIDTHS[plan.precision] + SMALL_FILES_BYTES
        else:
            owners["adapter"] = 4 * facts.num_trained + SMALL_FILES_BYTES
    if phase == "merge":
        owners["merged model"] = facts.num_parameters * WIDTHS["bf16"] + SMALL_FILES_BYTES
    return {owner: size for owner, size in owners.items() if size}


def notes(plan: Plan, facts: Facts) -> tuple[str, ...]:
    """What the figures of RAM leave out."""
    found = []
    if process_bytes(plan, facts) is None:
        found.append(f"RAM is not computed: a {plan.device} process was not measured on {facts.platform}")
    elif facts.data_tokens is None:
        found.append("RAM is without the data's tokens (8 bytes each): they are counted when the data is read")
    return tuple(found)
