"""A run that is killed after its last checkpoint: the same command writes the adapter and the report that it lacks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shardwise.checkpoint.resume_checks import finished
from shardwise.checkpoint.run_folder import write_job
from shardwise.core.plan import Plan
from shardwise.model.files.peft import AdapterFiles
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.loop import Job, Trainer
from tests.harness.plans import small_plan
from tests.harness.pool import Pool


def job(corpus: Path) -> tuple[Recipe, Plan]:
    values: dict[str, Any] = {
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16},
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": 2,
        "batch_size": 2,
        "adapter": {"rank": 2},
        "checkpoint": {"every": 1},
        "evaluation": {"sequences": 2},
        "strategy": {"zero_stage": 0, "micro_batch_size": 2},
    }
    recipe = recipe_of(values, SETTINGS)
    return recipe, replace(small_plan(), strategy=strategy_from(recipe.strategy))


def trained(folder: Path, corpus: Path) -> list[str]:
    """Train to the end. Returns moments in which a reader would have found no whole adapter."""
    torn: list[str] = []
    adapter, seen = folder / "adapter", []

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree") and not looking:
            looking.append(True)
            files = [adapter / name for name in ("adapter_config.json", "adapter_model.safetensors")]
            if all(file.is_file() for file in files):
                AdapterFiles(adapter)
                seen.append(event)
            elif seen:
                torn.append(f"{event} {arguments[0]}")
            looking.pop()

    looking: list[bool] = []
    sys.addaudithook(look)
    recipe, plan = job(corpus)
    Trainer(Job(recipe, plan, folder, torch.device("cpu"))).train()
    looking.append(True)
    return torn


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a finished run, and its corpus."""
    corpus = tmp_path_factory.mktemp("data") / "corpus.txt"
    corpus.write_text("all work and no play\n" * 200)
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    write_job(folder, *job(corpus))
    assert pool.run(1, trained, folder, corpus) == [[]], "a moment without an adapter"
    return folder, corpus


def contents(file: Path) -> tuple[dict[str, str], dict[str, list[list[float]]]]:
    """The header's entries, and the values by name."""
    with safe_open(file, "pt") as opened:
        return opened.metadata(), {name: opened.get_tensor(name).tolist() for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("lost", ["the adapter is of an older step", "the adapter is missing", "nothing"])
def test_what_follows_the_last_checkpoint_is_written_again(
    pool: Pool, tmp_path: Path, run: tuple[Path, Path], lost: str
) -> None:
    whole, corpus = run
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    recipe, tensors = job(corpus)[0], folder / "adapter" / "adapter_model.safetensors"
    assert finished(recipe, folder) == "nothing to do: 2 of 2 steps are done"
    if lost != "nothing":
        expected, report = contents(tensors), json.loads((folder / "report.json").read_text())
        (folder / "report.json").unlink()
        if lost == "the adapter is missing":
            shutil.rmtree(folder / "adapter")
        else:
            older = tensors.read_bytes()
            at = older.index(b"shardwise_checkpoint") + 24
            tensors.write_bytes(older[:at] + b"0000" + older[at + 4 : -8] + os.urandom(8))
        assert finished(recipe, folder) == ""
        pool.run(1, trained, folder, corpus)
        assert contents(tensors) == expected
        again = json.loads((folder / "report.json").read_text())
        for key in ("held_out_loss", "tokens", "parameters", "measured_step_seconds"):
            assert again[key] == report[key], key
        assert again["ranks"][0]["measured_peak_bytes"] == 0
    assert finished(recipe, folder) == "nothing to do: 2 of 2 steps are done"
