"""Pipelines: time of a step by schedule, and what PipeDream's stale gradients cost: ``python benchmarks/pipelines.py``.

*Time.* Four stages in four processes over gloo, eight micro-batches a step, real passes, messages and updates of a
model so small that they are soon done; each pass is then slept out to a fixed time (40 ms forward, 80 ms backward), so
that two cores do for four devices. It is compared with the slots of the schedule. Schedules by turns; medians.

*Convergence.* A small decoder on the Python standard library's source, for the same steps, learning rate and samples:
1f1b, which trains as one process does, and PipeDream with and without vertical sync, with one and with four
micro-batches to an update; held-out loss at the end, three seeds.

Half an hour on two cores. Writes benchmarks/results/pipelines-cpu.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import described
from ranks import on_ranks

import shardwise
from shardwise.core.pipeline.schedule import Action, step_time
from shardwise.engine.build import build
from shardwise.engine.pipeline import executor
from shardwise.engine.run import ListedBatches
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.technique.pipeline.place import Pipeline

RESULTS = Path(__file__).parent / "results" / "pipelines-cpu.json"
STAGES, MICRO_BATCHES = 4, 8
FORWARD, BACKWARD = 0.04, 0.08
ROUNDS, STEPS = 3, 6
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream")
ASYNCHRONOUS = {"optimizer": {"clip_norm": None}, "guard": {"rewinds": 0}}


def timed_recipe(schedule: str) -> Recipe:
    return recipe_of(
        {
            "model": {"layers": 8, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 256, "context": 16},
            "data": {"sequence_length": 16},
            "steps": STEPS,
            "batch_size": MICRO_BATCHES,
            "strategy": {
                "precision": "fp32",
                "zero_stage": 0,
                "micro_batch_size": 1,
                "pipeline_parallel": STAGES,
                "pipeline_schedule": schedule,
            },
            **ASYNCHRONOUS,
        },
        SETTINGS,
    )  # fmt: skip


def timed(recipe: Recipe) -> list[float]:
    """Seconds from update to update on this rank, the first steps left out."""
    torch.set_num_threads(1)
    run = build(recipe, blueprint_of(recipe), strategy_from(recipe.strategy), torch.device("cpu"))
    assert isinstance(run.options.place, Pipeline)
    each = run.options.place.stages_per_rank
    engine: Any = executor
    engine.computing = functools.partial(_slept_out, each)
    ends = []
    ids = torch.randint(0, 256, (1, 16))
    batches: list[Batch] = [{"input_ids": ids, "labels": ids}] * MICRO_BATCHES
    run.passes.begin(ListedBatches([batches] * STEPS), 0)
    for _ in range(STEPS):
        step(run, batches, 1e-3)
        ends.append(time.perf_counter())
    dist.barrier()  # PipeDream's last messages leave while the run lives
    return [after - before for before, after in pairwise(ends[1:])]


@contextmanager
def _slept_out(each: int, action: Action) -> Iterator[None]:
    """Run a block as a pass of a fixed time, divided by the stages of a rank."""
    end = time.perf_counter() + _length(each, action)
    yield
    time.sleep(max(0.0, end - time.perf_counter()))


def _length(each: int, action: Action) -> float:
    """Seconds of a pass. The first stage does all of a halved backward pass in its second half."""
    first = {"I": 0.0, "W": BACKWARD} if action.stage == 0 else {}
    return ({"F": FORWARD, "B": BACKWARD, "I": BACKWARD / 2, "W": BACKWARD / 2} | first)[action.kind] / each


def times() -> list[dict[str, Any]]:
    seen: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for _ in range(ROUNDS):
        for name in SCHEDULES:
            ranks = on_ranks(STAGES, timed, timed_recipe(name))
            seen[name] += ranks[0]
    return [
        {
            "schedule": name,
            "slots": _slots(name),
            "seconds": statistics.median(seen[name]),
        }
        for name in SCHEDULES
    ]


def _slots(schedule: str) -> float:
    """Seconds of a step by the schedule alone."""
    each = 2 if schedule == "interleaved" else 1
    return step_time(schedule, STAGES, each, MICRO_BATCHES, functools.partial(_length, each))


def learning(schedule: str, sync: bool, per_step: int, seed: int, steps: int) -> Recipe:
    return recipe_of(
        {
            "model": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 4, "ffn": 352, "vocab": 256, "context": 128},
            "data": {"source": "stdlib", "sequence_length": 128},
            "steps": steps,
            "batch_size": 8,
            "seed": seed,
            "schedule": {"name": "cosine", "warmup": 0.1, "floor": 0.1},
            "evaluation": {"sequences": 128},
            "cluster": {"device": "cpu", "devices_per_node": STAGES},
            "strategy": {
                "precision": "fp32",
                "zero_stage": 0,
                "activation_checkpointing": "none",
                "micro_batch_size": 8 // per_step,
                "pipeline_parallel": STAGES,
                "pipeline_schedule": schedule,
                "pipeline_vertical_sync": sync,
            },
            "guard": {"rewinds": 0},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": None},
        },
        SETTINGS,
    )  # fmt: skip


def trained(recipe: Recipe, plan: shardwise.Plan) -> float:
    """Held-out loss of one run through the trainer, its processes, its data."""
    with tempfile.TemporaryDirectory() as folder:
        record = shardwise.train(recipe, plan, folder)
    assert record.outcome is not None and record.outcome.held_out_loss is not None
    return record.outcome.held_out_loss


COMPARED = (
    ("1f1b", False, 4),
    ("pipedream", False, 4),
    ("pipedream", True, 4),
    ("pipedream", False, 1),
    ("pipedream", True, 1),
)
"""Schedule, vertical sync, micro-batches to an update."""


def converged(schedule: str, sync: bool, per_step: int, seeds: int, steps: int) -> dict[str, Any]:
    """One row: the held-out loss of every seed."""
    recipes = [learning(schedule, sync, per_step, seed, steps) for seed in range(seeds)]
    plan = shardwise.plan(recipes[0])  # the same for all seeds
    held = [trained(recipe, plan) for recipe in recipes]
    return {
        "schedule": schedule,
        "vertical_sync": sync,
        "micro_batches": per_step,
        "steps": steps,
        "held_out": held,
        "mean": statistics.mean(held),
        "deviation": statistics.stdev(held) if seeds > 1 else 0.0,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| schedule | a step by its slots | measured |", "|---|---:|---:|"]
    lines += [f"| `{r['schedule']}` | {r['slots']:.2f} s | {r['seconds']:.2f} s |" for r in rows]
    return "\n".join(lines)


def loss_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [
        f"| held-out loss after {rows[0]['steps']} steps | micro-batches to an update | mean ± deviation |",
        "|---|---:|---:|",
    ]
    for row in rows:
        name = f"`{row['schedule']}`" + (", vertical sync" if row["vertical_sync"] else "")
        lines.append(f"| {name} | {row['micro_batches']} | {row['mean']:.4f} ± {row['deviation']:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--more", action="store_true", help="keep existing results, and add missing ones")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if asked.more else {}
    results["machine"] = described()
    rows = results.setdefault("convergence", [])
    known = [(row["schedule"], row["vertical_sync"], row["micro_batches"]) for row in rows]
    if "times" not in results:
        results["times"] = times()
        written(results)
    for compared in COMPARED:
        if compared not in known:
            rows.append(converged(*compared, asked.seeds, asked.steps))
            written(results)


def written(results: dict[str, Any]) -> None:
    """As far as it has come: a run of all takes half an hour."""
    results["table"] = f"{table(results['times'])}\n\n{loss_table(results['convergence'])}".rstrip()
    print(results["table"], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
