"""Memory and FLOPs of ``budget:F``, compared between versions of the code: ``python benchmarks/recompute.py NAME``.

For decoders of both families and several shares F: the planned peak of a step, and its FLOPs relative to a step without
recomputation. For the small decoders on the CPU also the measured peak, as in benchmarks/activation_memory.py; not with
``--planned``. NAME is the name of the version in benchmarks/results/recompute-cpu.json, where the rows of
other names stay. ``operations`` is today's code. ``recorder`` was measured with this file in a checkout of 66c17cb.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from activation_memory import SHAPES, measured, recipe_for
from machine import described

from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from

RESULTS = Path(__file__).parent / "results" / "recompute-cpu.json"
SHARES = (0.1, 0.2, 0.4, 0.6)
MEASURED = (0.2,)
"""Budgets at which the peaks of small decoders are also measured."""
REFERENCE, OTHER = "operations", "recorder"
"""The names that the table compares."""


def large(preset: str, cluster: str, length: int, size: int, **model: Any) -> tuple[Recipe, dict[str, Any]]:
    """A preset on one node: its recipe, and the settings of its strategy."""
    values = {
        "model": {"preset": preset, **model},
        "data": {"sequence_length": length},
        "steps": 1,
        "batch_size": 8 * size,
        "cluster": {"preset": cluster},
    }
    return recipe_of(values, SETTINGS), {"precision": "bf16", "zero_stage": 3, "micro_batch_size": size}


CASES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "Llama 3 8B, 32 blocks, 8 × H100": large("llama-3-8b", "8xH100-80GB", 8192, 1),
    "Llama 3 8B, 4 blocks, 8 × H100": large("llama-3-8b", "8xH100-80GB", 8192, 1, layers=4),
    "GPT-2 1.5B, 48 blocks, 8 × A100": large("gpt2-1.5b", "8xA100-80GB", 1024, 8),
    **{
        f"{name}, CPU": (recipe_for(SHAPES[name]), {"micro_batch_size": SHAPES[name].batch})
        for name in ("llama, 8 × 256", "gpt2, 12 × 256")
    },
}


def planned(case: str, kind: str) -> dict[str, int]:
    recipe, settings = CASES[case]
    strategy = strategy_from({**settings, "activation_checkpointing": kind})
    cluster = cluster_of(recipe.cluster)
    found = predict(recipe, blueprint_of(recipe), strategy, cluster)
    return {"peak_bytes": found.sum_bytes, "flops": found.cost.flops}


def rows_of(case: str, measure: bool) -> list[dict[str, Any]]:
    none = planned(case, "none")["flops"]
    rows = []
    for share in SHARES:
        found = planned(case, f"budget:{share:g}")
        row = {"case": case, "share": share, "peak_bytes": found["peak_bytes"]}
        row["added_flops"] = found["flops"] / none - 1
        if measure and case.endswith("CPU") and share in MEASURED:
            command = [sys.executable, __file__, "--child", case, f"budget:{share:g}"]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            row["measured_peak_bytes"] = json.loads(answer.splitlines()[-1])["peak_bytes"]
        rows.append(row)
        print(row, flush=True)
    return rows


def table(rows: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Both names, as the documentation shows them."""
    head = f"| model | F | FLOPs added, {REFERENCE} | {OTHER} | peak, {REFERENCE} | {OTHER} | less |"
    lines = [head, "|---|" + "---:|" * 6]
    pairs = [zip(rows[REFERENCE][case], rows[OTHER][case], strict=True) for case in CASES]
    for mine, other in itertools.chain(*pairs):
        flops = " | ".join(f"{100 * row['added_flops']:+.1f} %" for row in (mine, other))
        peaks = " | ".join(f"{row['peak_bytes'] / 2**20:.1f} MiB" for row in (mine, other))
        less = max(0.0, 1 - other["peak_bytes"] / mine["peak_bytes"])
        lines.append(f"| {mine['case']} | {mine['share']:g} | {flops} | {peaks} | {100 * less:.1f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default=REFERENCE, help="the implementation to measure")
    parser.add_argument(
        "--only", default="", help="the cases whose name contains this; others keep their rows"
    )
    parser.add_argument("--planned", action="store_true", help="measure nothing")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "KIND"), help="measure one run and print it")
    asked = parser.parse_args()
    if asked.child:
        case, kind = asked.child
        shape = SHAPES[case.removesuffix(", CPU")]
        print(json.dumps(measured(shape, {"activation_checkpointing": kind})))
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    results["machine"] = described()
    for case in (case for case in CASES if asked.only in case):
        results["rows"].setdefault(asked.name, {})[case] = rows_of(case, not asked.planned)
        rows = results["rows"]
        if all(rows.get(name, {}).keys() == CASES.keys() for name in (REFERENCE, OTHER)):
            results["table"] = table(rows)
            print(results["table"])
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
