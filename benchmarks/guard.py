"""The guard at work: false alarms in clean runs, and injected faults put right.

``python benchmarks/guard.py`` trains a small decoder on the standard library's source, in this process, with the
real trainer: 20 clean seeds of 500 steps, which must not rewind; and runs into which a fault is injected at step
250, which must notice it within 3 steps, rewind, leave out exactly the samples it logs, and have the held-out
loss of the clean run 50 steps later. Writes benchmarks/results/guard.json; ten minutes on one core.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import described

from shardwise import api
from shardwise.checkpoint.run_folder import write_job
from shardwise.core.plan import Plan
from shardwise.launch.process import join
from shardwise.model.blueprint import Batch
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from shardwise.trainer.loop import Job, Trainer

RESULTS = Path(__file__).parent / "results" / "guard.json"
SEEDS, STEPS, FAULT, LATER = 20, 500, 250, 50
MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 176, "vocab": 256, "context": 64}

Inject = Callable[[Trainer], None]


def recipe(seed: int, steps: int = STEPS, **strategy: Any) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"sequence_length": 64},
        "steps": steps,
        "batch_size": 8,
        "seed": seed,
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"name": "constant"},
        "guard": {"snapshot_every": 20},
        "evaluation": {"sequences": 256},
        "strategy": {"zero_stage": 0, "precision": "fp32", "micro_batch_size": 8, **strategy},
    }
    return recipe_of(values, SETTINGS)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(recipe: Recipe, plan: Plan, inject: Inject | None = None) -> dict[str, Any]:
    """Train; return the final held-out loss, the events, the metrics, and the samples of every step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_job(folder, recipe, plan)
        trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
        trainer.log._progress.show = lambda *_: None  # type: ignore[method-assign]
        if inject is not None:
            inject(trainer)
        trainer.train()
        return {
            "held_out": trainer.log.validation_loss,
            "state": trainer.state,
            "events": lines(folder / "events.jsonl"),
            "metrics": lines(folder / "metrics.jsonl"),
            "samples": trainer.data.samples,
        }


# ---- faults -----------------------------------------------------------------------------------------------


def corrupted_window(width: int) -> Inject:
    """The tokens of ``width`` batches are drawn at random."""

    def inject(trainer: Trainer) -> None:
        read = trainer.data.micro_batches

        def corrupted(position: int, *arguments: int) -> list[Batch]:
            batches = read(position, *arguments)
            if FAULT <= position < FAULT + width:
                generator = torch.Generator().manual_seed(position)
                for batch in batches:
                    tokens = torch.randint(0, 256, batch["input_ids"].shape, generator=generator)
                    batch["input_ids"], batch["labels"] = tokens, tokens.roll(-1, 1)
            return batches

        trainer.data.micro_batches = corrupted  # type: ignore[method-assign]

    return inject


def large_gradients(factor: float, width: int) -> Inject:
    """Gradients are multiplied in the steps that read ``width`` batches."""

    def inject(trainer: Trainer) -> None:
        read, at = trainer.data.micro_batches, [-1]

        def noted(position: int, *arguments: int) -> list[Batch]:
            at[0] = position
            return read(position, *arguments)

        clip = trainer.run.update.finish

        def enlarged(*arguments: Any) -> Any:
            if FAULT <= at[0] < FAULT + width:
                for parameter in trainer.run.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
            return clip(*arguments)

        trainer.data.micro_batches = noted  # type: ignore[method-assign]
        trainer.run.update.finish = enlarged  # type: ignore[method-assign]

    return inject


FAULTS: dict[str, Inject] = {
    "1 corrupted batch": corrupted_window(1),
    "3 corrupted batches": corrupted_window(3),
    "gradients x 100 for 5 steps": large_gradients(100, 5),
}


# ---- experiments ------------------------------------------------------------------------------------------


def clean(plan: Plan) -> dict[str, Any]:
    """Events of clean runs."""
    odd = rewinds = 0
    for seed in range(SEEDS):
        seen = run(recipe(seed), plan)
        odd += sum(event["event"] == "odd" for event in seen["events"])
        rewinds += seen["state"].rewinds
        print(f"clean seed {seed}: {len(seen['events'])} events, {seen['state'].rewinds} rewinds", flush=True)
    return {"seeds": SEEDS, "steps": STEPS, "rewinds": rewinds, "odd_steps": odd}


def faulty(plan: Plan, inject: Inject, seed: int, undisturbed: float) -> dict[str, Any]:
    """One fault: when it was noticed, what it cost."""
    seen = run(recipe(seed, FAULT + LATER), plan, inject)
    spikes = [event for event in seen["events"] if event["event"] == "spike"]
    rewinds = [event for event in seen["events"] if event["event"] == "rewind"]
    left_out = {place for start, end in seen["state"].left_out for place in range(start, end)}
    logged = [sample for event in rewinds for sample in event["samples"]]
    return {
        "detected_after_steps": spikes[0]["step"] - FAULT if spikes else None,
        "rewinds": len(rewinds),
        "steps_repeated": sum(event["step"] - event["to_step"] for event in rewinds),
        "batches_left_out": len(left_out),
        "logged_is_left_out": logged == [s for place in sorted(left_out) for s in seen["samples"](place)],
        "loss_against_clean": seen["held_out"] / undisturbed - 1,
    }


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan = api.plan(recipe(0))
    results: dict[str, Any] = {"machine": described(), "faults": {}}
    with join("cpu"):
        for seed in range(3):
            undisturbed = run(recipe(seed, FAULT + LATER), plan)["held_out"]
            for name, inject in FAULTS.items():
                row = faulty(plan, inject, seed, undisturbed)
                results["faults"].setdefault(name, []).append(row)
                print(name, row, flush=True)
        results["clean"] = clean(plan) if "--faults-only" not in sys.argv else None
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
