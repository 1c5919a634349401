"""The folder of a run: who may train in it, and a plan that is not one of this version."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.run_folder import claim, lacks_page, read_job, with_date, write_job
from shardwise.core.errors import DataError, RecipeError
from shardwise.recipe.load import recipe_of
from shardwise.report.record import read_run
from tests.harness.plans import small_plan


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    with pytest.raises(RecipeError, match="not UTF-8"), claim(folder):
        pass
    assert not folder.exists()


def test_a_page_is_lacking_when_it_is_older_than_its_report(tmp_path: Path) -> None:
    page, report = tmp_path / "report.html", tmp_path / "report.json"
    assert lacks_page(tmp_path)
    page.touch()
    assert not lacks_page(tmp_path)
    report.touch()
    os.utime(page, ns=(0, 0))
    assert lacks_page(tmp_path)


def test_a_job_reads_back(tmp_path: Path) -> None:
    recipe = recipe_of({"model": {"preset": "tiny"}, "steps": 1, "batch_size": 4})
    write_job(tmp_path, recipe, small_plan())
    assert read_job(tmp_path) == (recipe, small_plan())


def test_the_recipe_of_a_module_with_its_own_samples_says_that_no_source_is_read(tmp_path: Path) -> None:
    recipe = recipe_of({"model": {"factory": "my_module:model"}, "steps": 1, "batch_size": 4})
    plan = small_plan()
    for unit, said in (("samples", True), ("tokens", False)):
        write_job(tmp_path, recipe, replace(plan, step=replace(plan.step, unit=unit)))
        first, *_ = (tmp_path / "recipe.yaml").read_text(encoding="utf-8").splitlines()
        assert (first.startswith("#") and "data.source" in first) == said
        assert read_job(tmp_path)[0] == recipe


def test_a_run_keeps_the_date_of_its_start(tmp_path: Path) -> None:
    """Chat templates may write it: on another day, and without its token cache, the run has the same tokens."""
    recipe = recipe_of({"model": {"preset": "tiny"}, "steps": 1, "batch_size": 4})
    today = date.today().isoformat()
    assert with_date(recipe, tmp_path).data.date == with_date(recipe).data.date == today
    begun = recipe_of(
        {"model": {"preset": "tiny"}, "data": {"date": "2026-02-03"}, "steps": 1, "batch_size": 4}
    )
    write_job(tmp_path, begun, small_plan())
    assert with_date(recipe, tmp_path).data.date == "2026-02-03"
    asked = recipe_of(
        {"model": {"preset": "tiny"}, "data": {"date": "2026-02-04"}, "steps": 1, "batch_size": 4}
    )
    assert with_date(asked, tmp_path).data.date == "2026-02-04"
    (tmp_path / "recipe.yaml").write_text("damaged: [")
    assert with_date(recipe, tmp_path).data.date == today
    for other in ("2026-13-01", "today"):
        with pytest.raises(RecipeError, match=r"data\.date"):
            recipe_of({"model": {"preset": "tiny"}, "data": {"date": other}, "steps": 1, "batch_size": 4})


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (lambda plan: plan["strategy"].pop("zero_stage"), "strategy"),
        (lambda plan: plan["strategy"].update(zero_stage=7), "strategy.zero_stage"),
        (lambda plan: plan["strategy"].update(micro_batch_size=[]), "strategy.micro_batch_size"),
        (lambda plan: plan["strategy"].update(precision=None), "strategy.precision"),
        (lambda plan: plan["strategy"].update(tensor_parallel=4), "strategy.tensor_parallel"),
        (lambda plan: plan["layout"].pop("tensor"), "layout"),
        (lambda plan: plan["layout"].update(pipeline=2), "layout"),
    ],
)
def test_a_plan_of_other_settings_or_axes_is_refused(
    tmp_path: Path, damage: Callable[[Any], None], place: str
) -> None:
    write_job(tmp_path, recipe_of({"model": {"preset": "tiny"}, "steps": 1, "batch_size": 4}), small_plan())
    plan = json.loads((tmp_path / "plan.json").read_text())
    damage(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match=place):
        read_job(tmp_path)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_report_of_a_plan_without_an_axis_is_refused(tmp_path: Path, axis: str) -> None:
    write_job(tmp_path, recipe_of({"model": {"preset": "tiny"}, "steps": 1, "batch_size": 4}), small_plan())
    plan = json.loads((tmp_path / "plan.json").read_text())
    del plan["layout"][axis]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match="layout"):
        read_run(tmp_path)


def test_a_new_folder_in_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"

    def claimed(written: str) -> None:
        with pytest.raises(DataError), claim(folder):
            if written:
                (folder / written).touch()
            raise DataError("bad data")

    claimed("")
    assert not list(tmp_path.iterdir())
    folder.mkdir(parents=True)
    claimed("")
    assert folder.exists() and not list(folder.iterdir())
    claimed("plan.json")
    assert {path.name for path in folder.iterdir()} == {".lock", "plan.json"}
