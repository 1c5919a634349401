"""Functions of users whose signature is not that of their call are told by file and line, without an import."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.call_signatures import Call, require_accepts, require_callable
from shardwise.core.errors import RecipeError
from shardwise.data import check_data
from shardwise.jobs.objects import recipe_from, with_callbacks
from shardwise.jobs.request import read_request
from shardwise.model.factory import LOSS_CALL

MINE = """
raise SystemExit('imported')
def right(prompts, completions, **fields): ...
def with_answer(prompts, completions, answer): ...
def plain(prompts, completions): ...
def one(completions, **fields): ...
def swapped(completions, prompts, **fields): ...
def named(*, prompts, completions): ...
def rate(step, steps): ...
def rate_of_step(step): ...
def several(): ...
def several(prompts): ...
@cached
def decorated(): ...
def changed(): ...
changed = wrapped(changed)
def build(layers, width=8): ...
def muon(named_parameters, lr, momentum=0.9): ...
class Good:
    def __init__(self, path='x'): ...
    def on_step(self, values): ...
class Bare:
    def on_step(self): ...
class Needs:
    def __init__(self, path): ...
    def on_step(self, values): ...
"""
REWARD = Call(("prompts", "completions"), keywords=None)
RATE, CALLBACK = Call(("step", "steps")), Call(("values",), methods="on_")
OPTIMIZER = Call(("named_parameters",), optional=("lr",))

REFUSED: list[tuple[str, Call, str]] = [
    (
        "one",
        REWARD,
        "6: its argument 1 is 'completions'; it is called as one(prompts, completions, **fields)",
    ),
    ("swapped", REWARD, "7: its argument 1 is 'completions'; it is called as swapped(prompts, completions, "),
    ("named", REWARD, "8: too many positional arguments"),
    ("rate_of_step", RATE, "10: too many positional arguments; it is called as rate_of_step(step, steps)"),
    ("build", Call(), "17: missing a required argument: 'layers'"),
    ("build", Call(keywords=("layers", "depth")), "17: got an unexpected keyword argument 'depth'"),
    ("Bare", CALLBACK, "23: too many positional arguments; it is called as on_step(values)"),
    ("Needs", CALLBACK, "25: missing a required argument: 'path'; it is called as __init__()"),
    ("rate", CALLBACK, "9: missing a required argument: 'step'; it is called as rate()"),
    ("with_answer", Call(REWARD.values, ("level",)), "4: "),
    ("plain", Call(REWARD.values, ("answer",)), "5: got an unexpected keyword argument 'answer'"),
]
TAKEN: list[tuple[str, Call]] = [
    ("right", REWARD), ("with_answer", REWARD), ("plain", REWARD), ("rate", RATE), ("several", RATE),
    ("decorated", RATE), ("changed", RATE), ("missing", RATE), ("Good", CALLBACK), ("muon", OPTIMIZER),
    ("build", Call(keywords=("layers",))),
]  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "my_functions.py").write_text(MINE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("name", "call", "told"), REFUSED)
def test_another_signature_is_told_by_file_and_line(name: str, call: Call, told: str, mine: Path) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"my_functions.py:{told}")):
        require_callable(f"{mine}/my_functions:{name}", "objective.rewards[0]", call)


@pytest.mark.parametrize(("name", "call"), TAKEN)
def test_what_can_be_called_or_is_not_plain_is_left_alone(name: str, call: Call, mine: Path) -> None:
    require_callable(f"{mine}/my_functions:{name}", "objective.rewards[0]", call)


def _recipe(folder: Path, reward: str = "right", more: str = "") -> Path:
    lines = (
        "model: {layers: 1, width: 16, heads: 2, vocab: 257}",
        f"objective: {{name: grpo, group: 2, completion_length: 8, rewards: [my_functions:{reward}]}}",
        "data: {source: prompts.jsonl, sequence_length: 16, held_out: 0.0}",
        "steps: 1",
        "batch_size: 2",
        more,
    )
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4, encoding="utf-8")
    (folder / "grpo.yaml").write_text("\n".join(lines), encoding="utf-8")
    return folder / "grpo.yaml"


@pytest.mark.parametrize(
    ("reward", "more", "told"),
    [
        ("one", "", "2: objective.rewards[0]"),
        ("right", "schedule: {factory: my_functions:rate_of_step}", "6: schedule.factory"),
        ("right", "callbacks: [my_functions:Bare]", "6: callbacks[0]"),
        ("right", "optimizer: {factory: my_functions:muon, arguments: {beta: 1}}", "6: optimizer.factory"),
    ],
)
def test_a_recipe_is_told_by_its_line(reward: str, more: str, told: str, mine: Path) -> None:
    with pytest.raises(RecipeError, match=rf"grpo.yaml:{re.escape(told)}.*my_functions.py:\d+: "):
        read_request(_recipe(mine, reward, more), [])


@pytest.mark.parametrize(
    ("depth", "told"), [("layers", "3: evaluation.metrics"), ("depth", "1: model.factory")]
)
def test_a_recipe_of_an_own_module_is_told_by_its_line(depth: str, told: str, mine: Path) -> None:
    lines = (
        f"model: {{factory: my_functions:build, arguments: {{{depth}: 2}}}}",
        "data: {sequence_length: 16}",
        "evaluation: {metrics: my_functions:rate_of_step}",
        "steps: 1",
        "batch_size: 2",
    )
    (mine / "own.yaml").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(RecipeError, match=rf"own.yaml:{re.escape(told)}.*my_functions.py:\d+: "):
        read_request(mine / "own.yaml", [])


def test_a_reward_takes_the_fields_of_the_data(mine: Path) -> None:
    check_data(read_request(_recipe(mine, "with_answer"), [])[0])
    with pytest.raises(RecipeError, match=r"my_functions.py:5: got an unexpected keyword argument 'answer'"):
        check_data(read_request(_recipe(mine, "plain"), [])[0])


class Bare:
    def on_step(self) -> None: ...


def _loss(module: Any, batch: Any) -> Any: ...


def test_objects_of_python_are_checked(mine: Path) -> None:
    def made(**more: Any) -> Any:
        cpu = {"device": "cpu"}
        return recipe_from(torch.nn.Linear(2, 2), _loss, [], None, steps=1, batch_size=1, cluster=cpu, **more)

    for more in ({"schedule": lambda: 1.0}, {"compute_metrics": lambda logits: {}}):
        with pytest.raises(RecipeError, match=r"test_call_signatures.py:\d+: .*it is called as "):
            made(**more)
    with pytest.raises(RecipeError, match=r"callbacks: Bare\): .*called as on_step\(values\)"):
        with_callbacks(made(), [Bare()])
    with pytest.raises(RecipeError, match=r"called as <lambda>\(module, batch\)"):
        require_accepts(lambda batch: 0, "model.factory", LOSS_CALL)
