"""What the GPU benchmark measured (results/gpu-SECTION.json), as the tables of docs/reference/gpu.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.core.units import format_bytes

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def page() -> str:
    """All sections that have results, each with the machine of its figures."""
    made = {
        "parity": _parity,
        "memory": _memory,
        "ceilings": _ceilings,
        "clock": _clock,
        "training": _training,
        "lora": _training,
        "cross_entropy": _cross_entropy,
    }
    parts = []
    for name, shown in made.items():
        path = RESULTS / f"gpu-{name}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in found["rows"] if not isinstance(row.get("error"), str)]
            if rows:
                parts.append(f"### {name}\n\n{_machine(found['machine'])}\n\n{shown(rows)}")
    return "\n\n".join(parts) or "No results are committed yet."


def _machine(machine: Row) -> str:
    gpu = ", ".join(machine["accelerators"])
    return f"{gpu}, {machine['cores']} cores of {machine['processor']}, torch {machine['torch']}, {machine['day']}."


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %".replace("-", "−")


def _settings(settings: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "free choice"


def _parity(rows: list[Row]) -> str:
    exact = [row for row in rows if row["precision"] == "fp64"]
    worst = max(max(row["loss"], row["gradient_norm"], row["parameters"]) for row in exact)
    passed = sum(row["passed"] for row in rows)
    return (
        f"{passed} of {len(rows)} values train as one plain process on the CPU does, over 20 steps. In fp64"
        f" ({len(exact)} values) the worst relative difference of a loss, of a gradient norm or of the weights is"
        f" {worst:.1e}.\n\n" + ", ".join(f"`{row['value']}`" for row in rows) + "."
    )


def _memory(rows: list[Row]) -> str:
    allocated, reserved = ([abs(row[key]) for row in rows] for key in ("error", "reserved_error"))
    said = (
        f"{len(rows)} configurations. Error of the allocated peak: median {100 * statistics.median(allocated):.2f} %,"
        f" worst {100 * max(allocated):.2f} %. Error of the reserved peak, fragmentation included: median"
        f" {100 * statistics.median(reserved):.2f} %, worst {100 * max(reserved):.2f} %."
    )

    def lines() -> Iterator[Sequence[str]]:
        for row in rows:
            name = (
                f"{row['model']}, {row['micro_batch_size']} × {row['length']}, {_settings(row['settings'])}"
            )
            predicted, measured = (format_bytes(row[key]) for key in ("predicted_bytes", "allocated_bytes"))
            yield (
                name,
                predicted,
                measured,
                f"{100 * row['error']:+.2f} %".replace("-", "−"),
                f"{100 * row['reserved_error']:+.2f} %".replace("-", "−"),
            )

    return f"{said}\n\n" + _table(("run", "predicted", "allocated", "error", "error of reserved"), lines())


def _ceilings(rows: list[Row]) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for row in rows:
            if "product" in row:
                size = row["product"]
                name = f"product of {size:,} × {size:,}, {row['dtype'].removeprefix('torch.')}"
                yield name, f"{row['flops'] / 1e12:.0f} TFLOP/s"
            elif "attention_length" in row:
                forward, both = (row[key] / 1e12 for key in ("forward_flops", "forward_backward_flops"))
                name = f"attention of {row['attention_length']:,} tokens, forward; with backward"
                yield name, f"{forward:.0f}; {both:.0f} TFLOP/s"
            else:
                speeds = ("copy_bytes_per_s", "to_device_bytes_per_s", "to_host_bytes_per_s")
                copied, there, back = (row[key] / 1e9 for key in speeds)
                yield (
                    "copy on the device; from the host; to it",
                    f"{copied:,.0f}; {there:.0f}; {back:.0f} GB/s",
                )

    return _table(("", "measured"), lines())


def _clock(rows: list[Row]) -> str:
    errors = [abs(row["error_of_prediction"]) for row in rows if row["settings"]]
    said = (
        f"{len(errors)} runs with a pinned strategy: median error {100 * statistics.median(errors):.1f} %, worst"
        f" {100 * max(errors):.1f} %."
    )

    def lines() -> Iterator[Sequence[str]]:
        for row in rows:
            predicted, measured = (f"{row[key]:.3f} s" for key in ("predicted_seconds", "median_seconds"))
            name = f"{row['work']}: {_settings(row['settings'])}"
            yield name, predicted, measured, _percent(row["error_of_prediction"])

    head = ("run", "predicted", "measured", "error")
    return f"{said}\n\n{_table(head, lines())}\n\n{_choices(rows)}"


def _choices(rows: list[Row]) -> str:
    """The planner's choices against all strategies of the same work in bf16. Equal plans are one: their median."""

    def lines() -> Iterator[Sequence[str]]:
        for choice in (row for row in rows if not row["settings"]):
            times: dict[str, list[float]] = {}
            for row in rows:
                if row["work"] == choice["work"] and row["settings"].get("precision", "bf16") == "bf16":
                    times.setdefault(row["plan"], []).append(row["median_seconds"])
            seconds = {plan: statistics.median(taken) for plan, taken in times.items()}
            best = min(seconds, key=seconds.__getitem__)
            own, least = seconds[choice["plan"]], seconds[best]
            shown = (f"{own:.3f} s", f"{best} of {len(seconds)}", f"{least:.3f} s")
            yield choice["work"], choice["plan"], *shown, _percent(own / least - 1)

    return _table(("recipe", "the planner's choice", "measured", "best", "measured", "slower by"), lines())


def _training(rows: list[Row]) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for row in rows:
            yield (
                row["model"],
                row["plan"],
                f"{row['tokens_per_second']:,.0f}",
                f"{100 * row['share_of_bf16_ceiling']:.0f} %",
                f"{row['predicted_seconds']:.3f} s",
                f"{row['median_seconds']:.3f} s",
                format_bytes(row["predicted_bytes"]),
                format_bytes(row["allocated_bytes"]),
            )

    head = ("model", "plan", "tokens/s", "share of a bf16 product's speed", "predicted", "measured")
    return _table((*head, "predicted memory", "allocated"), lines())


def _cross_entropy(rows: list[Row]) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for row in rows:
            yield (
                row["function"],
                f"{1000 * row['median_seconds']:.0f} ms",
                format_bytes(row["bytes_above_inputs"]),
            )

    said = "Output layer and loss of 8,192 tokens, 4,096 wide, 128,256 words, bf16, forward and backward."
    return f"{said}\n\n" + _table(("loss", "time", "memory above the inputs"), lines())
