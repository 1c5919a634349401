"""Rows of tests/test_agreement.py that train: every setting of every technique, in pairs.

The factors are made from the techniques' own settings, so a new technique is covered here the day it is added to
``technique.ORDER``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, ORDER, SETTINGS, broken_rules, strategy_from
from tests.harness.corpora import WORDS
from tests.harness.covering import Pair, Row, covering_rows, few_of
from tests.harness.parity import Trial
from tests.rows.table import Rows

Wanted = Callable[[Pair], bool]
FACTORS: dict[str, list[Any]] = {
    setting.key: list(setting.examples) or [1, 2]
    for technique in ORDER
    for setting in technique.settings
    if len(setting.choices) != 1
}
# Of the values that are joined, one with everything stands for all. The trained rows separate the host's memory from
# the device's, so that all of it moves (harness/ranks.py); the measured rows cannot: on the CPU only files take
# anything out of it.
FACTORS["offload"] = ["none", "activations", "optimizer", "nvme:/tmp", "activations+parameters+nvme:/tmp"]
FACTORS["offload_fraction"] = [1.0, 0.5]
# A method says nothing without a degree: one factor of both, "METHOD DEGREE". PipeDream trains otherwise than one
# process does (tests/plugins/pipeline/test_pipedream.py); its memory has a test of its own.
METHODS = {
    "sequence": ("sequence_method", "sequence_parallel", ["ulysses 1", "ulysses 2", "ring 2"]),
    "tensor": (
        "tensor_sequence_parallel",
        "tensor_parallel",
        ["none 1", "none 2", "gathered 2", "regathered 2"],
    ),
    "pipeline": (
        "pipeline_schedule",
        "pipeline_parallel",
        ["1f1b 1", "1f1b 2", "naive 2", "gpipe 2", "interleaved 2", "zero_bubble 2"],
    ),
}
for name, (method, degree, values) in METHODS.items():
    del FACTORS[method], FACTORS[degree]
    FACTORS[name] = values
# Experts need a mixture: tests/technique/test_expert.py. A reference needs an objective:
# tests/plugins/preferences/test_layouts.py.
for key in (
    "pipeline_stages_per_rank",
    "pipeline_vertical_sync",
    "expert_parallel",
    "expert_capacity",
    "reference",
):
    del FACTORS[key]
FACTORS["optimizer"] = ["adamw", "sgd", "adamw_8bit"]
# A compilation takes seconds, so compiled blocks have rows of their own.
del FACTORS["compile"]
# First of each what most goes with: rows are completed with it. The world is what the degrees and the data-parallel
# ranks make: two of these where a ZeRO stage is to shard, and four for two copies of two shards.
PARITY_FACTORS = {
    **FACTORS,
    "fp8_layers": ["all", "large"],
    "data_ranks": [2, 1, 4],
    MICRO_BATCH_SIZE.key: [1, 2],
    "model": ["grouped", "llama", "gpt2", "tied", "sixteens"],
}
# A row is held to as little as its least exact value allows. So all pairs of exact values are of rows that have nothing
# else, and rows that give bits up have the pairs in which one of the two does.
GIVES_BITS_UP: dict[str, list[Any]] = {
    "precision": ["bf16", "fp16", "fp8"],
    "optimizer": ["adamw_8bit"],
    "master_weights": [False],
    "reduce_dtype": ["compute"],
    "buffer_dtype": ["compute"],
    "fp8_scaling": FACTORS["fp8_scaling"],
    "fp8_layers": FACTORS["fp8_layers"],
}
EXACT_FACTORS = {
    name: [value for value in values if value not in GIVES_BITS_UP.get(name, [])]
    for name, values in PARITY_FACTORS.items()
    if not name.startswith("fp8")
}
# Adapters belong to the recipe, not to the strategy, so the reference trains the same adapters. They meet each
# other and what divides, recomputes or moves weights, which they are part of; other settings do not see them.
ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"rank": 3, "alpha": 6, "learning_rate_ratio": 2.0},
    "dora": {"name": "dora", "rank": 3, "alpha": 6},
    "qlora": {"rank": 3, "alpha": 6, "quantize": "nf4", "targets": "attention"},
    "int8": {"rank": 3, "alpha": 6, "quantize": "int8", "targets": "attention"},
}
ADAPTER_FACTORS: dict[str, list[Any]] = {
    "adapter": ["lora", "dora", "qlora", "int8"],
    "zero_stage": [0, 1, 2, 3],
    "activation_checkpointing": ["none", "full", "budget:0.4"],
    "offload": ["none", "activations", "nvme:/tmp"],
    "pipeline": ["1f1b 1", "1f1b 2", "interleaved 2", "zero_bubble 2"],
    "sequence": ["ulysses 1", "ulysses 2", "ring 2"],
    "loss": FACTORS["loss"],
    "precision": ["fp64", "fp32", "bf16", "fp16"],
    "tensor": ["none 1", "gathered 2"],
    "data_ranks": [2, 1, 4],
    "model": ["grouped", "llama", "gpt2"],
}
# Inner widths and vocabularies that no world size divides; a batch of 3 leaves ranks and micro-batches with unequal
# counts, one of four ranks with nothing. In the last two every linear layer can run in 8 bits, also half of it, in the
# first of them with biases, and with tokens that are no multiple of 16. Four blocks are one for each of two stages on
# two ranks; without a pipeline they are enough for activations to leave the device.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"layers": 2, "width": 40, "heads": 4, "kv_heads": 2, "ffn": 55, "vocab": 257, "context": 32},
    "gpt2": {"family": "gpt2", "layers": 2, "width": 42, "heads": 2, "ffn": 51, "vocab": 263, "context": 32},
    "tied": {
        "layers": 4,
        "width": 36,
        "heads": 6,
        "kv_heads": 6,
        "ffn": 49,
        "vocab": 269,
        "context": 32,
        "tied": True,
    },
    "sixteens": {
        "family": "gpt2",
        "layers": 4,
        "width": 64,
        "heads": 4,
        "ffn": 96,
        "vocab": 271,
        "context": 32,
    },
    # Tied: where it is not, fp8 alone, in one process, moves the gradient norm of a step by 16 % (the loss by 0.1 %).
    "grouped": {
        "layers": 4,
        "width": 64,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 96,
        "vocab": 271,
        "context": 32,
        "tied": True,
    },
}
MOST_RANKS = 4
STEPS = 20
LENGTH = 24
BATCH = 3


def tables() -> dict[str, Rows]:
    """The rows. The few have each value, on few ranks: exact ones, and adapters."""
    with_stages = has("zero_stage")

    def covering(factors: dict[str, list[Any]], first: Wanted, then: Wanted = lambda pair: True) -> Rows:
        few = covering_rows(factors, valid, first, world_of)
        return Rows([*few, *covering_rows(factors, valid, then, given=few)], few)

    exact = covering(EXACT_FACTORS, with_stages).rows
    fewer = covering(PARITY_FACTORS, lambda p: gives_bits_up(p) and with_stages(p), gives_bits_up)
    plain = {name: values[0] for name, values in PARITY_FACTORS.items()} | {"fp8_layers": "large"}
    # Hybrid sharding takes three values, which pairs may leave out.
    hybrid = plain | {"data_ranks": 4, "zero_stage": 2, "replicate": 2, "optimizer": "adamw_8bit"}
    assert valid(hybrid)
    adapters = covering(ADAPTER_FACTORS, lambda p: with_stages(p) and has("adapter")(p)).rows
    return {
        "exact": Rows(exact, few_of(exact, cost=world_of)),
        "fewer bits": Rows([*fewer.rows, hybrid], fewer.few),
        "adapters": Rows(adapters, few_of(adapters, cost=world_of)),
        "compiled": compiled(),
    }


def compiled() -> Rows:
    """Blocks as generated kernels, with each value of every other setting. Each takes a minute of compiling."""
    exact = {"compile": ["block"], **EXACT_FACTORS}
    every = {name: PARITY_FACTORS.get(name, values) for name, values in exact.items()}
    plain = {name: values[0] for name, values in exact.items()} | {"data_ranks": 1}
    given = [
        plain,
        plain | {"data_ranks": 4, "zero_stage": 2, "replicate": 2},
    ]  # hybrid sharding takes three values
    assert all(map(valid, given))
    rows = [*given, *covering_rows(exact, valid, has("compile"), world_of, given=given)]
    return Rows([*rows, *covering_rows(every, valid, has("compile"), world_of, given=rows)], [])


def has(factor: str) -> Wanted:
    """Whether one value of a pair is of the factor."""
    return lambda pair: factor in (pair[0][0], pair[1][0])


def world_of(row: Row) -> int:
    """Ranks of a row: its data-parallel ranks times the degrees of the model's axes."""
    return row["data_ranks"] * model_ranks(row)


def model_ranks(row: Row) -> int:
    return math.prod(int(row.get(name, "1").split()[-1]) for name in METHODS)


def valid(row: Row) -> bool:
    """Whether a row is of few ranks, breaks no rule, and does what it names."""
    copies = row.get("replicate", 1)
    if world_of(row) > MOST_RANKS or row["data_ranks"] % copies or not takes_place(row):
        return False
    recipe = recipe_for_rules(MODELS[row["model"]], row)
    return not any(broken_rules(strategy_from(settings_of(row)), world_of(row), recipe))


def takes_place(row: Row) -> bool:
    """Whether a row shards, trains in 8 bits and moves activations where it says so: it has ranks, layers and blocks
    enough."""
    copies = row.get("replicate", 1)
    shards = row["data_ranks"] > copies or (copies == 1 and not row["sequence"].endswith(" 1"))
    in_8_bits = row["model"] in ("sixteens", "grouped") and row.get("fp8_layers") == "all"
    moves = MODELS[row["model"]]["layers"] >= 4
    return (
        (shards or (row["zero_stage"] == 0 and copies == 1))
        and (row["precision"] != "fp8" or in_8_bits)
        and ("activations" not in row["offload"] or moves)
    )


def gives_bits_up(pair: Pair) -> bool:
    return any(value in GIVES_BITS_UP.get(name, []) for name, value in pair)


def recipe_for_rules(model: dict[str, Any], row: Row) -> Recipe:
    return _recipe_for_rules(
        tuple(model.items()),
        row.get("optimizer", "adamw"),
        row.get("optimizer_in_backward", False),
        row.get("adapter", "full"),
    )


@functools.cache
def _recipe_for_rules(model: tuple[Any, ...], optimizer: str, in_backward: bool, adapter: str) -> Recipe:
    values = {
        "model": dict(model),
        "data": {"sequence_length": LENGTH},
        "steps": 1,
        "batch_size": 1,
        "optimizer": optimizer_of({"optimizer": optimizer, "optimizer_in_backward": in_backward}),
        "adapter": ADAPTERS[adapter],
    }
    return recipe_of(values, SETTINGS)


def optimizer_of(row: Row) -> dict[str, Any]:
    """The recipe's optimizer section: clipped wherever clipping is possible.

    SGD's rate is below its edge of stability, beyond which gradient norms tell the dtype's noise many times over.
    """
    rate = 0.02 if row.get("optimizer") == "sgd" else 1e-3
    clip = None if row.get("optimizer_in_backward") else 1.0
    # B starts at zero, so all of it is update, and Adam's update is rounding where the gradient is: not above epsilon.
    epsilon = 1e-5 if "adapter" in row else 1e-8
    name = row.get("optimizer", "adamw")
    return {"name": name, "learning_rate": rate, "clip_norm": clip, "epsilon": epsilon}


def settings_of(row: Row) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, (method, degree, values) in METHODS.items():
        chosen, number = row.get(name, values[0]).split()
        joined |= {method: chosen, degree: int(number)}
    if "fp8" in row:
        joined["fp8_scaling"], joined["fp8_layers"] = row["fp8"].split()
    return {s.key: row[s.key] for s in SETTINGS if s.key in row} | joined


def trial_of(row: Row) -> Trial:
    values = {
        "model": MODELS[row["model"]],
        "data": {"source": WORDS, "sequence_length": LENGTH},
        "steps": STEPS,
        "batch_size": BATCH,
        "optimizer": optimizer_of(row),
        "adapter": ADAPTERS[row.get("adapter", "full")],
    }
    return Trial(recipe_of(values, SETTINGS), world_of(row), settings_of(row))
