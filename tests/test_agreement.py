"""Every technique, alone and in pairs: it trains as one plain process does, and takes the memory it was planned.

The rows are made from the techniques' own settings, so a new technique is covered here the day it is added to
``technique.ORDER``. `make test` trains every value beside every ZeRO stage and measures the memory of each value once;
all pairs are those of `make test-all`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import write_words
from pairwise import Pair, Row, covering_rows, few_of
from pool import Pool
from ranks import measured_rank, reference_rank, strategy_rank

from shardwise.core.cluster import cluster_of
from shardwise.core.recipe import Recipe, recipe_of
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.model.blueprint import blueprint_of
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    ORDER,
    SETTINGS,
    broken_rules,
    layout_of,
    strategy_from,
)

FACTORS: dict[str, list[Any]] = {
    setting.key: list(setting.examples) or [1, 2]
    for technique in ORDER
    for setting in technique.settings
    if len(setting.choices) != 1
}
# Of the values that are joined, one with everything stands for all. What is trained tells the host's memory from the
# device's, so that all of it moves (ranks.py); what is measured cannot: on the CPU only files take anything out of it.
FACTORS["offload"] = ["none", "activations", "optimizer", "nvme:/tmp", "activations+parameters+nvme:/tmp"]
FACTORS["offload_fraction"] = [1.0, 0.5]
# A method says nothing without a degree: one factor of both, "METHOD DEGREE". PipeDream trains otherwise than one
# process does (tests/engine/test_pipedream.py); its memory has a test of its own below.
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
for key in ("pipeline_stages_per_rank", "pipeline_vertical_sync"):
    del FACTORS[key]
FACTORS["optimizer"] = ["adamw", "sgd", "adamw_8bit"]
# Memory is measured on a larger model, which takes its time: what is held as something else is has rows of its own,
# sharded and not. fp16 is held as bf16 is and fp64 as fp32, segments are blocks that are recomputed, a pipeline that is
# filled and emptied holds one micro-batch or all, how 8 bits are scaled goes with which layers have them, and what
# gathers shares of the sequence again gathers as "gathered" does, and then once more.
LEDGER_FACTORS = {
    **{key: values for key, values in FACTORS.items() if key not in ("fp8_scaling", "fp8_layers")},
    "tensor": ["none 1", "none 2", "regathered 2"],
    "activation_checkpointing": ["none", "full", "selective", "budget:0.4"],
    "precision": ["fp32", "bf16", "fp8"],
    "fp8": ["tensor large", "row all"],
    "pipeline": ["1f1b 1", "1f1b 2", "interleaved 2", "zero_bubble 2"],
    "accumulate": [1, 2],
}
SHARDED: dict[str, list[Any]] = {"zero_stage": [0, 3], "accumulate": [1]}
# Of the smallest rows, not to be lost from sight.
KNOWN_DIFFERENCE: dict[str, list[Any]] = {
    "sequence": ["ring 2"],
    "tensor": ["regathered 2"],
    "precision": ["bf16"],
    "reduce_dtype": ["compute"],
    "activation_checkpointing": ["full"],
    "optimizer": ["sgd"],
    "optimizer_in_backward": [True],
    "zero_stage": [0],
    "accumulate": [2],
}
LEDGER_ALONE: list[dict[str, list[Any]]] = [
    SHARDED | {"activation_checkpointing": ["every:2", "sqrt"]},
    SHARDED | {"precision": ["fp16", "fp64"]},
    SHARDED | {"pipeline": ["naive 2", "gpipe 2"]},
    KNOWN_DIFFERENCE,
]
# First of each what most goes with: rows are completed with it.
PARITY_FACTORS = {
    **FACTORS,
    "fp8_layers": ["all", "large"],
    "world_size": [4, 2, 1],
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
# What is trained is the recipe's and not the strategy's, so the reference trains the same adapters. They meet each
# other and what divides, recomputes or moves weights, which they are part of; other settings do not see them.
ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"rank": 3, "alpha": 6, "learning_rate_ratio": 2.0},
    "dora": {"name": "dora", "rank": 3, "alpha": 6},
    "qlora": {"rank": 3, "alpha": 6, "quantize": "nf4", "targets": "attention"},
    "int8": {"rank": 3, "alpha": 6, "quantize": "int8", "targets": "attention"},
}
ADAPTER_FACTORS: dict[str, list[Any]] = {
    "adapter": ["lora", "dora", "qlora"],
    "zero_stage": [0, 1, 2, 3],
    "activation_checkpointing": ["none", "full", "budget:0.4"],
    "offload": ["none", "activations", "nvme:/tmp"],
    "pipeline": ["1f1b 1", "1f1b 2", "zero_bubble 2"],
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
ADAPTER_PARITY_FACTORS = {
    **ADAPTER_FACTORS,
    "adapter": ["lora", "dora", "qlora", "int8"],
    "pipeline": ["1f1b 1", "1f1b 2", "interleaved 2", "zero_bubble 2"],
    "sequence": ["ulysses 1", "ulysses 2", "ring 2"],
    "loss": FACTORS["loss"],
    "precision": ["fp64", "fp32", "bf16", "fp16"],
    "tensor": ["none 1", "gathered 2"],
    "world_size": [4, 2],
    "model": ["grouped", "llama", "gpt2"],
}
ADAPTER_LEDGER_FACTORS = {
    **ADAPTER_FACTORS,
    "adapter": ["lora", "qlora"],
    "pipeline": ["1f1b 1", "1f1b 2"],
    "precision": ["fp32", "bf16"],
    "tensor": ["none 1", "none 2"],
    "accumulate": [1],
}
LEDGER_MODEL = {
    "layers": 8,
    "width": 384,
    "heads": 6,
    "kv_heads": 2,
    "ffn": 1024,
    "vocab": 2048,
    "context": 512,
}
# Without gradients and optimizer state the same model takes so little that the resident set's noise is 5 % of it.
WIDER = {"layers": 6, "width": 768, "heads": 12, "kv_heads": 4, "ffn": 2048}
KNOWN = 0.08
"""How far off the rows may be that are known to be; others 5 %."""
STEPS = 20
LENGTH = 24
BATCH = 3


def valid(row: Row) -> bool:
    """Whether the strategy of a row breaks no rule."""
    model, world_size = row.get("model", ""), row.get("world_size") or ledger_world(row)
    in_backward, adapter = row.get("optimizer_in_backward", False), row.get("adapter", "full")
    recipe = recipe_for_rules(model, row.get("optimizer", "adamw"), in_backward, adapter)
    if world_size > 4 or any(broken_rules(strategy_from(settings_of(row)), world_size, recipe)):
        return False
    return takes_place(row) if model else not kept_within_a_budget_and_offloaded(row)


def takes_place(row: Row) -> bool:
    """Whether a row shards, trains in 8 bits and moves activations where it says so: it has ranks, layers and blocks
    enough."""
    layout = layout_of(strategy_from(settings_of(row)), row["world_size"])
    shards = layout.degree("shard") > 1 or (layout.degree("sequence") > 1 and layout.degree("replicate") == 1)
    copies = row.get("replicate", 1) > 1
    in_8_bits = row["model"] in ("sixteens", "grouped") and row.get("fp8_layers") == "all"
    moves = MODELS[row["model"]]["layers"] >= 4
    return (
        (shards or (row["zero_stage"] == 0 and not copies))
        and (row["precision"] != "fp8" or in_8_bits)
        and ("activations" not in row["offload"] or moves)
    )


def gives_bits_up(pair: Pair) -> bool:
    return any(value in GIVES_BITS_UP.get(name, []) for name, value in pair)


def kept_within_a_budget_and_offloaded(row: Row) -> bool:
    """On a CPU nothing is offloaded, and what is measured is the CPU's."""
    budget = row.get("activation_checkpointing", "").startswith("budget")
    return budget and "activations" in row.get("offload", "")


def ledger_world(row: Row) -> int:
    """Ranks of a run whose memory is measured: two that shard, where two axes of the model do not make four."""
    ranks = math.prod(settings_of(row)[degree] for _, degree, _ in METHODS.values())
    copies = row.get("replicate", 1)
    return ranks if ranks == 4 and copies == 1 else 2 * ranks * copies


@functools.cache
def recipe_for_rules(model: str, optimizer: str, in_backward: bool, adapter: str) -> Recipe:
    row = {"optimizer": optimizer, "optimizer_in_backward": in_backward}
    values = {
        "model": MODELS.get(model, LEDGER_MODEL),
        "data": {"sequence_length": LENGTH},
        "steps": 1,
        "batch_size": 1,
        "optimizer": optimizer_of(row),
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("data") / "corpus.txt")


def parity_recipe(row: Row, corpus: Path) -> Recipe:
    values = {
        "model": MODELS[row["model"]],
        "data": {"source": str(corpus), "sequence_length": LENGTH},
        "steps": STEPS,
        "batch_size": BATCH,
        "optimizer": optimizer_of(row),
        "adapter": ADAPTERS[row.get("adapter", "full")],
    }
    return recipe_of(values, SETTINGS)


@pytest.fixture(scope="module")
def reference(pool: Pool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder with the plain process's losses and weights, for a row; each distinct one trained once."""
    folders: dict[tuple[Any, ...], Path] = {}

    def trained(row: Row) -> Path:
        precision = "fp64" if row["precision"] == "fp64" else "fp32"
        kind = (row["model"], row.get("adapter", "full"), precision, *optimizer_of(row).values())
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("reference")
            settings = {"precision": precision, MICRO_BATCH_SIZE.key: BATCH}
            pool.run(1, reference_rank, parity_recipe(row, corpus), settings, folders[kind])
        return folders[kind]

    return trained


def name_of(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


EXACT_ROWS = covering_rows(EXACT_FACTORS, valid)
FEW_BITS_ROWS = covering_rows(PARITY_FACTORS, valid, gives_bits_up)
ADAPTER_ROWS = covering_rows(ADAPTER_PARITY_FACTORS, valid)
PARITY_ROWS = [*EXACT_ROWS, *FEW_BITS_ROWS, *ADAPTER_ROWS]
FEW = [*few_of(EXACT_ROWS, "zero_stage"), *few_of(FEW_BITS_ROWS), *few_of(ADAPTER_ROWS, "zero_stage")]


def known_difference(row: Row) -> str:
    """Why a plan is known to differ by more than 5 % from what was measured, and has not been mended; "" of others."""
    small = {"precision": "bf16", "reduce_dtype": "compute", "optimizer": "sgd"}.items() <= row.items()
    if small and row["tensor"].startswith("regathered"):
        return (
            "4 to 6 % short of 67 to 89 MB where oneDNN compiles nothing: 1 MB more is resident after each step, and"
            " tensors agree to the byte; 7.6 % on Intel Sapphire Rapids, before what is compiled for attention counted"
        )
    return ""


def cases(rows: list[Row], few: list[Row]) -> list[Any]:
    """Parameters of a test: the rows, all but a few for `make test-all` alone, and some known to fail."""

    def marks(row: Row) -> Iterator[pytest.MarkDecorator]:
        if row not in few:
            yield pytest.mark.long
        if "world_size" not in row and (reason := known_difference(row)):
            yield pytest.mark.xfail(reason=reason, raises=AssertionError)

    return [pytest.param(row, marks=tuple(marks(row)), id=name_of(row)) for row in rows]


def test_every_value_is_of_some_row_that_is_trained() -> None:
    """A pair that no rule allows is left out silently; a value without any row would be as well."""
    held = {(name, value) for row in PARITY_ROWS for name, value in row.items()}
    asked = {(name, value) for name, values in PARITY_FACTORS.items() for value in values}
    assert asked <= held
    exact = {(name, value) for row in EXACT_ROWS for name, value in row.items()}
    assert exact == {(name, value) for name, values in EXACT_FACTORS.items() for value in values}


@pytest.mark.parametrize("row", cases(PARITY_ROWS, FEW))
def test_trains_as_one_plain_process(row: Row, pool: Pool, corpus: Path, reference: Any) -> None:
    """Loss, gradient norm and weights over 20 steps: 1e-10 in fp64, 1e-5 in fp32, wider where bits are given up."""
    folder, recipe = reference(row), parity_recipe(row, corpus)
    verdicts = pool.run(row["world_size"], strategy_rank, recipe, settings_of(row), folder, timeout=240)
    assert verdicts[0].steps == STEPS
    assert all(v == verdicts[0] for v in verdicts)
    assert verdicts[0].passed, verdicts[0]


def ledger_recipe(world_size: int, row: Row, **sections: Any) -> Recipe:
    asked = settings_of(row)
    degree = asked["sequence_parallel"]
    data_ranks = world_size // degree // asked["tensor_parallel"]
    # The CPU computes fp16 products at a hundredth of the speed of others: fewer tokens for them.
    tokens = 48 if row.get("precision") == "fp16" else 192
    values = {
        "model": LEDGER_MODEL | (WIDER if "adapter" in row else {}),
        "data": {"sequence_length": tokens * degree},  # on a rank as many as in any other row
        "steps": 3,
        "batch_size": 4 * data_ranks,
        "optimizer": optimizer_of(row),
        "adapter": ADAPTERS[row.get("adapter", "full")],
        "cluster": {"devices_per_node": world_size},
    }
    return recipe_of(values | sections, SETTINGS)


LEDGER_ROWS = [
    *covering_rows(LEDGER_FACTORS, valid),
    *(row for factors in LEDGER_ALONE for row in covering_rows(factors, valid)),
    *covering_rows(ADAPTER_LEDGER_FACTORS, valid),
]


# None of those few is one that may fail.
@pytest.mark.parametrize(
    "row", cases(LEDGER_ROWS, few_of([row for row in LEDGER_ROWS if not known_difference(row)]))
)
def test_takes_the_memory_it_was_planned(row: Row, pool: Pool) -> None:
    """Predicted peak against the operating system's figure, every rank: 5 %."""
    world_size = ledger_world(row)
    recipe = ledger_recipe(world_size, row)
    agrees(recipe, {**settings_of(row), MICRO_BATCH_SIZE.key: 4 // row["accumulate"]}, world_size, pool)


@pytest.mark.parametrize("stage", [1, 3])
def test_snapshots_take_the_memory_they_were_planned(stage: int, pool: Pool) -> None:
    """On the CPU the host's memory is the device's, so the plan counts them."""
    recipe = ledger_recipe(2, {}, guard={"snapshot_every": 2})
    run = agrees(recipe, {"zero_stage": stage, MICRO_BATCH_SIZE.key: 2}, 2, pool)
    ledger = run.peak.ledger
    state = ledger.optimizer_state + 4 * run.parameters // 2  # what lies between two steps is sharded
    assert ledger.overhead == pytest.approx(2 * state, rel=0.02)


@pytest.mark.parametrize("sync", [False, True])
def test_stashed_weights_take_the_memory_they_were_planned(sync: bool, pool: Pool) -> None:
    """Of an asynchronous pipeline: 3, 2, 1 and 0 older versions on four stages, or 3 on each."""
    recipe = ledger_recipe(4, {"optimizer_in_backward": True}, guard={"rewinds": 0}, batch_size=1, steps=7)
    asked = {"pipeline_parallel": 4, "pipeline_schedule": "pipedream", "pipeline_vertical_sync": sync}
    agrees(recipe, {**asked, MICRO_BATCH_SIZE.key: 1}, 4, pool)


def agrees(recipe: Recipe, settings: dict[str, Any], world_size: int, pool: Pool) -> DryRun:
    """Predicted peak against the operating system's figure, every rank; rank 0's prediction."""
    strategy, cluster = strategy_from(settings), cluster_of(recipe.cluster)
    assert layout_of(strategy, world_size).world_size == world_size
    measured = pool.run(world_size, measured_rank, recipe, settings, timeout=240)
    stage_ranks = layout_of(strategy, world_size).stride("pipeline")
    stages = range(0, world_size, stage_ranks)
    runs = [dry_run(recipe, blueprint_of(recipe), strategy, cluster, rank=rank) for rank in stages]
    for rank, peak in enumerate(measured):
        predicted = runs[rank // stage_ranks].peak.bytes + cluster.device.overhead.workspace_bytes
        error = predicted / peak - 1
        if math.fabs(error) > KNOWN:
            pytest.fail(f"rank {rank} is off by {error:+.1%}, further than any known difference")
        assert math.fabs(error) <= 0.05, (
            f"rank {rank}: predicted {predicted:,}, measured {peak:,}, {error:+.1%}"
        )
    return runs[0]
