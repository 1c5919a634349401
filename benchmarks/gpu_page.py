"""What the GPU benchmark measured (results/gpu-rows.jsonl), as the tables of docs/reference/gpu.md.

Of every row the newest figures are shown, and the earlier ones of the same kind of accelerator with day and torch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from gpu_store import Row, is_measured, read

from shardwise.core.units import format_bytes

RESULTS = Path(__file__).parent / "results"
ABSENT = "–"
Cell = Callable[[Row], str]


def number(key: str, shown: str, factor: float = 1.0) -> Cell:
    """A figure of a row as ``shown``, such as ``{:.3f} s``; a dash for a row without it."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return ABSENT if value is None else shown.format(factor * value).replace("-", "−")

    return cell


def memory_of(key: str) -> Cell:
    return lambda row: format_bytes(row[key]) if row.get(key) else ABSENT


def error_of(predicted: str, measured: str, shown: str = "{:+.1f} %") -> Cell:
    """How far a prediction is from the measured figure."""

    def cell(row: Row) -> str:
        if not row.get(predicted) or not row.get(measured):
            return ABSENT
        return shown.format(100 * (row[predicted] / row[measured] - 1)).replace("-", "−")

    return cell


def milliseconds(kind: str) -> Cell:
    return lambda row: f"{row['milliseconds'].get(kind, 0.0):,.1f}"


def _largest(row: Row) -> str:
    name, spent = row["largest_others"][0]
    return f"{name}: {spent:.1f} ms"


@dataclass(frozen=True)
class Table:
    """Rows of a section that have the same figures.

    Attributes:
        key: the figure that such a row has.
        columns: heads and cells, after the row's name.
        earlier: the figure that is shown of earlier measurements.
        said: a paragraph above the table.
    """

    key: str
    columns: Mapping[str, Cell]
    earlier: Cell
    said: Callable[[list[Row]], str] = lambda rows: ""


def _counted(rows: list[Row]) -> str:
    exact = [row for row in rows if row.get("precision") == "fp64"]
    worst = max((max(row["loss"], row["gradient_norm"], row["parameters"]) for row in exact), default=0.0)
    passed = sum(row["passed"] for row in rows)
    return (
        f"{passed} of {len(rows)} values train as one plain process on the CPU does, over 20 steps. In fp64"
        f" ({len(exact)} values) the worst relative difference of a loss, of a gradient norm or of the weights is"
        f" {worst:.1e}."
    )


def _memory_errors(rows: list[Row]) -> str:
    allocated, reserved = ([abs(row[key]) for row in rows] for key in ("error", "reserved_error"))
    return (
        f"{len(rows)} configurations. Error of the allocated peak: median {100 * statistics.median(allocated):.2f} %,"
        f" worst {100 * max(allocated):.2f} %. Error of the reserved peak, fragmentation included: median"
        f" {100 * statistics.median(reserved):.2f} %, worst {100 * max(reserved):.2f} %."
    )


def _clock_errors(rows: list[Row]) -> str:
    errors = [abs(row["error_of_prediction"]) for row in rows if row["settings"]]
    if not errors:
        return ""
    return (
        f"{len(errors)} runs with a pinned strategy: median error {100 * statistics.median(errors):.1f} %, worst"
        f" {100 * max(errors):.1f} %."
    )


def _choices(rows: list[Row]) -> Iterator[Sequence[str]]:
    """The planner's choices against all strategies of the same work in bf16. Equal plans are one: their median."""
    for choice in (row for row in rows if not row["settings"]):
        times: dict[str, list[float]] = {}
        for row in rows:
            if row["work"] == choice["work"] and row["settings"].get("precision", "bf16") == "bf16":
                times.setdefault(row["plan"], []).append(row["median_seconds"])
        seconds = {plan: statistics.median(taken) for plan, taken in times.items()}
        best = min(seconds, key=seconds.__getitem__)
        own, least = seconds[choice["plan"]], seconds[best]
        slower = f"{100 * (own / least - 1):+.1f} %".replace("-", "−")
        yield (
            choice["work"],
            choice["plan"],
            f"{own:.3f} s",
            f"{best} of {len(seconds)}",
            f"{least:.3f} s",
            slower,
        )


_SPEED = Table(
    "tokens_per_second",
    {
        "tokens/s": number("tokens_per_second", "{:,.0f}"),
        "share of a bf16 product's speed": number("share_of_bf16_ceiling", "{:.0f} %", 100),
        "measured": number("median_seconds", "{:.3f} s"),
        "predicted": number("predicted_seconds", "{:.3f} s"),
        "error": error_of("predicted_seconds", "median_seconds"),
        "allocated": memory_of("allocated_bytes"),
        "error of memory": error_of("predicted_bytes", "allocated_bytes", "{:+.2f} %"),
        "reserved": memory_of("reserved_bytes"),
        "how": lambda row: row.get("plan") or row.get("memory") or "",
    },
    number("tokens_per_second", "{:,.0f}"),
)
_ATTENTION_ERRORS = (
    "error_of_output",
    "error_of_gradient_of_q",
    "error_of_gradient_of_k",
    "error_of_gradient_of_v",
)

SECTIONS: Mapping[str, tuple[Table, ...]] = {
    "machine": (
        Table(
            "healthy",
            {
                "healthy": lambda row: "yes" if row["healthy"] else "no",
                "warnings": lambda row: "; ".join(row["warnings"]) or ABSENT,
            },
            lambda row: "healthy" if row["healthy"] else "not healthy",
        ),
        Table(
            "flops", {"measured": number("flops", "{:.0f} TFLOP/s", 1e-12)}, number("flops", "{:.0f}", 1e-12)
        ),
        Table(
            "copy_bytes_per_s",
            {
                "on the device": number("copy_bytes_per_s", "{:,.0f} GB/s", 1e-9),
                "from the host": number("to_device_bytes_per_s", "{:.0f} GB/s", 1e-9),
                "to the host": number("to_host_bytes_per_s", "{:.0f} GB/s", 1e-9),
            },
            number("copy_bytes_per_s", "{:,.0f}", 1e-9),
        ),
        Table(
            "forward_flops",
            {
                "forward": number("forward_flops", "{:.0f} TFLOP/s", 1e-12),
                "with backward": number("forward_backward_flops", "{:.0f} TFLOP/s", 1e-12),
                "error of output, ∂q, ∂k, ∂v": lambda row: (
                    ", ".join(number(key, "{:.1e}")(row) for key in _ATTENTION_ERRORS if key in row) or ABSENT
                ),
            },
            number("forward_backward_flops", "{:.0f}", 1e-12),
        ),
        Table(
            "median_seconds",
            {
                "time": number("median_seconds", "{:.0f} ms", 1e3),
                "memory above the inputs": memory_of("bytes_above_inputs"),
            },
            number("median_seconds", "{:.0f} ms", 1e3),
            lambda rows: (
                "Output layer and loss of 8,192 tokens, 4,096 wide, 128,256 words, bf16, forward and backward."
            ),
        ),
    ),
    "ladder": (_SPEED,),
    "profile": (
        Table(
            "launches",
            {
                "trained": lambda row: row["trained"],
                "step": number("step_milliseconds", "{:,.1f} ms"),
                "products": milliseconds("products"),
                "attention": milliseconds("attention"),
                "memory-bound": milliseconds("memory-bound kernels"),
                "optimizer": milliseconds("optimizer"),
                "copies": milliseconds("copies"),
                "collectives": milliseconds("collectives"),
                "idle": milliseconds("idle"),
                "launches": number("launches", "{:,.0f}"),
                "largest without products": lambda row: _largest(row),
            },
            number("step_milliseconds", "{:,.1f} ms"),
        ),
    ),
    "techniques": (
        _SPEED,
        Table(
            "stall_seconds",
            {
                "training waits": number("stall_seconds", "{:.2f} s"),
                "the first time": number("first_stall_seconds", "{:.2f} s"),
                "whole save": number("whole_save_seconds", "{:.2f} s"),
                "size": memory_of("checkpoint_bytes"),
            },
            number("stall_seconds", "{:.2f} s"),
        ),
    ),
    "clock": (
        Table(
            "error_of_prediction",
            {
                "predicted": number("predicted_seconds", "{:.3f} s"),
                "measured": number("median_seconds", "{:.3f} s"),
                "error": number("error_of_prediction", "{:+.1f} %", 100),
            },
            number("error_of_prediction", "{:+.1f} %", 100),
            _clock_errors,
        ),
    ),
    "parity": (
        Table(
            "parameters",
            {
                "passed": lambda row: "yes" if row["passed"] else "no",
                "loss": number("loss", "{:.1e}"),
                "gradient norm": number("gradient_norm", "{:.1e}"),
                "weights": number("parameters", "{:.1e}"),
                "precision": lambda row: row["precision"],
            },
            lambda row: "yes" if row["passed"] else "no",
            _counted,
        ),
        Table(
            "killed_after_step",
            {
                "killed after step": number("killed_after_step", "{}"),
                "steps": number("steps", "{}"),
                "every line as without": lambda row: "yes" if row["passed"] else "no",
            },
            lambda row: "yes" if row["passed"] else "no",
        ),
    ),
    "memory": (
        Table(
            "reserved_error",
            {
                "predicted": memory_of("predicted_bytes"),
                "allocated": memory_of("allocated_bytes"),
                "error": number("error", "{:+.2f} %", 100),
                "error of reserved": number("reserved_error", "{:+.2f} %", 100),
            },
            number("error", "{:+.2f} %", 100),
            _memory_errors,
        ),
    ),
}


def page(folder: Path = RESULTS) -> str:
    """Sections with results, by kind of accelerator; each with the machines of its newest figures."""
    rows = [row for row in read(folder) if not row.get("tiny")]
    parts = []
    for section, tables in SECTIONS.items():
        lines = [row for row in rows if row["section"] == section]
        for accelerators in dict.fromkeys(_accelerators(row) for row in lines):
            same = [row for row in lines if _accelerators(row) == accelerators]
            if shown := _shown(section, tables, same):
                parts.append(f"### {section}, {accelerators}\n\n{shown}")
    return "\n\n".join(parts) or "No results are committed yet."


def _accelerators(row: Row) -> str:
    return ", ".join(row["machine"]["accelerators"]) or "no accelerator"


def _shown(section: str, tables: Sequence[Table], lines: list[Row]) -> str:
    measurements: dict[str, list[Row]] = {}
    for row in lines:
        measurements.setdefault(row["row"], []).append(row)
    measured = {name: [row for row in found if is_measured(row)] for name, found in measurements.items()}
    newest = [found[-1] for found in measured.values() if found]
    parts = [f"{'; '.join(dict.fromkeys(map(_measured_on, newest)))}."] if newest else []
    for table in tables:
        own = [row for row in newest if _first(tables, row) is table]
        if own:
            parts += [said] if (said := table.said(own)) else []
            parts.append(_table(table, own, measured))
    if choices := list(_choices([row for row in newest if "settings" in row])):
        head = ("recipe", "the planner's choice", "measured", "best", "measured", "slower by")
        parts.append(_markdown(head, choices))
    if lacking := [found[-1] for name, found in measurements.items() if not measured[name]]:
        reasons = (f"{row['row']} ({row.get('reason') or row['error']})" for row in lacking)
        parts.append(f"Not measured: {'; '.join(reasons)}.")
    return "\n\n".join(parts)


def _first(tables: Sequence[Table], row: Row) -> Table | None:
    """The table of a row: the first one whose figure it has."""
    return next((table for table in tables if table.key in row), None)


def _measured_on(row: Row) -> str:
    machine = row["machine"]
    return f"{machine['cores']} cores of {machine['processor']}, {_version_and_day(row)}"


def _version_and_day(row: Row) -> str:
    return f"torch {row['machine']['torch']}, {row['day']}"


def _table(table: Table, rows: list[Row], measured: Mapping[str, list[Row]]) -> str:
    """The newest figures; a column of days where they differ, and of earlier figures where there are some."""
    columns = dict(table.columns)
    if len({_version_and_day(row) for row in rows}) > 1:
        columns["when"] = _version_and_day
    if any(len(measured[row["row"]]) > 1 for row in rows):
        columns["earlier"] = lambda row: "; ".join(
            f"{table.earlier(past)} ({_version_and_day(past)})"
            for past in reversed(measured[row["row"]][:-1])
        )
    lines = ((row["row"], *(cell(row) for cell in columns.values())) for row in rows)
    return _markdown(("row", *columns), lines)


def _markdown(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    print(page())
