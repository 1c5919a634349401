"""The recipes of docs/how-to/train-on-preferences.md train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import run as run_command
from tests.plugins.preferences.test_layouts import write_pairs
from tests.test_docs import PREFERENCES_PAGE, blocks


@pytest.mark.parametrize(("name", "measure"), [("dpo.yaml", "accuracy"), ("grpo.yaml", "reward")])
def test_the_recipes_of_the_page_train(
    name: str, measure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    for block in blocks(PREFERENCES_PAGE):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    write_pairs(tmp_path / "pairs.jsonl")
    prompts = [{"prompt": f"count from {number}: "} for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    assert run_command(["train", name, "--out", "run", "steps=2", "batch_size=8"]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert measure in json.loads(lines[-1])["measures"]
