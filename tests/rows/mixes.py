"""Rows of tests/test_mixes.py: two and three axes on one mesh, on four and eight processes."""

from __future__ import annotations

import functools
import math
from typing import Any

from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, broken_rules, strategy_from
from tests.harness.corpora import FEW_LETTERS
from tests.harness.covering import Row, covering_rows, few_of
from tests.harness.parity import Trial
from tests.rows.table import Rows

STEPS, LENGTH = 20, 16
LLAMA = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 257, "context": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"kv_heads": 2, "family": "qwen3", "head_dim": 10},
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
    "model": ["llama", "qwen3", "tied", "gpt2"],
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


def recipe_of_row(row: Row) -> Recipe:
    d = degrees(row)
    # One sample less than there is room for: ranks and micro-batches count unequally many targets.
    return _recipe(row["model"], row["micro_batches"] * d["copies"] * d["shards"] - (d["shards"] > 1))


@functools.cache
def _recipe(model: str, batch_size: int) -> Recipe:
    values = {
        "model": MODELS[model],
        "data": {"source": FEW_LETTERS, "sequence_length": LENGTH},
        "steps": STEPS,
        "batch_size": batch_size,
        "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0},
    }
    return recipe_of(values, SETTINGS)


def trial_of(row: Row) -> Trial:
    return Trial(recipe_of_row(row), world_of(row), settings_of(row))


def further_trial(processes: int, settings: dict[str, Any], optimizer: str, model: str) -> Trial:
    rate = 0.02 if optimizer == "sgd" else 1e-3
    clip = None if settings.get("optimizer_in_backward") else 1.0
    strategy = {"precision": "fp32", "micro_batch_size": 1, **settings}
    values = {
        "model": MODELS[model],
        "data": {"source": FEW_LETTERS, "sequence_length": LENGTH},
        "steps": 6,
        "batch_size": 7,
        "optimizer": {"name": optimizer, "learning_rate": rate, "clip_norm": clip},
        "strategy": strategy,
        "cluster": {"devices_per_node": processes},
    }
    return Trial(recipe_of(values, SETTINGS), processes, strategy)


def tables() -> dict[str, Rows]:
    """The rows; the few have every value once, every two axes, and three axes once."""
    rows = covering_rows(FACTORS, valid)
    # Eight processes take their time on two cores: of each three axes the first row.
    large = covering_rows(FACTORS, functools.partial(valid, processes=8))
    few = [*few_of(rows), *{axes_of(row): row for row in reversed(rows)}.values()]
    return {
        "mixes": Rows(rows, few),
        "mixes of three axes": Rows([*{axes_of(row): row for row in reversed(large)}.values()], large[:1]),
    }


def world_of(row: Row) -> int:
    return math.prod(degrees(row).values())


def axes_of(row: Row) -> frozenset[str]:
    return frozenset(axis for axis, degree in degrees(row).items() if degree > 1)


def valid(row: Row, processes: int = 4) -> bool:
    """Whether a row divides a model over so many processes, and no rule is broken."""
    if world_of(row) != processes:
        return False
    return not any(broken_rules(strategy_from(settings_of(row)), processes, recipe_of_row(row)))


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
        (4, SHARES | {"pipeline_parallel": 2, "pipeline_schedule": schedule}, "adamw", "qwen3")
        for schedule in ("naive", "gpipe")
    ),
    *(
        (2, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved", **some}, "adamw", "llama")
        for some in ({"activation_checkpointing": "every:2"}, {"activation_checkpointing": "sqrt"})
    ),
    (4, HYBRID | {"activation_checkpointing": "sqrt"}, "adamw", "llama"),
    (4, HYBRID | {"activation_checkpointing": "every:2"}, "adamw", "llama"),
    (4, HYBRID | {"offload": "activations"}, "sgd", "llama"),
    (4, HYBRID | {"optimizer_in_backward": True}, "adamw", "llama"),
    (4, HYBRID | {"precision": "bf16", "master_weights": False}, "adamw", "llama"),
    (2, ON_HOST | {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}, "adamw", "llama"),
    (1, ON_HOST | {"activation_checkpointing": "budget:0.4"}, "adamw", "llama"),
    (1, ROWS_OF_8_BITS | {"compile": "block"}, "adamw", "llama"),
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
