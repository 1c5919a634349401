"""BERT-like models under the masked objective: transformers' own loss, plans, sharded training and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.core.errors import RecipeError
from shardwise.data import Batch, open_data
from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.corpora import write_tokenizer, write_words
from tests.harness.families import config_of
from tests.harness.parity import Parity, Trial

transformers = pytest.importorskip("transformers")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def _saved(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config_of(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / family)
    return folder / family


def _recipe(family: str, folder: Path, **sections: Any) -> Recipe:
    write_words(folder / "words.txt", count=500)
    tokenizer = str(write_tokenizer(folder / "letters", "[SEP]"))
    data = {"source": str(folder / "words.txt"), "tokenizer": tokenizer, "sequence_length": 24}
    model = {"hf": str(_saved(family, folder)), "objective": "masked"}
    return recipe_of({"model": model, "data": data, "steps": 3, "batch_size": 4} | sections, SETTINGS)


def _batch(recipe: Recipe, folder: Path) -> Batch:
    return open_data(recipe, cache=folder / "cache").micro_batches(0, 0, 1, 4)[0]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_the_loss_is_transformers_on_the_same_masked_batch(family: str, tmp_path: Path, whole: Any) -> None:
    recipe = _recipe(family, tmp_path)
    blueprint, batch = blueprint_of(recipe), _batch(recipe, tmp_path)
    total, count = blueprint.loss(whole(blueprint).train(), batch)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(recipe.model.hf, dtype=torch.float32).eval()
    assert 0 < count.item() < 40
    assert (total / count).item() == pytest.approx(theirs(**batch).loss.item(), rel=1e-6)


def test_blocks_are_the_layers_and_not_the_tied_embeddings(tmp_path: Path) -> None:
    """BERT names its embeddings among the modules not to split; their matrix is the output layer's."""
    blueprint = blueprint_of(_recipe("bert", tmp_path))
    with torch.device("meta"):
        model: Any = blueprint.build()
    assert blueprint.blocks(model) == list(model.bert.encoder.layer) and blueprint.depth == 2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("adapter", [None, {"rank": 4, "targets": "attention"}], ids=["full", "lora"])
def test_it_learns(adapter: dict[str, Any] | None, tmp_path: Path) -> None:
    recipe = _recipe("bert", tmp_path, adapter=adapter)
    blueprint = blueprint_of(recipe)
    run = build(recipe, blueprint, strategy_from({"micro_batch_size": 4}), torch.device("cpu"))
    batch = _batch(recipe, tmp_path)
    losses = [float(step(run, [batch], 1e-2).loss) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0], losses


def test_it_is_planned(tmp_path: Path) -> None:
    recipe = _recipe("bert", tmp_path)
    strategy = strategy_from({"zero_stage": 3, "micro_batch_size": 2})
    cluster = cluster_of(recipe.cluster.model_copy(update={"devices_per_node": 2}))
    planned = dry_run(recipe, blueprint_of(recipe), strategy, cluster)
    assert planned.cost.flops > 0 and planned.peak.bytes > 0


def test_sharded_training_is_that_of_one_process(tmp_path: Path, parity: Parity) -> None:
    recipe = _recipe("bert", tmp_path)
    adapted = _recipe("bert", tmp_path, adapter={"rank": 4})
    sharded = {"precision": "fp64", "zero_stage": 3, "micro_batch_size": 1}
    parity.all_pass(
        Trial(recipe, 2, sharded | {"activation_checkpointing": "full"}), Trial(adapted, 2, sharded)
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sequence_parallel": 2}, "its attention is not causal"),
        ({"tensor_parallel": 2}, "no tensor-parallel plan for bert"),
        ({"pipeline_parallel": 2}, "cannot be cut into stages"),
    ],
)
def test_layouts_of_causal_models_are_refused(settings: dict[str, int], says: str, tmp_path: Path) -> None:
    recipe = _recipe("bert", tmp_path)
    cluster = cluster_of(recipe.cluster.model_copy(update={"devices_per_node": 2}))
    with pytest.raises(RecipeError, match=says):
        dry_run(recipe, blueprint_of(recipe), strategy_from(settings | {"micro_batch_size": 2}), cluster)


def test_an_adapter_has_no_task_type_as_peft_knows_none(tmp_path: Path) -> None:
    blueprint: Any = blueprint_of(_recipe("bert", tmp_path, adapter={"rank": 4}))
    assert blueprint.config()["task_type"] is None
