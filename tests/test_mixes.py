"""Mixes of every way to divide a model, on four and eight processes: they train as one plain process does.

tests/test_agreement.py takes every setting in pairs; here two and three axes meet on one mesh in every row. Rows on
four processes cover all pairs of what is listed that two axes allow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from corpora import write_words
from pairwise import Row, covering_rows, few_of
from pool import Pool
from ranks import reference_rank, strategy_rank

from shardwise.core.recipe import Recipe, recipe_of
from shardwise.technique import SETTINGS, broken_rules, refuse_broken, strategy_from

STEPS, LENGTH = 20, 16
LLAMA = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 257, "context": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "grouped": LLAMA | {"kv_heads": 2},
    "tied": LLAMA | {"tied": True},
    "gpt2": {k: v for k, v in LLAMA.items() if k != "kv_heads"} | {"family": "gpt2"},
    "grouped gpt2": LLAMA | {"kv_heads": 2, "family": "gpt2"},
}
FACTORS: dict[str, list[Any]] = {
    "data": ["zero0", "zero1", "zero2", "zero3", "hybrid2", "hybrid3"],
    "tensor": [1, 2],
    "shares": ["none", "gathered", "regathered"],
    "sequence": ["none", "ulysses", "ring"],
    "schedule": ["none", "1f1b", "interleaved", "zero_bubble"],
    "micro_batches": [2, 3],
    "precision": ["fp64", "fp32", "bf16", "fp16"],
    "activation_checkpointing": ["none", "full", "selective", "budget:0.4"],
    "model": ["llama", "grouped", "tied", "gpt2"],
    "loss": ["logits", "chunked"],
}


def degrees(row: Row) -> dict[str, int]:
    hybrid = row["data"].startswith("hybrid")
    return {
        "copies": 2 if hybrid else 1,
        "shards": 2 if row["data"] in ("zero1", "zero2", "zero3") or hybrid else 1,
        "tensor": row["tensor"],
        "sequence": 1 if row["sequence"] == "none" else 2,
        "pipeline": 1 if row["schedule"] == "none" else 2,
    }


def settings_of(row: Row) -> dict[str, Any]:
    d = degrees(row)
    return {
        "precision": row["precision"],
        "zero_stage": int(row["data"][-1]),
        "replicate": d["copies"],
        "tensor_parallel": d["tensor"],
        "tensor_sequence_parallel": row["shares"],
        "sequence_parallel": d["sequence"],
        "sequence_method": "ring" if row["sequence"] == "ring" else "ulysses",
        "pipeline_parallel": d["pipeline"],
        "pipeline_schedule": "1f1b" if row["schedule"] == "none" else row["schedule"],
        "activation_checkpointing": row["activation_checkpointing"],
        "loss": row["loss"],
        "micro_batch_size": 1,
    }


def recipe_for(row: Row, corpus: Path) -> Recipe:
    d = degrees(row)
    values = {
        "model": MODELS[row["model"]],
        "data": {"source": str(corpus), "sequence_length": LENGTH},
        "steps": STEPS,
        # One sample less than there is room for: ranks and micro-batches count unequally many targets.
        "batch_size": row["micro_batches"] * d["copies"] * d["shards"] - (d["shards"] > 1),
        "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0},
    }
    return recipe_of(values, SETTINGS)


def further_recipe(
    processes: int, settings: dict[str, Any], optimizer: str, model: str, corpus: Path
) -> Recipe:
    rate = 0.02 if optimizer == "sgd" else 1e-3
    clip = None if settings.get("optimizer_in_backward") else 1.0
    values = {
        "model": MODELS[model],
        "data": {"source": str(corpus), "sequence_length": LENGTH},
        "steps": 6,
        "batch_size": 7,
        "optimizer": {"name": optimizer, "learning_rate": rate, "clip_norm": clip},
        "strategy": {"precision": "fp32", "micro_batch_size": 1, **settings},
        "cluster": {"devices_per_node": processes},
    }
    return recipe_of(values, SETTINGS)


def valid(row: Row, processes: int = 4) -> bool:
    """Whether a row divides a model over so many processes, and no rule is broken."""
    world = math.prod(degrees(row).values())
    if world != processes:
        return False
    return not any(broken_rules(strategy_from(settings_of(row)), world, recipe_for(row, Path("any"))))


def name_of(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


def axes_of(row: Row) -> frozenset[str]:
    return frozenset(axis for axis, degree in degrees(row).items() if degree > 1)


ROWS = covering_rows(FACTORS, valid)
# What no row has of the pairs in docs/reference/combinations.md: (processes, settings, optimizer, model).
HYBRID = {"zero_stage": 2, "replicate": 2}
ON_HOST = {"offload": "optimizer+parameters"}
HALF_ON_HOST = {"offload": "activations+optimizer", "offload_fraction": 0.5}
ROWS_OF_8_BITS = {"precision": "fp8", "fp8_scaling": "row", "fp8_layers": "all"}
SPLIT = {"tensor_parallel": 2}
SHARES = SPLIT | {"tensor_sequence_parallel": "gathered"}
FURTHER: list[tuple[int, dict[str, Any], str, str]] = [
    (
        4,
        HYBRID
        | {"precision": "bf16", "reduce_dtype": "compute", "buffer_dtype": "compute"}
        | {"activation_checkpointing": "every:2"},
        "adamw",
        "llama",
    ),
    (4, HYBRID | ROWS_OF_8_BITS, "sgd", "llama"),
    (8, HYBRID | {"sequence_parallel": 2, "sequence_method": "ring"}, "adamw", "llama"),
    *(
        (8, HYBRID | ON_HOST | {"pipeline_parallel": 2, "pipeline_schedule": schedule}, "adamw", "llama")
        for schedule in ("naive", "gpipe", "1f1b", "zero_bubble")
    ),
    (8, HYBRID | {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}, "adamw", "llama"),
    *(
        (4, {"zero_stage": 1, "pipeline_parallel": 2, "pipeline_schedule": schedule}, "adamw", "tied")
        for schedule in ("naive", "gpipe")
    ),
    *(
        (4, SHARES | {"pipeline_parallel": 2, "pipeline_schedule": schedule}, "adamw", "grouped")
        for schedule in ("naive", "gpipe")
    ),
    *(
        (2, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved", **some}, "adamw", "llama")
        for some in ({"activation_checkpointing": "every:2"}, {"activation_checkpointing": "sqrt"})
    ),
    (4, HYBRID | {"activation_checkpointing": "sqrt"}, "adamw", "llama"),
    (2, ON_HOST | {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}, "adamw", "llama"),
    (1, ON_HOST | {"activation_checkpointing": "budget:0.4"}, "adamw", "llama"),
    (2, {"offload": "activations", "activation_checkpointing": "budget:0.4"}, "adamw", "llama"),
    (1, HALF_ON_HOST, "adamw", "llama"),
    (8, HYBRID | SPLIT, "adamw", "llama"),
    (8, HYBRID | SHARES, "adamw", "llama"),
    (2, SHARES | ROWS_OF_8_BITS | {"activation_checkpointing": "sqrt"}, "adamw", "llama"),
    (2, SHARES | HALF_ON_HOST | {"precision": "bf16", "buffer_dtype": "compute"}, "adamw", "llama"),
    (2, SHARES | ON_HOST | {"optimizer_in_backward": True}, "adamw", "llama"),
    (2, SHARES | {"offload": "nvme:/tmp"}, "adamw", "llama"),
    (1, {}, "adamw", "grouped gpt2"),
]
# Eight processes take their time on two cores: of each three axes the first row.
LARGE = covering_rows(FACTORS, functools.partial(valid, processes=8))
# `make test` trains every value once and every two axes; all rows are those of `make test-all`.
FEW = [*few_of(ROWS), *{axes_of(row): row for row in reversed(ROWS)}.values(), LARGE[0]]
FEW_FURTHER = [
    row for row in FURTHER if row[0] <= 2 and ("offload" in row[1] or "pipeline_parallel" in row[1])
]
ROWS += {axes_of(row): row for row in reversed(LARGE)}.values()


def mark(row: Any, few: list[Any]) -> tuple[pytest.MarkDecorator, ...]:
    return () if row in few else (pytest.mark.long,)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Up to 8 ranks."""
    running = Pool(8)
    yield running
    running.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("data") / "corpus.txt", 4000, even=True, letters="abcdefgh")


@pytest.fixture(scope="module")
def reference(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder with the plain process's losses and weights, for a recipe; each distinct one trained once."""
    folders: dict[str, Path] = {}

    def trained(recipe: Recipe, precision: str) -> Path:
        key = f"{recipe.model} {recipe.steps} {recipe.batch_size} {recipe.optimizer} {precision}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("reference")
            pool.run(1, reference_rank, recipe, {"precision": precision, "micro_batch_size": 8}, folders[key])
        return folders[key]

    return trained


def test_there_are_enough_of_them_and_every_axis_meets_every_other() -> None:
    assert len(ROWS) >= 40
    axes = ("copies", "shards", "tensor", "sequence", "pipeline")
    met = {axes_of(row) for row in ROWS}
    assert all(any({a, b} <= some for some in met) for a, b in combinations(axes, 2))
    assert all(any(set(three) <= some for some in met) for three in combinations(axes[1:], 3))


@pytest.mark.parametrize("row", [pytest.param(row, marks=mark(row, FEW), id=name_of(row)) for row in ROWS])
def test_trains_as_one_plain_process(row: Row, pool: Pool, corpus: Path, reference: Any) -> None:
    recipe = recipe_for(row, corpus)
    folder = reference(recipe, "fp64" if row["precision"] == "fp64" else "fp32")
    world = math.prod(degrees(row).values())
    verdicts = pool.run(world, strategy_rank, recipe, settings_of(row), folder, timeout=240)
    assert verdicts[0].steps == STEPS
    assert all(v == verdicts[0] for v in verdicts)
    assert verdicts[0].passed, verdicts[0]


@pytest.mark.parametrize(
    ("processes", "settings", "optimizer", "model"),
    [pytest.param(*row, marks=mark(row, FEW_FURTHER)) for row in FURTHER],
    ids=str,
)
def test_what_no_row_has_trains_as_one_plain_process(
    processes: int,
    settings: dict[str, Any],
    optimizer: str,
    model: str,
    pool: Pool,
    corpus: Path,
    reference: Any,
) -> None:
    recipe = further_recipe(processes, settings, optimizer, model, corpus)
    refuse_broken(recipe, processes, str)
    folder = reference(recipe.model_copy(update={"strategy": {}}), "fp32")
    verdicts = pool.run(processes, strategy_rank, recipe, dict(recipe.strategy), folder, timeout=240)
    assert verdicts[0].passed, verdicts[0]
