"""Several runs on one page: results, series over the steps, differences of the recipes, and how each was started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.core.atomic_file import write_whole
from shardwise.core.counted import Units
from shardwise.core.errors import RecipeError
from shardwise.core.identity import starts
from shardwise.core.units import format_bytes, format_count
from shardwise.report.charts import compared_charts
from shardwise.report.loss_card import loss_text
from shardwise.report.notation import seconds, tokens_rate
from shardwise.report.page_parts import picture
from shardwise.report.record import RunRecord, read_run
from shardwise.report.series import LINE_COLOURS, compared_picture
from shardwise.report.template import rendered

TITLES = ("held-out loss", "training loss", "steps", "tokens", "step", "processed", "trained on", "peak")


def write_comparison(folders: Sequence[Path], path: Path) -> None:
    """Write the page.

    Raises:
        RecipeError: there are more runs than colours of lines.
        DataError: a folder is not a run's, or one of its files cannot be read.
        ResourceError: the page cannot be written.
    """
    if len(folders) > len(LINE_COLOURS):
        why = f"a picture tells {len(LINE_COLOURS)} lines apart"
        raise RecipeError(f"{len(folders)} runs are too many", where="command line", why=why)
    runs = dict(zip(_run_names(folders), [read_run(folder) for folder in folders], strict=True))
    write_whole(path, render_comparison(runs).encode("utf-8"))


def render_comparison(runs: Mapping[str, RunRecord]) -> str:
    """The page of runs by name, as HTML."""
    steps = {name: run.steps for name, run in runs.items()}
    every = {run.plan.step.units for run in runs.values()}
    units = next(iter(every)) if len(every) == 1 else _mixed(every)
    values = {
        "titles": TITLES,
        "runs": [
            {
                "name": name,
                "line": run.plan.line,
                "figures": list(_figures(run)),
                "starts": [start.sentences() for start in starts(run.folder)],
            }
            for name, run in runs.items()
        ],
        "differences": list(setting_differences(runs)),
        "series": picture("Series of the runs", lambda width: compared_picture(steps, width, units)),
        "charts": {"series": compared_charts(steps, units)},
    }
    return rendered("compare.html", values, package=__package__)


def _mixed(units: Iterable[Units]) -> Units:
    """The units of runs that do not all have the same."""
    samples = any(run.read == "samples" for run in units)
    return Units("samples" if samples else "tokens", "targets")


def _run_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names; whole paths where two have the same name."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _figures(run: RunRecord) -> Iterator[str]:
    """A figure for each of TITLES."""
    measured = run.step_seconds
    last = run.steps[-1] if run.steps else None
    yield "–" if run.held_out_loss is None else loss_text(run.held_out_loss)
    yield "–" if last is None else loss_text(last.loss)
    yield str(last.step if last else 0)
    unit = "" if run.counted == "tokens" else f" {run.counted}"
    yield format_count(sum(step.tokens for step in run.steps)) + unit
    yield seconds(measured or 0.0)
    yield tokens_rate(run.plan.step.tokens / measured, run.plan.step.unit) if measured else "–"
    counts = run.plan.step.units.trained
    trained = run.tokens_per_second
    yield "–" if trained is None or counts == "targets" else tokens_rate(trained, counts)
    yield format_bytes(run.outcome.worst.measured_peak_bytes) if run.outcome else "–"


def setting_differences(runs: Mapping[str, RunRecord]) -> Iterator[tuple[str, list[str]]]:
    """The keys in which recipes and strategies differ, with the value of each run; – where a run has none."""
    every = [_flat_settings(run) for run in runs.values()]
    for key in sorted({key for settings in every for key in settings}):
        values = [settings.get(key, "–") for settings in every]
        if len(set(values)) > 1:
            yield key, values


def _flat_settings(run: RunRecord) -> dict[str, str]:
    recipe = run.settings().model_dump(mode="json")
    recipe["strategy"] = dict(run.plan.strategy.values)
    return dict(_flat(recipe))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", str(value)
