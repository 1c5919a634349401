"""Objects of a user's modules: a missing one is told without an import; one that may be there is left alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardwise.core.errors import RecipeError
from shardwise.core.module_files import require_defined
from shardwise.jobs.request import read_request

FILES = {
    "plain_rewards.py": "raise SystemExit('imported')\nfrom json import loads as read\ndef digits(): ...\nLIMIT = 3\n",
    "with_star.py": "from json import *\n",
    "lazy.py": "def __getattr__(name): return name\n",
    "made.py": "globals()['later'] = 1\n",
    "broken.py": "def digits(:\n",
    "package/__init__.py": "raise SystemExit('imported')\n",
    "package/inner.py": "class Reward: ...\n",
    "package/nested/rewards.py": "def digits(): ...\n",
    "namespace/deep/rewards.py": "def digits(): ...\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        "plain_rewards:digits", "plain_rewards:read", "plain_rewards:LIMIT", "with_star:anything", "lazy:anything",
        "made:later", "broken:digits", "package.inner:Reward", "json:loads", "math:sqrt", "os.path:join",
        "namespace.deep.rewards:digits", "package.nested.rewards:digits",
    ],
)  # fmt: skip
def test_what_is_there_or_may_be_there_is_left_alone(target: str, folder: Path) -> None:
    require_defined(f"{folder}/{target}", "objective.rewards[0]")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("plain_rewards:digit", r"plain_rewards.py has no 'digit'; did you mean 'digits'\?"),
        ("package.inner:Rewards", r"inner.py has no 'Rewards'; did you mean 'Reward'\?"),
        ("rewards_away:digits", "there is no module 'rewards_away'; it must be importable from "),
        ("package.outer:Reward", "there is no module 'package.outer'"),
        ("namespace.deep.rewards:digit", r"rewards.py has no 'digit'; did you mean 'digits'\?"),
        ("namespace.deep.reward:digits", "there is no module 'namespace.deep.reward'"),
        ("plain_rewards.py:digits", "leave out .py: plain_rewards:digits"),
    ],
)
def test_what_is_missing_is_told_by_its_key(target: str, message: str, folder: Path) -> None:
    with pytest.raises(RecipeError, match=rf"cannot be imported \(objective.rewards\[0\]\): .*{message}"):
        require_defined(f"{folder}/{target}", "objective.rewards[0]")


def test_a_recipe_is_told_by_file_and_line(folder: Path) -> None:
    recipe = folder / "grpo.yaml"
    lines = (
        "model: {layers: 1, width: 16, heads: 2, vocab: 257}",
        "objective: {name: grpo, group: 2, completion_length: 8, rewards: [plain_rewards:digit]}",
        "data: {source: prompts.jsonl, sequence_length: 16}",
        "steps: 1",
        "batch_size: 2",
    )
    recipe.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"grpo.yaml:2: objective.rewards\[0\]\): .*did you mean 'digits'"):
        read_request(recipe, [])
    assert read_request(recipe, [], modules=False)[0].objective is not None
