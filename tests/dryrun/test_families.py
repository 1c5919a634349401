"""Every family of transformers that a plan accepts trains: dry run and steps in one process, in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.families import DENSE, SPARSE, config_of

transformers = pytest.importorskip("transformers")

SHORT = ("falcon", "mixtral", "gpt_oss")
"""Families of the default tiers: experts with and without biases, and a layer class of its own."""


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", SHORT)
def test_representative_families_are_planned_and_train(family: str, tmp_path: Path) -> None:
    _plans_and_trains(family, "fp32", tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_every_family_is_planned_and_trains(family: str, precision: str, tmp_path: Path) -> None:
    _plans_and_trains(family, precision, tmp_path)


def _plans_and_trains(family: str, precision: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    model.config.save_pretrained(folder)
    values: dict[str, Any] = {"model": {"hf": str(folder)}, "steps": 3, "batch_size": 2}
    values["loss_scale"] = {"initial": 256.0}  # fp16: no update is left out while the scale is found
    adapted = recipe_of(values | {"data": {"sequence_length": 16}, "adapter": {"rank": 2}}, SETTINGS)
    assert blueprint_of(adapted).parameter_counts()[0] > 0, "LoRA has targets, without the weights' files"
    model.save_pretrained(folder)
    recipe = recipe_of(values | {"data": {"sequence_length": 16}}, SETTINGS)
    blueprint, strategy = blueprint_of(recipe), strategy_from({"precision": precision, "micro_batch_size": 2})
    planned = dry_run(recipe, blueprint, strategy, cluster_of(recipe.cluster))
    assert planned.cost.flops > 0 and planned.peak.bytes > 4 * blueprint.parameter_count()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    run = build(recipe, blueprint, strategy, torch.device("cpu"))
    ids = torch.randint(2, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    losses = [float(step(run, [batch], 1e-2).loss) for _ in range(4)]
    assert losses[-1] < losses[0], losses


def test_the_products_of_experts_are_counted(tmp_path: Path) -> None:
    """6 FLOPs per token and weight that it meets: the chosen experts', not all of them; and attention's products."""
    config = config_of("mixtral", num_local_experts=8, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    values = {"model": {"hf": str(tmp_path)}, "steps": 1, "batch_size": 2, "data": {"sequence_length": 16}}
    recipe = recipe_of(values, SETTINGS)
    flops = []
    for chosen in (1, 2):
        blueprint: Any = blueprint_of(recipe)
        blueprint.config.num_experts_per_tok = chosen
        strategy = strategy_from({"micro_batch_size": 2})
        flops.append(dry_run(recipe, blueprint, strategy, cluster_of(recipe.cluster)).cost.flops)
    weights_of_an_expert = 3 * 32 * 48
    assert flops[1] - flops[0] == 6 * 2 * 16 * 2 * weights_of_an_expert, "2 blocks, 32 tokens"
