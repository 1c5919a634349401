"""Modules of users train in every precision and stage: their layers take inputs of any dtype.

The reference is the textbook loop in fp32. It has the strategies' micro-batches, because batch norms see them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.data import open_data
from shardwise.dryrun.model_flops import model_flops
from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.run_state import share_buffers
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.open import blueprint_of
from shardwise.planner.answer import answer_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import canonical_name
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.modules import FACTORIES
from tests.harness.pool import Pool
from tests.harness.ranks import plain_rank, reference_rank, strategy_rank, verified_rank
from tests.harness.tiers import quick

STRATEGIES: list[dict[str, Any]] = [
    {"precision": "fp32", "zero_stage": 0},
    {"precision": "fp32", "zero_stage": 3},
    *({"precision": "bf16", "zero_stage": stage} for stage in range(4)),
    {"precision": "fp16", "zero_stage": 0},
    {"precision": "fp16", "zero_stage": 2},
]
MORE: list[dict[str, Any]] = [
    {"precision": "bf16", "zero_stage": 3, "activation_checkpointing": "full"},
    {"precision": "bf16", "zero_stage": 2, "activation_checkpointing": "sqrt"},
    {"precision": "bf16", "zero_stage": 1, "activation_checkpointing": "selective"},
    {"precision": "bf16", "zero_stage": 3, "master_weights": False},
    {"precision": "bf16", "zero_stage": 0, "master_weights": False, "reduce_dtype": "compute"},
    {"precision": "fp16", "zero_stage": 3, "offload": "optimizer+parameters"},
    {"precision": "fp8", "zero_stage": 2, "fp8_layers": "all"},
]
"""Settings that run a layer again, elsewhere, or with other weights."""


def recipe(name: str, **sections: Any) -> Recipe:
    values = {
        "model": {"factory": f"tests.harness.modules:{name}"},
        "steps": 3,
        "batch_size": 8,
        "cluster": {"device": "cpu", "devices_per_node": 2},
        "optimizer": {"learning_rate": 1e-3},
    }
    return recipe_of(values | sections, SETTINGS)


def trains(pool: Pool, folder: Path, asked: Recipe, strategies: list[dict[str, Any]]) -> None:
    """Two ranks train as the plain process does, and agree about it."""
    pool.run(1, reference_rank, [(asked, {"precision": "fp32", "micro_batch_size": 2}, folder)], timeout=120)
    jobs = [(asked, {**strategy, "micro_batch_size": 2}, folder) for strategy in strategies]
    first, second = pool.run(2, strategy_rank, jobs, timeout=600)
    assert first == second
    for strategy, verdict in zip(strategies, first, strict=True):
        assert verdict.passed, (strategy, verdict)


@pytest.mark.parametrize("name", quick(FACTORIES, "batch_norm", "vit", "mixed", "diffusion"))
def test_every_kind_of_module_trains_in_every_precision_and_stage(
    name: str, pool: Pool, tmp_path: Path
) -> None:
    trains(pool, tmp_path, recipe(name), STRATEGIES)


@pytest.mark.parametrize(
    "name",
    [
        "batch_norm",
        "vit",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("mixed", "diffusion", "contrastive")),
    ],
)
def test_layers_that_run_again_or_elsewhere_cast_as_well(name: str, pool: Pool, tmp_path: Path) -> None:
    trains(pool, tmp_path, recipe(name), MORE)


@pytest.mark.long
@pytest.mark.parametrize("name", ["batch_norm", "vit", "mixed", "diffusion", "contrastive"])
def test_layers_are_compiled(name: str, pool: Pool, tmp_path: Path) -> None:
    trains(pool, tmp_path, recipe(name), [{"precision": "bf16", "zero_stage": 2, "compile": "block"}])


@pytest.mark.parametrize("batch_size", [7, 5, 1])
def test_a_batch_that_does_not_divide_has_the_mean_of_the_whole_batch(
    batch_size: int, pool: Pool, tmp_path: Path
) -> None:
    """Micro-batches are shorter, and with 5 and 1 a rank has none."""
    asked = recipe("diffusion", batch_size=batch_size, optimizer={"learning_rate": 1e-3, "clip_norm": None})
    trains(pool, tmp_path, asked, [*STRATEGIES[:4], {"zero_stage": 2, "optimizer_in_backward": True}])


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_adapters_of_a_module(quantize: str, pool: Pool, tmp_path: Path) -> None:
    asked = recipe("vit", adapter={"rank": 4, "quantize": quantize})
    trains(pool, tmp_path, asked, [STRATEGIES[1], STRATEGIES[4]])


@pytest.mark.parametrize("name", quick(FACTORIES, "batch_norm", "siamese", "double_inputs"))
@pytest.mark.parametrize(
    "device",
    [pytest.param({"device": "cpu"}, marks=pytest.mark.long), {"preset": "2xH100-80GB"}],
    ids=["cpu", "cuda"],
)
def test_every_kind_of_module_is_planned(name: str, device: dict[str, Any]) -> None:
    asked = recipe(name, cluster=device)
    blueprint, cluster = blueprint_of(asked), cluster_of(asked.cluster)
    flops = {
        model_flops(blueprint, asked.data, 8, dtype, cluster.device.kind)
        for dtype in ("fp32", "bf16", "fp16")
    }
    assert max(flops) < 1.01 * min(flops)  # the first time step of an LSTM has no gradient of its state
    for precision in ("fp32", "bf16", "fp16"):
        strategy = strategy_from({"precision": precision, "zero_stage": 2, "micro_batch_size": 2})
        ledger = dry_run(asked, blueprint, strategy, cluster).peak.ledger
        assert ledger.activations > 0 and (ledger.master_weights > 0) == (precision != "fp32")


def test_a_loss_that_cannot_be_chunked_is_no_candidate() -> None:
    """Which layer of a module makes its logits is not known, so a plan does not compare both losses."""
    asked = recipe("regression")
    cluster = cluster_of(asked.cluster)
    plan = make_plan(asked, cluster)
    assert {candidate.strategy.values["loss"] for candidate in plan.candidates} == {"logits"}
    assert "loss" not in {other.setting for other in answer_of(asked, cluster, plan).nearest}


def test_sharded_layers_are_planned_compiled() -> None:
    """The compiler takes derivatives as a loss may not where weights are sharded."""
    asked = recipe("batch_norm", cluster={"preset": "2xH100-80GB"})
    settings = {"precision": "bf16", "zero_stage": 2, "micro_batch_size": 2, "compile": "block"}
    planned = dry_run(asked, blueprint_of(asked), strategy_from(settings), cluster_of(asked.cluster))
    assert planned.peak.ledger.activations > 0


@pytest.mark.parametrize(
    ("name", "precision"), [("batch_norm", "bf16"), ("vit", "fp16"), ("diffusion", "bf16")]
)
def test_a_module_in_16_bits_is_verified(name: str, precision: str, pool: Pool, tmp_path: Path) -> None:
    """As ``shardwise verify`` does: within its own rounding noise, and proved in fp64."""
    jobs = [(recipe(name), {"precision": precision, "zero_stage": 3, "micro_batch_size": 2}, tmp_path)]
    pool.run(1, plain_rank, jobs, timeout=200)
    (verdict,) = pool.run(2, verified_rank, jobs, timeout=200)[0]
    assert verdict.passed, verdict
    assert verdict.proof is not None and verdict.proof.max_parameter_difference < 1e-12


# -- running statistics ------------------------------------------------------------------------------


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {canonical_name(name): buffer.clone() for name, buffer in model.named_buffers()}


def by_shardwise(settings: dict[str, Any]) -> dict[str, Tensor]:
    asked = recipe(
        "batch_norm", optimizer={"name": "sgd", "momentum": 0, "weight_decay": 0, "clip_norm": None}
    )
    blueprint = blueprint_of(asked)
    run = build(asked, blueprint, strategy_from({**settings, "micro_batch_size": 2}), torch.device("cpu"))
    data = open_data(asked, blueprint.dataset)
    for index in range(3):
        step(run, data.micro_batches(index, run.data_rank, run.data_degree, 2), 0.1)
    share_buffers(run)
    return statistics(run.model)


def by_ddp() -> dict[str, Tensor]:
    """The same loop with PyTorch's own data parallelism, which divides by ranks and not by targets."""
    asked = recipe("batch_norm")
    blueprint, rank = blueprint_of(asked), dist.get_rank()
    with torch.device("meta"):
        model = blueprint.build()
    model.to_empty(device="cpu")
    blueprint.fill(model, asked.seed)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = open_data(asked, blueprint.dataset)
    for index in range(3):
        for batch in data.micro_batches(index, rank, 2, 2):
            total = F.cross_entropy(parallel(batch["x"]), batch["labels"], reduction="sum")
            (total * 2 / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    return statistics(model)


def test_running_statistics_are_those_of_ddp(pool: Pool) -> None:
    """Rank 0's, on every rank. A block that runs again in the backward pass does not count its samples twice."""
    expected, _ = pool.run(2, by_ddp)
    for settings in ({"zero_stage": 0}, {"zero_stage": 3, "activation_checkpointing": "full"}):
        for found in pool.run(2, by_shardwise, settings):
            assert expected["blocks.0.norm.num_batches_tracked"] == 6
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
