"""``plan --for devices``: the fewest devices on which a recipe fits, and takes at most so many hours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.plan import Plan
from shardwise.core.units import GiB
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.plugins.fewest_devices import search as module
from shardwise.recipe.cluster_sizes import sizes
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.harness.plans import small_plan

STATES, WORK = 300 * GiB, 64.0
"""Bytes that all devices share, and seconds of a step on one device."""


def recipe(preset: str, **changed: Any) -> Recipe:
    values: dict[str, Any] = {"model": {"preset": "llama-3-8b"}, "steps": 3600, "batch_size": 64}
    cluster = {"preset": preset, "price_per_device_hour": 2.0}
    return recipe_of({**values, "cluster": cluster, **changed}, SETTINGS)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plans that divide memory and time evenly; the numbers of devices that were planned."""
    asked: list[int] = []

    def make(recipe: Recipe, cluster: Cluster, **how: Any) -> Plan:
        size = cluster.world_size
        asked.append(size)
        if size == 2:
            raise RecipeError("three heads cannot be divided")
        plan = replace(small_plan(), world_size=size, capacity_bytes=80 * GiB)
        peak = replace(plan.peak, bytes=STATES // size)
        return replace(plan, peak=peak, step=replace(plan.step, seconds=WORK / size))

    monkeypatch.setattr(module, "make_plan", make)
    return asked


def found(preset: str, hours: float | None, **changed: Any) -> tuple[Recipe, Cluster, Any]:
    asked = recipe(preset, **changed)
    return module.fewest_devices(asked, cluster_of(asked.cluster), hours)


def test_the_fewest_that_fit_without_hours(planned: list[int]) -> None:
    """300 GiB need four devices of 80."""
    asked, cluster, tried = found("8xH100-80GB", None)
    assert cluster.world_size == 4 and asked.cluster.price_per_device_hour == 2.0
    assert {each.devices: each.verdict for each in tried}[4] == "enough"
    assert len(planned) < len((1, 2, 4, 8)), "halved, not counted up"


def test_devices_of_a_users_file_are_divided(planned: list[int], tmp_path: Path) -> None:
    path = tmp_path / "my-card.toml"
    path.write_text('like = "H100-80GB"\n', encoding="utf-8")
    whole = recipe("8xH100-80GB").cluster.model_copy(
        update={"preset": None, "device": str(path), "devices_per_node": 8}
    )
    asked = recipe("8xH100-80GB").model_copy(update={"cluster": whole})
    _, cluster, _ = module.fewest_devices(asked, cluster_of(whole), None)
    assert cluster.name == "4xmy-card.toml"


def test_hours_ask_for_more(planned: list[int]) -> None:
    """3,600 steps of 64 device-seconds are 64 device-hours: 16 devices for 4 hours, 8 for 8."""
    _, cluster, tried = found("8x8xH100-80GB", 4.0)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 8)
    by_size = {each.devices: each for each in tried}
    assert by_size[16].hours == 4.0 and by_size[16].cost == 16 * 4.0 * 2.0
    assert by_size[8].verdict == "takes longer"
    assert [each.devices for each in tried] == sorted(by_size)


@given(st.integers(1, 40), st.sampled_from(["8xH100-80GB", "8x8xH100-80GB", "3x6xH100-80GB"]))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_smaller_is_enough(planned: list[int], hours: int, preset: str) -> None:
    asked = recipe(preset)
    cluster = cluster_of(asked.cluster)
    numbers = [nodes * each for nodes, each in sizes(cluster, cluster.nodes)]
    assert numbers == sorted(set(numbers)) and numbers[-1] == cluster.world_size
    enough = [s for s in numbers if s != 2 and STATES // s <= 80 * GiB and WORK / s <= hours]
    if not enough:
        with pytest.raises(ResourceError, match="takes longer than"):
            found(preset, float(hours))
        return
    assert found(preset, float(hours))[1].world_size == enough[0]


def test_what_does_not_fit_at_all_is_refused(planned: list[int]) -> None:
    with pytest.raises(ResourceError, match="does not fit"):
        found("1xH100-80GB", None)


def test_hours_of_epochs_are_refused(planned: list[int]) -> None:
    """Their steps are counted from the data."""
    asked = recipe("8xH100-80GB").model_copy(update={"steps": 0, "epochs": 2.0})
    with pytest.raises(RecipeError, match="needs steps"):
        module.fewest_devices(asked, cluster_of(asked.cluster), 4.0)
    assert not planned
