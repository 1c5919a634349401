"""Predicted against measured step time on this machine: ``python benchmarks/clock_here.py [--minutes M]``.

Every run is planned, then trained for a few optimizer steps by the public API: 1, 2 and 4 processes, and every mesh
axis. Runs go round all cases, so a slow minute of the machine hits each case alike. Before every eighth run
``shardwise doctor --calibrate`` measures the machine again, because the speed of a shared one drifts within minutes.
It replaces the calibration of this machine. The error of a case is the median of its errors in all rounds.
For five recipes the planner chooses the strategy. Its choice is trained in the same rounds and compared with every
strategy that was trained for the recipe; of different choices in several rounds, the slowest counts.

A run is one line of results/clock-cpu.jsonl. Started again, the benchmark goes on after the last line; after another
calibration it starts anew. results/clock-cpu.json is the summary.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import described

from shardwise import api
from shardwise.core.errors import ShardwiseError
from shardwise.hardware.cluster import cluster_of
from shardwise.hardware.this_machine import calibration_file, read_calibration
from shardwise.jobs.planning import make_plan
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

RESULTS = Path(__file__).parent / "results"
RUNS, SUMMARY = RESULTS / "clock-cpu.jsonl", RESULTS / "clock-cpu.json"
STEPS = 12
RUNS_PER_CALIBRATION = 8

MODELS: dict[str, dict[str, Any]] = {
    "0.3M": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 512},
    "5M": {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 4096},
    "gpt2 4M": {"family": "gpt2", "layers": 4, "width": 256, "heads": 8, "ffn": 1024, "vocab": 2048},
    "19M": {"layers": 4, "width": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192},
    "41M": {"layers": 8, "width": 640, "heads": 10, "kv_heads": 5, "ffn": 1728, "vocab": 2048},
}


@dataclass(frozen=True)
class Case:
    """One run: ``batch`` sequences of ``length`` tokens per optimizer step.

    Attributes:
        settings: of the strategy; those that are missing are the planner's choice.
        counted: whether the case is one of the runs whose error is reported; others only compete with a choice.
    """

    model: str
    world: int
    batch: int
    length: int = 256
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    counted: bool = True

    @property
    def work(self) -> str:
        """The recipe without its strategy."""
        words = f"{self.model}, {self.world} × cpu, batch {self.batch} × {self.length}"
        words += f", {self.settings['precision']}" if "precision" in self.settings else ""
        return words + (", LoRA" if self.adapter else "")

    @property
    def name(self) -> str:
        said = [f"{key} {value}" for key, value in self.settings.items() if key != "precision"]
        return f"{self.work}: {', '.join(said) or 'free choice'}"

    def recipe(self) -> dict[str, Any]:
        return {
            "model": MODELS[self.model] | {"context": max(self.length, 256)},
            "data": {"sequence_length": self.length},
            "steps": STEPS,
            "batch_size": self.batch,
            "cluster": {"device": "cpu", "devices_per_node": self.world},
            "strategy": {"precision": "fp32", **self.settings},
            "evaluation": {"sequences": 1},
            **({"adapter": dict(self.adapter)} if self.adapter else {}),
        }


def _of(work: tuple[str, int, int, int], *settings: dict[str, Any]) -> list[Case]:
    return [Case(*work, each) for each in settings]


MB1, MB2, MB4, MB8 = ({"micro_batch_size": size} for size in (1, 2, 4, 8))
PIPELINE = {"pipeline_parallel": 2}
BF16 = {"precision": "bf16"}
"""A processor without bf16 units multiplies far more slowly, so these cases have few tokens."""

CASES: tuple[Case, ...] = (
    *_of(("0.3M", 1, 8, 64), MB2),
    *_of(
        ("5M", 1, 4, 256),
        MB4,
        MB4 | {"activation_checkpointing": "full"},
        MB4 | {"activation_checkpointing": "selective"},
        MB4 | {"offload": "optimizer"},
    ),
    *_of(("5M", 1, 2, 1024), MB2),
    *_of(("0.3M", 1, 8, 64), MB8 | BF16),
    *_of(("5M", 1, 2, 64), MB2 | BF16),
    *_of(("gpt2 4M", 1, 4, 256), MB4),
    *_of(("19M", 1, 4, 256), MB4),
    Case("19M", 1, 4, 256, MB4, {"name": "lora", "rank": 8}),
    *_of(("41M", 1, 2, 256), MB2),
    *_of(
        ("5M", 2, 8, 256),
        *(MB4 | {"zero_stage": stage} for stage in range(4)),
        MB8 | {"tensor_parallel": 2},
        MB8 | {"sequence_parallel": 2},
        MB8 | {"sequence_parallel": 2, "sequence_method": "ring"},
        MB2 | PIPELINE | {"pipeline_schedule": "1f1b"},
        MB2 | PIPELINE | {"pipeline_schedule": "gpipe"},
    ),
    *_of(("0.3M", 2, 8, 64), MB4 | {"zero_stage": 3}),
    *_of(("5M", 2, 2, 64), MB1 | BF16 | {"zero_stage": 0}),
    *_of(("19M", 2, 4, 256), MB2 | {"zero_stage": 3}, MB4 | {"tensor_parallel": 2}),
    *_of(("19M", 2, 8, 256), MB2 | {"zero_stage": 1, "activation_checkpointing": "full"}),
    *_of(("0.3M", 4, 8, 64), MB2 | {"zero_stage": 3}),
    *_of(
        ("5M", 4, 8, 256),
        MB2 | {"zero_stage": 0},
        MB2 | {"zero_stage": 3},
        MB2 | {"zero_stage": 3, "replicate": 2},
        MB4 | {"tensor_parallel": 2, "zero_stage": 3},
        MB2 | PIPELINE | {"zero_stage": 1},
    ),
)

CHOICES: tuple[Case, ...] = tuple(
    Case(*work, counted=False)
    for work in (("0.3M", 2, 8, 64), ("5M", 1, 4), ("5M", 2, 8), ("5M", 4, 8), ("19M", 2, 4))
)
"""Recipes whose strategy is left to the planner."""

RIVALS: tuple[Case, ...] = tuple(
    Case(model, world, batch, length, settings, counted=False)
    for model, world, batch, length, settings in (
        ("0.3M", 2, 8, 64, MB4 | {"zero_stage": 0}),
        ("0.3M", 2, 8, 64, MB8 | {"tensor_parallel": 2}),
        ("5M", 1, 4, 256, MB1),
        ("19M", 2, 4, 256, MB2 | {"zero_stage": 0}),
        ("19M", 2, 4, 256, MB1 | PIPELINE),
    )
)
"""More strategies for these recipes."""

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


def accuracy(rows: Sequence[Row]) -> list[Row]:
    """One row for each counted case that was measured."""
    found = []
    for name in dict.fromkeys(case.name for case in CASES if case.counted):
        runs = [row for row in rows if row["case"] == name and "failed" not in row]
        if not runs:
            continue
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


def regrets(rows: Sequence[Row]) -> list[Row]:
    """The planner's choice against the best strategy of those that were measured for the recipe."""
    found = []
    for case in CHOICES:
        measured: dict[str, list[Row]] = {}
        for row in rows:
            if row["work"] == case.work and "failed" not in row:
                measured.setdefault(row["strategy"], []).append(row)
        seconds = {strategy: median(runs, "measured_seconds") for strategy, runs in measured.items()}
        chosen = [row for row in rows if row["case"] == case.name and "failed" not in row]
        if not chosen:
            continue
        choice = max(chosen, key=lambda row: seconds.get(row["strategy"], math.inf))
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


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """All results."""
    table, choices = accuracy(rows), regrets(rows)
    errors = [abs(row["error"]) for row in table]
    calibration = read_calibration()
    results: dict[str, Any] = {
        "machine": described(),
        "calibrated": calibration.day if calibration else None,
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


def tables() -> str:
    """Which calibration is in use, so that runs with different ones are kept apart."""
    path = calibration_file()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


def calibrate() -> None:
    """Measure the speeds of this machine, in a process of its own."""
    subprocess.run([sys.executable, "-m", "shardwise", "doctor", "--calibrate"], check=True)


def known(path: Path) -> list[Row]:
    """The lines, if the machine's calibration is still that of the last one."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return rows if rows and rows[-1]["calibration"] == tables() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=18.0, help="begin no run after this time (18)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all cases (3)")
    parser.add_argument("--only", default="", help="the cases whose name contains this, and write nothing")
    options = parser.parse_args()
    begin = time.monotonic()
    cases = [case for case in (*CASES, *CHOICES, *RIVALS) if options.only in case.name]
    rows = [] if options.only else known(RUNS)
    every = missing(cases, rows, options.rounds)
    for index, (number, case) in enumerate(every, 1):
        spent = time.monotonic() - begin
        if spent > 60 * options.minutes:
            print(f"stopped after {spent / 60:.0f} minutes; the same command goes on", flush=True)
            break
        if len(rows) % RUNS_PER_CALIBRATION == 0:
            calibrate()
        rows.append({"round": number, "calibration": tables(), **run(case)})
        print(f"{index}/{len(every)} {spent:4.0f} s  {case.name}: {told(rows[-1])}", flush=True)
        if not options.only:
            with RUNS.open("a" if len(rows) > 1 else "w", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            write(summary(rows))
    results = summary(rows)
    if not options.only:
        write(results)
    show(results)


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


def write(results: dict[str, Any]) -> None:
    SUMMARY.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


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
