"""Plans of models that do not fit on a desk: time, memory, and one published figure.

``python benchmarks/scale.py`` plans Llama-3-8B on 8 H100 (zero stages 2 and 3; the difference against the
12.59 GiB that torchtitan measured between `reshard_after_forward` never and default, commit 5940ddeb53, both
without fragmentation) and Llama-3-405B on 16,384 H100, each in a process of its own. Expandable segments are set, as
torchtitan sets them; without them the 405B model, whose blocks' gradients are reduced in pieces of 15 GiB, runs out
of memory by fragmentation. Writes benchmarks/results/scale.json.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from machine import described

RESULTS = Path(__file__).parent / "results" / "scale.json"
PUBLISHED_GIB = 12.59


def recipe(preset: str, cluster: str, length: int, batch: int, **strategy: Any) -> dict[str, Any]:
    return {
        "model": {"preset": preset},
        "data": {"sequence_length": length},
        "steps": 10,
        "batch_size": batch,
        "cluster": {"preset": cluster},
        "strategy": {"precision": "bf16", "micro_batch_size": 1, **strategy},
    }


KEPT = {"activation_checkpointing": "none"}
CASES: dict[str, dict[str, Any]] = {
    "Llama-3-8B on 8 H100, stage 3": recipe("llama-3-8b", "8xH100-80GB", 8192, 8, zero_stage=3, **KEPT),
    "Llama-3-8B on 8 H100, stage 2": recipe("llama-3-8b", "8xH100-80GB", 8192, 8, zero_stage=2, **KEPT),
    "Llama-3-8B on 8 H100, stage chosen": recipe("llama-3-8b", "8xH100-80GB", 8192, 8),
    "Llama-3-405B on 16,384 H100": recipe("llama-3-405b", "16384xH100-80GB", 4096, 16384, zero_stage=3),
}


def planned(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One ``shardwise plan --json``: its figures, wall time and peak resident memory of the process."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "plan", str(path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    plan = json.loads(done.stdout)
    return {
        "plan_seconds": round(seconds, 1),
        # The largest child so far: an upper bound for this one.
        "plan_memory_gib": round(
            max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 2**20, 2
        ),
        "line": plan["line"],
        "fits": plan["fits"],
        "peak_gib": plan["peak"]["bytes"] / 2**30,
        "fragmentation_gib": plan["ledger"]["fragmentation"] / 2**30,
        "where": plan["peak"]["where"],
    }


def main() -> None:
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, values in CASES.items():
            rows[name] = planned(values, Path(scratch))
            print(name, rows[name], flush=True)
    tensors = {name: row["peak_gib"] - row["fragmentation_gib"] for name, row in rows.items()}
    saved = tensors["Llama-3-8B on 8 H100, stage 2"] - tensors["Llama-3-8B on 8 H100, stage 3"]
    results = {
        "machine": described(),
        "rows": rows,
        "saved_by_resharding_gib": saved,
        "published_gib": PUBLISHED_GIB,
        "error": saved / PUBLISHED_GIB - 1,
    }
    print(f"saved by resharding: {saved:.3f} GiB, published {PUBLISHED_GIB}, {results['error']:+.2%}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
