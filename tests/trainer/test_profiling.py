"""``profile: {steps: [...]}``: traces and memory snapshots of the steps and ranks that are named, and of no others."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.memory_snapshot import snapshot_bytes
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer import memory_profile
from shardwise.trainer.loop import Job, Trainer
from tests.harness.memory_viewer import viewed
from tests.harness.plans import small_plan
from tests.harness.pool import Pool


def train(folder: Path, corpus: Path, profile: dict[str, Any]) -> list[str]:
    """The names of the files that a run's profiles left."""
    values = {
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16},
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": 5,
        "batch_size": 2,
        "profile": profile,
        "strategy": {"zero_stage": 3, "micro_batch_size": 1},
    }
    recipe = recipe_of(values, SETTINGS)
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy))
    folder.mkdir(exist_ok=True)
    if torch.distributed.get_rank() == 0:
        write_job(folder, recipe, plan)
    torch.distributed.barrier()
    Trainer(Job(recipe, plan, folder, torch.device("cpu"))).train()
    torch.distributed.barrier()
    found = (folder / "profile").rglob("*") if (folder / "profile").is_dir() else ()
    return sorted(str(path.relative_to(folder)) for path in found if path.is_file())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("all work and no play\n" * 200, encoding="utf-8")
    return tmp_path / "corpus.txt"


def test_named_steps_and_ranks_are_recorded(pool: Pool, tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "run"
    found, _ = pool.run(2, train, folder, corpus, {"steps": [4], "ranks": [1]})
    assert found == ["profile/step-4/rank-1.memory.pickle", "profile/step-4/rank-1.trace.json.gz"]
    with gzip.open(folder / found[1], "rt") as file:
        events = json.load(file)["traceEvents"]
    phases = [event["name"] for event in events if event.get("name", "").startswith("phase ")]
    assert list(dict.fromkeys(phases)) == ["phase forward", "phase backward", "phase clip", "phase optimizer"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    snapshot, levels = viewed((folder / found[0]).read_bytes())
    assert max(levels) > 16 * 32 * 4 and _memory_viz.segsum(snapshot)
    names = {frame["name"] for entry in snapshot["device_traces"][0] for frame in entry["frames"]}
    assert "aten::mm" in names and any("rms_norm" in name or "embedding" in name for name in names)
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[3])["step"] == 4


def test_a_free_that_another_thread_notes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address 8 is freed before the profile knows of it, and 64 is allocated again before its free is noted."""
    events: list[tuple[int, int, list[Any]]]
    events = [(8, -16, []), (64, 32, []), (64, 48, []), (64, -32, []), (8, 16, []), (64, -48, [])]
    monkeypatch.setattr(memory_profile, "_changes", lambda profiled: events)
    _, levels = viewed(snapshot_bytes(memory_profile.allocations_of(None)))  # type: ignore[arg-type]
    assert levels[-1] == 16 and max(levels) == 64 and min(levels) == 0


def test_a_profile_without_memory_has_a_trace_alone(pool: Pool, tmp_path: Path, corpus: Path) -> None:
    [found] = pool.run(1, train, tmp_path / "run", corpus, {"steps": [2, 3], "memory": False})
    assert found == [f"profile/step-{step}/rank-0.trace.json.gz" for step in (2, 3)]


def test_a_profile_that_cannot_be_written_is_one_warning(
    pool: Pool, tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("in the way")
    [found] = pool.run(1, train, tmp_path / "run", corpus, {"steps": [2]})
    assert found == [] and (tmp_path / "run" / "report.json").exists()
