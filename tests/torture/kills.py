"""Random kills: a run that is killed again and again ends bitwise as the uninterrupted run.

    python -m tests.torture.kills --trials 300 --seed 1
    python -m tests.torture.kills --pairs

A chain of kills trains one recipe on 1, 2 or 4 ranks. Each trial kills a rank, the launcher or all processes with
SIGKILL at a random moment and runs the same command again. At its end the curve and the weights must equal those of
the uninterrupted run, bit by bit. ``--pairs`` resumes each layout's checkpoint with each other layout in fp64: the rest
of the curve equals the uninterrupted one to 1e-10. The report is JSON; the exit code is 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import psutil
import torch

from shardwise.checkpoint.checkpoint import latest
from shardwise.checkpoint.saved_weights import load_weights
from tests.harness.commands import Running, Shell
from tests.harness.pool import Pool

STEPS, HALF = 120, 4
MOST = 12
"""Kills of one chain. A slow machine gets hardly further between two kills, and would stay with the first layout."""
TEXT = "".join(f"line {number} of the text, {number * number % 97}\n" for number in range(800))
RECIPE = """
model: {layers: 4, width: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 257, context: 32}
data: {source: corpus.txt, sequence_length: 16}
steps: STEPS
batch_size: 8
optimizer: {learning_rate: 1.0e-3}
schedule: {name: constant, warmup: 2}
evaluation: {every: 25, sequences: 4}
checkpoint: {every: EVERY, keep: 3, background: BACKGROUND}
cluster: {device: cpu, devices_per_node: RANKS}
strategy: SETTINGS
"""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"zero_stage": 0}),
    "zero1": (2, {"zero_stage": 1}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor_parallel": 2}),
    "pipeline": (2, {"pipeline_parallel": 2}),
    "ulysses": (2, {"sequence_parallel": 2}),
    "hybrid": (4, {"zero_stage": 3, "replicate": 2}),
    "tensor, pipeline": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}


@dataclass(frozen=True)
class Job:
    """One recipe: a layout, the steps between checkpoints, and whether they are saved in the background."""

    layout: str
    every: int
    background: bool
    steps: int = STEPS
    precision: str = "fp32"

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    def text(self) -> str:
        settings = {"micro_batch_size": 2, "precision": self.precision, **LAYOUTS[self.layout][1]}
        values = {
            "STEPS": self.steps,
            "EVERY": self.every,
            "BACKGROUND": json.dumps(self.background),
            "RANKS": self.ranks,
            "SETTINGS": json.dumps(settings),
        }
        text = RECIPE
        for name, value in values.items():
            text = text.replace(name, str(value))
        return text


def started(shell: Shell, job: Job, folder: Path) -> Running:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(job.text())
    (folder / "corpus.txt").write_text(TEXT)
    return shell.start("train", "recipe.yaml", "--out", "run", folder=folder, ranks=job.ranks)


def trained(shell: Shell, job: Job, folder: Path) -> None:
    with started(shell, job, folder) as run:
        assert run.wait(180) == 0, run.stderr


def killed(shell: Shell, job: Job, folder: Path, dice: random.Random) -> str:
    """Start the run and kill it at a random moment; the victim, or "" if it ended before."""
    metrics = folder / "run/metrics.jsonl"
    before = _changed(metrics)
    with started(shell, job, folder) as run:
        at_start = dice.random() < 0.2
        if at_start:
            time.sleep(dice.uniform(0.0, 2.0))
        while not at_start and _changed(metrics) == before and run.poll() is None:
            time.sleep(0.005)
        if not at_start:
            time.sleep(dice.uniform(0.0, 0.6))
        if run.poll() is not None:
            assert run.returncode == 0, run.stderr
            return ""
        ranks = [child.pid for child in psutil.Process(run.pid).children()]
        # A rank that waits to be started is part of the harness, not of the run.
        target = "launcher" if at_start or not ranks else dice.choice(("launcher", "a rank", "all"))
        victims = {"launcher": [run.pid], "a rank": [dice.choice(ranks)] if ranks else []}.get(
            target, [run.pid, *ranks]
        )
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while run.poll() is None or any(_alive(pid) for pid in ranks):
            assert time.monotonic() < deadline, "processes outlive the run"
            time.sleep(0.01)
        return target


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _changed(path: Path) -> tuple[int, int]:
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0)


Line = tuple[float, ...]


def curve(folder: Path) -> list[Line]:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().split("\n") if line]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "held_out_loss")
    return [tuple(float(line.get(key, -1.0)) for key in keys) for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest(folder / "run/checkpoints")
    assert checkpoint is not None
    return load_weights(checkpoint)


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    equal = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return equal and curve(one) == curve(other)


def chains(shell: Shell, trials: int, seed: int, seconds: float = math.inf) -> dict[str, Any]:
    """Chains of kills until there were ``trials``, or none is begun after so many seconds; the counts."""
    deadline = time.monotonic() + seconds
    dice, kills, wrong, ended = random.Random(seed), Counter[str](), list[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        for number, job in enumerate(_jobs(dice)):
            if kills.total() >= trials or time.monotonic() > deadline:
                break
            folder, plain = Path(name) / str(number), Path(name) / f"plain {job}"
            if not plain.exists():
                trained(shell, job, plain)
            for _ in range(min(MOST, trials - kills.total())):
                if not (target := killed(shell, job, folder, dice)):
                    break
                kills[target] += 1
                print(f"{kills.total()}: {target}, {job}", file=sys.stderr, flush=True)
            trained(shell, job, folder)
            ended[job.layout] += 1
            if not same(folder, plain):
                wrong.append(str(job))
    return {
        "kills": kills.total(),
        "killed": dict(kills),
        "chains": dict(ended),
        "different": wrong,
        "seed": seed,
    }


def _jobs(dice: random.Random) -> Iterator[Job]:
    """Every layout in turn; few kinds, so that uninterrupted runs are shared."""
    while True:
        for layout in LAYOUTS:
            yield Job(layout, dice.choice((1, 7)), dice.random() < 0.5)


def pairs(shell: Shell, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> dict[str, Any]:
    """Resume each layout's checkpoint with each other layout; the largest difference of the loss."""
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = folder / "whole"
        trained(shell, Job("one process", 2 * HALF, False, 2 * HALF, "fp64"), whole)
        expected = curve(whole)
        for first, second in permutations(layouts, 2):
            there = folder / f"{first} to {second}"
            trained(shell, Job(first, HALF, False, HALF, "fp64"), there)
            trained(shell, Job(second, HALF, False, 2 * HALF, "fp64"), there)
            found = curve(there)
            worst = max(
                abs(a[1] / b[1] - 1) if a[0] == b[0] and a[4] == b[4] else math.inf
                for a, b in zip(found, expected, strict=True)
            )
            differences[f"{first} to {second}"] = worst
            print(f"{first} to {second}: {worst:.1e}", file=sys.stderr, flush=True)
    worst = max(differences.values())
    return {"pairs": len(differences), "largest_difference": worst, "within": worst <= 1e-10}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.kills")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no chain after so long")
    parser.add_argument("--pairs", action="store_true")
    given = parser.parse_args()
    pool = Pool(4)
    try:
        shell = Shell(pool)
        report = pairs(shell) if given.pairs else chains(shell, given.trials, given.seed, 60 * given.minutes)
    finally:
        pool.close()
    print(json.dumps(report, indent=1))
    return 0 if report.get("within", True) and not report.get("different") else 1


if __name__ == "__main__":
    sys.exit(main())
