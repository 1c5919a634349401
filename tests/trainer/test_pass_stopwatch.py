"""A pipeline's run, from its plan to the pictures: what its passes are drawn from was measured on its own ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.pipeline.schedule import Action, orders
from shardwise.core.plan import Plan
from shardwise.core.run_files import PassesRecord
from shardwise.engine.build import build
from shardwise.engine.run import ListedBatches
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.report.page import render_page
from shardwise.report.pipeline.gantt import PASS_COLOURS
from shardwise.report.pipeline.pictures import planned_and_measured
from shardwise.report.record import RunRecord, read_run
from shardwise.report.run import write_report
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.loop import Job, Trainer
from shardwise.trainer.meter import EXACT_STEPS
from shardwise.trainer.pass_stopwatch import Stopwatch
from tests.harness.plans import NOTHING_TO_SEARCH
from tests.harness.pool import Pool

COUNT, STEPS = 4, 6
MODEL = {"layers": 4, "width": 24, "heads": 2, "kv_heads": 2, "ffn": 40, "vocab": 256, "context": 16}


def recipe_for(schedule: str, corpus: Path, **sections: Any) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": STEPS,
        "batch_size": COUNT,
        "cluster": {"devices_per_node": 2},
        "strategy": {**NOTHING_TO_SEARCH, "pipeline_parallel": 2, "pipeline_schedule": schedule},
    }
    return recipe_of(values | sections, SETTINGS)


def trained_rank(recipe: Recipe, plan: Plan, folder: Path) -> None:
    Trainer(Job(recipe, plan, folder, torch.device("cpu"))).train()


def run_of(recipe: Recipe, folder: Path, pool: Pool) -> RunRecord:
    """The record of a run that a pool of ranks has made in ``folder``."""
    plan = make_plan(recipe, cluster_of(recipe.cluster))
    write_job(folder, recipe, plan)
    pool.run(plan.world_size, trained_rank, recipe, plan, folder, timeout=120)
    return read_run(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(pool: Pool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return run_of(recipe_for("1f1b", corpus), tmp_path_factory.mktemp("run"), pool)


def passes_of(run: RunRecord) -> list[list[tuple[Action, float, float]]]:
    assert run.outcome is not None and run.outcome.passes is not None
    return [list(spans) for spans in run.outcome.passes.played().spans]


def test_every_rank_writes_down_the_passes_of_one_step_in_their_order(run: RunRecord) -> None:
    spans = passes_of(run)
    assert run.outcome is not None and run.outcome.passes is not None
    assert run.outcome.passes.step == EXACT_STEPS + 1
    assert [each.rank for each in run.outcome.passes.ranks] == [0, 1]
    assert [tuple(action for action, _, _ in rank) for rank in spans] == list(orders("1f1b", 2, 1, COUNT))
    for rank in spans:
        times = [time for _, begin, end in rank for time in (begin, end)]
        assert times == sorted(times) and len(set(times)) == len(times)
    assert min(begin for rank in spans for _, begin, _ in rank) == 0
    # A step lasts at least as long as its passes.
    assert max(end for rank in spans for _, _, end in rank) <= run.steps[EXACT_STEPS].seconds


def test_nobody_begins_before_what_it_needs_has_been_computed(run: RunRecord) -> None:
    """On two ranks' clocks, brought together by the time of day."""
    begins = {action: begin for rank in passes_of(run) for action, begin, _ in rank}
    ends = {action: end for rank in passes_of(run) for action, _, end in rank}
    for number in range(COUNT):
        assert begins[Action("F", 1, number)] > ends[Action("F", 0, number)]
        assert begins[Action("B", 0, number)] > ends[Action("B", 1, number)]


def test_the_picture_shows_the_plan_s_passes_and_the_run_s(run: RunRecord) -> None:
    timetable = run.plan.pipeline
    assert run.outcome is not None and timetable is not None
    planned, measured = planned_and_measured(timetable, run.outcome.passes).axes
    for axes, played in (
        (planned, timetable.played("1f1b", COUNT)),
        (measured, run.outcome.passes.played() if run.outcome.passes else None),
    ):
        assert played is not None
        bars = [p for p in axes.patches if p.get_zorder() > 0]
        wanted = [
            (PASS_COLOURS[a.kind][1], 1e3 * b, 1e3 * (e - b)) for spans in played.spans for a, b, e in spans
        ]
        drawn = [(matplotlib.colors.to_hex(p.get_facecolor()), p.get_x(), p.get_width()) for p in bars]
        assert [d[0] for d in drawn] == [w[0] for w in wanted]
        assert [d[1:] for d in drawn] == [pytest.approx(w[1:]) for w in wanted]
        assert f"waits {100 * played.bubble:.0f} %" in axes.get_title(loc="left")


@pytest.mark.long
def test_the_report_shows_both_and_every_schedule(run: RunRecord) -> None:
    write_report(run.folder)
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    words = set(re.findall(r"<text[^>]*>([^<]*)<", page))
    assert any(word.startswith("planned · 1f1b") for word in words)
    assert any(word.startswith(f"measured · step {EXACT_STEPS + 1}") for word in words)
    for schedule in ("naive", "gpipe", "1f1b · this plan's", "interleaved, 2 stages a rank", "zero_bubble"):
        assert any(word.startswith(schedule) for word in words), schedule
    for name in ("pipeline.png", "schedules.png"):
        assert (run.folder / name).read_bytes().startswith(b"\x89PNG")


def test_a_plan_alone_has_a_page_without_a_run(run: RunRecord) -> None:
    alone = RunRecord(Path("some-plan"), run.recipe, run.plan, (), None, planned_only=True)
    page = render_page(alone)
    assert "nothing has been trained" in page and "planned · 1f1b" in page
    assert "measured · step" not in page and "no step has finished" not in page


# ---- without a trainer ------------------------------------------------------------------------------------


def timed_rank(recipe: Recipe) -> PassesRecord | None:
    """Two steps on random tokens; what the stopwatch has of the second."""
    run = build(recipe, blueprint_of(recipe), strategy_from(recipe.strategy), torch.device("cpu"))
    watch = Stopwatch(run, first=0)
    ids = torch.randint(0, 256, (1, 16))
    batches = [{"input_ids": ids, "labels": ids}] * COUNT
    run.passes.begin(ListedBatches([batches] * recipe.steps), 0)
    for index in range(recipe.steps):
        with watch.over(index):
            step(run, batches, 1e-3)
    return watch.collect()


@pytest.mark.parametrize("schedule", ["zero_bubble", "interleaved", "pipedream"])
def test_halves_parts_and_endless_steps_are_written_down(schedule: str, corpus: Path, pool: Pool) -> None:
    endless = {"optimizer": {"clip_norm": None}, "guard": {"rewinds": 0}} if schedule == "pipedream" else {}
    left = pool.run(2, timed_rank, recipe_for(schedule, corpus, steps=2, **endless))
    assert left[0] == left[1] and left[0].step == 2
    for rank, order in enumerate(orders(schedule, 2, 2 if schedule == "interleaved" else 1, COUNT)):
        mine = [Action(*span[:3]) for span in left[0].ranks[rank].spans]
        if (
            schedule == "pipedream"
        ):  # of the second step; the first rank has done one of its forward passes before
            kinds = [(a.kind, a.micro_batch) for a in mine]
            assert [k for k in kinds if k[0] == "B"] == [("B", COUNT + n) for n in range(COUNT)]
            assert [k for k in kinds if k[0] == "F"] == [("F", COUNT + n) for n in range(1 - rank, COUNT)]
        else:
            # The first stage computes no gradient of its input, so its backward pass has no first half.
            assert mine == [action for action in order if (action.kind, action.stage) != ("I", 0)]


def test_a_run_without_a_pipeline_writes_none_down(corpus: Path, pool: Pool) -> None:
    assert (
        pool.run(2, timed_rank, recipe_for("1f1b", corpus, steps=1, strategy={"zero_stage": 2})) == [None] * 2
    )
