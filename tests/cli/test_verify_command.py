"""``shardwise verify``: what it prints and exits with, and the folder whose logs its errors name."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shardwise.cli.main import run
from shardwise.core.json_file import text_of
from shardwise.core.plan import Plan
from shardwise.jobs import verifying
from shardwise.launch import launcher as launching
from shardwise.verifier.verdict import Allowed, ComparedCounts, Verdict
from tests.harness.commands import Shell

RECIPE = """
model: {layers: 1, width: 16, heads: 2, ffn: 32, vocab: 256, context: 16}
data: {source: CORPUS, sequence_length: 16}
steps: 2
batch_size: 4
strategy: {zero_stage: 0, micro_batch_size: 2, activation_checkpointing: none, loss: logits}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Temporary folders are made in ``scratch``."""
    (tmp_path / "corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("CORPUS", str(tmp_path / "corpus.txt")), encoding="utf-8")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return str(path)


Judged = Callable[[Verdict | int], None]


@pytest.fixture
def judged(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Nothing is planned, and no process is started: the ranks leave this verdict, or end with this code."""

    def judge(verdict: Verdict | int) -> None:
        def run_ranks(
            processes: int, arguments: list[str], *rest: object, **options: object
        ) -> tuple[int, str]:
            if isinstance(verdict, int):
                return verdict, ""
            (Path(arguments[1]) / "verify.json").write_text(text_of(verdict), encoding="utf-8")
            return 0, ""

        monkeypatch.setattr(verifying, "make_plan", lambda *arguments, **options: plan)
        monkeypatch.setattr(launching, "run_ranks", run_ranks)

    return judge


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "scratch").glob("shardwise-verify-*")]


def test_a_strategy_that_trains_as_one_process_does(shell: Shell, recipe: str, tmp_path: Path) -> None:
    """Really trained, twice."""
    scratch = {"TMPDIR": str(tmp_path / "scratch")}
    done = shell.run("verify", recipe, "--steps", "2", "--json", environment=scratch)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict.keys() == {field.name for field in fields(Verdict)} | {"passed"}
    assert verdict["passed"] is True and verdict["steps"] == 2
    assert left(tmp_path) == []


def test_a_verdict_in_words(
    recipe: str, judged: Judged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(Verdict(1e-7, 2e-7, 3e-7, "layers.0", 1e-5, 20))
    assert run(["verify", recipe]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fp32 · zero0×1 · mb2×ga2 against one plain process, 20 steps")
    assert [line.split() for line in lines[1:4]] == [
        ["loss", "1.00e-07"],
        ["gradient", "norm", "2.00e-07"],
        ["parameters", "3.00e-07"],
    ]
    assert lines[4] == "  passed at a tolerance of 1e-05"
    assert left(tmp_path) == []


def test_a_strategy_that_does_not(
    recipe: str, judged: Judged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(Verdict(1e-7, 1e-7, 2e-5, "layers.0.up", 1e-5, 20))
    assert run(["verify", recipe]) == 6
    out, err = capsys.readouterr()
    assert "FAILED at a tolerance of 1e-05" in out
    assert err.count("\n") == 1 and "worst parameter: layers.0.up" in err
    assert left(tmp_path) == []


def test_advantages_of_zero_leave_nothing_to_compare(
    recipe: str, judged: Judged, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(Verdict(0.0, 9e-3, 2e-5, "layers.0.up", 1e-5, 20, untrained=20))
    assert run(["verify", recipe]) == 3
    out, err = capsys.readouterr()
    assert "nothing compared at a tolerance of 1e-05" in out and "FAILED" not in out
    assert "nothing to compare: all advantages are zero (objective.rewards): in all 20 steps" in err
    judged(replace(NEAR, proof=replace(PROOF, untrained=3)))
    assert run(["verify", recipe]) == 3 and "in the first 3 steps" in capsys.readouterr().err


PROOF = Verdict(
    1e-14, 2e-14, 3e-14, "layers.0.up", 1e-10, 20, precision="fp64", notes=("precision: fp64 for fp16",)
)
NEAR = Verdict(
    1e-3,
    2e-2,
    3e-3,
    "layers.0.up",
    1e-5,
    20,
    precision="fp16",
    allowed=Allowed(4e-3, 9e-2, 2e-2, 5e-3),
    compared=20,
    counted=ComparedCounts((20, 20), (12, 18), (38, 39), (0, 39)),
    max_gradient_difference=1e-2,
    worst_gradient="layers.1.up",
    skipped=(2, 2),
    notes=("dropout is off in all runs",),
    proof=PROOF,
)


def test_a_run_in_fewer_bits_is_shown_with_its_noise_and_its_proof(
    recipe: str, judged: Judged, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(NEAR)
    assert run(["verify", recipe]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  loss           1.00e-03, allowed 4.00e-03",
        "  gradient norm  2.00e-02, allowed 9.00e-02, in 12 of 18; noise hides the others",
        "  gradients      1.00e-02, allowed 2.00e-02, in 38 of 39; noise hides the others",
        "  parameters     not compared, because rounding noise would hide an error of 10 %",
        "  skipped updates: 2, of the plain process 2; their norms are left out",
        "  dropout is off in all runs",
        "  passed within the rounding noise of plain processes",
        "the same layout in fp64 against one plain process in fp64:",
        "  loss           1.00e-14",
        "  gradient norm  2.00e-14",
        "  parameters     3.00e-14",
        "  precision: fp64 for fp16",
        "  passed at a tolerance of 1e-10",
    ]
    none = ComparedCounts((20, 20), (0, 18), (0, 0), (39, 39))
    judged(replace(NEAR, counted=none))
    assert run(["verify", recipe]) == 0
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "  gradient norm  not compared, because rounding noise would hide an error of 10 %",
        "  gradients      not compared",
        "  parameters     3.00e-03, allowed 5.00e-03",
    ]


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (replace(NEAR, proof=replace(PROOF, max_loss_difference=1e-6)), "in fp64 is above 1e-10"),
        (replace(NEAR, max_loss_difference=1e-2), "of the loss is above what rounding noise explains;"),
        (replace(NEAR, max_gradient_difference=0.1), "explains (worst parameter: layers.1.up)"),
        (replace(NEAR, max_parameter_difference=0.1), "explains (worst parameter: layers.0.up)"),
        (replace(NEAR, skipped=(19, 2)), "it skipped 19 updates, the plain process 2"),
        (replace(NEAR, unskipped=1), "1 of 20 steps updated with a gradient that is not finite"),
    ],
)
def test_what_failed_in_fewer_bits_is_named(
    verdict: Verdict, why: str, recipe: str, judged: Judged, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(verdict)
    assert run(["verify", recipe]) == 6
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err


@pytest.mark.parametrize("code", [5, 7])
def test_a_failed_run_s_logs_are_kept(code: int, recipe: str, judged: Judged, tmp_path: Path) -> None:
    judged(code)
    assert run(["verify", recipe]) == code
    assert len(left(tmp_path)) == 1
