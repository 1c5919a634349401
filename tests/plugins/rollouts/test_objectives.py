"""GRPO, RLOO and PPO: equal to plain PyTorch, and under every layout to one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.errors import DataError, RecipeError
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from tests.harness.pool import Pool
from tests.harness.tiers import quick
from tests.plugins.rollouts.rollout_runs import (
    EXACT,
    MIXTURE,
    digits,
    evaluated,
    gradients,
    letters,
    printed,
    prompts,
    rollout_recipe,
    tables,
    trained,
)

ADAPTER = {"rank": 4, "targets": "attention"}
PPO = {"epochs": 2, "minibatches": 2, "beta": 0.0}
KL = {"beta": 0.2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts(tmp_path_factory.mktemp("prompts"))


# ---- plain PyTorch ----------------------------------------------------------------------------------------


def plain_model(recipe: Recipe) -> tuple[Any, Any]:
    blueprint = blueprint_of(recipe)
    model = blueprint.build().double()
    blueprint.fill(model, recipe.seed)
    return blueprint, model


def completions(made: dict[str, Tensor]) -> list[tuple[int, list[int], int]]:
    """(row, ids, where the completion begins) of every completion with labels."""
    found = []
    for row in range(len(made["labels"])):
        targets = (made["labels"][row] >= 0).nonzero().flatten().tolist()
        if targets:
            found.append((row, made["input_ids"][row, : targets[-1] + 2].tolist(), targets[0] + 1))
    return found


def plain_log_probabilities(blueprint: Any, model: Any, ids: list[int], begin: int) -> Tensor:
    """Of one completion alone, without padding."""
    logits = blueprint.logits(model, torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    own = torch.tensor(ids[begin:])
    return logits[begin - 1 :].gather(1, own.unsqueeze(1)).squeeze(1)


def plain_group_loss(recipe: Recipe, made: dict[str, Tensor], name: str, objective: dict[str, Any]) -> Tensor:
    blueprint, model = plain_model(recipe)
    plain_group_loss.model = model  # type: ignore[attr-defined]
    rewards = made["rewards"][:, 0].tolist()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row, ids, begin in completions(made):
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
        mean = sum(group) / 4
        if name == "rloo":
            advantage = rewards[row] - (sum(group) - rewards[row]) / 3
        elif objective.get("scale_rewards", True):
            deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / 3)
            advantage = (rewards[row] - mean) / (deviation + 1e-4)
        else:
            advantage = rewards[row] - mean
        logs = plain_log_probabilities(blueprint, model, ids, begin)
        total = total - advantage * (logs - logs.detach()).exp().sum()
        if beta := objective.get("beta"):
            reference = logs.detach()  # the model has not been trained yet
            total = total + beta * ((reference - logs).exp() - (reference - logs) - 1).sum()
        tokens += len(logs)
    return total / (12 * 12 if objective.get("normalise") == "length" else tokens)


GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"scale_rewards": False, "normalise": "length"}),
    ("grpo", {"beta": 0.5, "mask_truncated": True}),
    ("rloo", {}),
]


@pytest.mark.parametrize(("name", "objective"), GROUPS, ids=str)
def test_loss_and_gradients_equal_plain_pytorch(
    pool: Pool, source: Path, name: str, objective: dict[str, Any]
) -> None:
    recipe = rollout_recipe(source, name, objective)
    made, loss, grads = pool.run(1, gradients, recipe, {"micro_batch_size": 5})[0]
    plain = plain_group_loss(recipe, made, name, objective)
    assert loss == pytest.approx(float(plain), abs=1e-12)
    plain.backward()  # type: ignore[no-untyped-call]
    for key, parameter in plain_group_loss.model.named_parameters():  # type: ignore[attr-defined]
        assert torch.allclose(grads[key], parameter.grad, rtol=0, atol=1e-12), key


def test_ppo_equals_plain_pytorch(pool: Pool, source: Path) -> None:
    """Advantages, returns and the loss of the first step, from one completion at a time."""
    keys = {"beta": 0.3, "epochs": 2, "discount": 0.97, "trace_decay": 0.9, "value_weight": 0.4}
    recipe = rollout_recipe(source, "ppo", keys)
    made, loss, grads = pool.run(1, gradients, recipe, {"micro_batch_size": 5})[0]
    blueprint, model = plain_model(recipe)
    advantages: list[float] = []
    rows = []
    for row, ids, begin in completions(made):
        logs = plain_log_probabilities(blueprint, model, ids, begin)
        count = len(logs)
        rewards = [0.0] * (count - 1) + [float(made["rewards"][row, 0])]  # KL is 0: nothing was trained yet
        values = [0.0] * (count + 1)  # as the head begins
        deltas = [rewards[t] + 0.97 * values[t + 1] - values[t] for t in range(count)]
        own = [sum((0.97 * 0.9) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]
        assert made["returns"][row][made["labels"][row] >= 0].tolist() == pytest.approx(own, abs=1e-12)
        advantages += own
        rows.append((logs, own))
    mean = sum(advantages) / len(advantages)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1) + 1e-8)
    total = torch.zeros((), dtype=torch.float64)
    for logs, own in rows:
        white = torch.tensor([(a - mean) / deviation for a in own], dtype=torch.float64)
        total = total - ((logs - logs.detach()).exp() * white).sum()
        total = total + 0.4 * 0.5 * torch.tensor(own, dtype=torch.float64).square().sum()
    total = total / len(advantages)
    assert loss == pytest.approx(float(total), abs=1e-12)
    total.backward()  # type: ignore[no-untyped-call]
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(grads[key], parameter.grad, rtol=0, atol=1e-12), key
    assert float(grads["v_head.weight"].abs().max()) > 0


# ---- layouts ----------------------------------------------------------------------------------------------

RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "grpo with a copy": ("grpo", KL, {}),
    "rloo with an adapter": ("rloo", KL, {"adapter": ADAPTER}),
    "ppo": ("ppo", {**PPO, "beta": 0.1}, {}),
    "grpo by length": ("grpo", {"normalise": "length"}, {}),
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"micro_batch_size": 5}),  # the last micro-batch has padding
    (2, {"zero_stage": 3}),
    (2, {"zero_stage": 1, "micro_batch_size": 4}),  # one rank has more rows than the other
    (2, {"tensor_parallel": 2}),
    (4, {"tensor_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full", "loss": "chunked"}),
    (2, {"sequence_parallel": 2}),
    (4, {"sequence_parallel": 2, "sequence_method": "ring", "zero_stage": 3}),
    (4, {"sequence_parallel": 2, "tensor_parallel": 2, "activation_checkpointing": "full"}),
]


@pytest.fixture(scope="module")
def alone(pool: Pool, source: Path) -> dict[str, list[dict[str, float]]]:
    return {
        name: pool.run(1, trained, rollout_recipe(source, kind, keys, **values), {"micro_batch_size": 12})[0]
        for name, (kind, keys, values) in RUNS.items()
    }


@pytest.mark.parametrize(("world", "settings"), quick(LAYOUTS, *LAYOUTS[1:3]), ids=str)
@pytest.mark.parametrize("name", quick(RUNS, "rloo with an adapter", "ppo"))
def test_every_layout_trains_as_one_process(
    pool: Pool, source: Path, alone: dict[str, Any], name: str, world: int, settings: dict[str, Any]
) -> None:
    """Also the normaliser: of the global batch, not of a rank or a micro-batch (TRL #3187, #2995)."""
    kind, keys, values = RUNS[name]
    for rank in pool.run(world, trained, rollout_recipe(source, kind, keys, **values), settings):
        for step, expected in zip(rank, alone[name], strict=True):
            assert step == pytest.approx(expected, abs=1e-10)


ON_OTHER_RANKS: list[dict[str, Any]] = [
    {"expert_parallel": 2},
    {"expert_parallel": 2, "tensor_parallel": 2},  # which does not divide the 9 tokens of a pass
    {"expert_parallel": 2, "sequence_parallel": 2},
]


@pytest.mark.parametrize("settings", quick(ON_OTHER_RANKS, ON_OTHER_RANKS[1]), ids=str)
@pytest.mark.parametrize(
    "name", quick(["grpo with a copy", "rloo with an adapter", "ppo"], "rloo with an adapter")
)
def test_experts_on_other_ranks_train_as_one_process(
    pool: Pool, source: Path, name: str, settings: dict[str, Any]
) -> None:
    kind, keys, values = RUNS[name]
    recipe = rollout_recipe(source, kind, {**keys, "group": 3}, **values, model=MIXTURE, batch_size=9)
    plain = pool.run(1, trained, recipe, {"micro_batch_size": 9})[0]
    for rank in pool.run(2, trained, recipe, settings):
        for step, expected in zip(rank, plain, strict=True):
            assert step == pytest.approx(expected, abs=1e-10)


def test_measures_say_what_happens(alone: dict[str, Any]) -> None:
    for first, *_, last in alone.values():
        assert first["reward"] == pytest.approx(first["reward/digits"] + first["reward/letters"] / 4)
        assert 0 < first["completion_length"] <= 12
        assert first["mismatch"] < 1e-12  # in fp64 the cache and the training pass agree
        assert last["entropy"] < 5.6
    assert alone["grpo with a copy"][0]["kl"] == 0
    assert alone["grpo with a copy"][-1]["kl"] > 0
    assert alone["rloo with an adapter"][-1]["kl"] > 0
    assert alone["ppo"][0]["clipped"] == 0


DATA = {"format": "prompt", "sequence_length": 28, "held_out": 0.3}


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_an_evaluation_is_the_mean_reward_of_held_out_prompts(pool: Pool, source: Path, name: str) -> None:
    """All of them, in parts that are no larger than a rollout, and with the same random numbers every time."""
    recipe = rollout_recipe(source, name, KL, data={"source": str(source), **DATA})
    (rows, loss, measures), *_ = pool.run(1, evaluated, recipe, {"micro_batch_size": 5})
    held_out = {bytes(row["input_ids"][:9].tolist()) for row in rows}
    assert len(rows) == 4 * len(held_out) > 12  # more than one part
    total = 0.0
    for row in rows:
        (ends,) = (row["labels"] >= 0).nonzero(as_tuple=True)
        written = bytes(row["labels"][ends].tolist()).replace(b"\0", b"").decode(errors="replace")
        total += digits([""], [written])[0] + letters([""], [written])[0] / 4
    assert measures["reward"] == pytest.approx(total / len(rows), abs=1e-12)
    assert loss == pytest.approx(-measures["reward"], abs=1e-12)
    assert measures["mismatch"] < 1e-12
    for _, other_loss, other in pool.run(2, evaluated, recipe, {"zero_stage": 3}):
        assert other_loss == pytest.approx(loss, abs=1e-12)
        assert other == pytest.approx(measures, abs=1e-10)


# ---- rollouts ---------------------------------------------------------------------------------------------


def test_truncated_completions_train_nothing_but_count_in_their_group(pool: Pool, source: Path) -> None:
    """TRL #6439: a completion without an end has no loss. Its reward is still part of the baseline."""
    whole = pool.run(1, tables, rollout_recipe(source, "rloo"), EXACT)[0]
    masked = pool.run(1, tables, rollout_recipe(source, "rloo", {"mask_truncated": True}), EXACT)[0]
    ended = whole["ended"] == 1
    assert ended.any()
    assert not ended.all()
    assert torch.equal(masked["labels"][ended], whole["labels"][ended])
    assert (masked["labels"][~ended] < 0).all()
    assert torch.equal(masked["advantages"], whole["advantages"])


def test_a_rollout_that_trains_nothing_is_a_warning_once(pool: Pool, source: Path) -> None:
    recipe = rollout_recipe(source, "grpo", {"mask_truncated": True, "completion_length": 2})
    line = (
        "warning: every completion was cut at objective.completion_length = 2 and trains nothing; "
        "raise it, or set objective.mask_truncated: false\n"
    )
    assert pool.run(2, printed, recipe, EXACT) == [line, ""]


def test_training_reads_the_sampled_ids_even_where_text_would_be_tokenized_otherwise(
    pool: Pool, source: Path
) -> None:
    """TRL #5242. Bytes that are no UTF-8 become U+FFFD in text, three bytes each."""
    made = pool.run(1, tables, rollout_recipe(source, "grpo"), EXACT)[0]
    changed = 0
    for _, ids, begin in completions(made):
        text = bytes(ids[begin:]).decode("utf-8", errors="replace")
        changed += list(text.encode()) != ids[begin:]
        assert bytes(ids[:begin]).decode().startswith("say ")
    assert changed


def test_every_epoch_visits_all_completions_of_a_rollout(source: Path) -> None:
    recipe = rollout_recipe(source, "ppo", {**PPO, "minibatches": 3, "epochs": 2}, steps=6)
    spec = blueprint_of(recipe).minimises.spec  # type: ignore[attr-defined]
    parts = [spec.rows(part, 0) for part in range(6)]
    for epoch in (parts[:3], parts[3:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(36))
    assert parts[:3] != parts[3:]
    assert spec.rows(0, 1) != parts[0]


def test_a_temperature_is_in_training_as_in_sampling(pool: Pool, source: Path) -> None:
    """TRL #4159."""
    hot = pool.run(1, trained, rollout_recipe(source, "grpo", {"temperature": 1.7}), {})[0]
    chunked = pool.run(1, trained, rollout_recipe(source, "grpo", {"temperature": 1.7}), {"loss": "chunked"})[
        0
    ]
    for step, other in zip(hot, chunked, strict=True):
        assert step["mismatch"] < 1e-12
        assert step == pytest.approx(other, abs=1e-10)


def test_a_prompt_without_room_for_a_completion_is_refused(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "%s"}\n' % ("x" * 20), encoding="utf-8")
    with pytest.raises(DataError, match="all 1 have more than 16 tokens"):
        pool.run(1, tables, rollout_recipe(path, "grpo", {"completion_length": 12}), EXACT)


def test_steps_and_checkpoints_are_whole_rollouts(source: Path) -> None:
    with pytest.raises(RecipeError, match=r"steps must be whole rollouts .* the nearest that works is 4"):
        rollout_recipe(source, "ppo", PPO, steps=5)
    with pytest.raises(RecipeError, match="every must be whole rollouts"):
        rollout_recipe(source, "ppo", PPO, steps=8, checkpoint={"every": 3})
