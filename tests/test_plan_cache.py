"""Plans in files: the same plan without torch, and a new one wherever something differs or is damaged."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.core.plan import Plan
from shardwise.hardware.cluster import cluster_of
from shardwise.hardware.measured import NEW, Grid, MeasuredSpeeds
from shardwise.jobs.plan_cache import PLANS_FOLDER, cached_plan
from shardwise.jobs.request import read_request
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.harness.plans import small_plan

MODEL = {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))


def recipe(**changed: object) -> Recipe:
    values = {"model": MODEL, "data": {"sequence_length": 16}, "steps": 2, "batch_size": 4}
    return recipe_of({**values, **changed}, SETTINGS)


def made(asked: Recipe, compare: bool = False) -> int:
    """How many plans are made when this one is asked for."""
    count: list[Plan] = []

    def make() -> Plan:
        count.append(small_plan())
        return count[-1]

    assert cached_plan(asked, cluster_of(asked.cluster), compare, make).as_dict() == small_plan().as_dict()
    return len(count)


def test_the_same_plan_is_made_once() -> None:
    assert [made(recipe()), made(recipe()), made(recipe())] == [1, 0, 0]
    assert made(recipe(data={"sequence_length": 16, "source": "elsewhere"})) == 0, "a plan reads no data"
    assert made(recipe(cluster={"price_per_device_hour": 2.0})) == 0, "a price changes no plan"


def test_what_differs_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(recipe()) == 1
    assert made(recipe(), compare=True) == 1
    assert made(recipe(batch_size=8)) == 1
    assert made(recipe(cluster={"memory_gib": 1.0})) == 1
    assert made(recipe(plan={"objective": "memory"})) == 1
    monkeypatch.setattr("shardwise.jobs.plan_cache.code_digest", lambda: "another version")
    assert made(recipe()) == 1


def test_models_whose_files_may_change_are_planned_anew() -> None:
    asked = recipe(model={"factory": "package.module:build"})
    assert [made(asked), made(asked)] == [1, 1]


def test_speeds_that_are_measured_anew_on_one_day_are_planned_anew() -> None:
    cluster = cluster_of(recipe().cluster)
    grid = Grid(((16,), (16,), (16,)), (1e-6,))
    plans: list[Plan] = []

    def make() -> Plan:
        plans.append(small_plan())
        return plans[-1]

    for seconds in (1e-6, 2e-6, 2e-6):
        speeds = MeasuredSpeeds(1, 1, {"fp32": grid}, {}, {NEW: ((1e3, seconds),)})
        device = replace(cluster.device, measured=speeds, measured_on="2026-11-23")
        cached_plan(recipe(), replace(cluster, device=device), False, make)
    assert len(plans) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe"])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    assert made(recipe()) == 1
    (path,) = (tmp_path / PLANS_FOLDER).glob("*.json")
    path.write_bytes(content)
    assert [made(recipe()), made(recipe())] == [1, 0]


def test_a_folder_that_cannot_be_written_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", "/proc/nowhere")
    assert [made(recipe()), made(recipe())] == [1, 1]


def test_a_repeated_plan_loads_no_torch(tmp_path: Path) -> None:
    """The command of a recipe whose plan is stored: `--json` and the table of it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe().model_dump_json(exclude_defaults=True))
    asked, cluster = read_request(path, [])
    cached_plan(asked, cluster, True, small_plan)
    code = (
        "import sys; from shardwise.cli.main import run;"
        f"code = run(['plan', {str(path)!r}]);"
        "assert code == 0 and not {'torch', 'numpy'} & set(sys.modules), code"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_folder_s_model_is_planned_again_when_its_config_changes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    asked = recipe(model={"hf": str(folder)})
    assert [made(asked), made(asked)] == [1, 0]
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert [made(asked), made(asked)] == [1, 0]
    (folder / "modeling.py").write_text("")
    assert [made(asked), made(asked)] == [1, 1], "its code may change"
    assert made(recipe(model={"hf": "org/name"})) == made(recipe(model={"hf": "org/name"})) == 1


def test_what_factories_make_is_planned_anew() -> None:
    asked = recipe(optimizer={"factory": "library:Optimizer"})
    assert [made(asked), made(asked)] == [1, 1]
    asked = recipe(objective={"factory": "own:objective"})
    assert [made(asked), made(asked)] == [1, 1]
