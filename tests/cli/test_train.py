"""The command ``train`` as a user runs it: real processes, stopped and resumed, under our launcher and torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import Shell
from tests.harness.plans import NOTHING_TO_SEARCH

STEPS = 30
STRATEGY = json.dumps({**NOTHING_TO_SEARCH, "zero_stage": 3, "micro_batch_size": 2})
# The model is wider than that of the warm-up, whose freed memory a smaller one would use again, unmeasured.
RECIPE = f"""
model: {{layers: 2, width: 128, heads: 4, kv_heads: 2, ffn: 256, vocab: 256, context: 32}}
data: {{source: CORPUS, sequence_length: 32}}
steps: {STEPS}
batch_size: 6
cluster: {{device: cpu, devices_per_node: 2}}
optimizer: {{learning_rate: 1.0e-2}}
strategy: {STRATEGY}
checkpoint: {{every: 10}}
evaluation: {{every: 15, sequences: 4}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 5, encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("CORPUS", str(tmp_path / "corpus.txt")), encoding="utf-8")
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardwise", *arguments]


def metrics(out: Path) -> list[dict[str, Any]]:
    text = (out / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # whole lines


def curve(out: Path) -> list[tuple[int, str, str, int]]:
    return [(m["step"], m["loss"].hex(), m["grad_norm"].hex(), m["tokens"]) for m in metrics(out)]


def test_trains_stops_resumes_and_reports(shell: Shell, recipe: Path, tmp_path: Path) -> None:
    """One uninterrupted run; one that gets SIGTERM, exits 75 and goes on: the same losses, bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = shell.run("train", str(recipe), "--out", str(whole))
    assert done.returncode == 0, done.stderr
    assert f"step {STEPS}/{STEPS}" in done.stdout and done.stderr == ""
    _check_files(whole)

    train = ("train", str(recipe), "--out", str(parts))
    with shell.start(*train) as run:
        while not (parts / "metrics.jsonl").exists() or len(metrics(parts)) < 4:
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 75, run.stderr
        printed = run.stdout
    stopped = len(metrics(parts))
    assert 4 <= stopped < STEPS and f"saved step {stopped}" in printed
    again = shell.run(*train)
    assert again.returncode == 0, again.stderr
    assert f"resumed after {stopped} of {STEPS} steps\n" in again.stdout
    assert curve(parts) == curve(whole)


def _check_files(out: Path) -> None:
    """The files of a run, as the contract lists them."""
    names = {path.name for path in out.iterdir()}
    assert {
        "recipe.yaml",
        "plan.json",
        "metrics.jsonl",
        "report.json",
        "report.html",
        "checkpoints",
        "logs",
    } <= names
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-20", "step-30"}
    assert {path.name for path in (out / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    lines = metrics(out)
    assert [m["step"] for m in lines] == list(range(1, STEPS + 1))
    keys = {"step", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second", "skipped"}
    assert all(keys <= set(m) for m in lines) and all(m["tokens"] == 6 * 32 for m in lines)
    assert [m["step"] for m in lines if "held_out_loss" in m] == [15, 30]
    assert lines[-1]["loss"] < lines[0]["loss"]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert all(rank["measured_peak_bytes"] > 0 for rank in report["ranks"])
    assert isinstance(report["sample"], str) and report["sample"]
    assert sum(report["ledger"].values()) == json.loads((out / "plan.json").read_text())["peak"]["bytes"]


@pytest.mark.long  # test_out_of_memory.py has a run under torchrun in `make test`
def test_under_torchrun(shell: Shell, recipe: Path, tmp_path: Path) -> None:
    """Two ranks that torchrun started: planned by one, trained by both, generated from."""
    out = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "shardwise", "train", str(recipe), "steps=5", "--out", str(out)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(metrics(out)) == 5 and (out / "report.html").exists()
    options = ["--prompt", "def ", "--tokens", "12", "--temperature", "0"]
    texts = {shell.run("generate", str(out), *options).stdout for _ in "12"}
    assert len(texts) == 1 and next(iter(texts)).startswith("def ")


@pytest.mark.long  # tests/launch/test_process.py loses a rank in `make test`
def test_a_lost_rank_is_named_and_the_run_goes_on_afterwards(
    shell: Shell, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with subprocess.Popen(
        command("train", str(recipe), "--out", str(out), "steps=200"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        while not (out / "metrics.jsonl").exists() or len(metrics(out)) < 12:
            assert run.poll() is None
            time.sleep(0.02)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text(encoding="utf-8").split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, error = run.communicate(timeout=60)
    assert run.returncode == 5
    assert error.count("\n") == 1 and "rank 1 was lost" in error and "SIGKILL" in error
    steps = metrics(out)[-1]["step"] + 2  # a busy machine lets some go by before the signal
    again = shell.run("train", str(recipe), "--out", str(out), f"steps={steps}")
    assert again.returncode == 0, again.stderr
    assert [m["step"] for m in metrics(out)] == list(range(1, steps + 1))
