"""Small recipes of rollouts, and what ranks do with them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.data import Data, open_data
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.engine.build import build
from shardwise.engine.optim.norm import local
from shardwise.engine.run import Run
from shardwise.engine.sampling import SamplingObjective
from shardwise.engine.step import named_measures, step
from shardwise.model.open import blueprint_of
from shardwise.plugins.rollouts.source import Rollouts
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.evaluation import evaluate

MIXTURE: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 257, "experts": 4, "experts_per_token": 2
}  # fmt: skip
EXACT = {"precision": "fp64", "micro_batch_size": 2}


def digits(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    """The share of digits, of at least 8 characters."""
    return [sum(letter.isdigit() for letter in text) / max(8, len(text)) for text in completions]


def letters(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    return [sum(letter.isalpha() for letter in text) / 8 for text in completions]


def equal(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    return [0.1] * len(completions)


def prompts(folder: Path, count: int = 24) -> Path:
    import json

    path = folder / "prompts.jsonl"
    records = [{"prompt": f"say {'x' * (i % 5)}{i}: ", "answer": str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rollout_recipe(source: Path, name: str, objective: dict[str, Any] | None = None, **values: Any) -> Recipe:
    """Of a tiny model; ``objective`` has further keys, and ``values`` are of the recipe."""
    rewards = {"rewards": [f"{__name__}:digits", f"{__name__}:letters"], "reward_weights": [1.0, 0.25]}
    asked = {"name": name, "completion_length": 12, "group": 4, "mask_truncated": False, **rewards}
    return recipe_of(
        {
            "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 256},
            "data": {"source": str(source), "format": "prompt", "sequence_length": 28, "held_out": 0},
            "steps": 4,
            "batch_size": 12,
            "optimizer": {"learning_rate": 3e-3},
            "schedule": {"name": "constant", "warmup": 0},
            "objective": {**asked, **(objective or {})},
            **values,
        },
        SETTINGS,
    )


class Prompts:
    """The prompts of a recipe, whose completions end at any of 16 tokens: about half of them in time."""

    def __init__(self, data: Data) -> None:
        self.records, self.held_out_records = data.records, data.held_out_records
        self.validation_sets = data.validation_sets
        self.tokenizer: Any = ManyEnds()


class ManyEnds(ByteTokenizer):
    ends = frozenset(range(16))  # type: ignore[assignment]


def opened(recipe: Recipe, settings: dict[str, Any]) -> tuple[Run, Rollouts]:
    strategy = strategy_from({**EXACT, **settings})
    run = build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))
    assert isinstance(run.objective, SamplingObjective)
    rollouts = run.objective.batches(run, Prompts(open_data(recipe)))
    assert isinstance(rollouts, Rollouts)
    return run, rollouts


def trained(recipe: Recipe, settings: dict[str, Any]) -> list[dict[str, float]]:
    """Loss, gradient norm, tokens and measures of every step."""
    run, rollouts = opened(recipe, settings)
    seen = []
    for index in range(recipe.steps):
        result = step(run, rollouts.at(index), 3e-3)
        while run.enlarged(result.capacity_used, result.capacity):
            result = step(run, rollouts.at(index), 3e-3)
        numbers = {"loss": result.loss, "norm": result.grad_norm, "tokens": result.tokens}
        named = named_measures(run, result.measures)
        seen.append({**{name: float(value) for name, value in numbers.items()}, **named})
    return seen


def tables(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Of the first rollout."""
    _, rollouts = opened(recipe, settings)
    return rollouts._made(0)


def printed(recipe: Recipe, settings: dict[str, Any]) -> str:
    """What this rank prints while it makes two rollouts in which no completion ends."""
    _, rollouts = opened(recipe, settings)
    rollouts.prompts.tokenizer.ends = frozenset({-1})
    with redirect_stdout(io.StringIO()) as out:
        rollouts._made(0)
        rollouts._made(1)
    return out.getvalue()


def evaluated(
    recipe: Recipe, settings: dict[str, Any]
) -> tuple[list[dict[str, Any]], float, dict[str, float]]:
    """The rows of this rank of a first evaluation; the loss and the measures of a second one."""
    run, rollouts = opened(recipe, settings)
    rows = []
    for batch in rollouts.validation():
        count = int(batch["present"].sum())
        rows += [{name: table[row] for name, table in batch.items()} for row in range(count)]
    loss = evaluate(run, rollouts.validation())
    return rows, loss, named_measures(run, run.passes.measures)


def gradients(recipe: Recipe, settings: dict[str, Any]) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Tables of the first rollout, the loss of the first step, and its gradients by name; of one process."""
    run, rollouts = opened(recipe, settings)
    batches, kept = rollouts.at(0), dict(rollouts._kept[0])
    _, loss = run.passes.forward_backward(batches)
    named = {name: local(p.grad).clone() for name, p in run.model.named_parameters() if p.grad is not None}
    return kept, float(loss), named
