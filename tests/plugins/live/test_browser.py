"""The pages in a real browser: every width and colour scheme, hover, zoom, and a run that is watched.

Screenshots go to the folder that SHARDWISE_SCREENSHOTS names, or to a temporary one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.core.plan import Plan
from shardwise.core.run_files import PhasesRecord, StepRecord
from shardwise.core.timetable import Timetable
from shardwise.plugins.compare.page import write_comparison
from shardwise.plugins.live.page import LiveRun
from shardwise.plugins.live.server import page_server
from shardwise.report.page import render_page
from shardwise.report.record import read_run
from tests.harness.browser import Browser, browser
from tests.report.conftest import MakeRun, example_plan, write_run

WINDOWS = {"light": (1280, False), "dark": (1280, True), "phone": (390, False), "phone-dark": (390, True)}
SPIKE = {"event": "spike", "step": 12, "loss": 9.25, "positions": [11], "text": ["<i>once</i> upon"]}
RECIPE = {"model": {"preset": "llama-3-8b"}, "steps": 30, "batch_size": 16}

CLIPPED = """
return [...document.querySelectorAll('h1, h2, h3, p, dd')].filter(e => e.scrollWidth > e.clientWidth + 1).length
"""
PLOT = "document.querySelector('[data-charts=series] .plot')"
STEPS, VALUES = (
    f"return [...{PLOT}.querySelectorAll('text.{axis}')].map(e => e.textContent)" for axis in "xy"
)
FIND = """
const chart = [...document.querySelectorAll('.chart')]
  .find(each => each.querySelector('b').textContent.startsWith(arguments[0]));
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a finished run with a spike, a measured step and a schedule; and its comparison with another run."""
    folder = tmp_path_factory.mktemp("runs")
    plan = example_plan()
    timetable = Timetable("1f1b", 2, 1, 4, (0.1, 0.1), (0.2, 0.2))
    phases = {"forward": 0.5, "backward": 1.0, "communication": 0.05, "optimizer": 0.1}
    planned = replace(plan, pipeline=timetable, step=replace(plan.step, phases=phases))
    made = write_run(folder / "example", planned, sample="def f():\n    return 1")
    (made / "events.jsonl").write_text(json.dumps(SPIKE) + "\n", encoding="utf-8")
    run = read_run(made)
    other = write_run(folder / "other", replace(plan, line="bf16 · zero2×8 · mb1×ga2"), steps=12)
    for each in (made, other):
        (each / "recipe.yaml").write_text(json.dumps(RECIPE), encoding="utf-8")
    assert run.outcome is not None
    ranks = tuple({name: spent * (1 + 0.1 * rank) for name, spent in phases.items()} for rank in range(8))
    outcome = replace(run.outcome, phases=PhasesRecord(4, phases, ranks))
    page, both = folder / "run.html", folder / "compare.html"
    page.write_text(render_page(replace(run, outcome=outcome)), encoding="utf-8")
    write_comparison([made, other], both)
    return {"run": page, "compare": both}


def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("SHARDWISE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_every_width_and_scheme_without_errors_or_scrolling(
    chromium: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    grounds = set()
    for name, page in pages.items():
        for window, (width, dark) in WINDOWS.items():
            chromium.open(page, width=width, dark=dark, touch=width < 500)
            assert chromium.errors() == []
            assert chromium.run("return document.documentElement.scrollWidth") == width, (name, window)
            assert chromium.run(CLIPPED) == 0
            assert chromium.run("return document.querySelectorAll('.chart svg').length") >= 4
            ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
            grounds.add((dark, ground))
            taken = chromium.screenshot(screenshots(tmp_path) / f"{name}-{window}.png")
            assert taken.startswith(b"\x89PNG") and len(taken) > 20_000
    assert grounds == {(False, "rgb(255, 255, 255)"), (True, "rgb(20, 24, 28)")}


def place(chromium: Browser, title: str, x: float) -> tuple[float, float]:
    """The middle of a chart, at this share of its plot's width."""
    script = """
    chart.scrollIntoView({block: 'center'});
    const box = chart.querySelector('.plot').getBoundingClientRect();
    return [box.left + 56 + (box.width - 70) * arguments[1], box.top + box.height / 2];
    """
    left, top = chromium.run(FIND + script, title, x)
    return left, top


def said(chromium: Browser, title: str) -> str:
    """The values that a chart shows."""
    text: str = chromium.run(FIND + "return chart.querySelector('.said').textContent", title)
    return text


def test_hover_says_values_and_what_caused_a_mark(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["run"])
    metrics = pages["run"].with_name("example") / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert said(chromium, "loss") == "training held-out"
    chromium.mouse("mouseMoved", *place(chromium, "loss", 11 / 29))
    text = said(chromium, "loss")
    assert text.startswith("step 12 ") and f"training {steps[11]['loss']:.4g}" in text
    assert "spike: loss 9.25 · “<i>once</i> upon”" in text
    assert said(chromium, "learning rate").startswith("step 12 "), "all charts read the same step"
    chromium.mouse("mouseMoved", *place(chromium, "memory", 0.2))
    assert said(chromium, "memory").startswith("forward") and "total" in said(chromium, "memory")
    chromium.mouse("mouseMoved", 2, 2)
    assert said(chromium, "loss") == "training held-out"


def edges(chromium: Browser) -> list[str]:
    """The first and the last label of the steps."""
    labels: list[str] = chromium.run(STEPS)
    return [labels[0], labels[-1]]


def test_zoom_log_scale_and_keys(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["run"])
    assert edges(chromium) == ["5", "30"]
    chromium.mouse("mousePressed", *place(chromium, "loss", 9 / 29), button="left", clickCount=1)
    end = place(chromium, "loss", 14 / 29)
    chromium.mouse("mouseMoved", *end, button="left")
    assert chromium.run("return document.querySelectorAll('.chosen').length") > 0
    chromium.mouse("mouseReleased", *end, button="left", clickCount=1)
    assert edges(chromium) == ["10", "15"]
    chromium.run("document.querySelectorAll('[data-charts=series] .tools button')[1].click()")
    assert edges(chromium) == ["5", "30"]
    linear = chromium.run(VALUES)
    chromium.run("document.querySelector('[data-charts=series] .bar-of button').click()")
    assert chromium.run(VALUES) == ["2", "5"] != linear
    chromium.mouse("mouseMoved", 2, 2)
    chromium.run("document.querySelector('[data-charts=series] .chart').focus()")
    for _ in range(2):
        chromium.command("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert said(chromium, "loss").startswith("step 2 ")
    assert chromium.errors() == []


def test_the_policy_holds_and_pictures_stay_without_scripts(
    chromium: Browser, pages: dict[str, Path]
) -> None:
    page = pages["run"]
    chromium.open(page)
    inject = """
    const script = document.createElement('script');
    script.textContent = 'window.ran = 1';
    document.body.append(script);
    return window.ran === undefined;
    """
    assert chromium.run(inject)
    assert any("Content Security Policy" in line for line in chromium.errors())
    hidden = "return [...document.querySelectorAll('[data-static]')].map(e => e.offsetParent === null)"
    assert chromium.run(hidden) == [True, True]
    chromium.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.open(page)
        chromium.command("Emulation.setScriptExecutionDisabled", value=False)
        assert chromium.run(hidden) == [False, False]
        assert chromium.run("return document.querySelectorAll('figure.charts:not([hidden])').length") == 0
    finally:
        chromium.command("Emulation.setScriptExecutionDisabled", value=False)


@pytest.fixture
def watched(plan: Plan, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """The folder of a run that trains, and the address of its page."""
    monkeypatch.setattr("shardwise.report.page_parts.svg", lambda figure, name: "<svg></svg>")
    folder = make_run(plan, steps=6, finished=False)
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE), encoding="utf-8")
    with page_server(LiveRun(folder), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def append(folder: Path, first: int, last: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            record = StepRecord(step, 1.5, 0.8, 3e-4, 131_072, 1.8, 72_817.8)
            file.write(json.dumps({k: v for k, v in vars(record).items() if v is not None}) + "\n")


def test_a_watched_run_follows_its_steps_and_its_end(
    chromium: Browser, watched: tuple[Path, str], plan: Plan, make_run: MakeRun
) -> None:
    folder, address = watched
    chromium.open(address)
    head = "return document.querySelector('[data-part=head] .note').textContent"
    chromium.until(f"{head}.startsWith('Step 6 of 30, 43.2')")
    chromium.run("window.same = true")
    append(folder, 7, 20)
    chromium.until(f"{head}.startsWith('Step 20 of 30')")
    assert chromium.run("return window.same"), "without loading the page anew"
    assert edges(chromium) == ["2", "20"]
    finished = make_run(plan, name="finished")
    (folder / "report.json").write_bytes((finished / "report.json").read_bytes())
    chromium.until("return document.querySelector('dt')?.textContent === 'Measured peak' && !window.same")
    assert chromium.errors() == []
