"""A law fitted to run folders: points, refusals, the command, and its picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.main import run as run_command
from shardwise.core.errors import DataError
from shardwise.core.plan import Plan
from shardwise.plugins.scaling.files import read_law
from shardwise.plugins.scaling.fitting import run_points
from tests.report.conftest import MakeRun

RECIPE = "model: {preset: tiny}\nsteps: 30\nbatch_size: 8\n"


def folders(plan: Plan, make_run: MakeRun) -> list[Path]:
    """Runs of three sizes and three lengths, with losses of the corrected law."""
    law, made = read_law("besiroglu"), []
    for size in (10**7, 10**8, 10**9):
        for tokens in (10**9, 10**10, 10**11):
            folder = make_run(replace(plan, parameters=size), name=f"{size}-{tokens}")
            (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
            report = json.loads((folder / "report.json").read_text())
            report |= {"tokens": tokens, "held_out_loss": law.loss(size, tokens)}
            (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
            made.append(folder)
    return made


def test_the_command_fits_and_writes_a_law(
    plan: Plan, make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(folder) for folder in folders(plan, make_run)]
    out = tmp_path / "mine.toml"
    options = ["--out", str(out), "--draws", "20", "--flops", "1e20", "--flops", "1e25"]
    assert run_command(["fit", *runs, *options, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["coefficients"]["alpha"] == pytest.approx(0.3478, abs=1e-3)
    assert [each["warning"] is None for each in values["predictions"]] == [True, False]
    assert read_law(str(out)).optimum(1e20).parameters == pytest.approx(
        values["predictions"][0]["parameters"]
    )
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_loss_is_that_of_the_end(plan: Plan, make_run: MakeRun) -> None:
    first, *others = folders(plan, make_run)[:3]
    (point,) = run_points([first])
    assert (point.parameters, point.tokens) == (1e7, 1e9)
    assert point.loss == pytest.approx(read_law("besiroglu").loss(1e7, 1e9))
    # Without a validation loss in one run, all have the training loss of their last steps.
    report = json.loads((first / "report.json").read_text()) | {"held_out_loss": None}
    (first / "report.json").write_text(json.dumps(report), encoding="utf-8")
    assert all(1.5 < each.loss < 1.7 for each in run_points([first, *others]))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (RECIPE + "adapter: {rank: 4}\n", "it trains an adapter"),
        (RECIPE + "data: {sequence_length: 64}\n", "data.sequence_length differs"),
    ],
)
def test_runs_that_do_not_compare_are_refused(recipe: str, said: str, plan: Plan, make_run: MakeRun) -> None:
    first, second, *_ = folders(plan, make_run)
    (second / "recipe.yaml").write_text(recipe, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        run_points([first, second])
    assert said in caught.value.line()


def test_an_unfinished_run_is_refused(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan, finished=False)
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.raises(DataError, match="not finished"):
        run_points([folder])
