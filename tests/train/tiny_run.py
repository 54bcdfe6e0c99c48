"""A tiny model as a folder, small data, and whole runs of the command line as processes of their own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 320
# Read by the fork server once; each process of a test then starts with them in a fraction of a second.
PRELOADED = ["torch", "transformers", "transformers.models.llama.modeling_llama", "bitsandbytes", "fitune.cli.main",
             "fitune.cli.commands.train", "fitune.cli.progress", "fitune.train.loop", "fitune.planner.make",
             "fitune.memory.trace", "fitune.engine.engine", "fitune.data.dataset", "fitune.model.source",
             "fitune.model.loading", "fitune.model.tokenizers", __name__]  # fmt: skip
WAIT_S = 240.0  # without a new line of output: a machine that many share


def make_base(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A random model of `tests.tiny` with a byte-level tokenizer, saved as people have it on their disk."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests import tiny

    values = dict(vocab_size=VOCABULARY, max_position_embeddings=512) | changes
    tiny.reference(architecture, **values).save_pretrained(folder)
    special = ["<pad>", "<s>", "</s>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


def questions(count: int) -> list[dict[str, str]]:
    """Prompts and answers of different lengths."""
    return [{"prompt": f"What is {i} plus {i}?{' Really?' * (i % 4)}", "response": f"It is {2 * i}{'!' * (i % 7)}"}
            for i in range(count)]  # fmt: skip


class Command:
    """`fitune ARGUMENTS` in a process of its own, with a real pid that can be killed.

    Args:
        prepare: called in the process before the command, to make something slow or broken there.
    """

    def __init__(self, *arguments: str, cwd: Path, prepare: Callable[[], None] | None = None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.log = cwd / f"log-{time.monotonic_ns()}.txt"
        target = (tuple(map(str, arguments)), str(cwd), str(self.log), prepare)
        self.process = context.Process(target=_child, args=target)
        self.process.start()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.join(WAIT_S)

    def wait(self) -> tuple[int, str]:
        """(exit code, everything printed)."""
        self.wait_for(lambda: False, every_s=0.02)
        self.process.join(WAIT_S)
        return self.process.exitcode, self.log.read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[], bool], every_s: float = 0.002) -> bool:
        """Until `condition` holds; False when the process ended before."""
        printed, end = -1, 0.0
        while not condition():
            if not self.process.is_alive():
                return condition()
            size = self.log.stat().st_size if self.log.exists() else 0
            if size != printed:
                printed, end = size, time.monotonic() + WAIT_S
            assert time.monotonic() < end, f"nothing happens any more: {self.log.read_text()}"
            time.sleep(every_s)
        return True


def _child(arguments: Sequence[str], cwd: str, log: str, prepare: Callable[[], None] | None) -> None:
    os.chdir(cwd)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from fitune.cli.main import main

    if prepare is not None:
        prepare()
    code = main(arguments)
    sys.stdout.flush()
    sys.exit(code)


def events(run: Path) -> list[dict[str, Any]]:
    """Whole events so far; a run that has not begun has none."""
    from fitune.train.events import read_events

    return read_events(run / "events.jsonl")


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in events(run) if e["event"] == kind]


def steps_done(run: Path) -> int:
    return max((e["step"] for e in of_kind(run, "step")), default=0)


def result_bytes(run: Path) -> bytes:
    """The trained weights as they lie on the disk."""
    adapter = run / "adapter" / "adapter_model.safetensors"
    return (adapter if adapter.exists() else run / "model" / "model.safetensors").read_bytes()


def checkpoint_bytes(run: Path, step: int) -> bytes:
    """Parameters and optimizer state after a step."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    return (folder / "parameters.safetensors").read_bytes() + (folder / "state.safetensors").read_bytes()
