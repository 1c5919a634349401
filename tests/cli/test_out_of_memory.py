"""Out of memory under the command ``train``: restarts by Shardwise and by torchrun, a resume, advice at the end.

The model is a factory whose loss allocates 4 PiB when a micro-batch is larger than ``FITS``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core.attempts import interruptions
from shardwise.core.identity import starts
from tests.harness.commands import Done, Shell

STEPS = 4
MODEL = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

class Points(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        return {"points": torch.full((64,), index / 256), "labels": torch.tensor(index % 4)}

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
    def units(self):
        return list(self.blocks)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def loss(model, batch):
    size = len(batch["labels"])
    if os.environ.get("RANK") == "1" and torch.is_grad_enabled() and size > int(os.environ["FITS"]):
        torch.empty(2**50)
    labels = batch["labels"]
    return F.cross_entropy(model(batch["points"])[:, :4], labels, reduction="sum"), (labels >= 0).sum()

def factory():
    return Layers(), loss, Points
"""
RECIPE = f"""
model: {{factory: "points:factory"}}
steps: {STEPS}
batch_size: 16
cluster: {{device: cpu, devices_per_node: 2}}
strategy: {{zero_stage: 3, micro_batch_size: 8, tensor_parallel: 1, sequence_parallel: 1, pipeline_parallel: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "points.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


def train(shell: Shell, folder: Path, fits: int, *overrides: str) -> Done:
    words = ("train", "recipe.yaml", *overrides, "--out", "run")
    return shell.run(*words, folder=folder, environment={"FITS": str(fits)}, ranks=8)


def assert_halved(shell: Shell, folder: Path) -> None:
    """The plan and the report are of a micro-batch of 4 instead of 8, and a resume starts with that."""
    plan, report = (json.loads((folder / "run" / f"{name}.json").read_text()) for name in ("plan", "report"))
    assert plan["strategy"]["micro_batch_size"] == 4 and plan["micro_batches"] == 2
    for rank in report["ranks"]:
        predicted = plan["allocated_bytes"].get(str(rank["rank"]), plan["allocated_bytes"]["0"])
        assert rank["predicted_peak_bytes"] == predicted
    assert report["ledger"] == plan["ledger"]
    again = train(shell, folder, 4, f"steps={STEPS + 2}")
    assert again.returncode == 0, again.stderr
    assert REASON in again.stdout and again.stdout.count("out of memory") == 1 and "mb4×ga2" in again.stdout
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 3))


REASON = "micro_batch_size is 4: with 8, rank 1 ran out of memory in step 1 (oom.json)"


@pytest.mark.long
def test_the_ranks_start_again(shell: Shell, folder: Path) -> None:
    done = train(shell, folder, 4)
    assert (done.returncode, done.stderr) == (0, "")
    told = "out of memory on rank 1 in step 1: micro_batch_size is now 4, accumulated 2 times; going on from the start"
    assert done.stdout.count("out of memory") == 1 and told in done.stdout
    assert_halved(shell, folder)


def test_ranks_of_torchrun_exit_and_the_same_command_goes_on(shell: Shell, folder: Path) -> None:
    words = ("train", "recipe.yaml", "--out", "run")
    first = shell.run_ranks(2, *words, folder=folder, environment={"FITS": "4"})
    assert [done.returncode for done in first] == [75, 75], first[0].stderr + first[1].stderr
    line = first[1].stderr.splitlines()[-1]
    assert line.startswith("error: out of memory (rank 1, step 1): tried to allocate 4.00 PiB with ")
    assert line.endswith(" already allocated; the same command goes on with micro_batch_size 4")
    second = shell.run_ranks(2, *words, folder=folder, environment={"FITS": "4"})
    assert [done.returncode for done in second] == [0, 0], second[0].stderr + second[1].stderr
    assert REASON in second[0].stdout
    commands = [start.command for start in starts(folder / "run")]
    assert commands == ["shardwise train recipe.yaml --out run"] * 2, "not that of the process that plans"
    [outage] = interruptions(folder / "run")
    assert "out of memory" in outage.cause
    assert_halved(shell, folder)


@pytest.mark.long
def test_torchrun_restarts_the_ranks(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--max-restarts=1", "-m", "shardwise", "train", "recipe.yaml"]
    environment = {**os.environ, "FITS": "4", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--out", "run"], capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert REASON in done.stdout and (folder / "run" / "report.json").exists()


def test_ends_with_the_nearest_plan(shell: Shell, folder: Path) -> None:
    done = train(shell, folder, 0)
    assert done.returncode == 7
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(
        "error: out of memory with a micro-batch of 1 (rank 1, step 1): tried to allocate 4.00 PiB with "
    )
    assert "nearest plan that fits in" in done.stderr or "no plan fits in" in done.stderr
