"""Points of the explorer equal plans of their recipes; refused ones say why."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.plan import Plan
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.open import blueprint_of
from shardwise.planner.search import plan_for
from shardwise.plugins.explorer.exploration import Exploration, asked_in
from shardwise.plugins.explorer.page import page_of
from shardwise.plugins.explorer.points import REFUSED
from shardwise.recipe.load import parse_recipe
from shardwise.report.record import read_run
from shardwise.technique import SETTINGS

pytestmark = pytest.mark.plan

DEPENDENT = ("pipeline schedule", "sequence method")
"""Controls that do something only next to another change; pairs of changes come last."""


def copied(data: dict[str, Any], point: dict[str, Any]) -> str:
    """The recipe of a point as the page's script puts it together."""
    sections = list(data["own"])
    for number, text in point["x"]:
        sections[number] = data["texts"][text]
    return "".join(sections)


def fresh_plan(recipe_text: str) -> Plan:
    recipe = parse_recipe(recipe_text, SETTINGS)
    assert set(recipe.strategy) == {setting.key for setting in SETTINGS}
    return plan_for(recipe, blueprint_of(recipe), cluster_of(recipe.cluster), compare=False)


def test_random_points_equal_plans_of_the_copied_recipe(exploration: Exploration) -> None:
    data = exploration.data()
    points = [point for point in data["points"] if "p" in point]
    assert len(points) >= 200 and exploration.done
    own, chosen, verdicts = data["start"][0], random.Random(41), set()
    tight = [point for point in points if point["c"][0] == own]  # the others have more memory
    refused = [point for point in points if point["v"] == "does not fit"]
    for point in [*chosen.sample(tight, 8), *chosen.sample(points, 8), *chosen.sample(refused, 4)]:
        plan = fresh_plan(copied(data, point))
        figures = (plan.peak.bytes, plan.peak.rank, plan.step.seconds, plan.step.tokens, plan.line)
        assert figures == (point["p"], point["r"], point["s"], point["k"], data["texts"][point["n"]])
        assert plan.fits == (point["v"] in ("fits", "tight"))
        kib = [round(size / 1024) for size in plan.ledger.as_dict().values()]
        assert kib == point["b"]
        verdicts.add(point["v"])
    assert verdicts >= {"fits", "does not fit"}


def test_the_first_point_is_the_plan(exploration: Exploration) -> None:
    data, plan = exploration.data(), exploration.plan
    first = data["points"][0]
    assert first["c"] == data["start"]
    assert (first["p"], first["s"]) == (plan.peak.bytes, plan.step.seconds)
    assert data["goal"] == 100 * plan.step.tokens and data["price"] == 2.5


def test_every_control_has_predicted_points(exploration: Exploration) -> None:
    """Also training, which changes the recipe, and sizes, which change its steps: the tokens are the same."""
    data = exploration.data()
    keys = [control["key"] for control in data["controls"]]
    assert keys[:5] == ["device", "devices", "sequence", "batch", "training"]
    assert {"strategy.micro_batch_size", "strategy.zero_stage", "strategy.precision"} < set(keys)
    for number, control in enumerate(data["controls"]):
        chosen = {point["c"][number] for point in data["points"]}
        beyond = 1 if control["title"] == "micro batch size" else 0  # 8 is more than the share of two devices
        if control["title"] not in DEPENDENT:
            assert len(chosen) == len(control["values"]) - beyond, control["key"]
    sequence, batch = keys.index("sequence"), keys.index("batch")
    for point in data["points"]:
        if "x" in point:
            recipe = parse_recipe(copied(data, point), SETTINGS)
            assert recipe.steps * recipe.batch_size * recipe.data.sequence_length == 100 * 8 * 128
            shown = (data["controls"][i]["values"][point["c"][i]] for i in (sequence, batch))
            assert tuple(shown) == (str(recipe.data.sequence_length), str(recipe.batch_size))


def test_refused_points_say_why(exploration: Exploration) -> None:
    refused = [point for point in exploration.points if point.verdict == REFUSED]
    reasons = {point.why for point in refused}
    assert any("longer than the model's context" in why for why in reasons)
    assert any("no units for fp8" in why for why in reasons)
    assert any(why.startswith("optimizer_in_backward cannot be True: the norm to clip by") for why in reasons)
    assert all(point.figures is None and not point.recipe for point in refused)
    assert not [
        point for point in exploration.points if point.verdict not in ("fits", REFUSED) and not point.why
    ]
    large = next(point for point in exploration.points if point.verdict == "does not fit")
    assert "too much" in large.why


def test_axes_beyond_the_devices_are_refused(exploration: Exploration) -> None:
    group = exploration.grid.changed({"strategy.tensor_parallel": 4, "strategy.sequence_parallel": 2})
    assert group is not None
    points = exploration.predict(group)
    assert {point.verdict for point in points} == {REFUSED} and points[0].why.startswith("tensor_parallel")


def test_the_page_is_one_small_file(exploration: Exploration) -> None:
    page = page_of(exploration)
    assert "default-src 'none'" in page and "connect-src" not in page
    assert "connect-src 'self'" in page_of(exploration, live=True)
    assert not [mark for mark in (" src=", "https:", "{{", "{%") if mark in page]
    assert len(page) < 1_000_000


def test_what_the_page_asks_for_is_predicted(recipe_path: Path) -> None:
    exploration = Exploration(recipe_path, [], "small")
    plain = exploration.data()["start"]
    assert plain is not None
    at = [control.key for control in exploration.controls].index("strategy.activation_checkpointing")
    for wrong in ((), plain[:-1], (*plain[:-1], 99), plain):
        exploration.ask(wrong)
    exploration.ask(wanted := (*plain[:at], 1 + plain[at], *plain[at + 1 :]))
    exploration.answer_asked(lambda: None)
    written = exploration.since(0, 0)
    made = {point["c"] for point in written["points"]}
    assert {plain, wanted} <= made and len(made) == 2 * len(exploration.devices)
    assert exploration.since(len(made), len(written["texts"])) == {"points": [], "texts": [], "done": False}
    exploration.ask(wanted)
    exploration.answer_asked(lambda: None)
    assert len(exploration.points) == len(made)


@pytest.mark.parametrize(
    ("query", "read"),
    [
        ("12.3", (12, 3, None)),
        ("12.3&0-4-1", (12, 3, (0, 4, 1))),
        ("", (0, 0, None)),
        ("x.3&0-4-1", (0, 0, (0, 4, 1))),
        ("1.1&0--1", (1, 1, None)),
        ("1.1&" + "1-" * 99 + "1", (1, 1, None)),
    ],
)
def test_queries_of_a_page(query: str, read: tuple[int, int, tuple[int, ...] | None]) -> None:
    assert asked_in(query) == read


def test_measured_figures_of_a_run(recipe_path: Path, run_folder: Path) -> None:
    """A folder's plan is explored without planning anew; of another recipe, the run's point is among the first."""
    folder = run_folder
    own = Exploration(folder / "recipe.yaml", [], "run", read_run(folder))
    run = own.data()["run"]
    assert own.plan == read_run(folder).plan and run["choice"] == own.data()["start"]
    assert run["seconds"] == 1.79 and run["peak"] > 0 and run["expected"] == own.plan.allocated_bytes[0]
    other = Exploration(recipe_path, ["strategy.micro_batch_size=1"], "small", read_run(folder))
    run = other.data()["run"]
    assert run["choice"] is not None and run["choice"] != other.data()["start"]
    assert other.groups()[1].strategy == own.plan.strategy
    json.dumps(other.data())


def test_a_grid_does_not_repeat_a_point(exploration: Exploration) -> None:
    groups = exploration.groups()
    assert len(set(groups)) == len(groups)
    assert (
        groups[0].strategy == make_plan(exploration.workloads.recipe, exploration.workloads.cluster).strategy
    )
