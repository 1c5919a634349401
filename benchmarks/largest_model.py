"""The largest model that trains in a given memory, technique by technique: ``python benchmarks/largest_model.py``.

A decoder of fixed width grows by whole blocks until its plan no longer fits the budget (20 GiB of one process on the
CPU, one sequence of 128 tokens at a time). The deepest that fits is then really trained for three steps by
``shardwise train``, and the run's own report says what it took. On a CPU the host's memory is the device's: offload to
the host moves nothing there, and its row says so.

Give it the machine for itself: it takes all of the budget, and as much of the disk again for the last row. Hours on
two cores. Writes benchmarks/results/largest-model-cpu.json after each row, and continues from the rows in that file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from machine import described

from shardwise.core.units import format_bytes, format_count
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.predictor import Predictor
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from

RESULTS = Path(__file__).parent / "results" / "largest-model-cpu.json"
WIDTH = {"width": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 8192}
BATCH, LENGTH, STEPS = 1, 128, 3
DEEPEST = 4096
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Of torch's allocator on Linux. Touching fresh memory by pages of 4 KiB takes much of an 8-bit update while the peak
is taken (updates.py); all large tensors here are whole huge pages (2 MiB), so the measure stays what it was."""


@dataclass(frozen=True)
class Rung:
    """The settings that each row adds to those above it."""

    name: str
    strategy: dict[str, Any]
    optimizer: dict[str, Any]


def ladder(scratch: Path) -> list[Rung]:
    return [
        Rung("plain: fp32, AdamW", {"precision": "fp32"}, {"name": "adamw"}),
        Rung("weights in bf16 alone", {"precision": "bf16", "master_weights": False}, {}),
        Rung("full checkpointing", {"activation_checkpointing": "full"}, {}),
        Rung("8-bit AdamW", {}, {"name": "adamw_8bit"}),
        Rung("optimizer in backward", {"optimizer_in_backward": True}, {"clip_norm": None}),
        Rung("optimizer offloaded to the host", {"offload": "optimizer"}, {}),
        Rung("optimizer offloaded to disk", {"offload": f"nvme:{scratch}"}, {}),
    ]


def recipe_for(
    strategy: dict[str, Any], optimizer: dict[str, Any], layers: int, gib: float
) -> dict[str, Any]:
    return {
        "model": {**WIDTH, "layers": layers},
        "data": {"sequence_length": LENGTH},
        "steps": STEPS,
        "batch_size": BATCH,
        "optimizer": {"learning_rate": 1e-4, **optimizer},
        "cluster": {"device": "cpu", "memory_gib": gib},
        "strategy": {
            "zero_stage": 0,
            "micro_batch_size": BATCH,
            "activation_checkpointing": "none",
            **strategy,
        },
        "evaluation": {"sequences": 1},
        "checkpoint": {"every": None},
    }


def peak_of(values: dict[str, Any]) -> tuple[int, int]:
    """(predicted peak, parameters) of a recipe that pins its strategy."""
    recipe = recipe_of(values, SETTINGS)
    predictor = Predictor(recipe, blueprint_of(recipe), cluster_of(recipe.cluster))
    estimate = predictor.estimate(strategy_from(recipe.strategy), alone=True)
    return estimate.bytes, sum(predictor.parameter_counts)


def deepest(strategy: dict[str, Any], optimizer: dict[str, Any], gib: float) -> int:
    """The most blocks whose plan fits: bisection over what estimates say."""
    fits, too_deep = 1, DEEPEST
    while too_deep - fits > 1:
        layers = (fits + too_deep) // 2
        bytes_, _ = peak_of(recipe_for(strategy, optimizer, layers, gib))
        fits, too_deep = (layers, too_deep) if bytes_ <= gib * 2**30 else (fits, layers)
    return fits


def trained(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Three real steps; what the run's report says of its one rank, and its losses."""
    recipe, out = folder / "recipe.yaml", folder / "run"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", "shardwise", "train", str(recipe), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **HUGE_PAGES})
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in metrics]
    assert len(losses) == STEPS and all(map(math.isfinite, losses)), losses
    [rank] = report["ranks"]
    return {
        "predicted_bytes": rank["predicted_peak_bytes"],
        "measured_bytes": rank["measured_peak_bytes"],
        "parameters": report["parameters"],
        "losses": losses,
        "step_seconds": min(row["seconds"] for row in metrics),
    }


def table(rows: list[dict[str, Any]], gib: float) -> str:
    lines = [
        f"| in {gib:g} GiB, one technique more in each row | blocks | parameters | planned | measured | a step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sizes = f"{format_bytes(row['predicted_bytes'])} | {format_bytes(row['measured_bytes'])}"
        count, time = format_count(row["parameters"]), f"{row['step_seconds']:.0f} s"
        lines.append(f"| {row['name']} | {row['layers']} | {count} | {sizes} | {time} |")
    return "\n".join(lines)


def known(out: Path, setting: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows that a file holds, by name, if they were measured in the same setting."""
    if not out.exists():
        return {}
    found = json.loads(out.read_text(encoding="utf-8"))
    same = all(found.get(key) == value for key, value in setting.items())
    return {row["name"]: row for row in found["rows"]} if same else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=20.0)
    parser.add_argument("--only", default="", help="train the rungs whose name contains this")
    parser.add_argument("--scratch", default=None, help="where the run folders and the offloaded state go")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of rows; those it holds are kept")
    asked = parser.parse_args()
    setting = {"gib": asked.gib, "batch": BATCH, "sequence_length": LENGTH}
    rows = known(asked.out, setting)
    strategy: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
        rungs = ladder(Path(scratch))
        for rung in rungs:
            strategy, optimizer = {**strategy, **rung.strategy}, {**optimizer, **rung.optimizer}
            if asked.only not in rung.name or rung.name in rows:
                continue
            layers = deepest(strategy, optimizer, asked.gib)
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                run = trained(recipe_for(strategy, optimizer, layers, asked.gib), Path(folder))
            rows[rung.name] = {"name": rung.name, "layers": layers, **run, "machine": described()}
            print(json.dumps(rows[rung.name]), flush=True)
            done = [rows[rung.name] for rung in rungs if rung.name in rows]
            # After every row, so that a stopped benchmark continues from its results.
            result = {**setting, "rows": done, "table": table(done, asked.gib)}
            asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
