"""Memory that runs out under the command ``train``: torchrun's ranks go on, a resume remembers, and the end has advice.

The model is a user's own, whose loss asks for more than any machine has where a micro-batch is larger than it fits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
strategy: {{zero_stage: 3, micro_batch_size: 8}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "points.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


def train(
    folder: Path, fits: int, *arguments: str, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    ranks = ["torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1", "-m"]
    command = [
        sys.executable,
        "-m",
        *(ranks if torchrun else []),
        "shardwise",
        "train",
        "recipe.yaml",
        *arguments,
    ]
    environment = {**os.environ, "FITS": str(fits), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_goes_on_and_remembers(folder: Path) -> None:
    done = train(folder, 4, "--out", "run", torchrun=True)
    assert done.returncode == 0, done.stderr
    told = "out of memory on rank 1 in step 1: micro_batch_size is now 4, accumulated 2 times"
    assert done.stdout.count("out of memory") == 1 and told in done.stdout
    plan, report = (json.loads((folder / "run" / f"{name}.json").read_text()) for name in ("plan", "report"))
    assert plan["strategy"]["micro_batch_size"] == 4 and plan["micro_batches"] == 2
    for rank in report["ranks"]:
        predicted = plan["allocated_bytes"].get(str(rank["rank"]), plan["allocated_bytes"]["0"])
        assert rank["predicted_peak_bytes"] == predicted
    assert report["ledger"] == plan["ledger"]

    again = train(folder, 4, f"steps={STEPS + 2}", "--out", "run")
    assert again.returncode == 0, again.stderr
    assert "micro_batch_size is 4: with 8 memory ran out on rank 1 in step 1 (shortage.json)" in again.stdout
    assert "out of memory" not in again.stdout and "mb4×ga2" in again.stdout
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 3))


def test_ends_with_the_nearest_plan(folder: Path) -> None:
    done = train(folder, 0, "--out", "run")
    assert done.returncode == 7
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(
        "error: out of memory with a micro-batch of 1 (rank 1, "
    )
    assert "nearest plan that fits in" in done.stderr or "no plan fits in" in done.stderr
