"""The core does without the plugins: a copy of the package that has none trains, verifies and exports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core.plugins import VERBS
from tests.harness.core_copy import copy_core, core_environment
from tests.harness.corpora import write_words
from tests.harness.plans import NOTHING_TO_SEARCH

RECIPE = """
model: {layers: 1, width: 32, heads: 2, ffn: 64, vocab: 256, context: 32}
data: {source: words.txt, sequence_length: 16}
steps: 2
batch_size: 4
cluster: {device: cpu, devices_per_node: 2}
strategy: STRATEGY
"""
STRATEGY = {**NOTHING_TO_SEARCH, "zero_stage": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    copy_core(folder)
    write_words(folder / "words.txt")
    (folder / "recipe.yaml").write_text(RECIPE.replace("STRATEGY", json.dumps(STRATEGY)), encoding="utf-8")
    return folder


def shell(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", *arguments]
    environment = core_environment(folder)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_core_does_its_work(folder: Path) -> None:
    for line in ("train recipe.yaml --out run", "export run model"):
        done = shell(folder, *line.split())
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (folder / "model" / "config.json").is_file() and (folder / "run" / "report.html").is_file()


@pytest.mark.long
def test_the_core_verifies(folder: Path) -> None:
    done = shell(folder, "verify", "recipe.yaml", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_what_plugins_add_is_absent(folder: Path) -> None:
    help_page = shell(folder, "--help").stdout
    assert "verify" in help_page and not any(f"│ {verb} " in help_page for verb in VERBS)
    asked = shell(folder, "plan", "recipe.yaml", "--serve")
    assert asked.returncode == 2
    assert asked.stderr.startswith("error: shardwise.plugins.serve is not installed (--serve)")
    traced = shell(folder, "train", "recipe.yaml", "--out", "tracked", "trackers=[csv]")
    assert traced.returncode == 0 and "tracker csv stopped: RecipeError" in traced.stderr + traced.stdout
