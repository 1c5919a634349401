"""bf16, fp16 and fp8 side by side on one CUDA device: ``python benchmarks/precision_gpu.py [--steps N]``.

A decoder of 1.5 billion parameters trains on the same data in each precision, by the engine's own build and step.
The precisions take turns, round by round, because a device's clock drifts with its temperature; a round builds the
run anew, since three do not fit at once. Step times are medians over all rounds, without the first steps of each;
losses are those of the first round, step by step. Writes benchmarks/results/precision-gpu.json. Needs 80 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import described

from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.launch.process import join
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from

RESULTS = Path(__file__).parent / "results" / "precision-gpu.json"
MODEL = {
    "layers": 22,
    "width": 2048,
    "heads": 16,
    "kv_heads": 16,
    "ffn": 8192,
    "vocab": 32768,
    "context": 2048,
    "tied": True,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "fp8, row scales": {"precision": "fp8", "fp8_scaling": "row"},
}
MICRO_BATCH = 8
UNTIMED = 4
"""First steps of a round, in which kernels are compiled and chosen."""


def recipe_for(steps: int) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"source": "stdlib", "tokenizer": "bytes", "sequence_length": 2048},
        "steps": steps,
        "batch_size": MICRO_BATCH,
        "optimizer": {"learning_rate": 1e-4},
    }
    return recipe_of(values, SETTINGS)


def batches(recipe: Recipe, device: torch.device) -> Iterator[list[Batch]]:
    data = open_data(recipe, None)
    for index in range(recipe.steps):
        yield [
            {k: v.to(device) for k, v in batch.items()}
            for batch in data.micro_batches(index, 0, 1, MICRO_BATCH)
        ]


def trained(run: Run, recipe: Recipe) -> tuple[list[float], list[float]]:
    """Seconds and losses of every step."""
    seconds, losses = [], []
    for batch in batches(recipe, run.device):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = step(run, [batch], recipe.optimizer.learning_rate)
        losses.append(float(result.loss))  # waits for the device
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def one_round(recipe: Recipe, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    strategy = strategy_from({**settings, "micro_batch_size": MICRO_BATCH})
    torch.cuda.reset_peak_memory_stats()
    run = build(recipe, blueprint_of(recipe), strategy, device)
    seconds, losses = trained(run, recipe)
    peak = torch.cuda.max_memory_allocated()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return {"seconds": seconds[UNTIMED:], "losses": losses, "peak_gib": round(peak / 2**30, 2)}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [s for each in rounds for s in each["seconds"]]
    return {
        "median_seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
        "peak_gib": rounds[0]["peak_gib"],
        "losses": [round(loss, 5) for loss in rounds[0]["losses"]],
    }


def measured(steps: int, rounds: int) -> dict[str, Any]:
    recipe = recipe_for(steps)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in STRATEGIES}
    with join("cuda") as world:
        for index in range(rounds):
            for name, settings in STRATEGIES.items():
                found[name].append(one_round(recipe, settings, world.device))
                seconds = statistics.median(found[name][-1]["seconds"])
                print(f"round {index + 1}, {name}: {seconds * 1e3:.0f} ms a step", flush=True)
    rows = {name: summary(each) for name, each in found.items()}
    for row in rows.values():
        row["speed_over_bf16"] = rows["bf16"]["median_seconds"] / row["median_seconds"]
        row["last_loss_over_bf16"] = row["losses"][-1] / rows["bf16"]["losses"][-1] - 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs a CUDA device, and there is none")
    if torch.cuda.get_device_capability() < (8, 9):
        sys.exit(f"error: {torch.cuda.get_device_name()} has no 8-bit products")
    rows = measured(max(given.steps, UNTIMED + 1), given.rounds)
    for name, row in rows.items():
        print(
            f"{name}: {row['median_seconds'] * 1e3:.0f} ms, {row['speed_over_bf16']:.2f} x bf16,"
            f" {row['peak_gib']} GiB, last loss {row['losses'][-1]:.4f}"
        )
    results = {"machine": described(), "model": MODEL, "tokens_a_step": MICRO_BATCH * 2048, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
