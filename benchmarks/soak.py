"""A run under random faults that ends bitwise as without any: ``python benchmarks/soak.py --minutes 60``.

Two processes train a small classifier with ZeRO 3 and background saves. Every few seconds one fault is injected:
SIGKILL of a rank or of the launcher, SIGSTOP of a rank (the watchdog ends the run), a full disk (RLIMIT_FSIZE of all
processes), NaN in a forward pass until the guard gives up, or a bit flip in the newest checkpoint. The supervisor does
one thing: it runs the same command again until the exit code is 0. Then losses, gradient norms and weights are
compared, bit by bit, with a run of the same recipe without faults. The page of the run lists each interruption with
its cost. Writes benchmarks/results/soak.json. Takes the given time, and that of the run without faults. Killed and
started again with the same arguments, the soak goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import described

from shardwise.checkpoint.checkpoint import latest
from shardwise.checkpoint.saved_weights import load_weights
from shardwise.core.attempts import interruptions

RESULTS = Path(__file__).parent / "results"
EVERY = 20
MODEL = '''
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Rings(Dataset):
    def __init__(self, size=8192):
        self.points = 2 * torch.rand(size, 2, generator=torch.Generator().manual_seed(0)) - 1
        self.labels = (3 * self.points.norm(dim=1)).long().clamp(max=3)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"points": self.points[index], "labels": self.labels[index]}


def poisoned():
    """Not next to a save: a checkpoint after one skipped update is another run's."""
    if not os.path.exists("nan"):
        return False
    lines = Path("run/metrics.jsonl").read_bytes().split(b"\\n")
    return 2 < json.loads(lines[-2])["step"] % EVERY < EVERY - 6 or os.path.exists("nan-seen")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(2, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64)) for _ in range(4)
        )
        self.leave = nn.Linear(64, 4)

    def units(self):
        return list(self.blocks)

    def forward(self, points):
        x = self.enter(points)
        for block in self.blocks:
            x = x + block(x)
        if points.device.type == "cpu" and type(points) is torch.Tensor and poisoned():
            Path("nan-seen").touch()
            x = x * torch.nan
        return self.leave(x)


def classifier():
    def loss(model, batch):
        return F.cross_entropy(model(batch["points"]), batch["labels"], reduction="sum"), (batch["labels"] >= 0).sum()

    return Classifier(), loss, Rings
'''
RECIPE = """
model: {factory: "soak_model:classifier"}
steps: STEPS
batch_size: 64
optimizer: {learning_rate: 1.0e-3}
schedule: {name: constant, warmup: 0}
cluster: {devices_per_node: 2}
strategy: {zero_stage: 3, micro_batch_size: 16, precision: fp32}
checkpoint: {every: EVERY, keep: 3, background: true}
guard: {skips: 1, rewinds: 0}
watchdog: 4
"""
FAULTS = ("kill a rank", "kill the launcher", "stop a rank", "full disk", "nan", "bit flip")


class Supervised:
    """One run: its processes, its faults, and the command that is run again."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(RECIPE.replace("STEPS", str(steps)).replace("EVERY", str(EVERY)))
        (folder / "soak_model.py").write_text(MODEL.replace("EVERY", str(EVERY)))
        self.codes: Counter[str] = Counter()
        self.launcher: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        for name in ("nan", "nan-seen"):
            (self.folder / name).unlink(missing_ok=True)
        command = [sys.executable, "-m", "shardwise", "train", "recipe.yaml", "--out", "run"]
        with (self.folder / "output.txt").open("ab") as output:
            self.launcher = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, start_new_session=True
            )

    def ranks(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.launcher.pid).children(recursive=True)
            return [p for p in found if "shardwise.worker" in " ".join(p.cmdline())]
        except psutil.Error:
            return []

    def reached(self) -> int:
        try:
            return int(json.loads((self.folder / "run/metrics.jsonl").read_bytes().split(b"\n")[-2])["step"])
        except (OSError, ValueError, IndexError):
            return 0

    def trains(self, seconds: float = 300) -> bool:
        """Wait until a step is made. False when the run ends before."""
        before, deadline = self._metrics_changed(), time.monotonic() + seconds
        while self._metrics_changed() == before or len(self.ranks()) < 2:
            if self.launcher.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"no step in {seconds:.0f} s; see {self.folder}/output.txt"
            time.sleep(0.1)
        return True

    def _metrics_changed(self) -> tuple[int, int]:
        path = self.folder / "run/metrics.jsonl"
        return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0)

    def inject(self, fault: str, draw: random.Random) -> None:
        ranks = self.ranks()
        if fault == "kill a rank" and ranks:
            draw.choice(ranks).kill()
        elif fault == "kill the launcher":
            self.launcher.kill()
        elif fault == "stop a rank" and ranks:
            draw.choice(ranks).suspend()
        elif fault == "full disk":
            for process in [psutil.Process(self.launcher.pid), *ranks]:
                process.rlimit(psutil.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        elif fault == "nan":
            (self.folder / "nan").touch()
        elif fault == "bit flip":
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()
            flip_a_bit(self.folder / "run/checkpoints", draw)

    def ended(self, seconds: float = 60) -> int:
        """Wait for the end of the launcher and of its ranks; the exit code."""
        code = self.launcher.wait(timeout=seconds)
        deadline = time.monotonic() + 10
        while any(
            "shardwise.worker" in " ".join(p.info["cmdline"] or ()) and p.info["cwd"] == str(self.folder)
            for p in psutil.process_iter(["cmdline", "cwd"])
        ):
            assert time.monotonic() < deadline, "ranks outlive their launcher"
            time.sleep(0.1)
        self.codes[str(code)] += 1
        return code


def flip_a_bit(checkpoints: Path, draw: random.Random) -> None:
    found = sorted(checkpoints.glob("step-*"), key=lambda path: int(path.name[5:]))
    if len(found) > 1:  # the newest of several, so that one is left
        path = draw.choice(sorted(path for path in found[-1].iterdir() if path.stat().st_size))
        raw = bytearray(path.read_bytes())
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)


def curve(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [(x["step"], x["loss"], x["grad_norm"], x["tokens"], x.get("skipped", False)) for x in lines]


def same(one: Path, other: Path) -> bool:
    """Equal curves and weights, bit by bit."""
    weights = []
    for folder in (one, other):
        checkpoint = latest(folder / "run/checkpoints")
        assert checkpoint is not None
        weights.append(load_weights(checkpoint))
    return curve(one) == curve(other) and all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


def soaked(folder: Path, steps: int, seconds: float, seed: int) -> dict[str, Any]:
    """Train with faults for ``seconds``, then to the end; the counts."""
    run, record = Supervised(folder, steps), folder / "supervisor.json"
    before = (
        json.loads(record.read_text()) if record.exists() else {"seconds": 0.0, "faults": {}, "codes": {}}
    )
    faults, run.codes = Counter[str](before["faults"]), Counter[str](before["codes"])
    draw, began = random.Random(seed + faults.total()), time.monotonic() - before["seconds"]
    while True:
        if run.trains() and time.monotonic() - began < seconds and run.reached() < steps - 3 * EVERY:
            time.sleep(draw.uniform(0.5, 5.0))
            fault = draw.choice(FAULTS)
            if run.launcher.poll() is None:
                run.inject(fault, draw)
                faults[fault] += 1
        elif time.monotonic() - began >= seconds or run.launcher.poll() is not None:
            run.launcher.wait()
        if run.launcher.poll() is None and run.reached() >= steps - 3 * EVERY:
            run.launcher.wait()
        code = run.ended()
        found = {"seconds": time.monotonic() - began, "faults": dict(faults), "codes": dict(run.codes)}
        record.write_text(json.dumps(found))
        if code == 0:
            return found
        run.start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("soak"))
    parser.add_argument("--result", type=Path, default=RESULTS / "soak.json")
    parser.add_argument("--fresh", action="store_true", help="delete what an earlier soak left in the folder")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    plain = Supervised(folder / "plain", arguments.steps)
    assert plain.ended(3600) == 0, (folder / "plain/output.txt").read_text()[-2000:]
    found = soaked(folder / "faults", arguments.steps, 60 * arguments.minutes, arguments.seed)
    listed = interruptions(folder / "faults/run")
    found |= {
        "causes": dict(Counter(each.cause for each in listed)),
        "steps": arguments.steps,
        "bitwise_equal": same(folder / "plain", folder / "faults"),
        "interruptions": len(listed),
        "steps_repeated": sum(each.repeated for each in listed),
        "median_seconds_lost": sorted(each.seconds for each in listed)[len(listed) // 2] if listed else 0.0,
        "seed": arguments.seed,
        "machine": described(),
    }
    print(json.dumps(found, indent=1))
    arguments.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not found["bitwise_equal"]:
        sys.exit("the curves or the weights differ")


if __name__ == "__main__":
    main()
