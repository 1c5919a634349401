"""The explorer: points equal plans of their recipes, and the page works in a real browser.

One file, because all tests share an exploration that takes a minute. Screenshots go to the folder that
SHARDWISE_SCREENSHOTS names, or to a temporary one.
"""

from __future__ import annotations

import json
import os
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.plan import Plan
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.open import blueprint_of
from shardwise.planner.search import plan_for
from shardwise.plugins.explorer.controls import Workloads, controls_of
from shardwise.plugins.explorer.exploration import Exploration, asked_in
from shardwise.plugins.explorer.page import ExplorationPage, page_of, write_page
from shardwise.plugins.explorer.points import REFUSED
from shardwise.plugins.live.server import page_server
from shardwise.recipe.load import parse_recipe
from shardwise.report.record import read_run
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.browser import Browser, browser

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


@pytest.mark.parametrize("count", [2, 5])
def test_random_points_equal_plans_of_the_copied_recipe(count: int, exploration: Exploration) -> None:
    """As many that do not fit, if there are; twice as many of the recipe's device, and of all."""
    data = exploration.data()
    points = [point for point in data["points"] if "p" in point]
    assert len(points) >= 200 and exploration.done
    own, chosen, verdicts = data["start"][0], random.Random(41), set()
    tight = [point for point in points if point["c"][0] == own]  # the others have more memory
    refused = [point for point in points if point["v"] == "does not fit"]
    for point in [
        *chosen.sample(tight, 2 * count),
        *chosen.sample(points, 2 * count),
        *chosen.sample(refused, min(count, len(refused))),
    ]:
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
    assert any(" cannot be " in why for why in reasons)
    assert all(point.figures is None and not point.recipe for point in refused)
    assert not [
        point for point in exploration.points if point.verdict not in ("fits", REFUSED) and not point.why
    ]
    large = next(point for point in exploration.points if point.verdict == "does not fit")
    assert "too much" in large.why


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ([], set()),
        (["model.experts=4", "model.experts_per_token=2"], {"expert_parallel", "expert_capacity"}),
        (["objective={name: dpo}", "data={source: pairs.jsonl}"], {"reference"}),
        (["optimizer.clip_norm=null"], {"optimizer_in_backward"}),
    ],
)
def test_a_control_has_a_value_that_some_choice_can_have(
    overrides: list[str], shown: set[str], recipe_path: Path
) -> None:
    workloads = Workloads(recipe_path, overrides)
    controls = controls_of(workloads, strategy_from(workloads.recipe.strategy), None)
    keys = {control.setting for control in controls}
    assert keys & {"expert_parallel", "expert_capacity", "reference", "optimizer_in_backward"} == shown
    assert {"zero_stage", "tensor_parallel", "sequence_method", "master_weights"} <= keys


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
    values = {"zero_stage": 2, "compile": "none", "offload": "none", "loss": "logits", "micro_batch_size": 2}
    pins = [f"strategy.{key}={value}" for key, value in values.items()]  # a short search
    exploration = Exploration(recipe_path, pins, "small")
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


@pytest.mark.long
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


# ---- in a browser ----

WINDOWS = {"light": (1280, False), "dark": (1280, True), "phone": (390, False), "phone-dark": (390, True)}
CLIPPED = """
return [...document.querySelectorAll('h1, h2, h3, p, dd, legend, .values, td')]
  .filter(e => e.scrollWidth > e.clientWidth + 1 && !e.closest('.scroll')).map(e => e.outerHTML)
"""
COLLIDING = """
const boxes = [...document.querySelectorAll('#front text')].map(e => [e.textContent, e.getBoundingClientRect()]);
return boxes.flatMap(([a, x], i) => boxes.slice(i + 1)
  .filter(([b, y]) => x.left < y.right - 1 && y.left < x.right - 1 && x.top < y.bottom - 1 && y.top < x.bottom - 1)
  .map(([b]) => `${a} / ${b}`))
"""
PRESSED = "return [...document.querySelectorAll('[aria-pressed=true]')].map(e => e.textContent)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(exploration: Exploration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "explore.html"
    write_page(exploration, path)
    return path


def button(title: str, label: str) -> str:
    """The script's expression for a value of a control."""
    box = f"[...document.querySelectorAll('fieldset')].find(e => e.querySelector('legend').textContent === '{title}')"
    return f"[...{box}.querySelectorAll('button')].find(e => e.textContent === '{label}')"


def text(chromium: Browser, name: str) -> str:
    found: str = chromium.run(f"return document.getElementById('{name}').textContent")
    return found


def test_every_width_and_scheme_without_errors_or_scrolling(
    chromium: Browser, page: Path, tmp_path: Path
) -> None:
    folder = Path(os.environ.get("SHARDWISE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    for window, (width, dark) in WINDOWS.items():
        chromium.open(page, width=width, dark=dark, touch=width < 500)
        for label in ("1", "2"):
            chromium.run(f"{button('micro batch size', label)}.click()")
            assert chromium.run(COLLIDING) == [], window
        assert chromium.run("return document.documentElement.scrollWidth") == width, window
        assert chromium.run(CLIPPED) == [], window
        assert chromium.run("return document.querySelectorAll('#front circle').length") > 10
        assert chromium.screenshot(folder / f"explore-{window}.png").startswith(b"\x89PNG")
        assert chromium.errors() == [], window


def test_a_choice_shows_its_point_and_its_recipe(
    chromium: Browser, page: Path, exploration: Exploration
) -> None:
    chromium.open(page)
    assert text(chromium, "recipe") == exploration.points[0].recipe
    assert text(chromium, "line") == exploration.plan.line
    assert text(chromium, "hours-of").startswith("to 102.4K tokens")
    stage = str(exploration.plan.strategy.values["zero_stage"])
    other = "3" if stage != "3" else "2"
    chromium.run(f"{button('zero stage', other)}.click()")
    assert f"zero_stage: {other}" in text(chromium, "recipe")
    recipes = {point.recipe for point in exploration.points}
    assert text(chromium, "recipe") in recipes
    rows = chromium.run("return document.getElementById('pair').rows[0].innerText.split('\\t')")
    assert rows[:3] == ["zero stage", stage, other]
    chromium.run("document.getElementById('keep').click()")
    assert chromium.run("return document.getElementById('pair').rows[0].cells[0].textContent") == "verdict"
    chromium.command(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    place = chromium.run(
        "const e = document.getElementById('copy'); e.scrollIntoView({block: 'center'});"
        "const box = e.getBoundingClientRect(); return [box.left + 5, box.top + 5]"
    )
    for kind in ("mousePressed", "mouseReleased"):
        chromium.mouse(kind, *place, button="left", clickCount=1)
    chromium.until("return document.getElementById('copied').textContent === 'copied'")
    read = "navigator.clipboard.readText().then((text) => { window.read = text; })"
    chromium.run(read)
    assert chromium.until("return window.read") == text(chromium, "recipe")
    assert chromium.errors() == []


def test_refused_and_too_large_choices_say_why(
    chromium: Browser, page: Path, exploration: Exploration
) -> None:
    chromium.open(page)
    before = chromium.run(PRESSED)
    chromium.run(f"{button('sequence length', '512')}.click()")
    assert "longer than the model's context" in text(chromium, "said")
    assert chromium.run(PRESSED) == before, "no point has it"
    chromium.run(f"{button('optimizer in backward', 'true')}.click()")
    assert "the norm to clip by is known only when" in text(chromium, "said")
    large = next(
        point
        for point in exploration.points
        if point.verdict == "does not fit" and point.workload == exploration.workloads.own
    )
    assert large.why in text(chromium, "why")
    assert any(point.why in text(chromium, "why") for point in exploration.points if point.verdict == REFUSED)


def test_prices_give_a_cost(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    script = """
    const price = document.getElementById('price');
    price.value = arguments[0];
    price.dispatchEvent(new Event('input'));
    return document.getElementById('cost').textContent;
    """
    assert chromium.run("return document.getElementById('price').value") == "2.5"
    costs = [float(chromium.run(script, price).replace(",", "")) for price in ("1e9", "2e9")]
    assert costs[1] == pytest.approx(2 * costs[0], rel=1e-3) and costs[0] > 0
    assert chromium.run(script, "") == chromium.run(script, "?") == "–"


def test_measured_figures_are_next_to_predicted_ones(
    chromium: Browser, run_folder: Path, tmp_path: Path
) -> None:
    exploration = Exploration(run_folder / "recipe.yaml", [], "run", read_run(run_folder))
    exploration.add(exploration.predict(exploration.groups()[0]))
    write_page(exploration, tmp_path / "run.html")
    chromium.open(tmp_path / "run.html", width=390, touch=True)
    rows = chromium.run(
        "return [...document.getElementById('run-rows').rows].map(e => e.innerText.split('\t'))"
    )
    assert [row[0] for row in rows] == ["peak", "step", "throughput"] and rows[1][2] == "1.79\u00a0s"
    assert chromium.run("return document.querySelectorAll('#front .measured').length") == 1
    assert "measured" in text(chromium, "front") and chromium.run(COLLIDING) == []
    assert chromium.run("return document.documentElement.scrollWidth") == 390
    assert chromium.errors() == []


@pytest.fixture
def served(recipe_path: Path) -> Iterator[tuple[Exploration, str]]:
    """An exploration with the plan's points alone, and the address of its page."""
    exploration = Exploration(recipe_path, [], "small")
    exploration.add(exploration.predict(exploration.groups()[0]))
    with page_server(ExplorationPage(exploration), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield exploration, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_served_page_fills_and_asks(chromium: Browser, served: tuple[Exploration, str]) -> None:
    exploration, address = served
    chromium.open(address)
    chromium.run("window.same = true")
    had = len(exploration.points)
    chromium.run(f"{button('activation checkpointing', 'full')}.click()")
    assert text(chromium, "said").startswith("predicting activation checkpointing full")
    exploration.answer_asked(lambda: None, wait=10)
    assert len(exploration.points) > had
    chromium.until(
        "return document.getElementById('recipe').textContent.includes('activation_checkpointing: full')"
    )
    exploration.add(exploration.predict(exploration.groups()[2]))
    chromium.until(
        f"return document.getElementById('count').textContent.startsWith('{len(exploration.points)} ')"
    )
    assert chromium.run("return window.same"), "without loading the page anew"
    assert chromium.errors() == []


def answer(address: str, **headers: str) -> Any:
    request = urllib.request.Request(address, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_server_answers_its_own_page_alone(served: tuple[Exploration, str]) -> None:
    address = served[1]
    assert answer(address) == 200
    assert answer(address + "now?0.0", Sec_Fetch_Site="same-origin") == 200
    assert answer(address + "now?0.0", Sec_Fetch_Site="cross-site") == 403
    assert answer(address, Host="example.org") == 403
    assert answer(address + "etc/passwd") == 404
