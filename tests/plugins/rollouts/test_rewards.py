"""Rewards of the user's: called per batch, summed with weights, and refused with the sample named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.checkpoint import save_checkpoint
from shardwise.core.errors import DataError, RecipeError, ShardwiseError
from shardwise.data.opening import open_splits
from shardwise.data.tokenizer import ByteTokenizer, open_tokenizer
from shardwise.engine.build import build
from shardwise.engine.train_state import TrainState
from shardwise.model.open import blueprint_of
from shardwise.model.scalar_head import values
from shardwise.plugins.preferences.scoring import load_reward_model
from shardwise.plugins.rollouts.rewards import RewardInput, Rewards, rewards_of
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.recipe.objective import ObjectiveSpec
from shardwise.recipe.sections import DataSpec
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.pool import Pool
from tests.harness.small_models import write_tokenizer
from tests.plugins.rollouts.rollout_runs import EXACT, prompts, rollout_recipe, tables
from tests.plugins.rollouts.test_objectives import completions

HERE = __name__


def length(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [len(completion) for completion in completions]


def right(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str]) -> list[bool]:
    return [text == wanted for text, wanted in zip(completions, answer, strict=True)]


def broken(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    raise KeyError("solution")


async def later(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def none_for_empty(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
    return [1.0 if completion else None for completion in completions]


def not_finite(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [float("nan")] * len(completions)


def one(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0]


def given(prompts: list[str], completions: list[str], **fields: Any) -> RewardInput:
    prompted, completed = ([list(text.encode()) for text in texts] for texts in (prompts, completions))
    return RewardInput(prompted, completed, fields, ByteTokenizer(), [[]] * len(prompts))


def opened(*names: str, weights: tuple[float, ...] | None = None) -> Rewards:
    named = tuple(f"{HERE}:{name}" for name in names)
    return rewards_of(ObjectiveSpec(name="grpo", rewards=named, reward_weights=weights))


def test_several_rewards_are_summed_with_their_weights() -> None:
    rewards = opened("length", "right", weights=(0.5, 2))
    assert rewards.measures == ["reward", "reward/length", "reward/right"]
    table = rewards.of(given(["a", "b"], ["xyz", "y"], answer=["xyz", "z"]))
    assert table.tolist() == [[0.5 * 3 + 2, 3, 1], [0.5, 1, 0]]


def test_without_weights_they_count_alike() -> None:
    assert opened("length", "length").of(given(["a"], ["xyz"])).tolist() == [[6, 3, 3]]


REFUSED = [
    (
        "broken",
        r"the reward function failed \(objective.rewards: \S+:broken at \S*test_rewards.py:"
        rf"{broken.__code__.co_firstlineno + 1}\): KeyError: 'solution'",
    ),
    ("none_for_empty", r"a reward is None .*: of the completion '' to 'second'; return a finite number"),
    ("not_finite", r"a reward is nan .*: of the completion 'xyz' to 'first'"),
    ("one", r"one number per completion .*: it returned 1 for 2 completions"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_a_fault_of_a_function_is_one_line_that_names_it(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        opened(name).of(given(["first", "second"], ["xyz", ""]))
    assert "\n" not in str(raised.value)


NOT_FUNCTIONS = [
    (f"{HERE}:missing", r"cannot be imported \(objective.rewards: "),
    (f"{HERE}:HERE", "must be a function .*: its type is str"),
    (f"{HERE}:later", "must be a function .*: it is async, and nothing awaits it; call asyncio.run"),
    ("my_rewards.py:digits", r"my_rewards.py:digits\): .*; leave out .py: my_rewards:digits"),
]


@pytest.mark.parametrize(("name", "message"), NOT_FUNCTIONS)
def test_what_cannot_be_called_is_refused_before_it_is(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        rewards_of(ObjectiveSpec(name="grpo", rewards=(name,)))


# ---- a reward model ---------------------------------------------------------------------------------------


def leave_reward_model(folder: Path, tokenizer: str) -> None:
    """The run of a reward model with other weights than its first ones."""
    data = {"source": "pairs.jsonl", "sequence_length": 48, "tokenizer": tokenizer}
    model = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 512}
    sections = {"model": model, "objective": "reward", "data": data, "steps": 1, "batch_size": 4}
    recipe = recipe_of(sections, SETTINGS)
    run = build(recipe, blueprint_of(recipe), strategy_from({}), torch.device("cpu"))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    folder.mkdir()
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    save_checkpoint(run, TrainState(1, 4), folder / "checkpoints", 1)


def read_alone(folder: Path, documents: list[list[int]]) -> list[float]:
    """The score at the last token of every document, one after the other."""
    found = load_reward_model(folder)
    with torch.no_grad():
        return [
            values(found.blueprint, found.model, {"input_ids": torch.tensor([ids])})[0, -1].item()
            for ids in documents
        ]


def test_a_reward_model_scores_the_sampled_tokens(pool: Pool, tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are other tokens after a way through text; and ranks score what one process scores."""
    pool.run(1, leave_reward_model, tmp_path / "model", "bytes")
    objective = {"rewards": [], "reward_weights": None, "reward_model": str(tmp_path / "model")}
    recipe = rollout_recipe(prompts(tmp_path), "ppo", {**objective, "beta": 0.0})
    made = pool.run(1, tables, recipe, EXACT)[0]
    documents = [ids for _, ids, _ in completions(made)]
    assert len(documents) == 12
    assert any(bytes(ids).decode(errors="replace").encode() != bytes(ids) for ids in documents)
    alone = read_alone(tmp_path / "model", documents)
    assert max(alone) - min(alone) > 0.05
    assert made["rewards"][:, 0].tolist() == pytest.approx(alone, abs=1e-5)
    for rank in pool.run(2, tables, recipe, {**EXACT, "zero_stage": 3}):
        assert torch.allclose(rank["rewards"], made["rewards"], rtol=0, atol=1e-5)


def test_a_reward_model_reads_a_chat_to_where_it_was_trained_to_score(pool: Pool, tmp_path: Path) -> None:
    """ChatML writes a line break after the end of an answer, which no completion has."""
    folder = str(tmp_path / "tokenizer")
    write_tokenizer(tmp_path / "tokenizer", "qwen2")
    turns = [{"role": "user", "content": "The capital of Peru?"}]
    pair = {"prompt": turns, "chosen": "Lima.", "rejected": "model"}
    source = tmp_path / "pairs.jsonl"
    source.write_text(json.dumps(pair) + "\n", encoding="utf-8")
    spec = DataSpec(source=str(source), tokenizer=folder, sequence_length=48, held_out=0.0)
    cuts = open_tokenizer(folder)
    scored = open_splits(spec, cuts, tmp_path / "cache", kind="scored").train.sample(0)
    last = (scored["labels"] >= 0).argmax(1)
    trained_on = [row[: at + 1].tolist() for row, at in zip(scored["input_ids"], last, strict=True)]
    prompt = open_splits(spec, cuts, tmp_path / "cache", kind="prompts").train.sample(0)
    start, end = len(prompt["prompt"]), next(iter(cuts.ends & set(trained_on[0])))
    sampled = [ids[start : ids.index(end, start) + 1] for ids in trained_on]
    assert [len(ids) for ids in trained_on] == [start + len(ids) + 1 for ids in sampled]
    pool.run(1, leave_reward_model, tmp_path / "model", folder)
    rewards = rewards_of(ObjectiveSpec(name="ppo", reward_model=str(tmp_path / "model")))
    asked = RewardInput([prompt["prompt"]] * 2, sampled, {}, cuts, [prompt["closing"]] * 2)
    assert rewards.of(asked)[:, 0].tolist() == pytest.approx(
        read_alone(tmp_path / "model", trained_on), abs=1e-5
    )
    cut = [ids[:-1] for ids in sampled]  # an answer that has not ended is not closed
    expected = read_alone(tmp_path / "model", [[*prompt["prompt"], *ids] for ids in cut])
    asked = RewardInput([prompt["prompt"]] * 2, cut, {}, cuts, [prompt["closing"]] * 2)
    assert rewards.of(asked)[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_with_another_tokenizer_reads_the_text(pool: Pool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    theirs = open_tokenizer(str(tmp_path / "tokenizer"))
    pool.run(1, leave_reward_model, tmp_path / "model", str(tmp_path / "tokenizer"))
    rewards = rewards_of(ObjectiveSpec(name="ppo", reward_model=str(tmp_path / "model")))
    assert rewards.measures == ["reward", "reward/model"]
    ended = given(["The sum of 2 and 2 is "], ["4\0"])
    document = [*theirs.encode("The sum of 2 and 2 is 4"), theirs.separator]
    begin = [] if theirs.begin is None else [theirs.begin]
    assert rewards.of(ended)[:, 0].tolist() == pytest.approx(
        read_alone(tmp_path / "model", [begin + document])
    )
    tagged = given(["\0user"], ["4"])
    with pytest.raises(RecipeError, match=r"another tokenizer \(objective.reward_model: .*its tag <end>"):
        rewards.of(tagged)


def test_a_text_beyond_the_context_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, leave_reward_model, tmp_path / "model", "bytes")
    model = load_reward_model(tmp_path / "model")
    context = model.blueprint.context
    assert context is not None
    assert len(model([[1] * context])) == 1
    with pytest.raises(DataError, match=rf"too long for the reward model: .*context is {context:,}"):
        model([[1], [1] * (context + 1)])


def test_a_folder_without_a_reward_model_is_refused_by_its_key(tmp_path: Path) -> None:
    """At once, before anything is planned or trained."""
    with pytest.raises(RecipeError, match=r"objective.reward_model: .*away\): there is no such folder"):
        rewards_of(ObjectiveSpec(name="ppo", reward_model=str(tmp_path / "away")))
    with pytest.raises(
        RecipeError, match=r"objective.reward_model: .*: it has neither recipe.yaml nor config"
    ):
        rewards_of(ObjectiveSpec(name="ppo", reward_model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ShardwiseError, match=r"\(objective.reward_model: /"):
        rewards_of(ObjectiveSpec(name="ppo", reward_model=str(tmp_path)))
    for objective in ("", "objective: dpo\ndata: {source: p.jsonl}\n"):
        text = f"model: {{preset: tiny}}\nsteps: 1\nbatch_size: 1\n{objective}"
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(
            RecipeError, match=r"not a reward model \(objective.reward_model: .*another objective"
        ):
            rewards_of(ObjectiveSpec(name="ppo", reward_model=str(tmp_path)))
