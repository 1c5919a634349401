"""A finished run, and commands on its folder: a command that is refused, or has no work, changes no file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shardwise.checkpoint.run_folder import LOCK, forget_report
from shardwise.cli import planner
from shardwise.cli.main import run
from shardwise.launch import launcher as launching
from shardwise.report.record import read_run
from tests.harness.commands import Shell
from tests.harness.pool import Pool

RECIPE = """
model: {layers: 1, width: 16, heads: 2, ffn: 32, vocab: 256, context: 16}
data: {source: CORPUS, sequence_length: 16}
steps: 2
batch_size: 4
strategy: {zero_stage: 0, micro_batch_size: 2, activation_checkpointing: none, loss: logits}
checkpoint: {every: 1}
evaluation: {sequences: 4}
"""


TRAIN = ("train", "recipe.yaml", "--out", "run", "--exact-memory")


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a recipe, and in ``run`` what it came to."""
    folder = with_recipe(tmp_path_factory.mktemp("finished"))
    done = Shell(pool).run(*TRAIN, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def with_recipe(folder: Path) -> Path:
    (folder / "corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    (folder / "recipe.yaml").write_text(
        RECIPE.replace("CORPUS", str(folder / "corpus.txt")), encoding="utf-8"
    )
    return folder


@pytest.fixture
def words(folder: Path) -> Callable[..., list[str]]:
    """The command that trains in ``out``, by default the folder of the run that is done."""

    def command(*overrides: str, out: Path = folder / "run") -> list[str]:
        return ["train", str(folder / "recipe.yaml"), *overrides, "--out", str(out)]

    return command


def contents(run_folder: Path) -> dict[str, bytes]:
    files = (path for path in run_folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(run_folder)): path.read_bytes() for path in files}


def refusal(command: list[str], code: int, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that is refused with an exit code and changes no file."""
    before = contents(run_folder)
    assert run(command) == code
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert contents(run_folder) == before
    return told


def never(*arguments: Any, **options: Any) -> NoReturn:
    raise AssertionError("ranks were started")


@pytest.mark.long
def test_a_run_goes_to_its_end_when_its_output_has_no_reader(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "shardwise", *TRAIN]
    folder = with_recipe(tmp_path)
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read().decode()
        assert process.wait(300) == 0, error
    found = read_run(folder / "run")
    assert [step.step for step in found.steps] == [1, 2]
    assert found.outcome is not None and found.outcome.worst.measured_peak_bytes > 0
    assert (folder / "run" / "report.html").exists()


def test_nothing_to_do_changes_nothing(
    folder: Path,
    words: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "run_ranks", never)
    before = contents(folder / "run")
    for steps in (2, 1):
        assert run(words(f"steps={steps}")) == 0
        assert capsys.readouterr().out == f"nothing to do: 2 of {steps} steps are done\n"
    assert (
        planner.main("prepare", str(folder / "recipe.yaml"), str(folder / "run"), "seed=0")
        == planner.FINISHED
    )
    assert capsys.readouterr().out == "nothing to do: 2 of 2 steps are done\n"
    assert contents(folder / "run") == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optimizer.learning_rate=0.5"], "optimizer.learning_rate was 0.0003, now 0.5"),
        (["strategy.zero_stage=3"], "strategy.zero_stage was 0, now 3"),
        (["law=hoffmann-3"], "law was besiroglu, now hoffmann-3"),
        (["evaluation.every=1", "steps=1"], "evaluation.every was None, now 1"),
        (["data.source=stdlib"], "/corpus.txt, now stdlib"),
    ],
)
def test_settings_that_a_finished_run_would_ignore_are_named(
    overrides: list[str],
    says: str,
    folder: Path,
    words: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "run_ranks", never)
    told = refusal(words(*overrides), 2, folder / "run", capsys)
    assert "finished, with other settings" in told and says in told


@pytest.mark.parametrize("key", ["checkpoint.start_from", "adapter.start_from"])
def test_other_weights_to_start_from_are_refused_where_they_would_be_ignored(
    key: str,
    folder: Path,
    words: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder has checkpoints of its own."""
    monkeypatch.setattr(launching, "run_ranks", never)
    given = words("steps=4", f"{key}={folder / 'run' / 'checkpoints'}")
    assert run(given) == (2 if key.startswith("checkpoint") else 4)  # without an adapter it is another run
    told = capsys.readouterr().err
    assert "would be ignored" in told or "adapter.alpha was None" in told


def test_a_run_that_ended_before_its_report_gets_one(
    folder: Path, tmp_path: Path, words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "run_ranks", never)
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    assert run(words(out=tmp_path / "run")) == 0
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("seed=1", 4, "seed was 0, now 1"),
        ("batch_size=8", 4, "batch_size was 4, now 8"),
        ("data.sequence_length=8", 3, "data.sequence_length was 16, now 8"),
        ("data.held_out=0.2", 3, "data.held_out was 0.05, now 0.2"),
    ],
)
def test_what_is_refused_changes_nothing(
    override: str,
    code: int,
    says: str,
    folder: Path,
    words: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "run_ranks", never)
    told = refusal(words("steps=4", override), code, folder / "run", capsys)
    assert says in told


def test_while_more_steps_are_trained_there_is_no_report_of_the_first(
    folder: Path,
    tmp_path: Path,
    words: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks that end as soon as they have begun; then the verb that draws a run."""
    shutil.copytree(folder / "run", tmp_path / "run")
    assert read_run(tmp_path / "run").outcome is not None

    def run_ranks(*arguments: Any, **options: Any) -> tuple[int, str]:
        assert read_run(tmp_path / "run").outcome is not None, "who is refused by the ranks keeps it"
        forget_report(tmp_path / "run")
        return 75, ""

    monkeypatch.setattr(launching, "run_ranks", run_ranks)
    assert run(words("steps=4", out=tmp_path / "run")) == 75
    found = read_run(tmp_path / "run")
    assert found.outcome is None and len(found.steps) == 2 and "steps: 4" in found.recipe
    capsys.readouterr()
    (tmp_path / "run" / "report.html").unlink()
    assert run(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'run' / 'report.html'}\n"
    assert "<html" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_damaged_end_is_trained_again(
    folder: Path, tmp_path: Path, words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all steps are done by a checkpoint that is whole, so ranks are started, which pass over the other."""
    shutil.copytree(folder / "run", tmp_path / "run")
    weights = next((tmp_path / "run" / "checkpoints" / "step-2").glob("weights-*"))
    weights.write_bytes(weights.read_bytes()[:-1])
    started = []

    def run_ranks(processes: int, arguments: list[str], *others: Any, **named: Any) -> tuple[int, str]:
        started.append((processes, arguments))
        return 75, ""

    monkeypatch.setattr(launching, "run_ranks", run_ranks)
    assert run(words(out=tmp_path / "run")) == 75
    assert started == [(1, ["train", "--", str(tmp_path / "run")])]
    assert json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))["fits"]


@pytest.mark.parametrize("override", ["strategy.precision=fp64", "data.source=other.txt"])
def test_what_the_workers_refuse_leaves_the_recipe_and_the_plan(
    override: str, folder: Path, tmp_path: Path, shell: Shell
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "other.txt").write_text(RECIPE * 20, encoding="utf-8")
    before = contents(tmp_path / "run")
    done = shell.run(*TRAIN, "steps=3", override, folder=tmp_path)
    assert done.returncode in (3, 4) and "error: the checkpoint " in done.stderr
    after = contents(tmp_path / "run")
    assert after.keys() == before.keys()
    assert [name for name in ("recipe.yaml", "plan.json") if after[name] != before[name]] == []


def test_a_run_that_was_interrupted_says_why(
    folder: Path,
    tmp_path: Path,
    words: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    monkeypatch.setattr(launching, "run_ranks", lambda *arguments, **options: (5, "error: rank 1 was lost"))
    assert run(words("steps=4", out=tmp_path / "run")) == 5
    assert capsys.readouterr().err == "error: rank 1 was lost\n"
    last = (tmp_path / "run" / "attempts.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(last)["error"] == "error: rank 1 was lost"
