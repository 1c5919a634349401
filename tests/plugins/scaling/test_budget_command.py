"""``shardwise budget``: what it prints, the recipe that it writes, and that this recipe is planned, fits and trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import run
from shardwise.core.run_files import StepRecord
from shardwise.jobs.planning import make_plan
from shardwise.jobs.request import read_request
from shardwise.report.record import read_run
from tests.harness.commands import Shell

CPU = """
model: {layers: 1, width: 16, heads: 2, ffn: 48, vocab: 256, context: 16}
data: {source: CORPUS, sequence_length: 16}
steps: 200
batch_size: 4
schedule: {warmup: 100}
strategy: {zero_stage: 0, micro_batch_size: 4, activation_checkpointing: none, loss: logits}
evaluation: {sequences: 4}
"""
H100 = """
model: {preset: llama-3-8b}
data: {sequence_length: 2048}
steps: 1
batch_size: 512
cluster: {preset: PRESET}
strategy: {precision: bf16}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of a byte-level model on this machine."""
    (tmp_path / "corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(CPU.replace("CORPUS", str(tmp_path / "corpus.txt")), encoding="utf-8")
    return path


def budget(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["budget", *words, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def check_recipe(path: Path, values: dict[str, Any]) -> None:
    """The written recipe is planned as it was printed, and fits."""
    asked, cluster = read_request(path, [])
    plan = make_plan(asked, cluster)
    assert plan.fits
    assert (plan.parameters, plan.line) == (values["parameters"], values["strategy"])
    assert asked.steps * plan.step.tokens == values["tokens"]
    assert asked.steps * plan.step.seconds == pytest.approx(values["seconds"])
    assert asked.steps * plan.step.model_flops == values["flops"]


def test_the_written_recipe_is_planned_as_printed(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out.yaml", tmp_path / "budget.html"
    values = budget(capsys, str(recipe), "--tokens", "256", "--write", str(out), "--html", str(page))
    keys = {"parameters", "tokens", "flops", "loss", "seconds", "strategy", "law"}
    assert keys <= values.keys()
    assert (values["steps"], values["tokens"], values["law"]) == (4, 256, "besiroglu")
    assert "extrapolated" in values["warnings"][0]
    check_recipe(out, values)
    assert "<svg" in page.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_written_recipe_trains(
    recipe: Path, tmp_path: Path, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.yaml"
    assert budget(capsys, str(recipe), "--tokens", "256", "--write", str(out))["steps"] == 4
    done = shell.run("train", str(out), "--out", str(tmp_path / "run"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    steps: tuple[StepRecord, ...] = read_run(tmp_path / "run").steps
    assert [step.step for step in steps] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "none of --flops, --hours and --tokens is given"),
        (["--hours", "1", "--tokens", "9"], "2 of --flops, --hours and --tokens are given"),
        (["--hours", "1", "--law", "kaplan"], "unknown law 'kaplan' (command line: law)"),
        (["--hours", "1", "--law", "."], "unknown law '.'"),
        (["--tokens", "1e15"], "steps, of 1,000,000,000 at most (batch_size)"),
        (["--tokens", "1e300"], "e+298 steps, of 1,000,000,000 at most (batch_size)"),
        (["--hours", "0"], "greater than or equal to 0.000001"),
        (["--flops", "inf"], "a budget must be finite"),
        (["--tokens", "9", "--serve-tokens", "inf"], "a budget must be finite"),
    ],
)
def test_wrong_options(words: list[str], said: str, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["budget", str(recipe), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.long
def test_a_minute_of_this_machine(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.yaml"
    values = budget(capsys, str(recipe), "--hours", str(1 / 60), "--write", str(out))
    assert values["seconds"] == pytest.approx(60, rel=0.01)
    assert all(each["loss_difference"] > -1e-3 for each in values["neighbours"])
    check_recipe(out, values)


@pytest.mark.long
@pytest.mark.parametrize(("preset", "devices"), [("8xH100-80GB", 8), ("64xH100-80GB", 64)])
def test_a_day_of_gpus(preset: str, devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out.yaml"
    recipe.write_text(H100.replace("PRESET", preset), encoding="utf-8")
    values = budget(capsys, str(recipe), "--hours", "24", "--write", str(out))
    assert values["seconds"] == pytest.approx(86_400, rel=1e-3)
    # Between a fifth and four fifths of the peak of 989 TFLOP/s.
    assert 0.2 < values["flops"] / (devices * 86_400 * 989e12) < 0.8
    assert 10 < values["tokens_per_parameter"] < 40
    assert all(each["loss_difference"] > -1e-3 for each in values["neighbours"])
    check_recipe(out, values)
