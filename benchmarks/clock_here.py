"""Predicted against measured step time on this machine: ``python benchmarks/clock_here.py [--only TEXT] [--fresh]``.

Run ``shardwise doctor --calibrate`` first. Every row is one ``shardwise train`` of a few optimizer steps, planned and
measured by the command itself: 1, 2 and 4 processes, and every axis of a strategy. The prediction is made before the
run starts. Then, in five cases, the planner's choice is compared with every strategy that was measured for its recipe.
Rows that results/clock-cpu.json has already are kept, unless --fresh. About 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from machine import described

from shardwise.hardware.this_machine import read_calibration

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "clock-cpu.json"
STEPS = 12

MODELS: dict[str, dict[str, Any]] = {
    "0.3M": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 512},
    "5M": {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 4096},
    "gpt2 4M": {"family": "gpt2", "layers": 4, "width": 256, "heads": 8, "ffn": 1024, "vocab": 2048},
    "19M": {"layers": 4, "width": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192},
    "41M": {"layers": 8, "width": 640, "heads": 10, "kv_heads": 5, "ffn": 1728, "vocab": 2048},
}


@dataclass(frozen=True)
class Case:
    """One run. ``batch`` sequences of ``length`` tokens per optimizer step; ``settings`` are of the strategy."""

    model: str
    world: int
    batch: int
    length: int = 256
    settings: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        said = [f"{key} {value}" for key, value in self.settings.items()] + list(self.more)
        return f"{self.model}, {self.world} processes, {self.batch} × {self.length}: {', '.join(said) or 'plain'}"


LORA = {"adapter": {"name": "lora", "rank": 8}}

CASES: tuple[Case, ...] = (
    Case("0.3M", 1, 4, 64, {"micro_batch_size": 4}),
    Case("0.3M", 1, 8, 64, {"micro_batch_size": 2}),
    Case("5M", 1, 4, 256, {"micro_batch_size": 4}),
    Case("5M", 1, 8, 256, {"micro_batch_size": 2}),
    Case("5M", 1, 4, 256, {"micro_batch_size": 4, "activation_checkpointing": "full"}),
    Case("5M", 1, 4, 256, {"micro_batch_size": 4, "activation_checkpointing": "selective"}),
    Case("5M", 1, 4, 256, {"micro_batch_size": 4, "precision": "bf16"}),
    Case("5M", 1, 4, 256, {"micro_batch_size": 4, "offload": "optimizer"}),
    Case("gpt2 4M", 1, 4, 256, {"micro_batch_size": 4}),
    Case("19M", 1, 4, 256, {"micro_batch_size": 4}),
    Case("19M", 1, 4, 256, {"micro_batch_size": 4}, LORA),
    Case("19M", 1, 4, 256, {"micro_batch_size": 4, "precision": "bf16"}),
    Case("41M", 1, 4, 256, {"micro_batch_size": 4}),
    Case("5M", 1, 2, 1024, {"micro_batch_size": 2}),
    *(Case("5M", 2, 8, 256, {"micro_batch_size": 4, "zero_stage": stage}) for stage in range(4)),
    Case("5M", 2, 16, 256, {"micro_batch_size": 2, "zero_stage": 2}),
    Case("5M", 2, 8, 256, {"micro_batch_size": 8, "tensor_parallel": 2}),
    Case("5M", 2, 8, 256, {"micro_batch_size": 8, "sequence_parallel": 2}),
    Case("5M", 2, 8, 256, {"micro_batch_size": 8, "sequence_parallel": 2, "sequence_method": "ring"}),
    Case("5M", 2, 8, 256, {"micro_batch_size": 2, "pipeline_parallel": 2, "pipeline_schedule": "1f1b"}),
    Case("5M", 2, 8, 256, {"micro_batch_size": 2, "pipeline_parallel": 2, "pipeline_schedule": "gpipe"}),
    Case("0.3M", 2, 8, 64, {"micro_batch_size": 4, "zero_stage": 3}),
    Case("19M", 2, 4, 256, {"micro_batch_size": 2, "zero_stage": 3}),
    Case("19M", 2, 8, 256, {"micro_batch_size": 2, "zero_stage": 1, "activation_checkpointing": "full"}),
    Case("19M", 2, 4, 256, {"micro_batch_size": 4, "tensor_parallel": 2}),
    Case("5M", 2, 8, 256, {"micro_batch_size": 4, "zero_stage": 0, "precision": "bf16"}),
    Case("0.3M", 4, 8, 64, {"micro_batch_size": 2, "zero_stage": 3}),
    Case("5M", 4, 8, 256, {"micro_batch_size": 2, "zero_stage": 3}),
    Case("5M", 4, 8, 256, {"micro_batch_size": 2, "zero_stage": 0}),
    Case("5M", 4, 8, 256, {"micro_batch_size": 4, "tensor_parallel": 2, "zero_stage": 3}),
    Case("5M", 4, 8, 256, {"micro_batch_size": 2, "pipeline_parallel": 2, "zero_stage": 1}),
)

CHOICES: tuple[Case, ...] = (
    Case("0.3M", 1, 8, 64),
    Case("5M", 1, 8, 256),
    Case("5M", 2, 8, 256),
    Case("19M", 2, 4, 256),
    Case("5M", 4, 8, 256),
)
"""Recipes whose strategy is left to the planner."""

RIVALS: dict[int, tuple[dict[str, Any], ...]] = {
    1: (
        {"micro_batch_size": 8},
        {"micro_batch_size": 2},
        {"micro_batch_size": 4, "activation_checkpointing": "full"},
    ),
    2: (
        {"micro_batch_size": 2, "zero_stage": 0},
        {"micro_batch_size": 2, "zero_stage": 3},
        {"micro_batch_size": 4, "tensor_parallel": 2},
        {"micro_batch_size": 1, "pipeline_parallel": 2},
    ),
    4: (
        {"micro_batch_size": 2, "zero_stage": 0},
        {"micro_batch_size": 2, "zero_stage": 3},
        {"micro_batch_size": 4, "tensor_parallel": 2, "zero_stage": 0},
        {"micro_batch_size": 2, "pipeline_parallel": 2, "zero_stage": 0},
    ),
}
"""Strategies that are measured with the planner's, by the number of processes."""


def recipe_for(case: Case) -> dict[str, Any]:
    return {
        "model": MODELS[case.model] | {"context": max(case.length, 256)},
        "data": {"sequence_length": case.length},
        "steps": STEPS,
        "batch_size": case.batch,
        "cluster": {"device": "cpu", "devices_per_node": case.world},
        "strategy": {"precision": "fp32"} | case.settings,
        "evaluation": {"sequences": 1},
        **case.more,
    }


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train, and return what the run's own files say."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        recipe, out = Path(scratch) / "recipe.yaml", Path(scratch) / "run"
        recipe.write_text(yaml.safe_dump(recipe_for(case)), encoding="utf-8")
        command = [sys.executable, "-m", "shardwise", "train", str(recipe), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return {"case": case.name, "failed": lines[-1] if lines else str(done.returncode)}
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    predicted, measured = report["predicted_step_seconds"], report["measured_step_seconds"]
    return {
        "case": case.name,
        "line": plan["line"],
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "error": predicted / measured - 1,
        "predicted_phases": plan["step"].get("phases", {}),
        "measured_phases": (report.get("phases") or {}).get("seconds", {}),
    }


def choice(case: Case, folder: Path) -> dict[str, Any]:
    """The planner's strategy and its rivals: measured in turns, twice."""
    cases = [
        case,
        *(Case(case.model, case.world, case.batch, case.length, rival) for rival in RIVALS[case.world]),
    ]
    every: list[list[dict[str, Any]]] = [[run(each, folder) for each in cases] for _ in range(2)]
    rows = [
        min(tries, key=lambda row: row.get("measured_seconds", 1e9)) for tries in zip(*every, strict=True)
    ]
    measured = [row["measured_seconds"] for row in rows if "failed" not in row]
    return {
        "case": case.name,
        "chosen": rows[0].get("line"),
        "regret": rows[0].get("measured_seconds", float("nan")) / min(measured) - 1,
        "rows": rows,
    }


def summary(rows: dict[str, Any], choices: dict[str, Any]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows.values() if "error" in row]
    calibration = read_calibration()
    return {
        "machine": described(),
        "calibrated": calibration.day if calibration else None,
        "threads": os.environ.get("OMP_NUM_THREADS", "a share of the cores"),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "rows": list(rows.values()),
        "choices": list(choices.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="run the cases whose name contains this, and write nothing"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what the results have already")
    parser.add_argument("--no-choices", action="store_true", help="leave out the planner's choices")
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() and not options.fresh else {}
    rows = {row["case"]: row for row in known.get("rows", []) if not options.only}
    choices = {row["case"]: row for row in known.get("choices", []) if not options.only}
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            if options.only in case.name and case.name not in rows:
                row = rows[case.name] = run(case, Path(scratch))
                said = row.get("failed") or (
                    f"{row['predicted_seconds']:.3f} s predicted, {row['measured_seconds']:.3f} s measured,"
                    f" {row['error']:+.1%}"
                )
                print(f"{case.name}: {said}", flush=True)
                _write(rows, choices, options.only)
        for case in CHOICES:
            if options.only in case.name and case.name not in choices and not options.no_choices:
                found = choices[case.name] = choice(case, Path(scratch))
                print(f"choice for {case.name}: {found['chosen']}, {found['regret']:+.1%}", flush=True)
                _write(rows, choices, options.only)
    results = summary(rows, choices)
    print(f"median {results['median_error']:.1%}, worst {results['worst_error']:.1%} of {len(rows)} runs")


def _write(rows: dict[str, Any], choices: dict[str, Any], only: str) -> None:
    """After every run: a benchmark that is stopped leaves what it has measured."""
    if not only:
        RESULTS.write_text(json.dumps(summary(rows, choices), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
