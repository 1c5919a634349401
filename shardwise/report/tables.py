"""A plan as text, for a terminal or a pipe: the output of `shardwise plan`.

Sections in order: the strategy and its speed, the answer (report/answer.py), memory at the peak, time of a step,
candidates with reasons, assumptions. The brief form is one screen of 80 columns: the largest rows of memory and time,
the best alternatives, and the options that show the rest.
There are no lines or frames: columns, blank lines and bars of block characters survive a pipe, a log file and a README.
Every colour has its name next to it. The layout adapts to the width, up to `WIDEST_TABLE` columns.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardwise.core.answer import TELLS, Answer
from shardwise.core.errors import one_line
from shardwise.core.ledger import Ledger
from shardwise.core.plan import Candidate, Plan
from shardwise.core.units import MiB, format_bytes, format_percent, format_rate
from shardwise.report.answer import (
    BRIEF_ALTERNATIVES,
    answer_sections,
    best_alternatives,
    brief_answer,
    is_hardly_faster,
    limit_rows,
)
from shardwise.report.layout import STACKED, VERDICT_STYLES, bulleted, columns, text_section
from shardwise.report.notation import (
    COLOURS,
    by_size,
    of_capacity,
    peak_of,
    percent_text,
    row_label,
    seconds,
    unit_for,
)

WIDEST_TABLE = 100
"""Largest width in columns."""

SHOWN_CANDIDATES = 12
"""Number of candidates shown by default."""

BRIEF_ROWS, BRIEF_PARTS = 5, 3
"""Rows of memory, and parts of a step's time, in the brief form."""

_ASCII = str.maketrans("×·–−…≥•µ░█▉▊▋▌▍▎▏", "x|--~>*u.#####   ")


LEAST_SHARE = 0.005
"""Of a step's time, in the brief form: what would read <1 %."""


PlanPart: TypeAlias = Literal["whole", "head", "rest"]


def plan_table(
    plan: Plan,
    top: int | None = None,
    standing: Sequence[str] = (),
    answer: Answer | None = None,
    *,
    brief: bool = False,
    part: PlanPart = "whole",
) -> RenderableType:
    """The output of `shardwise plan`.

    Args:
        top: number of candidates to show; None for `SHOWN_CANDIDATES`, or for alternatives in the brief form.
        standing: sentences about the run against a scaling law.
        answer: hours and cost, the nearest alternatives, what binds.
        brief: one screen.
        part: its three first lines (head), the others (rest), or the whole.
    """
    shown = (0 if brief else SHOWN_CANDIDATES) if top is None else max(0, top)
    return PlanTable(plan, shown, tuple(standing), answer, brief, part)


def plan_text(
    plan: Plan,
    width: int = WIDEST_TABLE,
    top: int | None = None,
    standing: Sequence[str] = (),
    answer: Answer | None = None,
    *,
    brief: bool = False,
) -> str:
    """`plan_table` as plain text without colour, `width` columns at most; for files and documentation."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={})
    with console.capture() as capture:
        console.print(plan_table(plan, top, standing, answer, brief=brief))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


@dataclass(frozen=True)
class PlanTable:
    """A plan that rich can print. On ASCII streams, similar characters of one column replace the others."""

    plan: Plan
    top: int
    standing: tuple[str, ...] = ()
    answer: Answer | None = None
    brief: bool = False
    part: PlanPart = "whole"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=min(options.max_width, WIDEST_TABLE))
        width = options.max_width
        if self.part == "head":
            parts = Group(*headline(self.plan))
        else:
            parts = Group(*(self._brief(width) if self.brief else self._parts(width)))
        for segment in console.render(parts, options):
            if options.ascii_only and not segment.control:
                text = segment.text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
                segment = Segment(text, segment.style)
            yield segment

    def _brief(self, width: int) -> Iterator[RenderableType]:
        """One screen. A plan that does not fit has no time and no alternatives worth showing."""
        plan, answer = self.plan, self.answer
        more = [*plan.departures]
        yield from self._headline()
        if more:
            yield bulleted(more, "")
        if answer is not None:
            yield from ("", *brief_answer(answer))
            if answer.run.likely_hours is None and (offer := plan.calibration_offer):
                more.append(offer)
                yield Text(offer, "bold yellow")
        device = _ledger_table(plan.ledger, plan.capacity_bytes, width, plan.reserve_bytes, BRIEF_ROWS)
        yield from text_section("Memory at the peak", plan.peak.in_words, device)
        elsewhere = list(_other_memory(plan))
        yield from elsewhere
        if plan.fits:
            yield from text_section(
                "Time of a step", seconds(plan.step.seconds), _time_table(plan, width, LEAST_SHARE)
            )
        if plan.fits and self.top:
            yield from self._considered(width)
        if answer is not None and answer.limits:
            yield from limit_rows(answer)
        elif answer is not None and plan.fits and not self.top:
            parts = sum(
                spent >= LEAST_SHARE * sum(plan.step.split.values()) for spent in plan.step.split.values()
            )
            taken = len((*more, *answer.unpin, *elsewhere)) + max(0, parts - BRIEF_PARTS)
            yield from best_alternatives(answer, plan, max(2, BRIEF_ALTERNATIVES - taken))
        ways = "--full shows the rest, --limits how far this goes"
        if plan.fits and len(plan.candidates) > self.top:
            ways += f", --top N of {len(plan.candidates)} strategies"
        yield from ("", Text(ways, "dim"))

    def _headline(self) -> Iterator[Text]:
        """The three lines of a printed plan, if they are not told; then pins that cost time."""
        if self.part == "whole":
            yield from headline(self.plan)
        for sentence in self.answer.unpin if self.answer else ():
            yield Text(one_line(sentence), "bold yellow")

    def _considered(self, width: int) -> Iterator[RenderableType]:
        """The first candidates, and what their signs mean."""
        shown = self.plan.candidates[: self.top]
        yield from ("", _candidate_rows(shown, width))
        if any(is_hardly_faster(candidate, self.plan) for candidate in shown):
            yield Text(f"  within {format_percent(TELLS)} of the fastest, the plainer is chosen", "dim")
        if any(candidate.peak_is == "estimated" for candidate in shown):
            yield Text("  ~ with fragmentation in proportion to the chosen one's", "dim")

    def _parts(self, width: int) -> Iterator[RenderableType]:
        plan = self.plan
        yield from self._headline()
        if self.answer is not None:
            yield from answer_sections(self.answer, width)
        device = _ledger_table(plan.ledger, plan.capacity_bytes, width, plan.reserve_bytes)
        yield from text_section("Memory at the peak", plan.peak.in_words, device)
        if plan.disk.bytes:
            yield f"On the disk: {format_bytes(plan.disk.bytes)} of a rank"
        if plan.host.bytes:
            host = _ledger_table(plan.host.ledger, plan.host.capacity_bytes, width)
            yield from text_section("Host memory", "of a rank, when it holds most", host)
        yield from text_section("Time of a step", seconds(plan.step.seconds), _time_table(plan, width))
        if any(plan.step.traffic_bytes.values()):
            yield from text_section("Sent by a rank in a step", "", _traffic(plan))
        if plan.candidates and self.top:
            yield from self._considered(width)
            if len(plan.candidates) > self.top:
                yield Text(f"  and {len(plan.candidates) - self.top} more; --top N shows N", "dim")
        if why := (*plan.reasons, *plan.departures):
            yield from text_section("Why", "", bulleted(why, ""))
        if self.standing:
            yield from text_section("By the scaling law", "", bulleted(self.standing, ""))
        sources = [*(self.answer.sources() if self.answer else ()), *plan.assumptions]
        if sources:
            yield from text_section("Where the figures come from", "", bulleted(sources, "dim"))


# -- the parts --------------------------------------------------------------------------------------


def headline(plan: Plan) -> Iterator[Text]:
    """The three lines of a printed plan."""
    strategy, figures, judged = str(plan).split("\n")
    yield Text(strategy, "bold")
    yield Text(figures)
    verdict = Text(judged, "dim")
    style = "bold yellow" if plan.tight else "bold green" if plan.fits else "bold red"
    verdict.stylize(style, 0, len(plan.verdict))
    yield verdict


def _other_memory(plan: Plan) -> Iterator[str]:
    """Lines on memory that is not the device's."""
    if plan.host.bytes:
        yield f"  host memory of a rank: {of_capacity(plan.host.bytes, plan.host.capacity_bytes)}"
    if plan.disk.bytes:
        yield f"  on the disk: {format_bytes(plan.disk.bytes)} of a rank"


def _ledger_table(
    ledger: Ledger, capacity: int, width: int, reserve: int = 0, most: int | None = None
) -> Table:
    """The ledger: a row per non-empty category, of many the ``most`` largest, the total, and the free memory.

    The largest row has the longest bar. Free memory gets a bar only if it is not longer than that. If free memory is
    below the reserve, it is labelled as the reserve, because none of it may be used.
    """
    peak = ledger.total
    free = capacity - ledger.total
    unit, cells, rows = unit_for(peak), _bar_cells(width), by_size(ledger)
    longest = rows[0][1] if rows else 0
    table = columns("left", "left", "right", "right")
    others = rows[most:] if most is not None and len(rows) > most + 1 else []
    for row, size in rows[: len(rows) - len(others)]:
        bar = Text(_fraction_bar(size / longest, cells), COLOURS[row])
        table.add_row(row_label(row), bar, unit.write(size), Text(percent_text(size, peak), "dim"))
    if others:
        size = sum(size for _, size in others)
        bar = Text(_fraction_bar(size / longest, cells), "dim")
        table.add_row(f"{len(others)} others", bar, unit.write(size), Text(percent_text(size, peak), "dim"))
    table.add_row(Text("total", "bold"), "", Text(unit.write(peak), "bold"), "")
    if free >= 0:
        bar = Text("░" * round(cells * free / longest) if 0 < free <= longest else "", "dim")
        name = "free" if free >= reserve else "free (reserve)"
        table.add_row(Text(name, "dim"), bar, Text(format_bytes(free), "dim"), "")
    return table


def _time_table(plan: Plan, width: int, least: float = 0.0) -> Table:
    """The parts of a step of at least this share."""
    table = columns("left", "left", "right", "right")
    whole = sum(plan.step.split.values())
    longest = max(plan.step.split.values(), default=0.0)
    for part, spent in plan.step.split.items():
        if spent < least * whole:
            continue
        bar = Text(_fraction_bar(spent / longest if longest else 0.0, _bar_cells(width)), "cyan")
        table.add_row(Text(one_line(part)), bar, seconds(spent), Text(percent_text(spent, whole), "dim"))
    return table


def _traffic(plan: Plan) -> Table:
    """Traffic by mesh axis, in the ring convention. The rate is the step's average, to compare with the link."""
    table = columns("left", "right", "right")
    for axis, sent in sorted(plan.step.traffic_bytes.items(), key=lambda pair: -pair[1]):
        rate = f"{format_rate(sent / plan.step.seconds, 'B')} on average" if sent >= MiB else ""
        table.add_row(Text(f"{one_line(axis)} axis"), format_bytes(sent), Text(rate, "dim"))
    return table


def _candidate_rows(candidates: Sequence[Candidate], width: int) -> RenderableType:
    """A row for each candidate. A verdict that does not fit into its row stands on the next line."""
    rows = [
        (
            f"  {one_line(candidate.line)}",
            peak_of(candidate),
            seconds(candidate.step_seconds),
            _verdict_of(candidate),
            candidate,
        )
        for candidate in candidates
    ]
    names = ("Considered", "peak", "step")
    columns = zip(*(row[:3] for row in rows), strict=True)
    wide = [max(map(cell_len, (name, *column))) for name, column in zip(names, columns, strict=True)]
    figures = f"{{:>{wide[1]}}}  {{:>{wide[2]}}}  "
    apart = wide[0] + 2 + cell_len(figures.format("", "")) > width
    shown: list[RenderableType] = [Text(names[0], "bold")]
    if not apart:
        shown = [Text.assemble((f"{names[0]:{wide[0] + 2}}", "bold"), (figures.format(*names[1:]), "dim"))]
    for line, peak, took, judged, candidate in rows:
        row = Text(line, "bold" if candidate.verdict == "chosen" else "")
        if not apart:
            row.pad_right(wide[0] + 2 - row.cell_len)
            row.append(figures.format(peak, took))
        whole = Text.assemble(row, judged)
        if apart:
            shown += [row, Padding(Text.assemble(figures.format(peak, took), judged), (0, 0, 0, STACKED))]
        elif whole.cell_len <= width:
            shown.append(whole)
        else:
            shown += [row, Padding(judged, (0, 0, 0, STACKED))]
    return Group(*shown)


def _verdict_of(candidate: Candidate) -> Text:
    reason = f": {one_line(candidate.reason)}" if candidate.reason else ""
    return Text.assemble((one_line(candidate.verdict), VERDICT_STYLES.get(candidate.verdict, "")), reason)


# -- the means --------------------------------------------------------------------------------------


def _bar_cells(width: int) -> int:
    """Width of a bar in a table of `width` columns that also has a name, a size and a share."""
    return max(8, min(48, width - 50))


def _fraction_bar(fraction: float, cells: int) -> str:
    """A bar of `fraction` of `cells` columns, in eighths; at least one eighth if `fraction` is not 0."""
    eighths = max(1, round(8 * cells * min(1.0, fraction))) if fraction > 0 else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", *"▏▎▍▌▋▊▉")[rest]
