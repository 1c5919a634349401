"""Starts of an adapter on a quantized base, compared: ``python benchmarks/qlora_start.py BASE``.

BASE is a folder of a byte-level model that transformers loads, trained on the source of Python's standard library
(here the preset ``python-6m``). Its blocks are rounded to 4 bits (NF4), or to 3 or 2 bits in groups of 64. Adapters of
rank 16 on all linear layers then train on the interpreter's English documentation, from four starts:

    default     B = 0 on quantize(W)
    pissa       A B = the best approximation of W, on quantize(W - A B) (Meng et al. 2024, QPiSSA)
    loftq, 1    A B = the best approximation of W - Q, Q = quantize(W) (Li et al. 2023)
    loftq, 5    Q and A B in turn, five times

All see the same samples at the same learning rate, in fp32. Figures are held-out losses in nats per byte, before the
first step and after the last, the median of the seeds.

About ten minutes on one core; a seed of a row that is there is not trained again (``--again`` does). Writes
benchmarks/results/qlora-start.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lora import write_documentation
from machine import described
from torch import Tensor

from shardwise.core.scheme import scheme_of
from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.launch.process import join
from shardwise.model.loftq import loftq, principal
from shardwise.model.lora import LoraLinear
from shardwise.model.open import blueprint_of
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.quantized import Packing
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.evaluation import evaluate

RESULTS = Path(__file__).parent / "results" / "qlora-start.json"
STEPS, BATCH, LENGTH, RANK, SEEDS = 30, 4, 128, 16, 3
RATE, HELD_OUT, EVALUATED = 2.0**-10, 0.9, 32
Rounded = Callable[[Tensor], Tensor]
Start = Callable[[Tensor, Rounded], tuple[Tensor, Tensor, Tensor]]
"""From a weight: the part to quantize, B and A."""
Rows = dict[str, dict[str, Any]]


def nf4(weight: Tensor) -> Tensor:
    packing = Packing("nf4", *weight.shape)
    return packing.unpack(packing.pack(weight, slice(0, packing.shape[0])), weight.dtype)


def integers(bits: int) -> Rounded:
    scheme = scheme_of(f"w{bits}a16-g64")
    return lambda weight: RoundToNearest().quantize(weight, scheme, None).dequantize()


def pissa(weight: Tensor, rounded: Rounded) -> tuple[Tensor, Tensor, Tensor]:
    b, a = principal(weight, RANK)
    return weight - b @ a, b, a


BASES: dict[str, Rounded | None] = {
    "16 bits": None,
    "4 bits (NF4)": nf4,
    "3 bits": integers(3),
    "2 bits": integers(2),
}
STARTS: dict[str, Start | None] = {
    "default": None,
    "pissa": pissa,
    "loftq, 1": lambda weight, rounded: loftq(weight, rounded, RANK, 1),
    "loftq, 5": lambda weight, rounded: loftq(weight, rounded, RANK, 5),
}


def recipe(base: Path, text: Path, seed: int) -> Recipe:
    return recipe_of(
        {
            "model": {"hf": str(base)},
            "data": {"source": str(text), "sequence_length": LENGTH, "held_out": HELD_OUT},
            "steps": STEPS,
            "batch_size": BATCH,
            "seed": seed,
            "adapter": {"rank": RANK, "alpha": RANK},
            "optimizer": {"learning_rate": RATE},
            "evaluation": {"sequences": EVALUATED},
            "strategy": {"zero_stage": 0, "micro_batch_size": BATCH, "precision": "fp32"},
        },
        SETTINGS,
    )


@torch.no_grad()
def begin(run: Run, rounded: Rounded | None, start: Start | None) -> None:
    """Give each layer its rounded weight, and its adapter the start."""
    for layer in run.model.modules():
        if isinstance(layer, LoraLinear) and rounded is not None:
            held = [p.detach().to_local() for p in (layer.weight, layer.lora_B.weight, layer.lora_A.weight)]  # type: ignore[attr-defined]
            weight = held[0].clone()
            rest, *factors = (weight, held[1], held[2]) if start is None else start(weight, rounded)
            for place, value in zip(held, (rounded(rest), *factors), strict=True):
                place.copy_(value)


def measured(made: Recipe, rounded: Rounded | None, start: Start | None) -> dict[str, float]:
    """Held-out losses of one seed."""
    data = open_data(made)
    run = build(made, blueprint_of(made), strategy_from(made.strategy), torch.device("cpu"))
    begin(run, rounded, start)
    first = evaluate(run, data.held_out(0, 0, 1, BATCH))
    for index in range(made.steps):
        step(run, data.micro_batches(index, 0, 1, BATCH), learning_rate(made, index))
    return {"start": first, "end": evaluate(run, data.held_out(0, 0, 1, BATCH))}


def medians(row: dict[str, Any]) -> tuple[float, float]:
    return (
        statistics.median(seed["start"] for seed in row.values()),
        statistics.median(seed["end"] for seed in row.values()),
    )


def table(rows: Rows) -> str:
    """The figures as the documentation shows them."""
    lines = [f"| base | start | before | after {STEPS} steps |", "|---|---|---:|---:|"]
    for name, row in rows.items():
        base, start = name.split(" · ")
        before, after = medians(row)
        lines.append(f"| {base} | {start} | {before:.4f} | {after:.4f} |")
    return "\n".join([*lines, "", "Repeat with `benchmarks/qlora_start.py`."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="a folder that transformers loads")
    parser.add_argument("--again", action="store_true", help="also repeat existing results")
    given = parser.parse_args()
    rows: Rows = {}
    if RESULTS.exists() and not given.again:
        rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    asked = [
        (seed, base, start)
        for seed in range(SEEDS)
        for base, rounded in BASES.items()
        for start in STARTS
        if rounded is not None or start == "default"
    ]
    with tempfile.TemporaryDirectory() as scratch, join("cpu"):
        text = write_documentation(Path(scratch) / "text")
        for seed, base, start in asked:
            row = rows.setdefault(f"{base} · {start}", {})
            if str(seed) not in row:
                made = recipe(given.base, text, seed)
                row[str(seed)] = measured(made, BASES[base], STARTS[start])
                print(f"{base} · {start}, seed {seed}: {row[str(seed)]}", flush=True)
                found = {"machine": described(), "rows": rows, "table": table(rows)}
                RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
