"""A disk that fails under the command ``train``: one line, the right exit code, and the last checkpoint still there.

A limit on file sizes stands in for a full disk: the run gets an error from the same system call.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.commands import Done, Shell

SMALL = 100 * 2**10
"""Bytes of the largest file, which holds the run's records but not the state of its optimizer."""

RECIPE = """
model: {layers: 2, width: 64, heads: 2, kv_heads: 2, ffn: 128, vocab: 256, context: 32}
data: {source: corpus.txt, sequence_length: 32}
steps: 4
batch_size: 2
checkpoint: {every: 2}
cluster: {device: cpu, devices_per_node: 1}
strategy: {precision: fp32, zero_stage: 1, activation_checkpointing: none, micro_batch_size: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("one two three four five six seven eight nine ten. " * 200)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "state").mkdir()
    return tmp_path


def train(shell: Shell, folder: Path, *overrides: str, largest: int | None = None) -> Done:
    return shell.run("train", "recipe.yaml", *overrides, "--out", "run", folder=folder, largest_file=largest)


def test_a_full_disk_ends_the_run_with_7_and_the_run_goes_on_when_there_is_room(
    shell: Shell, folder: Path
) -> None:
    assert train(shell, folder, "steps=2").returncode == 0
    kept = sorted(path.name for path in (folder / "run/checkpoints").iterdir())

    full = train(shell, folder, "strategy.offload=nvme:state", largest=SMALL)
    assert full.returncode == 7, full.stderr
    place = f"offload: nvme:{folder}/state"
    assert full.stderr.startswith(f"error: cannot reserve the file of offloaded state ({place}): ")
    assert full.stderr.count("\n") == 1 and "free some space or name another folder" in full.stderr
    assert sorted(path.name for path in (folder / "run/checkpoints").iterdir()) == kept
    assert list((folder / "state").iterdir()) == []

    again = train(shell, folder, "strategy.offload=nvme:state")
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_a_folder_that_is_missing_is_refused(shell: Shell, folder: Path) -> None:
    missing = train(shell, folder, "strategy.offload=nvme:nowhere")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1, missing.stderr
    assert "nvme:nowhere" in missing.stderr and "there is no such folder" in missing.stderr
