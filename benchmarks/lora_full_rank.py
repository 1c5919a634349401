"""LoRA of full rank against full fine-tuning: ``python benchmarks/lora_full_rank.py``.

Hu et al. 2021 (arXiv 2106.09685, section 4.1): LoRA on all weight matrices, with the rank of these matrices, roughly
recovers the expressiveness of full fine-tuning. Here a native decoder of width 64 is pretrained on the source of
Python's standard library, and adapted to the interpreter's English documentation by training all weights, by training
the matrices of its blocks alone, and by LoRA on these of rank 1, 8 and 64, which is their rank. Each method has its
own best learning rate, among powers of two, and the best is trained with further seeds (lora.py). Compared is the
held-out loss. LoRA leaves embedding, output layer and norms as they are, so its counterpart is the second; the first
says what they are worth.

About ten minutes on one core; rows that are there are not trained again (``--again`` does). Writes
benchmarks/results/lora-full-rank.json; nothing in it is a time.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora import swept, write_documentation
from machine import described

from shardwise import api
from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.optim.norm import local
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.launch.process import World, join
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.evaluation import evaluate

RESULTS = Path(__file__).parent / "results" / "lora-full-rank.json"
WIDTH, LENGTH, BATCH, SEEDS = 64, 128, 8, 3
MODEL = {"layers": 2, "width": WIDTH, "heads": 4, "ffn": 176, "vocab": 256, "context": LENGTH}
BASE_STEPS, STEPS = 1500, 400
ALL, SAME = "all weights", "matrices of blocks"
RANKS = (1, 8, WIDTH)
METHODS: dict[str, int | None] = {ALL: None, SAME: None, **{f"LoRA, rank {rank}": rank for rank in RANKS}}
WITHIN = 0.01
"""The target: loss of full rank within 1 % of that of training the same matrices."""


def common(steps: int, rate: float) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": BATCH,
        "optimizer": {"learning_rate": rate, "weight_decay": 0.0, "clip_norm": None},
        "strategy": {"zero_stage": 0, "micro_batch_size": BATCH, "precision": "fp32"},
    }


def pretrained(folder: Path) -> Path:
    """The base as a folder that transformers loads."""
    data = {"source": "stdlib", "sequence_length": LENGTH}
    asked = recipe_of({"model": MODEL, "data": data, **common(BASE_STEPS, 3e-3)}, SETTINGS)
    api.train(asked, api.plan(asked), folder / "run")
    api.export(folder / "run", folder / "base", dtype="fp32")
    return folder / "base"


def recipe(base: Path, text: Path, rank: int | None, exponent: int, seed: int) -> Recipe:
    adapter = None if rank is None else {"rank": rank, "alpha": rank, "targets": "all"}
    data = {"source": str(text), "sequence_length": LENGTH, "held_out": 0.5}
    values = {"model": {"hf": str(base)}, "data": data, "seed": seed, "adapter": adapter}
    return recipe_of({**common(STEPS, 2.0**exponent), **values, "evaluation": {"sequences": 128}}, SETTINGS)


def trained(recipe: Recipe, world: World, frozen: Callable[[str], bool]) -> tuple[float, int]:
    """(final held-out loss, trained weights). Parameters with a ``frozen`` name are put back after every step."""
    strategy = strategy_from(recipe.strategy)
    data, run = open_data(recipe), build(recipe, blueprint_of(recipe), strategy, world.device)
    mine = {name: local(weight) for name, weight in named_parameters(run.model) if weight.requires_grad}
    held = {name: weight.detach().clone() for name, weight in mine.items() if frozen(name)}
    for index in range(recipe.steps):
        step(run, data.micro_batches(index, 0, 1, BATCH), learning_rate(recipe, index))
        for name, before in held.items():
            mine[name].detach().copy_(before)
    count = sum(weight.numel() for name, weight in mine.items() if name not in held)
    return evaluate(run, data.held_out(0, 0, 1, BATCH)), count


def no_matrix_of_a_block(name: str) -> bool:
    return not re.search(r"layers\.\d+\..*proj\.weight$", name)


def measured(method: str, base: Path, text: Path, world: World) -> dict[str, Any]:
    """One row: the sweep, and the best rate's losses over the seeds."""
    weights: set[int] = set()

    def loss_at(exponent: int, seed: int = 0) -> float:
        asked = recipe(base, text, METHODS[method], exponent, seed)
        loss, count = trained(asked, world, no_matrix_of_a_block if method == SAME else lambda _: False)
        weights.add(count)
        print(f"{method}, rate 2^{exponent}, seed {seed}: {loss:.4f}", flush=True)
        return loss

    losses = swept(loss_at, -8 if METHODS[method] is None else -7)
    best = min(losses, key=lambda exponent: losses[exponent])
    seeds = [losses[best], *(loss_at(best, seed) for seed in range(1, SEEDS))]
    return {
        "trained": weights.pop(),
        "losses": {str(exponent): losses[exponent] for exponent in sorted(losses)},
        "best_rate": 2.0**best,
        "seeds": seeds,
        "mean": statistics.fmean(seeds),
        "spread": statistics.stdev(seeds),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The figures as the documentation shows them."""
    same = rows[SAME]["mean"]
    lines = ["| | weights trained | best rate | held-out loss | against the same matrices |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, row in rows.items():
        against = "" if name == SAME else f"{row['mean'] / same - 1:+.2%}"
        rate = f"2^{round(math.log2(row['best_rate']))}"
        lines.append(
            f"| {name} | {row['trained']:,} | {rate} | {row['mean']:.4f} ± {row['spread']:.4f} | {against} |"
        )
    return "\n".join([*lines, "", "Repeat with `benchmarks/lora_full_rank.py`."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="also repeat existing results")
    again = parser.parse_args().again
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and not again else {}
    with tempfile.TemporaryDirectory() as scratch:
        base, text = pretrained(Path(scratch)), write_documentation(Path(scratch) / "text")
        with join("cpu") as world:
            rows = {name: rows.get(name) or measured(name, base, text, world) for name in METHODS}
    reached = rows[f"LoRA, rank {WIDTH}"]["mean"] / rows[SAME]["mean"] - 1
    results = {
        "machine": described(),
        "model": MODEL,
        "steps": {"base": BASE_STEPS, "adapted": STEPS},
        "batch": BATCH,
        "rows": rows,
        "full_rank_against_the_same_matrices": reached,
        "met": reached <= WITHIN,
        "table": table(rows),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(results["table"], f"{reached:+.2%}", results["met"])


if __name__ == "__main__":
    main()
