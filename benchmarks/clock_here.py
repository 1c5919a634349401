"""Predicted against measured step time on this machine: ``python benchmarks/clock_here.py [--minutes M]``.

Every run is planned, then trained for a few optimizer steps by the public API: 1, 2 and 4 processes, and every mesh
axis. Runs go round all cases, so a slow minute of the machine hits each case alike. Each round begins with
``shardwise doctor --calibrate``, because the speed of a shared machine drifts by the hour. It replaces the
calibration of this machine. The error of a case is the median of its errors in all rounds.
For five recipes the planner chooses the strategy. Its choice is trained in the same rounds and compared with every
strategy that was trained for the recipe; of different choices in several rounds, the slowest counts.

With ``--device cuda`` the runs are those of one GPU: precisions, recomputation, offload, compiled blocks, adapters.

A run is one line of results/clock-cpu.jsonl, or of clock-PROFILE.jsonl for a GPU. Started again, the benchmark goes on
after the last line; after another calibration it starts anew. clock-cpu.json is the summary. ``--predict`` measures
nothing: after a change of the time model, it plans every case again and compares with the lines of the last
calibration.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from clock_cases import CPU, Case, Suite, gpu_suite
from machine import described

from shardwise import api
from shardwise.core.errors import ShardwiseError
from shardwise.hardware.cluster import cluster_of, recognise
from shardwise.hardware.measured_gpu import gpu_file
from shardwise.hardware.this_machine import calibration_file
from shardwise.jobs.planning import make_plan
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

RESULTS = Path(__file__).parent / "results"
RUNS, SUMMARY = RESULTS / "clock-cpu.jsonl", RESULTS / "clock-cpu.json"
Row = dict[str, Any]


def planned(case: Case) -> tuple[api.Recipe, api.Plan]:
    """The recipe, and its plan."""
    recipe = recipe_of(case.recipe(), SETTINGS)
    return recipe, make_plan(recipe, cluster_of(recipe.cluster))


def predicted(case: Case, plan: api.Plan) -> Row:
    """What the plan of a case says."""
    return {
        "case": case.name,
        "work": case.work,
        "strategy": json.dumps(dict(plan.strategy.values), sort_keys=True),
        "line": plan.line,
        "predicted_seconds": plan.step.seconds,
        "predicted_phases": dict(plan.step.phases),
    }


def run(case: Case) -> Row:
    """Plan and train a case."""
    try:
        recipe, plan = planned(case)
        with tempfile.TemporaryDirectory() as scratch:
            outcome = api.train(recipe, plan, Path(scratch) / "run").outcome
    except ShardwiseError as error:
        return {"case": case.name, "work": case.work, "failed": str(error)}
    assert outcome is not None
    phases = outcome.phases.seconds if outcome.phases else {}
    measured = {"measured_seconds": outcome.measured_step_seconds, "measured_phases": dict(phases)}
    return predicted(case, plan) | measured


def median(rows: Iterable[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def accuracy(suite: Suite, rows: Sequence[Row], plans: Mapping[str, Row]) -> list[Row]:
    """One row for each case that was measured."""
    found = []
    for name in dict.fromkeys(case.name for case in suite.cases):
        runs = [row for row in rows if row["case"] == name and "failed" not in row]
        if not runs:
            continue
        runs = [row | plans.get(name, {}) for row in runs]
        ratios = [row["predicted_seconds"] / row["measured_seconds"] for row in runs]
        found.append(
            {
                "case": name,
                "rounds": len(runs),
                "predicted_seconds": median(runs, "predicted_seconds"),
                "measured_seconds": median(runs, "measured_seconds"),
                "error": statistics.median(ratios) - 1,
                "predicted_phases": runs[-1]["predicted_phases"],
                "measured_phases": {
                    phase: statistics.median(row["measured_phases"].get(phase, 0.0) for row in runs)
                    for phase in runs[-1]["measured_phases"]
                },
            }
        )
    return found


def regrets(suite: Suite, rows: Sequence[Row], plans: Mapping[str, Row]) -> list[Row]:
    """The planner's choice against the best strategy of those that were measured for the recipe."""
    found = []
    for case in suite.choices:
        measured: dict[str, list[Row]] = {}
        for row in rows:
            if row["work"] == case.work and "failed" not in row:
                measured.setdefault(row["strategy"], []).append(row)
        seconds = {strategy: median(runs, "measured_seconds") for strategy, runs in measured.items()}
        chosen = [row for row in rows if row["case"] == case.name and "failed" not in row]
        choices = [plans[case.name]] if case.name in plans else chosen
        if not choices or not seconds:
            continue
        choice = max(choices, key=lambda row: seconds.get(row["strategy"], math.inf))
        best = min(seconds, key=lambda strategy: seconds[strategy])
        own = seconds.get(choice["strategy"])
        found.append(
            {
                "recipe": case.work,
                "strategies": len(seconds),
                "chosen": choice["line"],
                "chosen_seconds": own,
                "best": measured[best][0]["line"],
                "best_seconds": seconds[best],
                "regret": None if own is None else own / seconds[best] - 1,
            }
        )
    return found


def summary(suite: Suite, rows: Sequence[Row], plans: Mapping[str, Row]) -> dict[str, Any]:
    """All results. ``plans`` replace the predictions that the runs were made with."""
    table, choices = accuracy(suite, rows, plans), regrets(suite, rows, plans)
    errors = [abs(row["error"]) for row in table]
    results: dict[str, Any] = {
        "machine": described(),
        "calibrated": calibration_day(suite),
        "threads": os.environ.get("OMP_NUM_THREADS", "a share of the cores"),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "worst_regret": max((row["regret"] for row in choices if row["regret"] is not None), default=None),
        "rows": table,
        "choices": choices,
        "failed": sorted({f"{row['case']}: {row['failed']}" for row in rows if "failed" in row}),
    }
    return results | {"table": table_of(results)}


def table_of(results: Mapping[str, Any]) -> str:
    """Runs and choices for the page."""
    machine, lines = results["machine"], list[str]()
    if results["rows"]:
        lines += [
            f"{len(results['rows'])} runs of {machine['processor']}, {machine['cores']} cores"
            f" (torch {machine['torch']}, {machine['day']}): median error {_percent(results['median_error'])},"
            f" worst {_percent(results['worst_error'])}.",
            "",
            "| run | predicted | measured | error |",
            "| --- | ---: | ---: | ---: |",
        ]
    for row in results["rows"]:
        predicted, measured = (f"{row[f'{kind}_seconds']:.3f} s" for kind in ("predicted", "measured"))
        lines.append(f"| {row['case']} | {predicted} | {measured} | {_percent(row['error'], sign='+')} |")
    if results["choices"]:
        lines += [
            "",
            "| recipe | the planner's choice | measured | best of all measured | measured | slower by |",
            "| --- | --- | ---: | --- | ---: | ---: |",
        ]
    for row in results["choices"]:
        own, regret = row["chosen_seconds"], row["regret"]
        lines.append(
            f"| {row['recipe']} | {row['chosen']} | {'–' if own is None else f'{own:.3f} s'} | {row['best']} of"
            f" {row['strategies']} | {row['best_seconds']:.3f} s | {'–' if regret is None else _percent(regret)} |"
        )
    return "\n".join(lines)


def _percent(fraction: float, sign: str = "") -> str:
    return f"{100 * fraction:{sign}.1f} %".replace("-", "−")


def calibration_day(suite: Suite) -> str | None:
    """The day on which the suite's device was measured."""
    device = cluster_of(recipe_of(suite.cases[0].recipe(), SETTINGS).cluster).device
    return device.measured_on or None


def tables(suite: Suite) -> str:
    """Which calibration is in use, so that runs with different ones are kept apart."""
    device = suite.cases[0].device
    path = calibration_file() if device == "cpu" else gpu_file(device)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


def calibrate() -> None:
    """Measure the speeds of this machine, in a process of its own."""
    subprocess.run([sys.executable, "-m", "shardwise", "doctor", "--calibrate"], check=True)


def known(suite: Suite) -> list[Row]:
    """The lines, if the machine's calibration is still that of the last one."""
    if not suite.runs.exists():
        return []
    rows = [json.loads(line) for line in suite.runs.read_text(encoding="utf-8").splitlines()]
    return rows if rows and rows[-1]["calibration"] == tables(suite) else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=18.0, help="begin no run after this time (18)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all cases (3)")
    parser.add_argument("--only", default="", help="the cases whose name contains this, and write nothing")
    parser.add_argument("--predict", action="store_true", help="measure nothing; plan every case again")
    options = parser.parse_args()
    begin = time.monotonic()
    suite = CPU if options.device == "cpu" else gpu_suite(gpu_profile())
    cases = [case for case in suite.every if options.only in case.name]
    rows = [] if options.only else known(suite)
    if options.predict:
        rows = [row for row in rows if row["calibration"] == rows[-1]["calibration"]]
    plans = {case.name: predicted(case, planned(case)[1]) for case in cases} if options.predict else {}
    every = [] if options.predict else missing(cases, rows, options.rounds)
    for index, (number, case) in enumerate(every, 1):
        spent = time.monotonic() - begin
        if spent > 60 * options.minutes:
            print(f"stopped after {spent / 60:.0f} minutes; the same command goes on", flush=True)
            break
        if all(row["round"] != number for row in rows):
            calibrate()
        rows.append({"round": number, "calibration": tables(suite), **run(case)})
        print(f"{index}/{len(every)} {spent:4.0f} s  {case.name}: {told(rows[-1])}", flush=True)
        if not options.only:
            with suite.runs.open("a" if len(rows) > 1 else "w", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            write(suite, summary(suite, rows, plans))
    results = summary(suite, rows, plans)
    if not options.only:
        write(suite, results)
    show(results)


def gpu_profile() -> str:
    """The name of the profile of this machine's first GPU."""
    profile = recognise(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    if profile is None:
        sys.exit("error: no GPU with a profile in shardwise/hardware/profiles was found")
    return profile.name


def missing(cases: Sequence[Case], rows: Sequence[Row], rounds: int) -> list[tuple[int, Case]]:
    """The runs of all rounds that are not among the rows."""
    done = {(row["round"], row["case"]) for row in rows}
    return [(number, case) for number in range(rounds) for case in cases if (number, case.name) not in done]


def told(row: Row) -> str:
    """One run in a line."""
    if "failed" in row:
        return str(row["failed"])
    there, here = row["predicted_seconds"], row["measured_seconds"]
    return f"{there:.3f} s predicted, {here:.3f} s measured, {there / here - 1:+.1%}"


def write(suite: Suite, results: dict[str, Any]) -> None:
    suite.summary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def show(results: dict[str, Any]) -> None:
    """Print the summary."""
    for row in results["choices"]:
        regret = "not measured" if row["regret"] is None else f"{row['regret']:+.1%}"
        print(f"{row['recipe']}: {row['chosen']}; best of {row['strategies']}: {row['best']}; {regret}")
    for row in results["rows"]:
        print(f"{row['case']}: {told(row)}, {row['rounds']} rounds")
    if results["rows"]:
        runs = len(results["rows"])
        print(f"{runs} runs: median error {results['median_error']:.1%}, worst {results['worst_error']:.1%}")


if __name__ == "__main__":
    main()
