"""What the planner chooses freely for known models and clusters: ``python benchmarks/choices.py [--only TEXT]``.

A row has the chosen plan, its runner-up, the best plan on another mesh, plans that are faster but not allowed, and
the fastest published runs of a model of the same size on as many devices, from benchmarks/data/published_runs.csv.
Plans are predictions: none of these clusters was available to this project. Writes benchmarks/results/choices.json
after every row; a row that is there is not planned again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.plan import Candidate, Plan
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes, format_seconds
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.recipe.load import recipe_of
from shardwise.technique import AXES, SETTINGS, layout_of, strategy_from

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "choices.json"
PUBLISHED = HERE / "data" / "published_runs.csv"
PINNED = {"precision": "bf16"}
SAME_SIZE = 0.15
"""Relative difference of parameters within which a published model counts as the same."""


@dataclass(frozen=True)
class Case:
    """A model, a cluster, sequences of ``length`` tokens, ``batch`` of them a step.

    Attributes:
        gpu: the device in the table of published runs; ``billions`` of parameters.
        known: a published run whose figures the table does not have in its columns.
        host: GiB of host memory for each device, instead of its profile's.
    """

    model: str
    cluster: str
    length: int
    batch: int
    gpu: str
    billions: float
    known: str = ""
    host: float | None = None

    @property
    def name(self) -> str:
        host = f" with {self.host:g} GiB of host memory" if self.host else ""
        return f"{self.model}, {self.cluster}{host}, {self.batch:,} × {self.length:,} tokens"

    @property
    def devices(self) -> int:
        return int(self.cluster.split("x")[0])


TORCHTUNE = "torchtune: weights and gradients in bf16, paged 8-bit states, 1,650 tokens/s"

CASES = (
    Case("llama-3.2-1b", "8xA100-80GB", 4096, 64, "a100", 1.24),
    Case("llama-3-8b", "8xH100-80GB", 8192, 8, "h100", 8.03),
    Case("llama-3-8b", "64xH100-80GB", 8192, 64, "h100", 8.03),
    Case("llama-3-70b", "64xH100-80GB", 8192, 128, "h100", 70.55),
    Case("llama-3-70b", "8xH100-80GB", 4096, 32, "h100", 70.55),
    Case("llama-3-405b", "16384xH100-80GB", 8192, 2048, "h100", 405.85),
    Case("llama-3-8b", "16xH100-80GB", 131072, 16, "h100", 8.03),
    Case("llama-3-8b", "1xRTX4090-24GB", 4096, 8, "4090", 8.03, TORCHTUNE),
    Case("llama-3-8b", "1xRTX4090-24GB", 4096, 8, "4090", 8.03, TORCHTUNE, host=256),
)


def planned(case: Case) -> dict[str, Any]:
    recipe = recipe_of(
        {
            "model": {"preset": case.model, "context": case.length},
            "data": {"sequence_length": case.length},
            "batch_size": case.batch,
            "steps": 100_000,
            "cluster": {"preset": case.cluster, "host_memory_gib": case.host},
            "strategy": PINNED,
        },
        SETTINGS,
    )
    cluster = cluster_of(recipe.cluster)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDWISE_CACHE"] = folder
        began = time.process_time()
        plan = make_plan(recipe, cluster, compare=True)
        seconds = time.process_time() - began
    others = [each for each in plan.candidates if each.verdict in ("fits", "tight") and each.step_seconds]
    allowed = [each for each in others if is_allowed(each)]
    fitting = [each for each in allowed if each.verdict == "fits"]
    chosen = mesh_of(plan.strategy, plan.world_size)
    return {
        "chosen": plan.line,
        "fits": plan.fits,
        "reason": next(each.reason for each in plan.candidates if each.strategy == plan.strategy),
        "peak": format_bytes(plan.peak.bytes),
        "step_seconds": plan.step.seconds,
        "tokens_per_second_per_device": plan.step.tokens_per_second / plan.world_size,
        "tflops_per_device": plan.step.model_flops / plan.step.seconds / plan.world_size / 1e12,
        "runner_up": fastest(fitting),
        "other_mesh": fastest(e for e in fitting if mesh_of(e.strategy, plan.world_size) != chosen),
        "tight": faster(plan, (each for each in allowed if each.verdict == "tight")),
        "not_allowed": faster(plan, (each for each in others if not is_allowed(each))),
        "published": published(case),
        "planning_cpu_seconds": round(seconds, 1),
    }


def is_allowed(candidate: Candidate) -> bool:
    """Whether the planner may choose it for this recipe: no pinned setting differs, and the mathematics is the same."""
    strategy, default = candidate.strategy, strategy_from(PINNED)
    return all(strategy.values[key] == value for key, value in PINNED.items()) and not any(
        strategy[s] in s.compared and strategy[s] not in (default[s], *s.candidates) for s in SETTINGS
    )


def mesh_of(strategy: Strategy, world_size: int) -> list[int]:
    layout = layout_of(strategy, world_size)
    return [layout.degree(axis.name) for axis in AXES if not axis.samples]


def fastest(candidates: Iterable[Candidate]) -> dict[str, Any] | None:
    found = min(candidates, key=lambda each: each.step_seconds, default=None)
    return None if found is None else {"line": found.line, "seconds": found.step_seconds}


def faster(plan: Plan, candidates: Iterable[Candidate]) -> dict[str, Any] | None:
    """The fastest of them if it is faster than the plan."""
    found = fastest(candidates)
    return found if found is not None and found["seconds"] < plan.step.seconds else None


def published(case: Case) -> list[str]:
    """The fastest runs in bf16 and in 8 bits, by model FLOPs, of a model of the same size on as many devices."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if comparable(row, case)]
    found = [case.known] if case.known else []
    for eight_bits in (False, True):
        same = [row for row in rows if (row["fp8"] not in ("no", "")) == eight_bits]
        best = max(same, key=tflops, default=None)
        if best is not None:
            found.append(in_words(best))
    return found


def comparable(row: Mapping[str, str], case: Case) -> bool:
    """Whether a row is full training of a model of this size on as many such devices, and has a speed."""
    size, words = number(row["params_b"]), row["gpu"].lower() + " " + row["notes"].lower()
    return (
        case.gpu in words
        and "lora" not in words
        and number(row["gpus"]) == case.devices
        and abs(size / case.billions - 1) <= SAME_SIZE
        and tflops(row) > 0
    )


def tflops(row: Mapping[str, str]) -> float:
    """Model TFLOP/s per device as published, else 6 for each parameter and token."""
    return (
        number(row["tflops_per_gpu"]) or number(row["tokens_per_s_per_gpu"]) * number(row["params_b"]) * 6e-3
    )


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def in_words(row: Mapping[str, str]) -> str:
    axes = {"tensor": row["tp"], "pipeline": row["pp"], "context": row["cp"], "data": row["dp"]}
    mesh = ", ".join(f"{name} {degree}" for name, degree in axes.items() if degree not in ("", "1"))
    tokens = f"{number(row['tokens_per_s_per_gpu']):,.0f} tokens/s, " if row["tokens_per_s_per_gpu"] else ""
    about = "" if row["tflops_per_gpu"] else "about "
    how = ", ".join(filter(None, (row["precision"], row["ac"] and f"{row['ac']} checkpointing", mesh)))
    return (
        f"{row['source']}, {row['model']}, {row['seq_len']} tokens: {how}, {row['zero_stage_or_sharding']}: "
        f"{tokens}{about}{tflops(row):.0f} TFLOP/s"
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The table in the documentation."""
    lines = [
        "| case | chosen, and others | peak | step | tokens/s, TFLOP/s per device | fastest published, per device |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, row in rows.items():
        without = f"nothing fits; least memory: {row['chosen']}, {row.get('reason', '')}"
        plans = [f"**{row['chosen']}**" if row["fits"] else without]
        others = {"runner-up": "runner_up", "best on another mesh": "other_mesh"}
        others["faster, but the allocator empties its cache in every step"] = "tight"
        others["faster, but not allowed"] = "not_allowed"
        for words, key in others.items():
            if row[key] is not None and not (key == "other_mesh" and row[key] == row["runner_up"]):
                plans.append(f"{words}: {row[key]['line']}, {format_seconds(row[key]['seconds'])}")
        speed = f"{row['tokens_per_second_per_device']:,.0f}, {row['tflops_per_device']:.0f}"
        cells = (name, "<br>".join(plans), row["peak"], format_seconds(row["step_seconds"]), speed)
        lines.append(f"| {' | '.join((*cells, '<br>'.join(row['published']) or 'none'))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--again", action="store_true", help="also plan cases that are there")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if RESULTS.exists():
        rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    for case in CASES:
        if given.only in case.name and (given.again or case.name not in rows):
            rows[case.name] = planned(case)
            print(case.name, rows[case.name], flush=True)
            ordered = {each.name: rows[each.name] for each in CASES if each.name in rows}
            RESULTS.write_text(
                json.dumps({"rows": ordered, "table": table(ordered)}, indent=1) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
