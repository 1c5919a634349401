"""Writes planner/accuracy.toml, the spread of runs around their predictions: ``python benchmarks/intervals.py``.

The figures are quantiles of measured over predicted in the committed results of other benchmarks:

- seconds on accelerators: published runs, each of a stack that the fit did not see (calibrate.py);
- seconds on a CPU after ``doctor --calibrate``: runs on this machine (clock_here.py);
- memory on accelerators: what the allocator reserved in published runs of PyTorch's FSDP2 (memory.py);
- memory on a CPU: the worst rank of runs on this machine (ledger.py).

A quantity without committed results has no entry, and plans give no interval of it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FILE = Path(__file__).parent.parent / "shardwise" / "plan" / "accuracy.toml"
HELD_OUT = "all but nanotron"
LEAST_RUNS = 15
"""Of fewer, no quantile is taken."""


def text() -> str:
    """The file."""
    parts = [
        "# Quantiles of measured over predicted. Written by `python benchmarks/intervals.py`; do not edit."
    ]
    for name, figures, source in _spreads():
        if figures["runs"] >= LEAST_RUNS:
            p50, p95 = (f"{figures[each]:.4f}" for each in ("p50", "p95"))
            runs = figures["runs"]
            parts.append(f'[{name}]\np50 = {p50}\np95 = {p95}\nruns = {runs}\nsource = "{source}"')
    return "\n\n".join(parts) + "\n"


def _spreads() -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """(table, figures, source) of every quantity that has results."""
    if found := _result("time-accuracy"):
        row = found["held out"][HELD_OUT]
        source = "published runs of stacks that the fit did not see, docs/reference/accuracy.md"
        yield "seconds.accelerator", row["published over predicted"] | {"runs": row["runs"]}, source
    if found := _result("clock-cpu"):
        ratios = [row["measured_seconds"] / row["predicted_seconds"] for row in found["rows"]]
        source = "runs on a calibrated machine, docs/how-to/calibrate-step-time.md"
        yield "seconds.cpu", _quantiles(ratios), source
    if found := _result("memory-accuracy"):
        row = found["by stack"]["FSDP2"]
        source = "published runs of FSDP2, docs/reference/accuracy.md"
        yield "memory.accelerator", row["published over predicted"] | {"runs": row["runs"]}, source
    if found := _result("ledger-cpu"):
        worst = [max(run["ranks"], key=lambda rank: rank["measured_peak_bytes"]) for run in found["rows"]]
        ratios = [rank["measured_peak_bytes"] / rank["predicted_peak_bytes"] for rank in worst]
        yield "memory.cpu", _quantiles(ratios), "runs on a CPU, docs/reference/ledger-cpu.md"


def _quantiles(ratios: Sequence[float]) -> Mapping[str, Any]:
    cuts = statistics.quantiles(ratios, n=20, method="inclusive")
    return {"p50": statistics.median(ratios), "p95": cuts[-1], "runs": len(ratios)}


def _result(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> None:
    FILE.write_text(text(), encoding="utf-8")
    print(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
