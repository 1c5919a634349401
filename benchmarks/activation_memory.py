"""Savings and costs of each kind of activation checkpointing: ``python benchmarks/activation_memory.py``.

Native decoders on the CPU, one process, fp32. For each of ``ROWS``: memory saved at the peak and time added, compared
with no checkpointing, planned and measured. Memory is the rise of the process's high-water mark, as in
benchmarks/ledger.py, with one process per row. Time is the median step of interleaved processes, so that other work on
the machine affects all rows alike. Some minutes on two cores. Writes benchmarks/results/activation-memory-cpu.json.
``--only TEXT`` takes the shapes whose name contains it, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import described

from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.meter import MemoryMeter, return_large_frees
from shardwise.trainer.warm_up import warm_kernels

RESULTS = Path(__file__).parent / "results" / "activation-memory-cpu.json"
ROUNDS = 3
STEPS = 4
"""Timed steps of each process, after two in which the peak is taken."""


@dataclass(frozen=True)
class Shape:
    """A decoder, and the tokens of its one micro-batch."""

    model: Mapping[str, Any]
    batch: int
    length: int


SHAPES: dict[str, Shape] = {
    "llama, 8 × 256": Shape({"layers": 8, "width": 256, "heads": 4, "kv_heads": 2, "ffn": 704}, 8, 256),
    "llama, 24 × 192": Shape({"layers": 24, "width": 192, "heads": 3, "kv_heads": 3, "ffn": 512}, 4, 256),
    "gpt2, 12 × 256": Shape({"family": "gpt2", "layers": 12, "width": 256, "heads": 4, "ffn": 1024}, 4, 512),
}

ROWS: dict[str, dict[str, Any]] = {
    kind: {"activation_checkpointing": kind}
    for kind in (
        "none",
        "budget:0.8",
        "selective",
        "budget:0.6",
        "budget:0.4",
        "budget:0.2",
        "full",
        "sqrt",
        "budget:0",
    )
}
"""Compared strategy settings, by name. The first is the baseline."""


def recipe_for(shape: Shape) -> Recipe:
    values = {
        "model": {**shape.model, "vocab": 512, "context": shape.length},
        "data": {"sequence_length": shape.length},
        "steps": 2 + STEPS,
        "batch_size": shape.batch,
    }
    return recipe_of(values, SETTINGS)


def planned(shape: Shape, settings: dict[str, Any]) -> dict[str, float]:
    recipe = recipe_for(shape)
    strategy = strategy_from({**settings, "micro_batch_size": shape.batch})
    run = dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), history=False)
    return {"peak_bytes": run.peak.bytes, "flops": run.cost.flops}


def measured(shape: Shape, settings: dict[str, Any]) -> dict[str, Any]:
    """Peak of the first steps, and seconds of the later ones; in a process that has done nothing else."""
    torch.manual_seed(0)
    recipe, device = recipe_for(shape), torch.device("cpu")
    strategy = strategy_from({**settings, "micro_batch_size": shape.batch})
    blueprint = blueprint_of(recipe)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    warm_kernels(device, strategy)
    meter = MemoryMeter(device)
    run = build(recipe, blueprint, strategy, device)
    tokens = torch.randint(0, 512, (shape.batch, shape.length))
    batch = {"input_ids": tokens, "labels": tokens}
    seconds = []
    for index in range(2 + STEPS):
        start = time.perf_counter()
        step(run, [batch], 1e-4)
        seconds.append(time.perf_counter() - start)
        if index < 2:
            meter.sample()
            return_large_frees(index < 1)
    dist.destroy_process_group()
    return {"peak_bytes": meter.peak.allocated, "seconds": seconds[2:]}


def compared(name: str) -> list[dict[str, Any]]:
    """All rows of one shape, with memory saved and time added, planned and measured."""
    shape = SHAPES[name]
    plans = {row: planned(shape, settings) for row, settings in ROWS.items()}
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in ROWS}
    for _ in range(ROUNDS):
        for row in ROWS:
            command = [sys.executable, __file__, "--child", name, row]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs[row].append(json.loads(answer.splitlines()[-1]))
    peaks = {row: statistics.median(run["peak_bytes"] for run in found) for row, found in runs.items()}
    times = {
        row: statistics.median(s for run in found for s in run["seconds"]) for row, found in runs.items()
    }
    first = next(iter(ROWS))
    return [
        {
            "shape": name,
            "row": row,
            "planned": plans[row],
            "measured": {"peak_bytes": peaks[row], "seconds": times[row]},
            "saved_bytes": {
                "planned": plans[first]["peak_bytes"] - plans[row]["peak_bytes"],
                "measured": peaks[first] - peaks[row],
            },
            "added": {
                "planned_flops": plans[row]["flops"] / plans[first]["flops"] - 1,
                "measured_time": times[row] / times[first] - 1,
            },
        }
        for row in ROWS
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The results as the documentation shows them."""
    head = (
        "peak, planned | measured | saved, planned | measured | FLOPs added, planned | time added, measured"
    )
    lines: list[str] = []
    for name in dict.fromkeys(row["shape"] for row in rows):
        lines += [f"| {name} | {head} |", "|---|" + "---:|" * 6]
        for row in (row for row in rows if row["shape"] == name):
            peaks = (row[side]["peak_bytes"] for side in ("planned", "measured"))
            sizes = " | ".join(f"{size / 2**20:.1f} MiB" for size in (*peaks, *row["saved_bytes"].values()))
            added = " | ".join(f"{100 * share:+.1f} %" for share in row["added"].values())
            lines.append(f"| `{row['row']}` | {sizes} | {added} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the shapes whose name contains this; writes nothing")
    parser.add_argument("--child", nargs=2, metavar=("SHAPE", "ROW"), help="measure one run and print it")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measured(SHAPES[asked.child[0]], ROWS[asked.child[1]])))
        return
    rows: list[dict[str, Any]] = []
    for name in (name for name in SHAPES if asked.only in name):
        rows += compared(name)
        print(table(rows), flush=True)
        if not asked.only:
            # After every shape: a benchmark that is stopped leaves what it has measured.
            results = {"machine": described(), "rounds": ROUNDS, "rows": rows, "table": table(rows)}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
