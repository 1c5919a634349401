"""A small model learns a preference, judged on pairs that it was not trained on; a kill changes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.harness.killed_run import killed_and_whole
from tests.plugins.preferences.test_layouts import recipe_for

LETTERS = "abcdefgh"


def write_echoes(path: Path, count: int = 4000) -> None:
    """The chosen answer is the last letter of the prompt, the rejected one another letter: neither is more frequent."""
    chance = random.Random(0)

    def row() -> dict[str, str]:
        chosen, rejected = chance.sample(LETTERS, 2)
        noise = "".join(chance.choices(LETTERS, k=6))
        return {"prompt": f"{noise} {chosen}? ", "chosen": chosen, "rejected": rejected}

    path.write_text("\n".join(json.dumps(row()) for _ in range(count)), encoding="utf-8")


def evaluations(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [line["metrics"] for line in lines if line.get("metrics")]


@pytest.mark.long
def test_accuracy_on_held_out_pairs_rises_from_a_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks under ZeRO 3, with a frozen copy as reference."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    pairs = tmp_path / "echoes.jsonl"
    write_echoes(pairs)
    recipe = recipe_for(
        tmp_path,
        steps=160,
        batch_size=64,
        data={"source": str(pairs), "sequence_length": 24, "held_out": 0.05},
        optimizer={"learning_rate": 5e-3},
        evaluation={"every": 5, "sequences": 128},
        checkpoint={"every": 40},
        cluster={"device": "cpu", "devices_per_node": 2},
    )
    pinned = ["strategy.zero_stage=3", "strategy.micro_batch_size=32", "strategy.precision=fp32"]
    killed, whole = killed_and_whole(recipe, tmp_path, pinned, step=40)
    assert [line["loss"] for line in killed] == [line["loss"] for line in whole]
    assert evaluations(killed) == evaluations(whole)
    accuracies = [values["accuracy"] for values in evaluations(whole)]
    assert accuracies[0] == pytest.approx(0.5, abs=0.1)
    assert accuracies[-1] > 0.9
