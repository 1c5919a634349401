"""Published scaling curves and the planner's own: ``python benchmarks/scaling_curves.py``.

Each curve is a series of published runs (benchmarks/data/published_runs.csv) that differ in the number of devices. The
planner's step time is computed for the same runs, with their software's factor of the fit (calibrate.py), and for
further powers of two of devices from 8 to 16,384:

- weak scaling: the batch grows with the devices, so each device has the same work. The series of Megatron-LM also grows
  the model: it has only the published points.
- strong scaling: batch and model stay, and the data-parallel degree grows.

Both are given as FLOP/s of a device, by 6 FLOPs per parameter and token. Memory is not checked. Megatron-LM's tables of
weak scaling do not state the micro-batch: it is assumed to be one sequence.

Writes benchmarks/results/scaling-curves.json and its picture. `make docs` fills docs/reference/accuracy.md from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from cases import Case, predicted
from counted import cluster_for, layout_of, stages_of
from machine import described
from matplotlib.figure import Figure
from published import NODE, Inexpressible, Published, expressed, lines

from shardwise.report.pictures import INK, MUTED, STYLE, WIDE_INCHES, png

RESULTS = Path(__file__).parent / "results" / "scaling-curves.json"
FACTORS = Path(__file__).parent / "results" / "time-accuracy.json"
LARGEST = 16_384
FLOPS_PER_PARAMETER = 6


@dataclass(frozen=True)
class Series:
    """Published runs that differ in the number of devices.

    Attributes:
        chosen: values of columns that a row must have.
        strong: whether model and batch stay as they are.
        extended: whether further numbers of devices are predicted: one model and one batch per device.
        least: devices from which the series is extended.
    """

    name: str
    chosen: Mapping[str, str]
    strong: bool = False
    extended: bool = True
    least: int = NODE


_MOSAIC = {"source": "MosaicML llm-foundry", "gpu": "h100_80gb", "seq_len": "2048", "fp8": "no"}
_TABLE_2 = {"source": "Megatron-LM SC21 Table 2 (via llm-analysis figure)", "gpu": "A100 80GB"}
SERIES = (
    Series("MPT-7B, llm-foundry, H100", {**_MOSAIC, "model": "MPT-7b", "micro_batch": "6"}),
    Series("MPT-13B, llm-foundry, H100", {**_MOSAIC, "model": "MPT-13b", "micro_batch": "16"}, least=128),
    Series(
        "Llama 3 8B, torchtitan, H100",
        {"source": "torchtitan commit d9bdfbb206", "tp": "1", "model": "Llama 3 8B"},
    ),
    Series("GPT 1.7B to 39B, Megatron-LM, A100", {"source": "Megatron-LM SC21 Table 1"}, extended=False),
    Series(
        "GPT 1.7B to 462B, Megatron-LM, H100", {"source": "Megatron-LM README weak scaling"}, extended=False
    ),
    Series("GPT 530B, Megatron-LM, 280 model ranks, A100", {**_TABLE_2, "pp": "35"}, strong=True, least=280),
    Series("GPT 530B, DeepSpeed ZeRO 3, A100", {**_TABLE_2, "pp": "1"}, strong=True, extended=False),
)


@dataclass(frozen=True)
class Point:
    """FLOP/s of a device."""

    series: str
    devices: int
    published: float | None
    predicted: float


def rows_of(series: Series) -> list[tuple[Published, float]]:
    """The published runs of a series and the model's parameters."""
    found = []
    for row in lines("published_runs.csv"):
        if all(row[key].startswith(value) for key, value in series.chosen.items()):
            row = {**row, "micro_batch": row["micro_batch"] or "1"}
            try:
                found.append((expressed(row), 1e9 * float(row["params_b"])))
            except Inexpressible:
                continue
    return sorted((pair for pair in found if pair[0].seconds), key=lambda pair: pair[0].gpus)


def points_of(series: Series, factors: Mapping[str, float], folder: Path) -> Iterator[Point]:
    """The published points of a series with predictions, then predictions for further numbers of devices."""
    rows = rows_of(series)
    if not rows:
        raise SystemExit(f"{series.name}: no published row")
    for run, parameters in rows:
        assert run.seconds is not None
        yield _point(series, run, parameters, factors, folder, run.seconds)
    if not series.extended:
        return
    run, parameters = rows[-1]
    seen, devices = {each.gpus for each, _ in rows}, series.least
    while devices <= LARGEST:
        if devices not in seen and (more := _moved(run, devices, series.strong)) is not None:
            yield _point(series, more, parameters, factors, folder, None)
        devices *= 2


def _moved(run: Published, devices: int, strong: bool) -> Published | None:
    """The run on so many devices; None where its batch cannot be divided among them."""
    data, left = divmod(devices, run.tensor * run.pipeline * run.sequence)
    batch = run.batch if strong else run.batch * devices // run.gpus
    if left or not data or batch % (run.micro_batch * data):
        return None
    copies = data if run.copies == run.data else run.copies
    return replace(run, gpus=devices, data=data, copies=copies, batch=batch, seconds=None)


def _point(
    series: Series,
    run: Published,
    parameters: float,
    factors: Mapping[str, float],
    folder: Path,
    seconds: float | None,
) -> Point:
    case = Case(run, stages_of(run, folder), layout_of(run), cluster_for(run))
    work = FLOPS_PER_PARAMETER * parameters * run.batch * run.length / run.gpus
    return Point(
        series.name,
        run.gpus,
        work / seconds if seconds else None,
        work / (predicted(case) * factors[run.stack]),
    )


def table(points: Sequence[Point]) -> str:
    """Published and predicted TFLOP/s of a device by series, and the prediction for the largest cluster."""
    lines_ = [
        "| series | scaling | GPUs | published | predicted | predicted at |",
        "|---|---|---:|---:|---:|---|",
    ]
    for series in SERIES:
        own = [point for point in points if point.series == series.name]
        known = [point for point in own if point.published is not None]
        last = max(own, key=lambda point: point.devices)
        scaling = "strong" if series.strong else "weak"
        first, final = known[0], known[-1]
        lines_.append(
            f"| {series.name} | {scaling} | {first.devices:,} to {final.devices:,} "
            f"| {_tera(first.published)} to {_tera(final.published)} "
            f"| {_tera(first.predicted)} to {_tera(final.predicted)} "
            f"| {f'{last.devices:,}: {_tera(last.predicted)}' if series.extended else ''} |"
        )
    return "\n".join(lines_)


def _tera(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e12:.0f}"


@matplotlib.rc_context(STYLE)
def picture(points: Sequence[Point], width: float = WIDE_INCHES) -> Figure:
    """Weak and strong scaling: predictions are lines, published runs are circles of the same colour."""
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    for axes, strong in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        colours = iter(matplotlib.colormaps["tab10"].colors)  # type: ignore[attr-defined]
        for series in (each for each in SERIES if each.strong == strong):
            own = sorted((p for p in points if p.series == series.name), key=lambda p: p.devices)
            known, colour = [point for point in own if point.published is not None], next(colours)
            style = "-" if series.extended else ":"
            axes.plot([p.devices for p in own], [p.predicted / 1e12 for p in own], style, color=colour)
            axes.plot(
                [p.devices for p in known],
                [(p.published or 0.0) / 1e12 for p in known],
                "o",
                color=colour,
                markerfacecolor="none",
                label=series.name,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := [2**power for power in range(3, 15, 2)], [f"{each:,}" for each in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("GPUs", color=MUTED)
        axes.set_title(
            "strong scaling: one batch" if strong else "weak scaling: one batch per GPU",
            loc="left",
            color=INK,
        )
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    figure.axes[0].set_ylabel("TFLOP/s of a GPU", color=MUTED)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=Path(".cache") / "calibration", help="folder of counts")
    arguments = parser.parse_args()
    factors = json.loads(FACTORS.read_text(encoding="utf-8"))["factors"]
    points: list[Point] = []
    for series in SERIES:
        own = list(points_of(series, factors, arguments.cache))
        print(
            series.name, *(f"{p.devices}:{_tera(p.published)}/{_tera(p.predicted)}" for p in own), flush=True
        )
        points += own
    result: dict[str, Any] = {
        "machine": described(),
        "points": [vars(point) for point in points],
        "table": table(points),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".png").write_bytes(png(picture(points)))
    print(result["table"])


if __name__ == "__main__":
    main()
