"""The plan as text: complete, true to the plan, and whole at any width, with and without colour."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardwise.core.json_file import parse_json
from shardwise.core.ledger import CATEGORIES, Ledger
from shardwise.core.plan import HostMemory, Plan
from shardwise.core.units import GiB, MiB
from shardwise.report.notation import COLOURS, row_label
from shardwise.report.tables import plan_table, plan_text
from tests.harness.plans import with_rows


def printed(plan: Plan, **console: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, **console).print(plan_table(plan))  # type: ignore[arg-type]
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_the_head_is_the_printed_plan(plan: Plan, width: int) -> None:
    """In Python, a plan was 56,567 characters of dataclass."""
    head = [
        "bf16 · zero3×8 · mb1×ga2",
        "69.4 of 79.1 GiB   1.65 s/step   79.7 k tokens/s   MFU 58 %",
        "fits · 8.03B parameters · 8xH100-80GB · 131.1K tokens per step",
    ]
    assert str(plan).splitlines() == head == plan_text(plan, width).splitlines()[:3]
    assert repr(plan) == f"<Plan {plan.line}: fits>"
    large = replace(plan, capacity_bytes=plan.peak.bytes // 2)
    assert str(large).splitlines()[2].startswith("does not fit: ")


def test_a_tight_plan_says_so_in_its_third_line(plan: Plan) -> None:
    said = "the allocator empties its cache 11 times a step to make room"
    tight = replace(plan, reasons=(*plan.reasons, said))
    assert plan_text(tight).splitlines()[2].startswith(f"tight: {said} · 8.03B parameters")
    short = replace(tight, capacity_bytes=plan.peak.bytes - MiB)
    assert short.verdict == "does not fit: 1.00 MiB too much"


def test_ledger_rows_are_the_plans_and_sum_to_its_peak(plan: Plan) -> None:
    text = plan_text(plan)
    rows = dict(re.findall(r"^  (\w[\w ]*?)  +[█▏▎▍▌▋▊▉]+ +([\d.]+) GiB", text, re.MULTILINE))
    expected = {row_label(row): f"{size / GiB:.2f}" for row, size in plan.ledger.as_dict().items() if size}
    assert rows == expected
    assert list(rows) == sorted(rows, key=lambda row: -float(rows[row]))
    assert sum(map(float, rows.values())) == pytest.approx(plan.peak.bytes / GiB, abs=0.01 * len(rows))
    assert f"{plan.peak.bytes / GiB:.2f} GiB" in re.search("^  total.*$", text, re.MULTILINE)[0]  # type: ignore[index]


def test_bars_are_in_proportion(plan: Plan) -> None:
    lengths = {
        row: len(bar)
        for row, bar in re.findall(r"^  (\w[\w ]*?)  +([█▏▎▍▌▋▊▉]+) ", plan_text(plan), re.MULTILINE)
    }
    ledger = plan.ledger
    expected = lengths["activations"] * ledger.optimizer_state / ledger.activations
    assert lengths["optimizer state"] == pytest.approx(expected, abs=1)


def test_says_where_when_why_and_on_what_it_rests(plan: Plan) -> None:
    text = plan_text(plan)
    assert "in the backward phase, at layers.31.mlp, on rank 0" in text
    assert re.search(r"matrix products +\S+ +1\.24 s +76 %", text)
    assert re.search(r"shard axis +104\.7 GiB +68\.34 GB/s on average", text)
    assert plan.reasons[0] in text
    assert plan.assumptions[0] in text


def test_candidates_with_verdicts_and_reasons(plan: Plan) -> None:
    text = plan_text(plan)
    assert re.search(r"zero2×8 · mb1×ga2 +~ 79\.00 GiB +1\.57 s +fits: −5 % step time, about \+9\.6", text)
    assert re.search(r"zero0×8 · mb1×ga2 +≥ 90\.00 GiB +– +does not fit: weights alone: 90 GiB", text)
    fewer = plan_text(plan, top=2)
    assert "zero2×8" in fewer
    assert "zero0×8" not in fewer
    assert "and 2 more; --top N shows N" in fewer
    assert "Considered" not in plan_text(plan, top=0)


def test_what_does_not_fit_is_said_in_the_head(plan: Plan) -> None:
    text = plan_text(replace(plan, capacity_bytes=plan.peak.bytes - 512 * MiB))
    assert text.splitlines()[2].startswith("does not fit: 512.0 MiB too much · ")
    assert "  free" not in text


def test_a_reserve_that_is_not_left_is_named(plan: Plan) -> None:
    """The reserve is named next to "does not fit"."""
    within = plan_text(replace(plan, capacity_bytes=plan.peak.bytes + 200 * MiB, reserve_bytes=512 * MiB))
    beyond = plan_text(replace(plan, capacity_bytes=plan.peak.bytes - 100 * MiB, reserve_bytes=512 * MiB))
    said = "does not fit: {} MiB too much with a reserve of 512.0 MiB · "
    assert within.splitlines()[2].startswith(said.format("312.0"))
    assert beyond.splitlines()[2].startswith(said.format("612.0"))
    assert re.search(r"^  free \(reserve\) +░* +200\.0 MiB$", within, re.MULTILINE)
    assert "  free" not in beyond
    assert "  total" in beyond


def test_a_reserve_that_is_left_changes_no_figure(plan: Plan) -> None:
    assert plan_text(replace(plan, reserve_bytes=1620 * MiB)) == plan_text(plan)
    exactly = plan_text(replace(plan, reserve_bytes=plan.capacity_bytes - plan.peak.bytes))
    assert exactly.splitlines()[2].startswith("fits · ")
    assert "(reserve)" not in exactly


def test_every_memory_that_is_too_small_is_named(plan: Plan) -> None:
    host = replace(plan, host=HostMemory(Ledger(optimizer_state=3 * GiB), 2 * GiB))
    both = replace(host, capacity_bytes=plan.peak.bytes - 512 * MiB)
    said = "1.00 GiB too much in host memory · "
    assert plan_text(host).splitlines()[2].startswith(f"does not fit: {said}")
    assert plan_text(both).splitlines()[2].startswith(f"does not fit: 512.0 MiB too much, {said}")
    assert "Host memory   of a rank, when it holds most" in plan_text(host)


def test_plain_text_is_plain(plan: Plan) -> None:
    text = plan_text(plan)
    assert "\x1b" not in text
    assert not re.search(r"[─│┌┐└┘├┤┬┴┼━┃]|[ \t]$", text, re.MULTILINE)
    assert text.endswith("\n")


def test_piped_is_as_plain_text(plan: Plan) -> None:
    lines = [line.rstrip() for line in printed(plan, _environ={}).splitlines()]
    assert lines == plan_text(plan).splitlines()


def test_colours_are_the_ledgers_and_no_color_removes_them(plan: Plan) -> None:
    coloured = printed(plan, force_terminal=True, color_system="truecolor", _environ={})
    for row, colour in COLOURS.items():
        code = ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        assert (f"38;2;{code}m█" in coloured) == (getattr(plan.ledger, row) > 0)
    without = printed(plan, force_terminal=True, color_system="truecolor", _environ={"NO_COLOR": "1"})
    assert "38;" not in without


def test_a_stream_without_unicode_gets_ascii(plan: Plan) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=stream, width=100, _environ={}).print(plan_table(plan))
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "bf16 | zero3x8 | mb1xga2" in text
    assert re.search(r"activations +#{20,} ", text)


def test_words_from_outside_are_shown_as_they_are(plan: Plan) -> None:
    words = "[bold]x[/bold] [/] :smile: \x1b[31m\x07 one\ntwo"
    strange = replace(
        plan,
        line=f"line {words}",
        cluster=words,
        peak=replace(plan.peak, where=words, phase=words),
        step=replace(plan.step, traffic_bytes={words: 5}, split={words: 1.0}),
        candidates=(replace(plan.candidates[0], line=words, verdict=words, reason=words),),
        reasons=(words,),
        assumptions=(words,),
    )
    text = plan_text(strange, width=100)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("[bold]x[/bold] [/] :smile: [31m one two") >= 7


def test_a_plan_read_back_prints_the_same(plan: Plan) -> None:
    assert plan_text(parse_json(plan.to_json(), Plan, Path())) == plan_text(plan)


sizes = st.integers(0, 2**44)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.fixed_dictionaries(dict.fromkeys(CATEGORIES, sizes)),
    capacity=sizes,
    reserve=sizes,
    width=st.integers(60, 140),
    line=st.text("bf16 ·zero3×", min_size=1, max_size=120),
)
def test_fits_its_width_whatever_the_plan(
    plan: Plan, rows: dict[str, int], capacity: int, reserve: int, width: int, line: str
) -> None:
    other = replace(
        with_rows(plan, **rows),
        line=line,
        capacity_bytes=capacity,
        reserve_bytes=reserve,
        candidates=(replace(plan.candidates[0], line=line, reason=line * 3), *plan.candidates),
    )
    assert max(map(len, plan_text(other, width=width).splitlines())) <= min(width, 100)


def test_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, shardwise.report.tables, shardwise.report.record;"
        "sys.exit(bool({'torch', 'matplotlib'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_row_of_a_candidate_wraps_after_each_word(plan: Plan, width: int) -> None:
    """A narrow terminal shows each candidate on two lines: the strategy, then its peak, step and verdict."""
    text = plan_text(plan, width=width)
    considered = text[text.index("Considered") :].split("\n\n")[0].splitlines()
    assert len(considered) <= 1 + 3 * len(plan.candidates)
    for candidate in plan.candidates:
        assert any(candidate.line in line for line in considered)
        assert any(candidate.verdict in line for line in considered)


def test_samples_are_no_tokens(plan: Plan) -> None:
    own = replace(plan, step=replace(plan.step, unit="samples"))
    assert "k samples/s" in str(own) and "131.1K samples per step" in str(own) and "tokens" not in str(own)
