"""Training with expert parallelism: steps that need more room, and checkpoints under another degree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.commands import Shell
from tests.harness.plans import NOTHING_TO_SEARCH

RECIPE: dict[str, Any] = {
    "model": {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 256,
        "ffn": 48,
        "context": 32,
        "experts": 4,
        "expert_ffn": 48,
        "balance_loss": 0.0,
    },
    "data": {"source": "stdlib", "sequence_length": 32},
    "steps": 6,
    "batch_size": 8,
    "schedule": {"name": "constant"},
    "cluster": {"device": "cpu", "devices_per_node": 2},
    "strategy": {**NOTHING_TO_SEARCH, "expert_parallel": 2, "zero_stage": 1, "micro_batch_size": 2},
}


def test_steps_that_need_more_room_run_again_and_another_degree_goes_on(shell: Shell, tmp_path: Path) -> None:
    """Two ranks, then one: the losses are those of one process without expert parallelism."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    alone = ("cluster.devices_per_node=1", "strategy.expert_parallel=1", "steps=6")
    runs = {
        "first": ("run", "strategy.expert_capacity=1.0", "steps=2"),
        "resumed": ("run", "strategy.expert_capacity=1.0", "steps=4"),
        "second": ("run", *alone),
        "plain": ("plain", *alone),
    }
    said = {}
    for name, (folder, *changes) in runs.items():
        done = shell.run("train", "recipe.yaml", "--out", folder, *changes, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout + done.stderr
    assert "step 1: a rank's experts got" in said["first"] and "the step is run again" in said["first"]
    assert "run again" not in said["resumed"], "the checkpoint has the room that step 1 needed"
    assert "run again" not in said["second"] + said["plain"]
    divided, plain = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "plain")
    )
    assert [record["step"] for record in divided] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in divided] == pytest.approx([r[key] for r in plain], rel=1e-5)
    imbalance = [record.get("load_imbalance") for record in divided]
    assert all(value is not None and 1 <= value <= 2 for value in imbalance[:4]) and imbalance[4:] == [
        None,
        None,
    ]
    for key in ("busiest_expert", "dead_experts"):
        assert [r[key] for r in divided] == pytest.approx([r[key] for r in plain], rel=1e-5)
    experts = json.loads((tmp_path / "plain" / "report.json").read_text())["experts"]
    assert experts["steps"] == 6 and experts["layers"] == [f"layers.{n}.mlp.experts" for n in (0, 1)]
    assert [sum(row) for row in experts["load"]] == pytest.approx([4.0, 4.0], abs=1e-3)
    assert "the busiest expert is number" in (tmp_path / "plain" / "report.html").read_text()
