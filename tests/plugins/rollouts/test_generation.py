"""Completions of the model that is trained, under every way to divide it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.engine.build import build
from shardwise.model.open import blueprint_of
from shardwise.plugins.rollouts.generation import generate
from shardwise.plugins.serve.sampling import sampled, uniforms
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import strategy_from
from tests.harness.pool import Pool
from tests.harness.small_models import write_model
from tests.harness.tiers import quick
from tests.plugins.rollouts.rollout_runs import MIXTURE, prompts, rollout_recipe

ROWS, LONGEST, VOCAB = 8, 40, 257
PROMPTS = [[5 + row, 7, 11][: 1 + row % 3] for row in range(ROWS)]
ENDS = range(5)
"""So many tokens that some completions end within LONGEST, and some of a rank after those of all others."""


def small(model: dict[str, Any] | None = None, **values: Any) -> Recipe:
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB}
    return recipe_of(
        {"model": model or sizes, "data": {"sequence_length": 64}, "batch_size": ROWS, "steps": 1, **values}
    )


def generated(recipe: Recipe, settings: dict[str, Any], ends: range = ENDS) -> list[list[Any]]:
    """Of all rows of this rank: number of the row, tokens, log-probabilities, whether it ended."""
    strategy = strategy_from(settings)
    run = build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))
    share = ROWS // run.data_degree
    own = range(run.data_rank * share, (run.data_rank + 1) * share)
    noise = uniforms(3, 0, [(row // 2, row % 2) for row in own], LONGEST)
    done = generate(run, [PROMPTS[row] for row in own], noise, ends)
    assert run.model.training
    pairs = zip(own, done, strict=True)
    return [
        [row, made.tokens, made.log_probabilities.tolist(), made.tokens[-1] in ends] for row, made in pairs
    ]


def by_row(ranks: list[list[list[Any]]]) -> dict[int, list[Any]]:
    return {row: rest for rank in ranks for row, *rest in rank}


def recomputed(recipe: Recipe, settings: dict[str, Any], rows: dict[int, list[Any]]) -> float:
    """Largest difference of the sampled log-probabilities from those of one pass over the whole text."""
    blueprint = blueprint_of(recipe)
    run = build(recipe, blueprint, strategy_from(settings), torch.device("cpu"))
    worst = 0.0
    for row, (tokens, logs, _) in rows.items():
        text = torch.tensor([PROMPTS[row] + tokens])
        with torch.no_grad():
            logits = blueprint.logits(run.model, text[:, :-1])[0].log_softmax(-1)
        own = logits[len(PROMPTS[row]) - 1 :].gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        worst = max(worst, float((own - torch.tensor(logs, dtype=own.dtype)).abs().max()))
    return worst


EXACT = {"precision": "fp64", "micro_batch_size": 1}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[int, list[Any]]:
    return by_row(pool.run(1, generated, small(), EXACT))


def test_log_probabilities_are_those_of_the_tokens_sampled(pool: Pool, alone: dict[int, list[Any]]) -> None:
    assert pool.run(1, recomputed, small(), EXACT, alone)[0] < 1e-12
    ended = [row[2] for row in alone.values()]
    assert any(ended)
    assert not all(ended)
    for tokens, _, over in alone.values():
        assert (tokens[-1] in ENDS) == over
        assert not set(tokens[:-1]) & set(ENDS)
        assert over or len(tokens) == LONGEST


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 0}),
    (2, {"zero_stage": 1}),
    (2, {"zero_stage": 3}),
    (4, {"zero_stage": 3, "replicate": 2}),
    (2, {"tensor_parallel": 2}),
    (4, {"tensor_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full"}),
    (2, {"zero_stage": 3, "compile": "block", "activation_checkpointing": "selective"}),
    (2, {"zero_stage": 2, "offload": "optimizer+parameters"}),
    (2, {"sequence_parallel": 2}),
    (4, {"sequence_parallel": 2, "sequence_method": "ring", "zero_stage": 3, "compile": "block"}),
]


@pytest.mark.parametrize(
    ("world", "settings"),
    quick(LAYOUTS, LAYOUTS[2], LAYOUTS[4]),
    ids=lambda value: str(value).replace("'", ""),
)
def test_every_layout_samples_the_same_completions(
    pool: Pool, alone: dict[int, list[Any]], world: int, settings: dict[str, Any]
) -> None:
    ranks = by_row(pool.run(world, generated, small(), {**EXACT, **settings}))
    assert {row: rest[0] for row, rest in ranks.items()} == {row: rest[0] for row, rest in alone.items()}
    for row, (_, logs, _) in ranks.items():
        assert logs == pytest.approx(alone[row][1], abs=1e-12)


ON_OTHER_RANKS: list[dict[str, Any]] = [
    {"expert_parallel": 2},
    {"expert_parallel": 2, "zero_stage": 3},
    {"expert_parallel": 2, "tensor_parallel": 2},
]


@pytest.mark.parametrize("settings", quick(ON_OTHER_RANKS, ON_OTHER_RANKS[0]), ids=str)
def test_experts_on_other_ranks_take_every_token(pool: Pool, settings: dict[str, Any]) -> None:
    """A pass has few tokens, and all may have the same expert; prompts of ranks have other lengths.

    Routers choose in sampling as in a pass over the whole text (arXiv:2510.11370).
    """
    alone = by_row(pool.run(1, generated, small(MIXTURE), EXACT))
    assert pool.run(1, recomputed, small(MIXTURE), EXACT, alone)[0] < 1e-12
    ranks = by_row(pool.run(2, generated, small(MIXTURE), {**EXACT, **settings}))
    assert {row: rest[0] for row, rest in ranks.items()} == {row: rest[0] for row, rest in alone.items()}
    for row, (_, logs, _) in ranks.items():
        assert logs == pytest.approx(alone[row][1], abs=1e-12)


def test_an_adapter_and_mixed_precision_sample_from_the_adapted_model(pool: Pool) -> None:
    recipe = small(adapter={"rank": 4, "targets": "all"})
    settings = {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 1}
    rows = by_row(pool.run(2, generated, recipe, settings))
    assert pool.run(1, recomputed, recipe, {**settings, "zero_stage": 0}, rows)[0] < 0.05


@pytest.mark.parametrize("family", quick(["llama", "gpt2"], "llama"))
def test_models_of_transformers_keep_their_cache_when_they_are_sharded(
    pool: Pool, tmp_path: Path, family: str
) -> None:
    write_model(tmp_path, family)
    recipe = small({"hf": str(tmp_path)})
    pool.run(2, uses_a_cache, recipe)
    for settings in ({"zero_stage": 3}, {"sequence_parallel": 2}):
        rows = by_row(pool.run(2, generated, recipe, EXACT | settings, range(3)))
        assert pool.run(1, recomputed, recipe, EXACT, rows)[0] < 1e-11


def uses_a_cache(recipe: Recipe) -> None:
    from shardwise.plugins.serve.decoding import Transformers, reader_of
    from shardwise.plugins.serve.multi_lora import Bank

    settings = {**EXACT, "zero_stage": 3}
    run = build(recipe, blueprint_of(recipe), strategy_from(settings), torch.device("cpu"))
    assert isinstance(reader_of(run.blueprint, run.model, Bank(run.model, torch.float64)), Transformers)


REFUSED: list[dict[str, Any]] = [
    {"pipeline_parallel": 2},
    {"tensor_parallel": 2, "tensor_sequence_parallel": "gathered"},
]


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_layouts_that_cannot_generate_break_a_rule(tmp_path: Path, settings: dict[str, Any]) -> None:
    from shardwise.technique import broken_rules

    recipe = rollout_recipe(prompts(tmp_path), "grpo")
    keys = [violation.rule.key for violation in broken_rules(strategy_from(settings), 4, recipe)]
    assert keys == [list(settings)[-1]]


# ---- the distribution -------------------------------------------------------------------------------------


def test_tokens_have_the_probabilities_that_are_kept_for_them() -> None:
    """A sampling bias (TRL #6789) moves the shares."""
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0)) * 2
    logits[4] = -torch.inf
    shares = logits.softmax(0)
    count = 40_000
    noise = uniforms(1, 2, [(0, 0)], count)[0]
    tokens, logs = sampled(logits.expand(count, -1), noise)
    assert torch.allclose(logs, shares.log()[tokens], atol=1e-6)
    counted = torch.bincount(tokens, minlength=6) / count
    assert counted[4] == 0
    deviation = (shares * (1 - shares) / count).sqrt()
    assert ((counted - shares).abs() <= 4 * deviation).all()


def test_the_ends_of_the_uniform_numbers_choose_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    tokens, _ = sampled(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]


def test_noise_is_of_the_seed_the_step_the_prompt_and_the_sample() -> None:
    rows = [(prompt, sample) for prompt in range(3) for sample in range(2)]
    noise = uniforms(0, 5, rows, 7)
    assert noise.dtype == torch.float64
    assert len({tuple(row.tolist()) for row in noise}) == 6
    assert torch.equal(noise[3:4], uniforms(0, 5, [rows[3]], 7))  # whatever rows are on the same rank
    assert not torch.equal(noise, uniforms(0, 6, rows, 7))
    assert not torch.equal(noise, uniforms(1, 5, rows, 7))
    assert torch.equal(noise[:, :4], uniforms(0, 5, rows, 4))
