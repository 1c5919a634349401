"""Every number that ``plan`` prints is counted, measured, or assumed with a source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.answer import Answer, DeviceTry, FigureOrigin, QuantityLimit
from shardwise.core.ledger import CATEGORIES, Ledger
from shardwise.core.plan import DiskSpace, HostMemory, Plan, TimelinePoint
from shardwise.core.timetable import Timetable
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.hardware.profiles import PROFILES
from shardwise.planner.answer import answer_of
from shardwise.planner.explain import assumptions
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.planner.test_answer import candidate, plan

ROOT = Path(__file__).parent.parent.parent
REFERENCE = re.compile(r"docs/[\w/-]+\.md")
CLUSTERS = [*(f"8x{name}" for name in PROFILES), "8xcpu"]


def asked(cluster: str) -> tuple[Recipe, Cluster]:
    values = {
        "model": {"preset": "llama-3-8b"},
        "data": {"sequence_length": 4096},
        "steps": 9000,
        "batch_size": 64,
        "cluster": {"preset": cluster, "price_per_device_hour": 2.5},
    }
    recipe = recipe_of(values, SETTINGS)
    return recipe, cluster_of(recipe.cluster)


def whole_plan() -> Plan:
    """With something in every part of the file."""
    ledger = Ledger(**dict.fromkeys(CATEGORIES, 2**20))
    split = {"matrix products": 1.0}
    made = plan(
        candidate(60, 2.2, "fits", zero_stage=2, split=split),
        candidate(95, 1.6, "does not fit", zero_stage=0, split=split),
    )
    step = replace(made.step, traffic_bytes={"shard": 5}, phases={"forward": 1.0}, model_flops=7)
    return replace(
        made,
        ledger=ledger,
        step=step,
        host=HostMemory(ledger, 2**40),
        disk=DiskSpace(5),
        timeline=(TimelinePoint("forward", ledger),),
        pipeline=Timetable("1f1b", 2, 1, 4, (1.0, 1.0), (2.0, 2.0), sending=0.1),
    )


def numbers(value: Any, key: str = "") -> Iterator[str]:
    """Keys of all numbers, without places in lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key


def origin_of(key: str, answer: Answer) -> FigureOrigin | None:
    """The origin with the longest key that the figure is below."""
    found = [
        (len(each), origin)
        for origin in answer.origins
        for each in origin.figures
        if key == each or key.startswith(f"{each}.")
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_number_has_an_origin(cluster: str) -> None:
    recipe, here = asked(cluster)
    made = whole_plan()
    answer = replace(
        answer_of(recipe, here, made),
        devices=(DeviceTry(4, 1.0, 2.0, "enough"),),
        limits=(QuantityLimit("layers", 32, 34, 2**36, 35, 2**37, "needs 128.0 GiB of 80.00 GiB"),),
    )
    assert answer.nearest and answer.prices and answer.front
    written = made.as_dict() | answer.as_dict() | {"origins": []}
    keys = set(numbers(written))
    assert len(keys) > 50
    without = sorted(key for key in keys if origin_of(key, answer) is None)
    assert not without, "say in planner/origins.py where these come from"


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_is_assumed_has_a_source_that_exists(cluster: str) -> None:
    """The recipe, a page of the documentation that lists the device's figures, or the words of its profile."""
    recipe, here = asked(cluster)
    answer = answer_of(recipe, here, plan())
    for origin in answer.origins:
        assert origin.kind in ("counted", "measured", "assumed")
        pages = REFERENCE.findall(origin.source)
        assert all((ROOT / page).exists() for page in pages)
        if origin.kind == "assumed":
            own = any(text and text in origin.source for text in here.device.source.values())
            assert pages or own or "the recipe" in origin.source, origin
        if "docs/reference/presets.md" in pages:
            text = (ROOT / pages[0]).read_text(encoding="utf-8")
            listed = text.partition(f"### {here.device.name}\n")[2].partition("###")[0]
            assert all(f"`{figure}`" in listed for figure in here.device.source)
    said = " ".join(answer.sources())
    assert "counted: memory" in said and "assumed: " in said


@pytest.mark.parametrize("name", PROFILES)
def test_numbers_in_printed_assumptions_are_the_profiles(name: str) -> None:
    """No figure in a sentence but those of the device's file, which has their sources, and the reserve."""
    _, here = asked(f"8x{name}")
    reserve, sizes = here.device.traits.reserve, vars(here.device.overhead).values()
    known = [*(size / 2**20 for size in sizes), *(size / 2**30 for size in sizes), 100 * reserve]
    for sentence in assumptions(here, reserve):
        for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", sentence.replace(name, "")):
            assert any(abs(float(number) - value) < 0.006 for value in known), (number, sentence)
