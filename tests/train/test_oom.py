"""Every form of running out of memory is known for what it is, on texts from real reports, and nothing else is."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from fitune.train.oom import MemoryFailure, classify, classify_text, oom_kills


class AcceleratorError(RuntimeError):
    """As torch >= 2.9 raises it for every error of the driver."""


TORCH_22 = (
    "CUDA out of memory. Tried to allocate 386.00 MiB. GPU 0 has a total capacity of 9.64 GiB of which 95.38 MiB is "
    "free. Including non-PyTorch memory, this process has 9.54 GiB memory in use."  # huggingface/trl#3436
)
TORCH_113 = (
    "CUDA out of memory. Tried to allocate 160.00 MiB (GPU 0; 15.78 GiB total capacity; 13.92 GiB already allocated; "
    "98.75 MiB free; 14.35 GiB reserved in total by PyTorch)"  # huggingface/transformers#12587
)
BARE = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\n"  # unslothai/unsloth#1797
)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'"  # hiyouga/LlamaFactory#8036
)
CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "268435456 bytes. Error code 12 (Cannot allocate memory)"  # QwenLM/Qwen#852
)
WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds before timing out."  # torch c10d ProcessGroupNCCL
)
EXCEPTIONS = {
    "torch 2.2 and later": (torch.OutOfMemoryError(TORCH_22), "device", "torch", False),
    "torch 1.13": (RuntimeError(TORCH_113), "device", "torch", False),
    "bare driver error": (RuntimeError(BARE), "device", "driver", False),
    "AcceleratorError": (AcceleratorError(BARE), "device", "driver", False),
    "cuda driver error": (RuntimeError("CUDA driver error: out of memory"), "device", "driver", False),
    "triton": (RuntimeError("Triton Error [CUDA]: out of memory"), "device", "driver", False),
    # deepspeedai/DeepSpeedExamples#323
    "cuBLAS": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device",
               "cublas", False),
    "cuBLAS has no room for its handle": (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "device",
        "cublas", False),
    "cuDNN": (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device", "cudnn", False),
    "HIP": (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), "device", "torch", False),
    "NCCL": (RuntimeError(NCCL), "device", "nccl", True),
    "a peer that hangs": (RuntimeError(WATCHDOG), "peer", "rank", True),
    "pinned": (RuntimeError("CUDA error: out of memory (cudaHostAlloc of 4096 bytes)"), "pinned", "pinned", False),
    "CPU allocator": (RuntimeError(CPU_ALLOCATOR), "host", "cpu", False),
    "CPU allocator of Windows": (
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to "
                     "allocate 262144000 bytes."), "host", "cpu", False),
    "numpy": (MemoryError("Unable to allocate 7.28 GiB for an array with shape (1000, 512, 3815)"), "host", "python",
              False),
    "MemoryError": (MemoryError(), "host", "python", False),
    "fork": (OSError(errno.ENOMEM, "Cannot allocate memory"), "host", "cpu", False),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_exceptions(kind: str):
    error, where, source, fatal = EXCEPTIONS[kind]
    found = classify(error)
    assert found is not None
    assert (found.where, found.source, found.fatal) == (where, source, fatal)
    assert found.line and "\n" not in found.line


def test_a_cause_counts():
    """Libraries wrap what happened in an error of their own."""
    try:
        try:
            raise torch.OutOfMemoryError(TORCH_22)
        except RuntimeError as inner:
            raise RuntimeError("the layer could not be run") from inner
    except RuntimeError as outer:
        assert classify(outer) == MemoryFailure("device", "torch", TORCH_22)


NOT_MEMORY = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx`"),
    AcceleratorError("CUDA error: an illegal memory access was encountered"),
    ValueError("memory_efficient must be a bool"),
    KeyError("out"),
    OSError(errno.ENOSPC, "No space left on device"),
    # meta-llama/llama-cookbook#45: a nonsensical size is a bug, no smaller plan mends it
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory."),
]


@pytest.mark.parametrize("error", NOT_MEMORY, ids=lambda error: str(error)[:40])
def test_other_errors(error: Exception):
    assert classify(error) is None


@pytest.mark.parametrize(
    ("text", "where", "source"),
    [
        # bitsandbytes-foundation/bitsandbytes#726: prints and exits
        ("  0%|   | 0/1000\nError out of memory at line 380 in file /src/bitsandbytes/csrc/pythonInterface.c\n",
         "device", "bitsandbytes"),
        # hiyouga/LlamaFactory#4629
        ("[81234.612399] Out of memory: Killed process 21457 (python) total-vm:344834703kB, anon-rss:255433113kB",
         "host", "kernel"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.batch.", "host", "kernel"),
        (f"Traceback (most recent call last):\n  File \"x.py\", line 1\ntorch.OutOfMemoryError: {TORCH_22}\n", "device",
         "torch"),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", "host", "cpu"),
        ("Traceback\nMemoryError", "host", "python"),
    ],
)  # fmt: skip
def test_last_words(text: str, where: str, source: str):
    found = classify_text(text)
    assert found is not None and (found.where, found.source) == (where, source)


def test_our_own_messages():
    found = classify_text("error: out of GPU memory\n  why: Cuda failure 2 'out of memory'\n")
    assert found is not None and found.line == "Cuda failure 2 'out of memory'" and found.fatal


def test_who_knows_what_happened_goes_before_those_who_were_left():
    """Several ranks write to one standard error; the last line is that of one that waited in vain."""
    found = classify_text(f"torch.OutOfMemoryError: {TORCH_22}\nRuntimeError: Connection closed by peer\n")
    assert found is not None and (found.where, found.source) == ("device", "torch")
    alone = classify_text("RuntimeError: Connection closed by peer\n")
    assert alone is not None and alone.where == "peer"


def test_quiet_text():
    assert classify_text("step 12 of 40: out of 3 candidates memory was chosen\nTraceback: ValueError: no") is None


def test_every_shared_case_is_recognised(shared: Path):
    """Reports of people whose runs died of memory: those whose log says so in the words of a library."""
    told = {
        "gpu": {"device"},
        "none_other_process": {"device"},
        "host_ram": {"host"},
        "pinned_ram": {"device", "pinned"},
    }
    missed = []
    for path in sorted((shared / "oom_cases").glob("*.json")):
        case = json.loads(path.read_text())
        log = case["log"] if isinstance(case["log"], str) else "\n".join(case["log"])
        found = classify_text(log)
        expected = told.get(case["expected"]["memory"])
        if expected is not None and (found is None or found.where not in expected):
            missed.append(path.stem)
    # Killed from outside or a dead child: the exit code says so, no words (see tests/train/test_died.py).
    silent = {"fsdp_qlora_300b_ranks_host_ram", "images_2048_workers_died", "qwen32b_lora_zero3_cpu_after_checkpoint",
              "vision_11b_merge_colab_ram", "alpaca_final_save_fsdp_a100_40g"}  # fmt: skip
    assert set(missed) <= silent


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_kernels_counters(tmp_path: Path):
    two = write(tmp_path / "v2", proc__vmstat="nr_free_pages 1\noom_kill 3\n", proc__self__cgroup="0::/job\n")
    write(two / "sys/fs/cgroup/job", **{"memory.events": "low 0\noom 2\noom_kill 2\noom_group_kill 0\n"})
    assert oom_kills(two) == 5
    one = write(tmp_path / "v1", proc__self__cgroup="4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n")
    write(one / "sys/fs/cgroup/memory", **{"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"})
    assert oom_kills(one) == 7, "in a container the group's own path is the host's"
    assert oom_kills(tmp_path / "nothing") is None
