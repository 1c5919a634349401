"""What it costs to give up bits: ``python benchmarks/optimizers.py``.

A small native decoder on the source of Python's standard library, trained with the same samples, initial weights
and schedule: plain fp32 AdamW, 8-bit moments, bf16 and fp16 with fp32 master weights, bf16 weights alone with
stochastic rounding, and both economies together. Compared are the held-out loss at the end and the bytes of
optimizer state per parameter, as held. Several minutes on one core. Writes benchmarks/results/optimizers.json;
nothing in it is a time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from machine import described

from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.launch.process import join
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.evaluation import evaluate

RESULTS = Path(__file__).parent / "results" / "optimizers.json"
STEPS, SIZE, SEEDS = 240, 16, (0, 1, 2)
CASES: dict[str, dict[str, Any]] = {
    "fp32, adamw": {},
    "fp32, adamw_8bit": {"optimizer": "adamw_8bit"},
    "bf16, adamw": {"precision": "bf16"},
    "fp16, adamw": {"precision": "fp16"},
    "bf16 weights alone, adamw": {"precision": "bf16", "master_weights": False},
    "bf16 weights alone, adamw_8bit": {
        "precision": "bf16",
        "master_weights": False,
        "optimizer": "adamw_8bit",
    },
}


def trained(case: dict[str, Any], seed: int, device: torch.device) -> dict[str, float]:
    """Held-out loss at the end, and bytes held per parameter."""
    strategy = {key: value for key, value in case.items() if key != "optimizer"}
    recipe = recipe_of(
        {
            "model": {"layers": 3, "width": 128, "heads": 4, "ffn": 384, "vocab": 256, "context": 128},
            "data": {"source": "stdlib", "sequence_length": 128},
            "steps": STEPS,
            "batch_size": SIZE,
            "seed": seed,
            "optimizer": {"name": case.get("optimizer", "adamw"), "learning_rate": 1e-3},
            "evaluation": {"sequences": 256},
            "strategy": {**strategy, "zero_stage": 0, "micro_batch_size": SIZE},
        },
        SETTINGS,
    )
    run = build(recipe, blueprint_of(recipe), strategy_from(recipe.strategy), device)
    data, skipped = open_data(recipe), 0.0
    for index in range(STEPS):
        result = step(run, data.micro_batches(index, 0, 1, SIZE), learning_rate(recipe, index))
        skipped += float(result.skipped)
    parameters = sum(p.numel() for p in run.model.parameters())
    state = sum(t.nbytes for states in run.optimizer.state.values() for t in states.values())
    weights = sum(p.nbytes for p in run.model.parameters())
    held_out = evaluate(run, data.held_out(0, 0, 1, SIZE))
    return {
        "held_out_loss": held_out,
        "state_bytes_per_parameter": state / parameters,
        "weight_bytes_per_parameter": weights / parameters,
        "skipped_updates": skipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run plain fp32 and the cases whose name contains this")
    only = parser.parse_args().only
    chosen = {name: case for name, case in CASES.items() if only in name or not case}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    with join("cpu") as world:
        for seed in SEEDS:
            for name, case in chosen.items():
                rows[name].append(trained(case, seed, world.device))
                plain = rows["fp32, adamw"][-1]["held_out_loss"]
                row = rows[name][-1]
                difference = row["held_out_loss"] / plain - 1
                print(
                    f"seed {seed}, {name}: {row['held_out_loss']:.4f} ({difference:+.2%}),"
                    f" {row['state_bytes_per_parameter']:.3f} B of state a parameter,"
                    f" {row['skipped_updates']:.0f} skipped",
                    flush=True,
                )
                RESULTS.write_text(json.dumps(summary(rows), indent=1) + "\n", encoding="utf-8")
    print({name: f"{mean:+.2%}" for name, mean in summary(rows)["mean_difference"].items()})


def summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The results so far; means over the seeds that a case shares with plain fp32."""
    plain = [row["held_out_loss"] for row in rows["fp32, adamw"]]
    means = {
        name: sum(r["held_out_loss"] / p - 1 for r, p in zip(found, plain, strict=False)) / len(found)
        for name, found in rows.items()
        if found
    }
    return {"machine": described(), "steps": STEPS, "mean_difference": means, "rows": rows}


if __name__ == "__main__":
    main()
