"""Mixture-of-experts models of transformers: the router's auxiliary loss is transformers' own; they plan and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.errors import RecipeError
from shardwise.hardware.cluster import cluster_of
from shardwise.model.blueprint import Batch
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.open import blueprint_of
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS
from tests.harness.corpora import write_words
from tests.harness.families import config_of
from tests.harness.pool import Pool
from tests.harness.ranks import reference_rank, strategy_rank

transformers = pytest.importorskip("transformers")

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


def _batch() -> Batch:
    ids = torch.randint(2, 64, (3, 13), generator=torch.Generator().manual_seed(0))
    # Ids 0 and 1 are some models' pad token, whose embedding transformers does not train.
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def _theirs(model: Any, batch: Batch, **given: Any) -> Any:
    """transformers' own training loss; ``shift_labels`` are labels that are shifted already."""
    labels = batch["labels"]
    return model(batch["input_ids"], labels=labels, shift_labels=labels, **given).loss


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe"])
def test_the_loss_has_transformers_auxiliary_loss(family: str, saved: Any, whole: Any) -> None:
    folder = saved(config_of(family, **BALANCED))
    blueprint, batch = HuggingFaceModel(str(folder), 12), _batch()
    model = whole(blueprint)
    total, count = blueprint.loss(model, batch)
    (total / count).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    plain = _theirs(theirs, batch, output_router_logits=False)
    expected = _theirs(theirs, batch)
    expected.backward()
    assert expected - plain > 0.05, "the auxiliary loss is there to be missed"
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_padding_is_left_out_as_an_attention_mask_leaves_it_out(saved: Any, whole: Any) -> None:
    folder = saved(config_of("mixtral", **BALANCED))
    blueprint, batch = HuggingFaceModel(str(folder), 12), _batch()
    filled = torch.ones_like(batch["labels"])
    filled[0, 7:] = 0
    filled[2] = 0  # a row of padding, as the last micro-batch may have
    batch["labels"][filled == 0] = -100
    batch["labels"][1, :4] = -100  # a prompt: no targets, but no padding
    total, count = blueprint.loss(whole(blueprint), batch)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = _theirs(theirs, batch, attention_mask=filled)
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_micro_batch_of_padding_alone_adds_nothing(saved: Any, whole: Any) -> None:
    blueprint, batch = HuggingFaceModel(str(saved(config_of("mixtral", **BALANCED))), 12), _batch()
    batch["labels"].fill_(-100)
    total, count = blueprint.loss(whole(blueprint), batch)
    assert (total.item(), count.item()) == (0.0, 0)


def test_micro_batches_count_with_their_targets(saved: Any, whole: Any) -> None:
    """The definition over several forward passes: each one's loss, weighted by its share of the targets."""
    blueprint, batch = HuggingFaceModel(str(saved(config_of("mixtral", **BALANCED))), 12), _batch()
    batch["labels"][0, 7:] = -100
    model = whole(blueprint)
    rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(3)]
    mean = torch.stack([_theirs(model, row, attention_mask=_filled(row)) for row in rows])
    counts = torch.tensor([7.0, 12.0, 12.0])
    sums = [blueprint.loss(model, row)[0] for row in rows]
    assert (sum(sums) / counts.sum()).item() == pytest.approx((mean * counts).sum().item() / 31, rel=1e-6)


def _filled(row: Batch) -> Any:
    return (row["labels"] != -100).long()


def test_sharded_training_is_that_of_one_process(saved: Any, pool: Pool, tmp_path: Path) -> None:
    """One process with the same micro-batches has the same auxiliary losses. Routers are in fp32."""
    folder = saved(config_of("mixtral", vocab_size=256, **BALANCED))
    data = {"source": str(write_words(tmp_path / "words.txt")), "sequence_length": 16}
    recipe = recipe_of({"model": {"hf": str(folder)}, "data": data, "steps": 3, "batch_size": 5}, SETTINGS)
    plain = {"precision": "fp32", "micro_batch_size": 2}
    sharded = plain | {"zero_stage": 3, "activation_checkpointing": "full"}
    (tmp_path / "reference").mkdir()
    pool.run(1, reference_rank, [(recipe, plain, tmp_path / "reference")])
    verdicts = pool.run(2, strategy_rank, [(recipe, sharded, tmp_path / "reference")])
    assert all(verdict.passed for (verdict,) in verdicts), verdicts


def test_without_output_router_logits_there_is_no_auxiliary_loss(saved: Any, whole: Any) -> None:
    folder = saved(config_of("mixtral", router_aux_loss_coef=0.1))
    blueprint, batch = HuggingFaceModel(str(folder), 12), _batch()
    total, count = blueprint.loss(whole(blueprint), batch)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (total / count).item() == pytest.approx(_theirs(theirs, batch).item(), rel=1e-6)


def test_experts_of_odd_widths_and_of_double_precision_run(saved: Any, whole: Any) -> None:
    """``grouped_mm`` refuses both; the other kernel computes the same."""
    odd = HuggingFaceModel(str(saved(config_of("mixtral", intermediate_size=47))), 12)
    assert torch.isfinite(odd.loss(whole(odd), _batch())[0])
    even = HuggingFaceModel(str(saved(config_of("mixtral"))), 12)
    single = even.loss(whole(even), _batch())[0]
    double = even.loss(whole(even, dtype=torch.float64), _batch())[0]
    assert double.dtype == torch.float64 and double.item() == pytest.approx(single.item(), rel=1e-5)


def test_stages_and_parts_of_sequences_are_refused_with_the_auxiliary_loss(saved: Any) -> None:
    from shardwise.model.stage import Stage

    blueprint = HuggingFaceModel(str(saved(config_of("mixtral", **BALANCED))), 12)
    with pytest.raises(RecipeError, match=r"cannot be cut into stages.*auxiliary loss is one of all blocks"):
        blueprint.stage(Stage(range(1), first=True, last=False))
    with torch.device("meta"):
        model = blueprint.build()
    assert "auxiliary loss" in blueprint.context_parallel_obstacle(model)


@pytest.mark.long
@pytest.mark.plan
def test_blocks_are_not_compiled_with_the_auxiliary_loss(saved: Any) -> None:
    """A long run is planned without; a recipe that pins it is refused in one line."""
    model = {"hf": str(saved(config_of("mixtral", vocab_size=256, **BALANCED)))}
    pins = {"precision": "fp32", "activation_checkpointing": "none", "loss": "logits"}
    plans = []
    for more in ({}, {"compile": "block"}):
        values = {"model": model, "data": {"sequence_length": 16}, "steps": 10**6, "batch_size": 2}
        asked = recipe_of({**values, "cluster": {"device": "cpu"}, "strategy": {**pins, **more}}, SETTINGS)
        blueprint, cluster = blueprint_of(asked), cluster_of(asked.cluster)
        if more:
            with pytest.raises(
                RecipeError, match=r"cannot be compiled .*: its router's auxiliary loss"
            ) as refused:
                plan_for(asked, blueprint, cluster)
            assert "compile: none" in str(refused.value) and "\n" not in str(refused.value)
        else:
            plans.append(plan_for(asked, blueprint, cluster))
    assert plans[0].fits and plans[0].strategy.values["compile"] == "none"
    assert all(each.strategy.values["compile"] == "none" for each in plans[0].candidates)


def test_a_router_without_a_coefficient_is_refused(tmp_path: Path) -> None:
    from shardwise.model.hf.experts import router_coefficient

    config = config_of("llama", output_router_logits=True)
    with pytest.raises(RecipeError, match="no coefficient"):
        router_coefficient(torch.nn.Linear(1, 1), config)
