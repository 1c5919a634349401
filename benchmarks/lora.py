"""Full fine-tuning against LoRA, DoRA and QLoRA, each at its own best learning rate: ``python benchmarks/lora.py``.

A small native decoder is pretrained on the source of Python's standard library and exported as a folder that
transformers loads. From there it is adapted to another real text that every machine has, a tenth of the interpreter's
English documentation (``pydoc_data``), in one pass over it, by training all weights, LoRA on attention, LoRA on all
layers, DoRA, and QLoRA (NF4). Full fine-tuning and LoRA on all layers are then compared over three passes too, where
adapters fall behind.

Learning rates are powers of two. Each method walks from a first guess towards lower held-out loss until both
neighbours of the best are worse, so no best is at the edge of the sweep; the best is then trained with further
seeds. All see the same samples and the same number of steps. Everything is computed in fp32, which on a processor
without bf16 products is three times as fast, through the engine that ``shardwise train`` uses.

About three quarters of an hour for the base and as long for the rest, on two cores; rows that are there are not
trained again (``--again`` does). Writes benchmarks/results/lora.json and lora.png; nothing in them is a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import described

from shardwise import api
from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.launch.process import World, join
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS, strategy_from
from shardwise.trainer.evaluation import evaluate

RESULTS = Path(__file__).parent / "results" / "lora.json"
BASE_STEPS, BASE_BATCH, SEEDS = 5000, 8, 3
STEPS = {"one pass": 90, "three passes": 300}
MODEL = {"layers": 2, "width": 512, "heads": 8, "ffn": 1408, "vocab": 256, "context": 128}
LENGTH, BATCH, HELD_OUT = 128, 4, 0.9
"""Training uses a tenth of the documentation: adaptation sets are small compared with pretraining."""

METHODS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "LoRA, attention": {"rank": 16, "targets": "attention"},
    "LoRA, all": {"rank": 16, "targets": "all"},
    "DoRA, all": {"name": "dora", "rank": 16, "targets": "all"},
    "QLoRA, all": {"rank": 16, "targets": "all", "quantize": "nf4"},
}
LONGER = ("full", "LoRA, all")
"""Methods that also train for three passes."""

GUESS = {"full": -12}
"""Exponents of two at which a sweep begins; -9 for the others."""

WITHIN, SHARE, FASTER = 0.01, 0.05, (5, 20)
"""The target: loss within 1 % of full fine-tuning's, with less than 5 % of the weights, at 5 to 20 times the rate."""


def pinned(batch: int) -> dict[str, Any]:
    return {"zero_stage": 0, "micro_batch_size": batch, "precision": "fp32"}


def base_recipe() -> Recipe:
    return recipe_of(
        {
            "model": MODEL,
            "data": {"source": "stdlib", "sequence_length": LENGTH},
            "steps": BASE_STEPS,
            "batch_size": BASE_BATCH,
            "optimizer": {"learning_rate": 1e-3},
            "strategy": pinned(BASE_BATCH),
        },
        SETTINGS,
    )


def recipe(base: Path, text: Path, method: str, steps: int, exponent: int, seed: int) -> Recipe:
    return recipe_of(
        {
            "model": {"hf": str(base)},
            "data": {"source": str(text), "sequence_length": LENGTH, "held_out": HELD_OUT},
            "steps": steps,
            "batch_size": BATCH,
            "seed": seed,
            "adapter": METHODS[method],
            "optimizer": {"learning_rate": 2.0**exponent, "weight_decay": 0.0},
            "evaluation": {"sequences": 256},
            "strategy": pinned(BATCH),
        },
        SETTINGS,
    )


def write_documentation(folder: Path) -> Path:
    """The interpreter's own topics, one file each."""
    from pydoc_data.topics import topics

    folder.mkdir()
    for name, text in topics.items():
        (folder / f"{name.replace('/', '-')}.txt").write_text(text, encoding="utf-8")
    return folder


def pretrained(folder: Path) -> Path:
    """The base as a folder that transformers loads; its run is next to it."""
    recipe = base_recipe()
    api.train(recipe, api.plan(recipe), folder / "run")
    api.export(folder / "run", folder / "base", dtype="fp32")
    return folder / "base"


def trained(recipe: Recipe, world: World) -> tuple[float, int, int]:
    """(final held-out loss, trained weights, frozen weights)."""
    blueprint, strategy = blueprint_of(recipe), strategy_from(recipe.strategy)
    size = strategy[MICRO_BATCH_SIZE]
    data, run = open_data(recipe), build(recipe, blueprint, strategy, world.device)
    for index in range(recipe.steps):
        step(run, data.micro_batches(index, 0, 1, size), learning_rate(recipe, index))
    return (evaluate(run, data.held_out(0, 0, 1, size)), *blueprint.parameter_counts())


def swept(loss_at: Callable[[int], float], first: int) -> dict[int, float]:
    """Losses by exponent: from ``first`` downhill until both neighbours of the best are worse."""
    losses: dict[int, float] = {}
    wanted = [first]
    while wanted:
        losses |= {exponent: loss_at(exponent) for exponent in wanted}
        best = min(losses, key=lambda exponent: losses[exponent])
        wanted = [near for near in (best + 1, best - 1) if near not in losses][:1]
    return losses


def measured(method: str, steps: int, base: Path, text: Path, world: World) -> dict[str, Any]:
    """One row: the sweep, and the best rate's losses over the seeds."""
    counts: set[tuple[int, int]] = set()

    def loss_at(exponent: int, seed: int = 0) -> float:
        loss, *weights = trained(recipe(base, text, method, steps, exponent, seed), world)
        counts.add((weights[0], weights[1]))
        print(f"{method}, {steps} steps, rate 2^{exponent}, seed {seed}: {loss:.4f}", flush=True)
        return loss

    losses = swept(loss_at, GUESS.get(method, -9))
    best = min(losses, key=lambda exponent: losses[exponent])
    seeds = [losses[best], *(loss_at(best, seed) for seed in range(1, SEEDS))]
    [(weights, frozen)] = counts
    return {
        "trained": weights,
        "share": weights / (weights + frozen),
        "losses": {str(exponent): losses[exponent] for exponent in sorted(losses)},
        "best_exponent": best,
        "best_rate": 2.0**best,
        "seeds": seeds,
        "mean": statistics.fmean(seeds),
        "spread": statistics.stdev(seeds),
    }


Rows = dict[str, dict[str, Any]]


def compared(rows: Rows) -> dict[str, dict[str, float]]:
    """Each method against full fine-tuning of as many steps."""
    full = rows["full"]
    return {
        name: {"loss": row["mean"] / full["mean"] - 1, "rate": row["best_rate"] / full["best_rate"]}
        for name, row in rows.items()
    }


def met(rows: Rows) -> dict[str, bool]:
    """The target, for every method that adapts all layers."""
    against = compared(rows)
    return {
        name: against[name]["loss"] <= WITHIN
        and rows[name]["share"] < SHARE
        and FASTER[0] <= against[name]["rate"] <= FASTER[1]
        for name in rows
        if name.endswith("all")
    }


def table(passes: dict[str, Rows], before: float) -> str:
    """The figures as the documentation shows them."""
    lines = [
        "| | weights trained | best rate | over full's | held-out loss | against full |",
        "|---|---:|---:|---:|---:|---:|",
        f"| before | 0 | | | {before:.4f} | |",
    ]
    for how_many, rows in passes.items():
        against = compared(rows)
        for name, row in rows.items():
            last = "" if name == "full" else f"{against[name]['loss']:+.2%}"
            ratio = "" if name == "full" else f"{against[name]['rate']:g} x"
            lines.append(
                f"| {how_many}: {name} | {row['trained']:,} ({row['share']:.1%}) | 2^{row['best_exponent']} |"
                f" {ratio} | {row['mean']:.4f} ± {row['spread']:.4f} | {last} |"
            )
    return "\n".join([*lines, "", "Repeat with `benchmarks/lora.py`."])


def draw(rows: Rows, before: float, path: Path) -> None:
    """Held-out loss over the learning rate, a line for each method; what ends above the base's own is out of sight."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, row in rows.items():
        exponents = [int(exponent) for exponent in row["losses"]]
        axes.plot([2.0**e for e in exponents], list(row["losses"].values()), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.axhline(before, color="grey", linestyle=":", label="before")
    axes.set_ylim(top=1.01 * before)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="also repeat existing results")
    parser.add_argument("--base", type=Path, help="a folder with the base, or to leave it in")
    asked = parser.parse_args()
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() and not asked.again else {"passes": {}}
    with tempfile.TemporaryDirectory() as scratch:
        home = asked.base or Path(scratch)
        base = home / "base" if (home / "base").exists() else pretrained(home)
        text = write_documentation(Path(scratch) / "text")
        with join("cpu") as world:
            before = done.get("before") or untrained(base, text, world)
            for how_many, steps in STEPS.items():
                rows = done["passes"].setdefault(how_many, {})
                for method in METHODS if how_many == "one pass" else LONGER:
                    if method not in rows:
                        rows[method] = measured(method, steps, base, text, world)
                    write(done["passes"], before)
    print(table(done["passes"], before), met(done["passes"]["one pass"]), sep="\n")


def untrained(base: Path, text: Path, world: World) -> float:
    """The base's own loss on the held-out text."""
    asked = recipe(base, text, "full", 1, 0, 0)
    run, data = (
        build(asked, blueprint_of(asked), strategy_from(asked.strategy), world.device),
        open_data(asked),
    )
    return evaluate(run, data.held_out(0, 0, 1, BATCH))


def write(passes: dict[str, Rows], before: float) -> None:
    whole = {
        "compared": {how_many: compared(rows) for how_many, rows in passes.items()},
        "met": {how_many: met(rows) for how_many, rows in passes.items()},
        "table": table(passes, before),
    }
    settings = {
        "model": MODEL,
        "base": {"steps": BASE_STEPS, "batch": BASE_BATCH},
        "steps": STEPS,
        "batch": BATCH,
        "length": LENGTH,
    }
    results = {"machine": described(), **settings, "before": before, "passes": passes, **whole}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(passes["one pass"], before, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
