"""The line of a step: on one line of any terminal, never without the step, the loss and the time that is left."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from shardwise.core.counted import TOKENS, Units
from shardwise.core.run_files import StepRecord
from shardwise.trainer.progress import Progressing, StepLine

STEP = StepRecord(
    12_345, 8.0512, 1.0, 1e-3, 10, 7.31, 71_712.0, peak_bytes=77_309_411_328, held_out_loss=7.9123
)


def shown(width: int, step: StepRecord = STEP, units: Units = TOKENS) -> list[str]:
    line = StepLine(19_000, 0, units)
    line.update(step, 0.0)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(line)
    return [text.rstrip() for text in capture.get().splitlines()]


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120, 200])
def test_a_step_is_one_line_with_whole_figures(width: int) -> None:
    [text] = shown(width)
    assert len(text) <= width and "…" not in text
    assert text.startswith("step 12345/19000") and "loss 8.0512" in text
    assert "13 h 31 min left" in text
    known = {"71,712 tokens/s", "peak 72.00 GiB", "validation loss 7.9123", "loss 8.0512", "13 h 31 min left"}
    figures = [part for part in re.split(r" {2,}", re.sub(r"[━╸╺]+", "  ", text)) if part]
    assert set(figures[1:]) <= known


def test_the_peak_goes_first_and_the_step_never() -> None:
    widths = {
        figure: min(width for width in range(20, 200) if figure in shown(width)[0])
        for figure in ("peak 72.00 GiB", "━", "71,712 tokens/s", "13 h 31 min left", "step 12345/19000")
    }
    assert list(widths) == sorted(widths, key=lambda figure: -widths[figure])


def test_eighty_columns_have_the_step_the_rate_and_the_time() -> None:
    [text] = shown(80, StepRecord(12_345, 8.0512, 1.0, 1e-3, 10, 7.31, 71_712.0, peak_bytes=2**30))
    assert {"step 12345/19000", "loss 8.0512", "71,712 tokens/s", "13 h 31 min left"} <= {
        figure.strip() for figure in re.split(r" {2,}|[━╸╺]+", text)
    }


def test_samples_and_the_metrics_of_an_own_module_are_in_the_line() -> None:
    step = StepRecord(
        3,
        0.5,
        1.0,
        1e-3,
        0,
        0.1,
        0.0,
        peak_bytes=2**30,
        processed_per_second=640.0,
        metrics={"accuracy": 0.91},
    )
    [text] = shown(120, step, Units("samples", "targets"))
    assert "640 samples/s" in text and "accuracy 0.91" in text and "tokens" not in text


def test_measures_are_in_the_line_and_a_narrow_terminal_drops_the_last_ones_first() -> None:
    """The loss of pairs is a mean over pairs, which are no tokens."""
    measures = {"accuracy": 0.75, "reward_margin": 1.5, "chosen_log_probability": -66.43}
    step = StepRecord(3, 0.6581, 1.0, 1e-3, 8, 2.0, 4.0, processed_per_second=2844.0, measures=measures)
    [wide] = shown(200, step, Units("tokens", "pairs"))
    said = "loss 0.6581  accuracy 0.75  reward margin 1.5  chosen log probability -66.43  2,844 tokens/s, 4 pairs/s"
    assert said in wide and "trained" not in wide
    names = ("accuracy 0.75", "reward margin 1.5", "chosen log")
    seen = [sum(name in shown(width, step)[0] for name in names) for width in range(60, 200)]
    assert seen == sorted(seen) and set(seen) == {0, 1, 2, 3}
    assert all(
        "accuracy 0.75" in text for text in (shown(w, step)[0] for w in range(60, 200)) if "reward" in text
    )


def test_a_pipe_gets_plain_lines() -> None:
    file = io.StringIO()
    progress = Progressing(12_345, 0, Console(file=file, width=80))
    progress.show(STEP)
    progress.close()
    assert file.getvalue() == (
        "step 12345/12345  loss 8.0512  validation loss 7.9123  71,712 tokens/s  peak 72.00 GiB  0 s left\n"
    )


def test_a_plain_line_with_measures_has_a_hundred_columns() -> None:
    """DPO has six measures, and twice as many where it evaluates: a line of 240 columns."""
    measures = {"accuracy": 0.75, "reward_margin": 0.0009413, "chosen_reward": 0.5, "rejected_reward": -0.5}
    step = StepRecord(12, 0.6581, 1.0, 1e-3, 8, 2.0, 4.0, processed_per_second=2844.0, measures=measures)
    evaluated = replace(step, held_out_loss=0.6927, metrics=dict.fromkeys(measures, 0.25))
    plain, validated = (
        StepLine(40, 0, Units("tokens", "pairs")).plain(replace(each, peak_bytes=2**30))
        for each in (step, evaluated)
    )
    rates = "2,844 tokens/s, 4 pairs/s  0 s left"
    assert plain == f"step 12/40  loss 0.6581  accuracy 0.75  reward margin 0.0009413  {rates}"
    assert validated == f"step 12/40  loss 0.6581  validation loss 0.6927  accuracy 0.25  {rates}"


def test_the_time_left_is_of_the_mean_step_and_ends() -> None:
    """One slow step of a shared machine is no forecast; the first step, which is slower, is left out."""
    line = StepLine(10, 0)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    for step, now in ((1, 60.0), (2, 62.0), (3, 66.0)):
        line.update(replace(STEP, step=step, seconds=4.0 if step > 1 else 60.0), now)
    assert line.left == pytest.approx(7 * 3.0)
    console.print(line)
    line.update(replace(STEP, step=10), 87.0)
    console.print(line)
    during, after = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "21 s left" in during and "left" not in after
