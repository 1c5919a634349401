"""Callbacks: what each method gets, what on_step may ask for, and that all ranks do the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Plan
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.hooks import ASKS, Callback, Hooks, open_callbacks
from shardwise.trainer.loop import Job, Trainer
from tests.harness.plans import small_plan
from tests.harness.pool import Pool

SOURCE = """
import json
import os

from shardwise import Callback


class Recorder:
    ASKED = {2: "skip", 4: "save", 6: ["evaluate"], 10: "stop"}
    every_rank = False

    def _write(self, method, values):
        with open(f"heard-{type(self).__name__}-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps([method, values]) + "\\n")

    def on_start(self, run):
        self._write("start", run)

    def on_step(self, step):
        self._write("step", step)
        return self.ASKED.get(step["step"])

    def on_evaluate(self, evaluation):
        self._write("evaluate", evaluation)

    def on_save(self, saved):
        self._write("save", saved)

    def on_end(self, end):
        self._write("end", end)


class Everywhere(Recorder):
    ASKED = {}
    every_rank = True


class Broken:
    def on_step(self, step):
        return {}["key"]


class Greedy(Callback):
    def on_step(self, step):
        return "more"


class Unrelated:
    pass


def unmakable():
    raise ValueError("no")
"""


def values(corpus: Path, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16},
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": 20,
        "batch_size": 2,
        "evaluation": {"sequences": 2},
        "strategy": {"zero_stage": 2, "micro_batch_size": 1},
    } | sections


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text, in the working directory, next to a module of callbacks."""
    (tmp_path / "heard.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "corpus.txt").write_text("all work and no play\n" * 200, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "corpus.txt"


def job(given: Mapping[str, Any], folder: Path) -> tuple[Recipe, Plan]:
    recipe = recipe_of(dict(given), SETTINGS)
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy))
    folder.mkdir()
    write_job(folder, recipe, plan)
    return recipe, plan


def trained(recipe: Recipe, plan: Plan, folder: Path) -> tuple[str, int, list[int]]:
    """(error, the step of the end, number of all-reduces by step)."""
    counts: list[int] = []
    reduce = dist.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        counts[-1] += 1
        return reduce(*arguments, **options)

    try:
        trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
        issue = trainer._issue

        def counting(*arguments: Any) -> Any:
            counts.append(0)
            dist.all_reduce = counted
            try:
                return issue(*arguments)
            finally:
                dist.all_reduce = reduce

        trainer._issue = counting  # type: ignore[method-assign]
        trainer.train()
    except RecipeError as error:
        return error.line(), 0, counts
    return "", trainer.state.step, counts


def heard(folder: Path, name: str) -> list[list[tuple[str, Any]]]:
    """What the callbacks of this class heard, by process."""
    files = sorted(folder.glob(f"heard-{name}-*.jsonl"))
    return [[(m, v) for m, v in map(json.loads, file.read_text().splitlines())] for file in files]


def test_what_callbacks_hear_and_ask_for_on_two_ranks(pool: Pool, corpus: Path) -> None:
    names = ["heard:Recorder", "heard:Everywhere"]
    recipe, plan = job(values(corpus, callbacks=names), corpus.parent / "run")
    ended = pool.run(2, trained, recipe, plan, corpus.parent / "run")
    assert [(error, step) for error, step, _ in ended] == [("", 13), ("", 13)], "stop, asked after step 10"
    [told] = heard(corpus.parent, "Recorder")
    everyone = heard(corpus.parent, "Everywhere")
    assert len(everyone) == 2
    for each in (told, *everyone):
        steps = {v["step"]: v for m, v in each if m == "step"}
        assert list(steps) == list(range(1, 14))
        assert [number for number, v in steps.items() if v["skipped"]] == [5], "skip, asked after step 2"
        assert [v["step"] for m, v in each if m == "save"] == [7, 13], "save, asked after step 4"
        assert [v["step"] for m, v in each if m == "evaluate"] == [9, 13], "evaluate, asked after step 6"
        assert each[0][0] == "start" and each[-1] == ("end", {**each[-1][1], "reason": "stopped", "step": 13})
    start, lines = told[0][1], (corpus.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert (start["step"], start["steps"], start["world_size"]) == (0, 20, 2)
    assert start["recipe"]["data"]["source"] == str(corpus) and start["plan"]["line"]
    for line, (_, said) in zip(lines, [each for each in told if each[0] == "step"], strict=True):
        written = json.loads(line)
        assert said | written == said, "the dict has every figure of the line"
    assert (corpus.parent / "run" / "checkpoints" / "step-13").is_dir()
    assert (corpus.parent / "run" / "report.json").exists(), "the end that a callback asks for is an end"


def test_callbacks_cost_no_collective(pool: Pool, corpus: Path) -> None:
    counts = []
    for name, callbacks in (("with", ["heard:Everywhere"]), ("without", [])):
        folder = corpus.parent / name
        recipe, plan = job(values(corpus, callbacks=callbacks, steps=3), folder)
        counts.append(pool.run(1, trained, recipe, plan, folder)[0][2])
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Broken",
            r"a callback failed \(callbacks: heard:Broken.on_step at .*heard.py:40\): KeyError: 'key'",
        ),
        ("Greedy", "on_step returned 'more'; return one of stop, save, evaluate, skip"),
    ],
)
def test_a_callback_that_fails_is_one_line_with_its_place(
    name: str, says: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(corpus.parent)
    hooks = Hooks(open_callbacks([f"heard:{name}"]), rank=0)
    with pytest.raises(RecipeError, match=says) as caught:
        hooks.step({"step": 1})
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("heard:Missing", "callbacks: heard:Missing.*AttributeError"),
        ("heard:Unrelated", "no callback .*it has none of on_start"),
        ("heard:unmakable", "a callback failed .*unmakable.*ValueError: no"),
        ("python:gone", "was given to a function of Python"),
    ],
)
def test_what_is_no_callback_is_refused(
    target: str, says: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(corpus.parent)
    with pytest.raises(RecipeError, match=says):
        open_callbacks([target])


def test_only_rank_0_calls_unless_a_callback_asks_for_every_rank() -> None:
    class Counts(Callback):
        seen = 0

        def on_step(self, step: dict[str, Any]) -> str:
            self.seen += 1
            return "save"

    everywhere = Counts()
    everywhere.every_rank = True
    once = Counts()
    for rank in (0, 1):
        hooks = Hooks([("once", once), ("all", everywhere)], rank)
        hooks.step({"step": 1})
        assert hooks.may_ask and hooks.asked() == tuple(ask == "save" for ask in ASKS)
        assert not any(hooks.asked()), "asked once"
    assert (once.seen, everywhere.seen) == (1, 2)
