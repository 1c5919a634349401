"""Steps over the room of experts that meet what else a run does between two steps: all ends as with enough room."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint.run_folder import write_job
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.jobs.session import open_session
from shardwise.model.blueprint import Batch
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.hooks import Callback, Values
from shardwise.trainer.loop import Job, Trainer
from tests.harness.plans import NOTHING_TO_SEARCH
from tests.harness.pool import Pool
from tests.harness.tiers import quick
from tests.plugins.rollouts.rollout_runs import prompts, rollout_recipe

MODEL = {
    "layers": 2,
    "width": 24,
    "heads": 2,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 256,
    "context": 16,
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn": 24,
    "router_bias": True,
    "router_bias_rate": 0.01,
    "balance_loss": 0.0,
}
WORLD = 2
STRATEGY = {"precision": "fp64", "zero_stage": 1, "expert_parallel": 2}
ROOM, TOO_LITTLE = 2.0, 0.3
"""Of two ranks: all that can reach one; less than a balanced router needs."""


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        void: steps that have too little room when they are first read, from 0.
        little_to_evaluate: whether evaluations have too little room.
        corrupted: steps with wrong labels.
        not_a_number: steps whose embeddings are NaN.
        asks: what a callback asks for after a step, by its number from 1.
    """

    void: tuple[int, ...] = ()
    little_to_evaluate: bool = False
    corrupted: tuple[int, ...] = ()
    not_a_number: tuple[int, ...] = ()
    asks: dict[int, str] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None


class Asking(Callback):
    """Asks for something after some steps, once."""

    def __init__(self, asks: dict[int, str]) -> None:
        self.asks = dict(asks)

    def on_step(self, step: Values) -> str | None:
        return self.asks.pop(step["step"], None)


def recipe_for(case: Case, corpus: Path) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": 8,
        "batch_size": 8,
        "optimizer": {"learning_rate": 3e-3, "clip_norm": None},
        "cluster": {"device": "cpu", "devices_per_node": WORLD},
    }
    strategy = {**STRATEGY, "micro_batch_size": 2, "expert_capacity": ROOM, **case.strategy}
    return recipe_of({**values, **case.sections, "strategy": strategy}, SETTINGS)


def rank_of(case: Case, recipe: Recipe, plan: Any, folder: Path) -> dict[str, Any]:
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    room: Any = trainer.run.options.capacity
    read, left, factor = trainer.batches.at, set(case.void), [1.0]
    embedding = next(module for module in trainer.run.model.modules() if isinstance(module, nn.Embedding))
    embedding.register_forward_hook(lambda _, given, out: out * factor[0])

    def read_at(position: int) -> list[Batch]:
        batches = read(position)
        if room.factor == TOO_LITTLE:  # the next step's tokens are balanced
            room.factor = ROOM
        if position in left:
            left.remove(position)
            room.factor = TOO_LITTLE
        factor[0] = math.nan if position in case.not_a_number else 1.0
        if position in case.corrupted:
            generator = torch.Generator().manual_seed(0)
            for batch in batches:
                batch["labels"] = torch.randint(128, 256, batch["labels"].shape, generator=generator)
        return batches

    def validation(name: str = "") -> list[Batch]:
        room.factor = TOO_LITTLE if case.little_to_evaluate else room.factor
        return held_out(name)

    held_out, trainer.batches.validation = trainer.batches.validation, validation  # type: ignore[method-assign]
    trainer.batches.at = read_at  # type: ignore[method-assign]
    if case.asks:
        trainer.hooks._named.append(("asking", Asking(case.asks)))
        trainer.hooks.listening = trainer.hooks.may_ask = trainer._flags._skips = True
    trainer.train()
    weights = [p.detach() for p in trainer.run.model.parameters()]
    total = sum(float((w.to_local() if hasattr(w, "to_local") else w).double().abs().sum()) for w in weights)
    return {"left": sorted(left), "state": trainer.state, "weights": total, "factor": room.factor}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def own_loop(recipe: Recipe, plan: Any, folder: Path, void: int) -> dict[str, Any]:
    """A loop that evaluates between the passes and the update; then another one that resumes its checkpoint."""
    with open_session(recipe, plan) as run:
        room: Any = run._run.options.capacity
        norms = []
        for index, batch in enumerate(run.batches()):
            room.factor = TOO_LITTLE if index == void else ROOM
            run.forward_backward(batch)
            if index == void:
                room.factor = 2 * TOO_LITTLE  # evaluation has its own
                run.evaluate()
            norms.append(float(run.step().grad_norm))
        run.save(folder)
        weights = sum(float(weight.abs().sum()) for weight in run.parameters().values())
    with open_session(recipe, plan) as again:
        resumed: Any = again._run.options.capacity
        resumed.factor = 1.0
        again.resume(folder)
        return {"norms": norms, "weights": weights, "factor": resumed.factor}


Trained = Callable[[Case, Path], tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(
        "the quick brown fox jumps over the lazy dog, and two more foxes do. " * 300, encoding="utf-8"
    )
    return path


def plan_of(recipe: Recipe) -> Any:
    pinned = recipe.model_copy(update={"strategy": NOTHING_TO_SEARCH})
    return replace(make_plan(pinned, cluster_of(recipe.cluster)), strategy=strategy_from(recipe.strategy))


@pytest.fixture
def trained(pool: Pool, corpus: Path) -> Trained:
    """Train a case on two ranks: what each of them saw, and the last line of every step."""

    def train(case: Case, folder: Path) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
        recipe = case.recipe or recipe_for(case, corpus)
        folder.mkdir(parents=True)
        plan = plan_of(recipe)
        write_job(folder, recipe, plan)
        ranks = pool.run(WORLD, rank_of, case, recipe, plan, folder)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return ranks, {line["step"]: line for line in lines}

    return train


def curve(lines: dict[int, dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            step,
            pytest.approx(line["loss"], rel=1e-9),
            pytest.approx(line["grad_norm"], rel=1e-7),
            line["skipped"],
        )
        for step, line in sorted(lines.items())
    ]


def same(trained: Trained, folder: Path, case: Case) -> dict[int, dict[str, Any]]:
    """The lines of a run, which must be those of the same run with enough room."""
    enough, expected = trained(replace(case, void=()), folder / "enough")
    ranks, lines = trained(case, folder / "void")
    for rank, other in zip(ranks, enough, strict=True):
        assert rank["left"] == [] and rank["state"].step == other["state"].step
    assert curve(lines) == curve(expected)
    for rank, other in zip(ranks, enough, strict=True):
        assert rank["weights"] == pytest.approx(other["weights"], rel=1e-9)
    return lines


def test_a_void_step(trained: Trained, tmp_path: Path) -> None:
    same(trained, tmp_path, Case(void=(0, 4, 5, 7)))


@pytest.mark.parametrize("within_backward", quick([False, True], False))
def test_a_nan_is_no_load(trained: Trained, tmp_path: Path, within_backward: bool) -> None:
    """Its router sends all tokens to one rank. The step is skipped once, and no room is made for it."""
    room = {"expert_capacity": 1.9, "optimizer_in_backward": within_backward}
    ranks, lines = trained(Case(not_a_number=(4,), strategy=room), tmp_path / "run")
    assert [step for step, line in lines.items() if line["skipped"]] == [5]
    assert [rank["factor"] for rank in ranks] == [1.9, 1.9]


def test_a_rewind_while_a_void_step_is_on_its_way(trained: Trained, tmp_path: Path) -> None:
    """Its results are not read: no later update may be left out for it."""
    sections = {"guard": {"window": 8, "snapshot_every": 5}, "steps": 36}
    same(trained, tmp_path, Case(void=(29,), corrupted=(24, 25, 26), sections=sections))
    [event] = [e for e in events(tmp_path / "void") if e["event"] == "rewind"]
    assert event["step"] == 29  # counted from 1: the next one has been issued


@pytest.mark.parametrize("void", quick([3, 4, 5, 6], 5))
def test_what_a_callback_asks_for_is_not_lost(trained: Trained, tmp_path: Path, void: int) -> None:
    """The step that carries it to all ranks, or whose update is to be left out, is void."""
    skips = same(trained, tmp_path / "skip", Case(asks={4: "skip"}, void=(void,)))
    assert [step for step, line in skips.items() if line["skipped"]] == [7]
    assert len(same(trained, tmp_path / "stop", Case(asks={4: "stop"}, void=(void,)))) == 7


def test_the_noise_scale_is_of_all_tokens(trained: Trained, tmp_path: Path) -> None:
    """It passes the batch of the next step, which has too little room; and biases do not learn of those passes."""
    case = Case(sections={"evaluation": {"every": 4, "noise_scale": True}})
    _, expected = trained(case, tmp_path / "enough")
    _, lines = trained(replace(case, void=(4,)), tmp_path / "void")
    assert curve(lines) == curve(expected)
    for step in (4, 8):
        assert lines[step]["gradient_noise"] == pytest.approx(expected[step]["gradient_noise"], rel=1e-9)
    assert lines[5]["busiest_expert"] == expected[5]["busiest_expert"]


def test_the_load_of_a_step_is_relative_to_its_own_room(trained: Trained, tmp_path: Path) -> None:
    """An evaluation makes more room before the results of the step are written."""
    case = Case(sections={"evaluation": {"every": 4}})
    _, expected = trained(case, tmp_path / "enough")
    _, lines = trained(replace(case, little_to_evaluate=True), tmp_path / "little")
    loads = [line["load_imbalance"] for line in lines.values()]
    assert loads == pytest.approx([line["load_imbalance"] for line in expected.values()], rel=0.05)
    assert curve(lines) == curve(expected)
    for step in (4, 8):
        assert lines[step]["held_out_loss"] == pytest.approx(expected[step]["held_out_loss"], rel=1e-9)


def test_passes_of_a_rollout_leave_a_step_void(trained: Trained, tmp_path: Path) -> None:
    """The next rollout is made before the host knows that the step was void; its own passes need more room, too."""
    strategy = {**STRATEGY, "micro_batch_size": 3, "expert_capacity": ROOM}
    cluster = {"device": "cpu", "devices_per_node": WORLD}
    model = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 256, "experts": 4}
    changed = {
        "model": model | {"experts_per_token": 2},
        "strategy": strategy,
        "cluster": cluster,
        "steps": 6,
    }
    recipe = rollout_recipe(prompts(tmp_path), "ppo", {"epochs": 1, "minibatches": 1}, **changed)
    same(trained, tmp_path, Case(void=(2,), recipe=recipe))


def test_own_loops_evaluate_between_the_passes_and_the_update(
    corpus: Path, pool: Pool, tmp_path: Path
) -> None:
    """And a resumed one has the room that was needed."""
    recipe = recipe_for(Case(sections={"steps": 4}), corpus)
    plan = plan_of(recipe)
    enough = pool.run(WORLD, own_loop, recipe, plan, tmp_path / "enough", -1)
    found = pool.run(WORLD, own_loop, recipe, plan, tmp_path / "void", 1)
    for rank, other in zip(found, enough, strict=True):
        assert rank["factor"] > other["factor"] == 1.0
        assert rank["norms"] == pytest.approx(other["norms"], rel=1e-7)
        assert rank["weights"] == pytest.approx(other["weights"], rel=1e-9)
