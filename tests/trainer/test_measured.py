"""What a whole run measures, as its report says: the plan's peak, whatever else the run does in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.harness.commands import Shell
from tests.harness.corpora import write_words

MODEL = {"layers": 4, "width": 384, "heads": 6, "kv_heads": 2, "ffn": 1024, "vocab": 2048, "context": 512}


@pytest.mark.parametrize(
    "arguments",
    [[], pytest.param(["--exact-memory"], marks=pytest.mark.long)],
    ids=["first steps", "all steps"],
)
def test_a_run_takes_the_memory_it_was_planned(arguments: list[str], shell: Shell, tmp_path: Path) -> None:
    """With weights within the measure, evaluations and checkpoints outside of it: every rank, 5 %."""
    values = {
        "model": MODEL,
        "data": {"source": str(write_words(tmp_path / "corpus.txt")), "sequence_length": 96},
        "steps": 4,
        "batch_size": 8,
        "cluster": {"device": "cpu", "devices_per_node": 2},
        "strategy": {"zero_stage": 1, "micro_batch_size": 4, "activation_checkpointing": "none"},
        "evaluation": {"every": 2, "sequences": 2},
        "checkpoint": {"every": 2},
    }
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = shell.run("train", str(recipe), "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    ranks = json.loads((out / "report.json").read_text(encoding="utf-8"))["ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        predicted, measured = rank["predicted_peak_bytes"], rank["measured_peak_bytes"]
        assert abs(predicted / measured - 1) <= 0.05, (predicted, measured)
