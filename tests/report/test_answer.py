"""The answer in the terminal and on the page: complete and whole at any width; the picture of the front."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwise.core.answer import (
    Alternative,
    Answer,
    DeviceTry,
    FigureOrigin,
    Interval,
    MemoryPrice,
    QuantityLimit,
    RunCost,
)
from shardwise.core.plan import Plan
from shardwise.core.units import GiB
from shardwise.report.front import differs, memory_against_time
from shardwise.report.pictures import NARROW_INCHES, WIDE_INCHES, svg
from shardwise.report.tables import plan_text


@pytest.fixture
def answer(plan: Plan) -> Answer:
    """Of the plan in conftest.py, with long lines."""
    likely = Interval(
        55.0, 74.0, 195, "published runs of stacks that the fit did not see, docs/reference/accuracy.md"
    )
    run = RunCost(
        steps=108_000, tokens=108_000 * 131_072, devices=8, hours=49.35, price=2.5, likely_hours=likely
    )
    other, lacking = plan.candidates[1], plan.candidates[3]
    nearest = (
        Alternative(
            "zero_stage", "3", "2", other, "−4.7 % step time, about +9.6 GiB; 40.0 ms less memory-bound"
        ),
        Alternative(
            "micro_batch_size", "1", "2", lacking, "28.00 GiB too much in the backward phase at layers.31"
        ),
        Alternative(
            "tensor_parallel",
            "1",
            "",
            None,
            "not predicted: strategy.tensor_parallel=2 plans it",
        ),
    )
    price = MemoryPrice(28 * GiB, "micro_batch_size 2 (now 1)", -0.05, lacking)
    binding = "memory binds: faster strategies need more than the device has"
    devices = (DeviceTry(4, 98.0, 980.0, "takes longer"), DeviceTry(8, 49.35, 987.0, "enough"))
    front = (plan.candidates[0], other)
    peak = Interval(1.02 * 70 * GiB, 1.1 * 70 * GiB, 20, "runs")
    origins = (FigureOrigin(("ledger",), "counted", "memory by dry runs"),)
    return Answer(run, peak, nearest, binding, (price,), front, devices, origins)


def test_all_of_it_is_said(plan: Plan, answer: Answer) -> None:
    text = re.sub(r"\s+", " ", plan_text(plan, answer=answer))
    assert "2 d 01 h for 108,000 steps, 14.16B tokens" in text
    assert "costs 987: 395 device-hours of 8 devices at 2.5 each" in text
    assert "time: P50 2 d 07 h, P95 3 d 02 h, as in 195 published runs" in text
    assert "memory: P50 71.40 GiB, P95 77.00 GiB, as in 20 runs" in text
    assert (
        "micro_batch_size 2 (now 1) would be 5.0 % faster; it needs 28.00 GiB more than the device has"
        in text
    )
    assert "zero_stage 3 → 2 fits: −4.7 % step time" in text
    assert "tensor_parallel 1 not predicted: strategy.tensor_parallel=2 plans it" in text
    assert "4 4 d 02 h 980 takes longer" in text and "8 2 d 01 h 987 enough" in text
    assert "counted: memory by dry runs" in text
    assert text.index("The run") < text.index("Memory at the peak") < text.index("Considered")


def test_limits_are_rows_of_the_plan_and_take_the_room_of_alternatives(plan: Plan, answer: Answer) -> None:
    layers = QuantityLimit("layers", 32, 34, 76 * GiB, 35, 78 * GiB, "needs 80.00 GiB of 79.10 GiB")
    batch = QuantityLimit("micro_batch_size", 1, None, 0, 1, 0, "is not possible: why", "batch_size 8")
    limited = replace(answer, limits=(layers, batch))
    for text in (plan_text(plan, 80, answer=limited), plan_text(plan, 80, answer=limited, brief=True)):
        assert "Alternatives" not in text and "Limits   what fits at this strategy" in text
        assert re.search(r"  layers +34 +76.00 GiB  35 needs 80.00 GiB of 79.10 GiB", text)
        assert re.search(r"  micro_batch_size +none +1 is not possible: why; with batch_size 8", text)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_word_is_cut_and_nothing_is_lost_at_any_width(plan: Plan, answer: Answer, width: int) -> None:
    """Every word of the widest form is in the narrow one, whole."""
    narrow = plan_text(plan, width, answer=answer)
    assert max(map(len, narrow.splitlines())) <= min(width, 100)
    words = {word for word in re.split(r"[\s█▏▎▍▌▋▊▉░]+", plan_text(plan, answer=answer)) if word}
    assert words - {word for word in re.split(r"[\s█▏▎▍▌▋▊▉░]+", narrow) if word} <= {"peak", "step"}
    head = " ".join(narrow.splitlines()[:3])
    assert "fits" in head and "1.65 s/step" in head and "69.4 of 79.1 GiB" in head


def test_a_run_without_an_interval_says_so(plan: Plan, answer: Answer) -> None:
    bare = replace(answer, run=replace(answer.run, likely_hours=None, price=None), peak=None, devices=())
    text = plan_text(plan, answer=bare)
    assert "no interval of the time" in text and "costs" not in text and "P50" not in text
    assert "the fewest that are enough" not in text


def test_the_head_says_how_many_parameters_are_trained(plan: Plan) -> None:
    whole = replace(plan, parameters=5_050_000, trained_parameters=5_050_000)
    assert "5.05M parameters ·" in plan_text(whole)
    adapter = replace(whole, trained_parameters=448_500)
    assert "448.5K of 5.05M parameters trained ·" in plan_text(adapter)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("bf16 · zero2×8 · mb1×ga2", "zero2×8"),
        ("bf16 · zero3×8 · mb1×ga2", "bf16 · zero3×8 · mb1×ga2"),
        ("selective · bf16 · zero3×8 · mb2×ga1", "selective · mb2×ga1"),
        ("bf16 · mb1×ga2", "no zero3×8"),
    ],
)
def test_labels_say_what_differs(plan: Plan, other: str, words: str) -> None:
    assert differs(plan.line, other) == words


@pytest.mark.parametrize("width", [WIDE_INCHES, NARROW_INCHES])
def test_the_front_is_drawn_with_labels_that_do_not_overlap(plan: Plan, answer: Answer, width: float) -> None:
    figure = memory_against_time(plan, answer.front, width)
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert (
        "chosen" in labels and "zero2×8" in labels and any(label.startswith("capacity") for label in labels)
    )
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    assert "zero2×8" in svg(figure, "front")


def test_a_far_budget_does_not_flatten_the_front(plan: Plan, answer: Answer) -> None:
    largest = max(candidate.peak_bytes for candidate in plan.candidates)
    axes = memory_against_time(replace(plan, capacity_bytes=8 * largest, reserve_bytes=0), answer.front).axes[
        0
    ]
    assert axes.get_title(loc="left").startswith("capacity ") and axes.get_ylim()[1] < 2 * largest / GiB
    near = memory_against_time(plan, answer.front).axes[0]
    assert not near.get_title(loc="left") and near.get_ylim()[1] > plan.capacity_bytes / GiB


@pytest.mark.parametrize("width", [WIDE_INCHES, NARROW_INCHES])
def test_many_strategies_are_labelled_once_and_off_the_points(plan: Plan, width: float) -> None:
    """Close together, some with long names; the chosen one is on the front as an equal object, as from a file."""
    chosen = plan.candidates[0]
    near = [
        replace(
            chosen,
            line=f"{'' if number % 3 else 'compiled · selective checkpointing · '}bf16 · zero3×8 · mb{number}×ga2",
            verdict="fits",
            peak_bytes=chosen.peak_bytes + (number % 5 - 2) * GiB,
            step_seconds=chosen.step_seconds * (1 + 0.02 * (number - 6)),
        )
        for number in range(1, 14)
    ]
    figure = memory_against_time(replace(plan, candidates=(chosen, *near)), (replace(chosen), near[0]), width)
    figure.canvas.draw()
    [axes] = figure.axes
    labels = [text.get_text() for text in axes.texts]
    assert labels.count("chosen") == 1 and len(labels) >= 3
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    points = [
        axes.transData.transform((each.step_seconds, each.peak_bytes / GiB)) for each in (chosen, *near)
    ]
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_a_strategy_without_a_technique_reads_as_english() -> None:
    assert differs("compiled · bf16 · zero3×8", "bf16 · zero3×8") == "not compiled"
    assert differs("chunked loss · bf16", "bf16") == "no chunked loss"
