"""Mixtures of experts of the native decoder train as one plain process does, whatever divides or recomputes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.checkpoint import restore, save_checkpoint
from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.run_state import OPTIMIZER, tensors_of
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import gather, local_part
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS, refuse_broken, strategy_from
from tests.harness.corpora import EVEN, write_words
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool
from tests.harness.ranks import reference_rank, strategy_rank

SHAPE = {"layers": 2, "width": 40, "heads": 4, "kv_heads": 2, "vocab": 257, "context": 32, "ffn": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**SHAPE, "experts": 5},
    "qwen3": {**SHAPE, "family": "qwen3", "experts": 6, "experts_per_token": 3, "normalized_weights": False},
    "sigmoid": {
        **SHAPE, "experts": 4, "shared_ffn": 20, "dense_layers": 1, "router": "sigmoid", "router_groups": 2,
        "groups_per_token": 2, "router_scale": 1.5, "router_bias": True,
    },
}  # fmt: skip
SHARES = {"tensor_parallel": 2, "tensor_sequence_parallel": "gathered"}


def recipe_for(model: dict[str, Any], **sections: Any) -> Recipe:
    values = {
        "model": model,
        "data": {"source": EVEN, "sequence_length": 24},
        "steps": 20,
        "batch_size": 7,
        "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0},
        "cluster": {"device": "cpu", "devices_per_node": 2},
    }
    return recipe_of(values | sections, SETTINGS)


def row(
    name: str, precision: str, *marks: Any, adapter: dict[str, Any] | None = None, **settings: Any
) -> Any:
    settings = {"precision": precision, "micro_batch_size": 2, **settings}
    trial = Trial(recipe_for(MIXTURES[name], adapter=adapter), 2, settings)
    return pytest.param(trial, marks=marks, id="-".join([name, *map(str, settings.values())]))


LONG = pytest.mark.long
PARITY = [
    row("mixtral", "fp64", zero_stage=3, activation_checkpointing="full"),
    row("qwen3", "fp64", zero_stage=2, activation_checkpointing="budget:0.4"),
    row("sigmoid", "fp64", **SHARES, activation_checkpointing="selective"),
    row("sigmoid", "fp64", pipeline_parallel=2),
    row("mixtral", "fp64", sequence_parallel=2),
    row("qwen3", "fp64", zero_stage=1, adapter={"rank": 2, "targets": "attention"}),
    row("mixtral", "fp32", tensor_parallel=2),
    row("qwen3", "fp32", **SHARES, zero_stage=3),
    row("sigmoid", "fp32", zero_stage=0),
    row("mixtral", "fp64", LONG, tensor_parallel=2, loss="chunked"),
    row("qwen3", "fp64", LONG, pipeline_parallel=2, zero_stage=3, activation_checkpointing="full"),
    row("sigmoid", "fp32", LONG, offload="optimizer+parameters", zero_stage=3),
    row("sigmoid", "bf16", LONG, compile="block"),
]


@pytest.mark.parametrize("trial", PARITY)
def test_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
    """Loss, gradient norm and weights. fp64 lets every expert compute every token; fp32 groups the tokens."""
    refuse_broken(trial.recipe.model_copy(update={"strategy": trial.settings}), trial.world, str)
    verdict = parity.verdict(trial)
    assert verdict.tolerance == {"fp64": 1e-10, "fp32": 1e-5, "bf16": 5e-2}[trial.settings["precision"]]
    assert verdict.passed, verdict


BALANCED = {**MIXTURES["mixtral"], "balance_loss": 0.1, "z_loss": 0.01}


def test_auxiliary_losses_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """With the same micro-batches, whose auxiliary losses they are. Blocks that run again count once."""
    data = {"source": str(write_words(tmp_path / "words.txt")), "sequence_length": 16}
    recipe = recipe_for(BALANCED, data=data, batch_size=6, steps=5)
    plain = {"precision": "fp64", "micro_batch_size": 1}
    (tmp_path / "reference").mkdir()
    pool.run(1, reference_rank, [(recipe, plain, tmp_path / "reference")])
    several = [
        plain | {"zero_stage": 3, "activation_checkpointing": "full"},
        plain | {"zero_stage": 1, "activation_checkpointing": "budget:0.3"},
        plain | {"tensor_parallel": 2},
    ]
    jobs = [(recipe, settings, tmp_path / "reference") for settings in several]
    for verdicts in pool.run(2, strategy_rank, jobs):
        assert all(verdict.passed and verdict.tolerance == 1e-10 for verdict in verdicts), verdicts


def opened(settings: dict[str, Any]) -> Run:
    recipe = recipe_for(MIXTURES["sigmoid"])
    strategy = strategy_from({"precision": "fp32", MICRO_BATCH_SIZE.key: 1, **settings})
    return build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))


def weights_of(run: Run) -> dict[str, Tensor]:
    return {name: gather(t).clone() for name, t in tensors_of(run).items() if not name.startswith(OPTIMIZER)}


def saved(folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    run = opened(settings)
    for tensor in filter(torch.is_floating_point, (*run.model.parameters(), *run.model.buffers())):
        local_part(tensor).add_(0.25)
    save_checkpoint(run, TrainState(1, 4), folder, 1)
    return weights_of(run)


def resumed(folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    run = opened(settings)
    assert restore(run, folder) is not None
    return weights_of(run)


def test_checkpoints_resume_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    """Experts of tensor ranks, shards of them, and the routers' biases."""
    expected = pool.run(2, saved, tmp_path, {"tensor_parallel": 2})[0]
    assert (expected["layers.1.mlp.gate.e_score_correction_bias"] == 0.25).all()
    for world, settings in ((1, {}), (2, {"zero_stage": 3}), (2, {"pipeline_parallel": 2})):
        found = {name: t for part in pool.run(world, resumed, tmp_path, settings) for name, t in part.items()}
        assert found.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pipeline_parallel": 2}, "the last stage would need the routers' auxiliary losses of the others"),
        ({"sequence_parallel": 2}, "its routers' auxiliary losses are of whole sequences"),
        (SHARES, "its routers' auxiliary losses are of whole sequences"),
        ({"compile": "block"}, "its routers' auxiliary losses read tensors from within the blocks"),
    ],
)
def test_what_auxiliary_losses_exclude_is_refused_in_one_line(settings: dict[str, Any], why: str) -> None:
    recipe = recipe_for(BALANCED)
    strategy = strategy_from({"precision": "fp32", MICRO_BATCH_SIZE.key: 1, **settings})
    with pytest.raises(RecipeError, match=why) as refused:
        dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
    assert "\n" not in str(refused.value)


def test_a_rank_holds_its_experts_alone() -> None:
    recipe = recipe_for(MIXTURES["qwen3"])
    strategy = strategy_from({"precision": "fp32", MICRO_BATCH_SIZE.key: 1, "tensor_parallel": 2})
    found = dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
    whole = blueprint_of(recipe).parameter_count()
    norms, routers = 5 * 40 + 2 * 2 * 10, 2 * 6 * 40
    odd = 40  # the first of two ranks has 129 of 257 rows of the embedding and of the head
    counts = 2 * 6 * 8  # of the tokens of each expert, int64
    weights = 4 * ((whole - norms - routers) // 2 + odd + norms + routers)
    assert found.peaks["setup"].ledger.parameters == weights + counts
