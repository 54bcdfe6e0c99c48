"""Runs that run out of GPU memory for real, and one that must not grow.

    python benchmarks/faults_gpu.py --out benchmarks/results/faults.json            all of it, about three minutes
    python benchmarks/faults_gpu.py --only forward grab --out faults.json           some of it
    python benchmarks/faults_gpu.py --only killed --out faults.json                 the supervisor, a process killed

Each case is a whole run of a model of true shape with random weights, in this process. The failures are the
allocator's and the driver's own: at a chosen moment the free cached memory is given back and the allocator's limit is
drawn to what is in use (`set_per_process_memory_fraction`), so that the next large tensor does not fit; the limit is
lifted when the run changes its plan. `cap` limits a whole run to less than it needs, `grab` starts a second process
that takes the card's memory in mid-run and keeps it. Every case must finish with all steps once and the losses of the
undisturbed run within the noise of bf16. `steady` trains 1,000 steps of varying lengths: the memory that the allocator
reserves may grow by less than 1 % after step 50.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench

MODEL = "random:meta-llama/Llama-3.2-1B"
STEPS = 8
LOSS_NOISE = 0.02  # relative; bf16 has 8 bits, and the micro-batch may have been split
GIB = 1024**3
WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "while", "seven", "wizards", "boil", "water", "pots")
SQUEEZED = {
    "forward": dict(step=2, part="forward", index=5),
    "loss": dict(step=3, part="tail", index=0),
    "backward": dict(step=4, part="backward", index=5),
    "first update": dict(step=0, part="optimizer", index=0),
    "evaluation": dict(evaluation=2),
}
CASES = ("undisturbed", *SQUEEZED, "cap", "grab", "steady")
GRABBER = """
import sys, time, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


class Scene:
    """What goes wrong in one run. `install` wraps the engine's calls; `lift` is called when the plan changes."""

    def __init__(self, squeeze: dict[str, Any] | None = None, at_step: Callable[[int], None] | None = None):
        self.squeeze, self.at_step = squeeze, at_step
        self.evaluations = 0
        self.struck = False

    def strike(self) -> None:
        import torch

        if self.struck:
            return
        self.struck = True
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)

    def lift(self) -> None:
        import torch

        if self.squeeze is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def install(self) -> Callable[[], None]:
        """Returns what takes it away again."""
        from fitune.engine.engine import Engine
        from fitune.train import recover

        real_step, real_evaluate, real_replan = Engine.step, Engine.evaluate, recover.replan
        scene, where = self, self.squeeze or {}

        def step(self: Any, batches: Any, *, step: int, lr: float, observe: Any) -> Any:
            if scene.at_step is not None:
                scene.at_step(step)

            def watching(part: str, index: int) -> None:
                observe(part, index)
                if (where.get("step"), where.get("part"), where.get("index")) == (step, part, index):
                    scene.strike()

            return real_step(self, batches, step=step, lr=lr, observe=watching)

        def evaluate(self: Any, batches: Any) -> Any:
            scene.evaluations += 1
            if where.get("evaluation") == scene.evaluations:
                scene.strike()
            return real_evaluate(self, batches)

        def replan(*arguments: Any) -> Any:
            scene.lift()
            return real_replan(*arguments)

        Engine.step, Engine.evaluate, recover.replan = step, evaluate, replan

        def remove() -> None:
            Engine.step, Engine.evaluate, recover.replan = real_step, real_evaluate, real_replan

        return remove


def write_data(path: Path, records: int, longest_words: int, seed: int = 0) -> Path:
    chance = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(records):
            words = [chance.choice(WORDS) for _ in range(chance.randint(10, longest_words))]
            file.write(json.dumps({"prompt": " ".join(words[:8]), "response": " ".join(words[8:])}) + "\n")
    return path


def train(
    folder: Path, name: str, scene: Scene, on_step: Callable[[int], None] = lambda step: None, **changes: Any
) -> Path:
    """A run in this process; its folder."""
    import gc

    import torch

    from fitune import recipe as recipes
    from fitune.train import run

    settings = dict(model=MODEL, data=str(folder / "data.jsonl"), batch=8, seq_len=1024, steps=STEPS, lr=2e-4, lora_r=8,
                    recompute="auto", eval_share=0.1, eval_every=3, save_every=4, method="lora",
                    out=str(folder / name))  # fmt: skip

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            on_step(event["step"])

    remove = scene.install()
    try:
        run(recipes.build(settings | changes), on_event=on_event)
    finally:
        remove()
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()
    return folder / name


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in lines if event["event"] == kind]


def outcome(name: str, run: Path, undisturbed: Path, seconds: float) -> dict[str, Any]:
    from fitune.train.run_folder import RunFolder

    losses = [event["loss"] for event in events(run, "step")]
    whole = [event["loss"] for event in events(undisturbed, "step")]
    difference = max((abs(a - b) / b for a, b in zip(losses, whole, strict=False)), default=0.0)
    steps = [event["step"] for event in events(run, "step")]
    changes = [event["change"] for event in events(run, "replan")]
    ended = events(run, "end")[-1]["status"]
    ok = (ended == "done" and steps == list(range(1, len(whole) + 1)) and difference <= LOSS_NOISE
          and bool(changes) == (name != "undisturbed"))  # fmt: skip
    return {"name": name, "ok": ok, "status": ended, "steps": len(steps), "changes": changes,
            "causes": [event["cause"][:120] for event in events(run, "replan")],
            "final_loss": losses[-1], "undisturbed_final_loss": whole[-1], "largest_difference": difference,
            "story": RunFolder(run).info().recovered, "seconds": seconds}  # fmt: skip


class Grabber:
    """A second process that takes all of the card but `leave_bytes`, once."""

    def __init__(self, at: int, leave_bytes: int):
        self.at, self.leave_bytes = at, leave_bytes
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, step: int) -> None:
        import torch

        if step != self.at or self.process is not None:
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as after an evaluation that needed other sizes
        self.process = subprocess.Popen([sys.executable, "-c", GRABBER, str(self.leave_bytes)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == "held", "the second process could not take its memory"

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def case(name: str, folder: Path, undisturbed: Path) -> Path:
    import torch

    if name in SQUEEZED:
        return train(folder, name.replace(" ", "-"), Scene(SQUEEZED[name]))
    peak = max(event["peak_allocated_bytes"] for event in events(undisturbed, "step"))
    load = events(undisturbed, "phase")[0]["peak_allocated_bytes"]
    if name == "cap":
        total = torch.cuda.get_device_properties(0).total_memory
        limit = load + int(0.6 * (peak - load))

        def draw(step: int) -> None:
            torch.cuda.set_per_process_memory_fraction(limit / total)

        return train(folder, name, Scene(at_step=draw))
    assert name == "grab"
    grabber = Grabber(at=3, leave_bytes=int(0.5 * (peak - load)))
    try:
        return train(folder, name, Scene(at_step=grabber))
    finally:
        grabber.close()


def steady(folder: Path, steps: int) -> dict[str, Any]:
    """Reserved memory over a long run of varying lengths."""
    import torch

    started = time.perf_counter()
    write_data(folder / "varying.jsonl", 400, 350, seed=1)
    reserved: list[int] = []
    run = train(folder, "steady", Scene(), lambda step: reserved.append(torch.cuda.memory_reserved()), steps=steps,
                data=str(folder / "varying.jsonl"), batch=2, seq_len=512, eval_every=steps // 4,
                save_every=steps // 10)  # fmt: skip
    after = reserved[min(49, len(reserved) - 1) :]
    growth = max(after) / after[0] - 1
    lengths = sorted({event["tokens"] for event in events(run, "step")})
    texts = [event["text"] for event in events(run, "notice")]
    notices = [text for text in texts if "leak" in text or "another" in text]
    return {
        "name": "steady",
        "ok": growth < 0.01 and len(reserved) == steps and not notices,
        "steps": len(reserved),
        "reserved_at_50_bytes": after[0],
        "reserved_highest_bytes": max(after),
        "growth": growth,
        "reserved_every_50th_bytes": reserved[::50],
        "tokens_per_step": [lengths[0], lengths[-1]],
        "notices": notices,
        "seconds": time.perf_counter() - started,
    }


def killed(folder: Path, undisturbed: Path) -> dict[str, Any]:
    """The command line with its supervisor: the worker is killed in mid-run, nobody resumes it by hand."""
    started = time.perf_counter()
    out = folder / "killed"
    command = [sys.executable, "-m", "fitune", "train", MODEL, "--data", str(folder / "data.jsonl"), "--batch", "8",
               "--seq-len", "1024", "--steps", str(STEPS), "--lr", "2e-4", "--lora-r", "8", "--eval-share", "0.1",
               "--eval-every", "3", "--save-every", "4", "--method", "lora", "--out", str(out)]  # fmt: skip
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and not ((out / "events.jsonl").is_file() and len(events(out, "step")) >= 5):
            time.sleep(0.05)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        code = process.wait()
    found = outcome("killed", out, undisturbed, time.perf_counter() - started)
    restarts = events(out, "restart")
    return found | {"ok": code == 0 and len(restarts) == 1 and found["largest_difference"] <= LOSS_NOISE,
                    "exit_code": code, "restarts": [r["cause"] for r in restarts]}  # fmt: skip


def show(record: dict[str, Any]) -> None:
    mark = "ok  " if record["ok"] else "FAIL"
    if "error" in record:
        print(f"{mark} {record['name']:13} {record['error']}", flush=True)
    elif "growth" in record:
        first, highest = record["reserved_at_50_bytes"] / GIB, record["reserved_highest_bytes"] / GIB
        print(f"{mark} {record['name']:13} {record['steps']} steps, reserved {first:.3f} GiB after step 50, "
              f"{highest:.3f} at most ({record['growth']:+.2%})  [{record['seconds']:.0f} s]", flush=True)  # fmt: skip
    else:
        print(f"{mark} {record['name']:13} loss {record['final_loss']:.4f} (undisturbed "
              f"{record['undisturbed_final_loss']:.4f}, largest difference {record['largest_difference']:.2%})  "
              f"{'; '.join(record['changes']) or 'no change'}  [{record['seconds']:.0f} s]", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[*CASES, "killed"], default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults.json"))
    parser.add_argument("--steps", type=int, default=1000, help="of the steady run")
    args = parser.parse_args()
    from fitune.train import evaluation

    evaluation.SAMPLE_TOKENS = 8  # answers of random weights are not what is tested
    records = []
    with tempfile.TemporaryDirectory(prefix="fitune-faults-") as temporary:
        folder = Path(temporary)
        write_data(folder / "data.jsonl", 80, 700)
        started = time.perf_counter()
        undisturbed = train(folder, "undisturbed", Scene())
        first = outcome("undisturbed", undisturbed, undisturbed, time.perf_counter() - started)
        for name in ["undisturbed", *(n for n in args.only if n != "undisturbed")]:
            record = first if name == "undisturbed" else attempt(name, folder, undisturbed, args.steps)
            records.append(record)
            show(record)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({**bench.header("faults"), "model": MODEL, "cases": records}, indent=1) + "\n", encoding="utf-8"
    )
    return 0 if all(record["ok"] for record in records) else 1


def attempt(name: str, folder: Path, undisturbed: Path, steps: int) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        if name == "steady":
            return steady(folder, steps)
        if name == "killed":
            return killed(folder, undisturbed)
        return outcome(name, case(name, folder, undisturbed), undisturbed, time.perf_counter() - started)
    except Exception as error:  # noqa: BLE001  (a failed case is recorded, and the next one runs)
        return {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
