"""Every objective trains under every layout as one plain process does, and its measures are those of the global batch.

Faults of other trainers have a test of their own, by name: loss that stays at 0.6931 (TRL #1962, #1148), precomputed
references that are wrong under sharding, and an evaluation whose reference is the policy (TRL #6403, #6443), cached
references that depend on the loss (TRL #7084), measures of one rank (TRL #6380, #6478, #6452), sums in 16 bits
(TensorRT-LLM #19501).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import named_measures, step
from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import write_adapter
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique import SETTINGS, broken_rules, strategy_from
from shardwise.trainer.batches import RankBatches
from shardwise.trainer.evaluation import evaluate
from shardwise.trainer.precomputed import with_precomputed
from shardwise.verifier.reference import reference_model
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool
from tests.harness.ranks import reference_rank, strategy_rank
from tests.harness.tiers import quick

FIXED = {"precision": "fp64", "micro_batch_size": 2}
ADAPTER = {"rank": 4, "targets": "all"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def write_pairs(path: Path, count: int = 60) -> Path:
    """Pairs of a chosen answer that begins with yes, and a rejected one that begins with no."""
    chance = random.Random(0)

    def words() -> str:
        return "".join(chance.choices("abcdefgh ", k=chance.randint(2, 12)))

    rows = [
        {"prompt": f"{words()}? ", "chosen": f"yes {words()}", "rejected": f"no {words()}"}
        for _ in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def recipe_for(folder: Path, objective: Any = "dpo", **sections: Any) -> Recipe:
    values = {
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 257},
        "objective": objective,
        "data": {
            "source": str(write_pairs(folder / "pairs.jsonl")),
            "sequence_length": 96,
            "packing": True,
            "held_out": 0.2,
        },
        "steps": 20,
        "batch_size": 8,
        "optimizer": {"learning_rate": 1e-3},
    }
    return recipe_of(values | sections, SETTINGS)


def trials(recipe: Recipe, world: int, mixes: list[dict[str, Any]]) -> Iterator[Trial]:
    for mix in mixes:
        settings = FIXED | mix
        assert not list(broken_rules(strategy_from(settings), world, recipe)), mix
        yield Trial(recipe, world, settings)


COPIES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"zero_stage": 0},
        {"zero_stage": 2, "activation_checkpointing": "full"},
        {"zero_stage": 3, "loss": "chunked"},
        {"tensor_parallel": 2, "loss": "chunked"},
        {"sequence_parallel": 2},
        {"zero_stage": 3, "offload": "optimizer+parameters"},
        {"zero_stage": 3, "precision": "fp32"},
    ],
    4: [
        {"zero_stage": 3, "tensor_parallel": 2},
        {"zero_stage": 1, "sequence_parallel": 2, "tensor_parallel": 2},
        {"zero_stage": 3, "replicate": 2},
    ],
}


@pytest.mark.parametrize("quantize", quick(["int8", "nf4"], "int8"))
def test_the_reference_of_a_quantized_base_is_that_base(
    quantize: str, tmp_path: Path, parity: Parity
) -> None:
    """A copy of the base before it was quantized would be another model than that with its adapters off."""
    recipe = recipe_for(tmp_path, adapter={"rank": 3, "quantize": quantize})
    parity.all_pass(
        *trials(recipe, 1, [{"reference": how} for how in ("adapter_off", "copy", "precomputed")])
    )


IN_STAGES: list[dict[str, Any]] = [
    {"pipeline_parallel": 2, "zero_stage": 3},
    {"pipeline_parallel": 2, "tensor_parallel": 2},
    {"pipeline_parallel": 2, "sequence_parallel": 2, "pipeline_schedule": "gpipe"},
]


@pytest.mark.parametrize("world", quick(COPIES, 4))
def test_dpo_with_a_frozen_copy(world: int, tmp_path: Path, parity: Parity) -> None:
    parity.all_pass(*trials(recipe_for(tmp_path), world, COPIES[world]))


@pytest.mark.parametrize("stages", quick(IN_STAGES, IN_STAGES[2]), ids=str)
def test_precomputed_references_under_zero_3_and_in_pipelines(
    stages: dict[str, Any], tmp_path: Path, parity: Parity
) -> None:
    """TRL #6403: the plain process compares with a copy of its own."""
    recipe = recipe_for(tmp_path)
    mixes = [{"zero_stage": 3}, {"sequence_parallel": 2, "tensor_parallel": 2}, stages]
    parity.all_pass(*trials(recipe, 4, [mix | {"reference": "precomputed"} for mix in mixes]))


@pytest.mark.parametrize(
    "mixes",
    [
        [{"zero_stage": 3}, *IN_STAGES[:2]],
        pytest.param([{"zero_stage": 2, "sequence_parallel": 2}, IN_STAGES[2]], marks=pytest.mark.long),
    ],
    ids=["stages", "sequences"],
)
def test_adapters_that_are_switched_off(mixes: list[dict[str, Any]], tmp_path: Path, parity: Parity) -> None:
    recipe = recipe_for(tmp_path, adapter=ADAPTER)
    parity.all_pass(*trials(recipe, 4, [mix | {"reference": "adapter_off"} for mix in mixes]))


def test_first_values_of_modules_that_are_trained_in_full(tmp_path: Path, parity: Parity) -> None:
    """Switching adapters off would leave the trained output layer in the reference."""
    recipe = recipe_for(tmp_path, adapter={**ADAPTER, "modules_to_save": ["lm_head"]})
    mixes: list[dict[str, Any]] = [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3}]
    parity.all_pass(*trials(recipe, 2, [mix | {"reference": "adapter_off"} for mix in mixes]))


@pytest.mark.long
@pytest.mark.parametrize("all_mixes", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("name", ["ipo", "orpo", "simpo", "cpo", "reward", "kto"])
def test_other_objectives(name: str, all_mixes: bool, tmp_path: Path, parity: Parity) -> None:
    """A ring takes padded rows alone."""
    packed = recipe_for(tmp_path, name)
    padded = packed.model_copy(update={"data": packed.data.model_copy(update={"packing": False})})
    of_packed = [{"zero_stage": 3, "tensor_parallel": 2}, {"zero_stage": 1, "sequence_parallel": 2}]
    of_padded = [
        {"zero_stage": 1, "sequence_parallel": 2, "sequence_method": "ring"},
        {"pipeline_parallel": 2, "zero_stage": 1},
    ]
    if all_mixes:
        of_packed, of_padded = [*of_packed, of_padded[1]], [*of_packed, *of_padded]
    parity.all_pass(*trials(packed, 4, of_packed), *trials(padded, 4, of_padded))


@pytest.mark.long
def test_the_balance_loss_of_a_mixture_over_ranks(tmp_path: Path, pool: Pool) -> None:
    """With the same micro-batches, whose auxiliary loss it is."""
    mixture = {
        "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 257, "experts": 4,
        "experts_per_token": 2, "balance_loss": 0.3,
    }  # fmt: skip
    recipe = recipe_for(tmp_path, model=mixture, steps=3)
    plain = FIXED | {"micro_batch_size": 1}
    (tmp_path / "reference").mkdir()
    pool.run(1, reference_rank, [(recipe, plain, tmp_path / "reference")])
    several = [
        {"expert_parallel": 2},
        {"zero_stage": 3, "activation_checkpointing": "full", "reference": "precomputed"},
    ]
    jobs = [(recipe, plain | settings, tmp_path / "reference") for settings in several]
    for verdicts in pool.run(2, strategy_rank, jobs):
        assert all(verdict.passed and verdict.tolerance == 1e-10 for verdict in verdicts), verdicts


# -- measures


def trained_rank(recipe: Recipe, settings: dict[str, Any]) -> list[dict[str, float]]:
    """The measures of three steps, and those of an evaluation at their end, with its loss."""
    blueprint, strategy = blueprint_of(recipe), strategy_from(FIXED | settings)
    run, data = build(recipe, blueprint, strategy, torch.device("cpu")), open_data(recipe)
    with_precomputed(run, data, lambda sentence: None)
    batches, seen = RankBatches(data, run), []
    for index in range(3):
        result = step(run, batches.at(index), learning_rate(recipe, index))
        seen.append({**named_measures(run, result.measures), "loss": float(result.loss)})
    loss = evaluate(run, batches.validation())
    return [*seen, {**named_measures(run, run.passes.measures), "loss": loss}]


@pytest.mark.parametrize("name", quick(["dpo", "kto"], "dpo"))
def test_measures_are_those_of_the_global_batch(name: str, tmp_path: Path, pool: Pool) -> None:
    """TRL #6380, #6478, #6452; and TRL #6443: an evaluation compares with the model before training, too."""
    recipe = recipe_for(tmp_path, name)
    (expected,) = pool.run(1, trained_rank, recipe, {"micro_batch_size": 8})
    assert expected[-1]["loss"] != pytest.approx(expected[0]["loss"], rel=1e-3)
    layouts: list[dict[str, Any]] = [
        {"zero_stage": 3, "micro_batch_size": 1},
        {"reference": "precomputed", "sequence_parallel": 2},
        {"reference": "precomputed", "pipeline_parallel": 2},
    ]
    for settings in layouts:
        for seen in pool.run(2, trained_rank, recipe, settings):
            for mine, theirs in zip(seen, expected, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-10), settings


def test_the_loss_leaves_0_6931(tmp_path: Path, pool: Pool) -> None:
    """TRL #1962, #1148: it is log 2 in the first step, where policy and reference are equal, and only there."""
    seen, _ = pool.run(2, trained_rank, recipe_for(tmp_path), {"zero_stage": 3})
    assert seen[0]["loss"] == pytest.approx(0.69314718, rel=1e-8)
    assert seen[2]["loss"] < 0.69
    assert seen[0]["reward_margin"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "known", [True, False], ids=["own adapter", "an adapter of PEFT, without a fingerprint"]
)
def test_the_reference_of_an_adapter_that_continues_is_that_adapter(
    known: bool, tmp_path: Path, pool: Pool
) -> None:
    """The frozen copy has the first values, too, and does not count them to its base."""
    blueprint = blueprint_of(recipe_for(tmp_path, adapter=ADAPTER))
    assert isinstance(blueprint, AdaptedModel)
    model = reference_model(blueprint, 0, torch.float32)
    tensors = {name: p.detach() + 0.02 for name, p in named_parameters(model) if p.requires_grad}
    fingerprint = blueprint.base_fingerprint(model) if known else None
    write_adapter(tmp_path / "adapter", tensors, blueprint.config(), fingerprint)
    recipe = recipe_for(tmp_path, adapter={**ADAPTER, "start_from": str(tmp_path / "adapter")})
    (copied,), (switched,) = (
        pool.run(1, trained_rank, recipe, {"reference": how}) for how in ("copy", "adapter_off")
    )
    assert copied[0]["loss"] == pytest.approx(0.69314718, rel=1e-8)
    for mine, theirs in zip(copied, switched, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10, abs=1e-14)


def test_cached_references_serve_losses_of_other_settings(tmp_path: Path, pool: Pool) -> None:
    """TRL #7084: the cache has sums of log-probabilities, which no key of the objective changes. The model does."""
    settings = {"reference": "precomputed"}
    pool.run(1, trained_rank, recipe_for(tmp_path), settings)
    files = sorted((tmp_path / "cache" / "reference").iterdir())
    other = recipe_for(tmp_path, {"name": "dpo", "length_normalised": True, "beta": 0.5})
    (cached,), (copied,) = (
        pool.run(1, trained_rank, other, how) for how in (settings, {"reference": "copy"})
    )
    assert sorted((tmp_path / "cache" / "reference").iterdir()) == files
    for mine, theirs in zip(cached, copied, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)
    # Fewer heads have weights of the same shapes, and so the same first values.
    model = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "vocab": 257}
    ((first, *_),) = pool.run(1, trained_rank, recipe_for(tmp_path, model=model), settings)
    assert first["loss"] == pytest.approx(0.69314718, rel=1e-8)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-12)


def one_step(recipe: Recipe, precision: str) -> list[tuple[float, float, bool]]:
    """(loss, gradient norm, whether it was skipped) of the first step, tried again until it is not."""
    strategy = strategy_from({"precision": precision, "micro_batch_size": 8})
    run = build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))
    batches, seen = RankBatches(open_data(recipe), run).at(0), []
    while not seen or seen[-1][2]:
        result = step(run, batches, 0.0)
        seen.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return seen


def test_a_reward_model_in_fp16_overflows_by_its_loss_scale_alone(tmp_path: Path, pool: Pool) -> None:
    """A score is read at one token, so its gradient is large: the first scales may overflow, and back off."""
    settings = {"loss_scale": {"initial": 2.0**22, "hysteresis": 1}}
    recipe = recipe_for(tmp_path, {"name": "reward", "center_weight": 0.1}, **settings)
    ((*overflows, last),) = pool.run(1, one_step, recipe, "fp16")
    ((exact,),) = pool.run(1, one_step, recipe, "fp32")
    assert overflows and not any(map(math.isfinite, (norm for _, norm, _ in overflows)))
    assert {loss for loss, *_ in overflows} == {last[0]}
    assert last[:2] == pytest.approx(exact[:2], rel=5e-3)


def in_16_bits(recipe: Recipe) -> tuple[list[float], list[float]]:
    """Log-probabilities of a bf16 model: as it computes them, and from its logits in fp64."""
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 8})
    run = build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))
    batch = run.local_batch(RankBatches(open_data(recipe), run).at(0)[0])
    with torch.no_grad():
        ours = run.blueprint.log_probabilities(run.model, batch)
        logits = run.blueprint.logits(run.model, batch["input_ids"], batch["positions"], batch["starts"])
    assert dist.get_world_size() == 1
    assert ours.dtype == torch.float32
    picked = (
        logits.double().log_softmax(-1).gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    )
    valid = batch["labels"] >= 0
    return ours[valid].tolist(), picked[valid].tolist()


def test_log_probabilities_of_a_16_bit_model_are_fp32(tmp_path: Path, pool: Pool) -> None:
    """TensorRT-LLM #19501: softmax and sum in 16 bits lose what a pair differs by."""
    ((ours, exact),) = pool.run(1, in_16_bits, recipe_for(tmp_path, "simpo"))
    assert ours == pytest.approx(exact, rel=1e-6)
