"""Effective training time under failures: ``python benchmarks/goodput.py``.

Failures come at Llama 3's published rate: 16,384 GPUs, one interruption every 186 minutes (arXiv:2407.21783, section
3.3.4). The cost of a failure is measured on this machine: the stall and the length of a background save are those of
results/checkpoint-stall-cpu.json (two ranks, 300 MB each; Llama 3 405B has 346 MB of state per GPU), and the restart is
timed: a run is killed, and the same command goes on until its next step is in metrics.jsonl. A table gives longer
restarts too, since a cluster has to replace a node. 54 days are simulated 20 times for each. Three minutes. Writes
benchmarks/results/goodput.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import described

from shardwise.planner.checkpoint_interval import best_interval, effective_share

RESULTS = Path(__file__).parent / "results"
BETWEEN = 186 * 60.0
DAYS = 54
RECIPE = """
model: {layers: 8, width: 640, heads: 10, ffn: 1728, vocab: 8192, context: 256}
data: {source: corpus.txt, sequence_length: 64, held_out: 0}
steps: 1000
batch_size: 2
cluster: {devices_per_node: 2}
strategy: {zero_stage: 3, micro_batch_size: 1, precision: fp32}
checkpoint: {every: 2, background: true}
"""


def steps_in(folder: Path) -> int:
    path = folder / "run/metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def started(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shardwise", "train", "recipe.yaml", "--out", "run"]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)


def restart_seconds(times: int = 3) -> float:
    """Median seconds from a SIGKILL of the launcher to the next step of the same command."""
    found = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "corpus.txt").write_text("all work and no play makes jack a dull boy\n" * 5000)
        for _ in range(times + 1):
            before, began = steps_in(folder), time.monotonic()
            run = started(folder)
            # A resumed run cuts the lines after its checkpoint before it writes new ones.
            while steps_in(folder) <= before - 2 or steps_in(folder) < 1:
                time.sleep(0.05)
                assert run.poll() is None, (folder / "output.txt").read_text()[-2000:]
            first = (folder / "run/metrics.jsonl").stat().st_mtime
            while (folder / "run/metrics.jsonl").stat().st_mtime == first:
                time.sleep(0.05)
                assert run.poll() is None, (folder / "output.txt").read_text()[-2000:]
            found.append(time.monotonic() - began)
            goal = steps_in(folder) + 4
            while steps_in(folder) < goal:
                time.sleep(0.05)
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            time.sleep(1)
    return statistics.median(found[1:])


def simulated(interval: float, stall: float, write: float, restart: float, seed: int) -> float:
    """Share of useful time. A save counts once it is written; failures also strike restarts."""
    generator = random.Random(seed)
    clock, end, useful = 0.0, DAYS * 86400.0, 0.0
    while clock < end:
        failure = clock + generator.expovariate(1 / BETWEEN)
        saved, pending = 0.0, None
        at, done = clock, 0.0
        while True:
            finish = at + interval
            if pending is not None and pending[0] <= min(finish, failure):
                saved, pending = pending[1], None
            if finish + stall > failure:
                break
            at, done = finish + stall, done + interval
            pending = (at + write, done)
        useful += saved
        clock = failure + restart
        while generator.expovariate(1 / BETWEEN) < restart:
            clock += restart
    return useful / clock


def main() -> None:
    measured = json.loads((RESULTS / "checkpoint-stall-cpu.json").read_text())["rows"][-1]
    stall, write = measured["stall_seconds"]["background"], measured["background_write_seconds"]
    own = restart_seconds()
    rows: list[dict[str, Any]] = []
    for restart in (own, 60.0, 180.0, 300.0, 600.0):
        interval = max(best_interval(stall, BETWEEN), write)
        shares = [simulated(interval, stall, write, restart, seed) for seed in range(20)]
        rows.append(
            {
                "restart_seconds": restart,
                "interval_seconds": interval,
                "effective": statistics.fmean(shares),
                "worst": min(shares),
                "daly": effective_share(interval, stall, restart, BETWEEN),
            }
        )
        print(json.dumps(rows[-1]))
    result = {
        "machine": described(),
        "between_failures_seconds": BETWEEN,
        "stall_seconds": stall,
        "write_seconds": write,
        "measured_restart_seconds": own,
        "rows": rows,
    }
    (RESULTS / "goodput.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
