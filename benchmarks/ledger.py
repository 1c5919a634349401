"""Predicted against measured peak memory on real training runs: ``python benchmarks/ledger.py [--only TEXT]``.

Every row is one ``shardwise train`` of three optimizer steps, planned and measured by the command itself: worlds
of 1, 2 and 4 processes, ZeRO 0 to 3 and hybrid, native and Hugging Face models, accumulation of 1 and 4 (and of
others), several depths and micro-batches, peaks of 0.3 to 4 GiB. The prediction is made before the run starts.
About 15 minutes on two cores. Writes benchmarks/results/ledger-cpu.json and docs/reference/ledger-cpu.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from machine import described

from shardwise.core.units import format_change, format_percent

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ledger-cpu.json"
TABLE = ROOT / "docs" / "reference" / "ledger-cpu.md"


@dataclass(frozen=True)
class Case:
    """One run. ``batch`` is per data-parallel rank and optimizer step; sequences of ``length`` tokens."""

    model: str
    world: int
    stage: int
    micro: int
    passes: int
    length: int = 256
    replicate: int = 1
    precision: str = "fp32"

    @property
    def name(self) -> str:
        copies = f", {self.replicate} copies" if self.replicate > 1 else ""
        passes = f"mb {self.micro} × {self.passes}"
        return f"{self.model}, {self.world} × zero{self.stage}{copies}, {self.precision}, {passes}"


MODELS: dict[str, dict[str, Any]] = {
    "native 19M": {"layers": 4, "width": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192},
    "native 41M": {"layers": 8, "width": 640, "heads": 10, "kv_heads": 5, "ffn": 1728, "vocab": 2048},
    "native 110M": {"layers": 12, "width": 832, "heads": 13, "kv_heads": 13, "ffn": 2240, "vocab": 4096},
    "native gpt2 32M": {"family": "gpt2", "layers": 6, "width": 576, "heads": 9, "ffn": 2304, "vocab": 6000},
    "hf llama 21M": {
        "kind": "llama",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4000,
    },
    "hf gpt2 25M": {"kind": "gpt2", "n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 5000},
}

CASES: tuple[Case, ...] = (
    Case("native 19M", 1, 0, 4, 1),
    Case("native 19M", 1, 0, 4, 4),
    Case("native 19M", 1, 3, 8, 1),
    Case("native 41M", 1, 0, 2, 4),
    Case("native 41M", 1, 0, 8, 1),
    Case("native 41M", 1, 0, 10, 1, length=512),
    Case("native 41M", 1, 0, 16, 1, length=512),
    Case("native 41M", 1, 2, 4, 4),
    Case("native 110M", 1, 0, 2, 1),
    Case("native gpt2 32M", 1, 0, 4, 1),
    Case("native 41M", 1, 0, 4, 1, precision="bf16"),
    Case("hf llama 21M", 1, 0, 4, 1),
    Case("hf gpt2 25M", 1, 0, 4, 4),
    Case("native 19M", 2, 0, 4, 1),
    Case("native 19M", 2, 1, 4, 4),
    Case("native 41M", 2, 2, 2, 4),
    Case("native 41M", 2, 3, 4, 1),
    Case("native 110M", 2, 3, 1, 4),
    Case("native 110M", 2, 0, 2, 1),
    Case("native gpt2 32M", 2, 2, 4, 1),
    Case("hf llama 21M", 2, 3, 4, 4),
    Case("hf llama 21M", 2, 1, 4, 1),
    Case("hf gpt2 25M", 2, 3, 4, 1),
    Case("native 19M", 4, 0, 4, 1),
    Case("native 41M", 2, 3, 4, 2, precision="bf16"),
    Case("native 41M", 4, 3, 2, 4),
    Case("native 41M", 4, 1, 2, 4),
    Case("native 41M", 4, 3, 4, 1, replicate=2),
    Case("native 110M", 4, 2, 1, 4, replicate=2),
    Case("hf llama 21M", 4, 2, 4, 4),
    Case("hf gpt2 25M", 4, 3, 4, 1, replicate=2),
)


def hugging_face_folder(spec: dict[str, Any], folder: Path) -> Path:
    """A model with random weights, saved as transformers saves it."""
    import transformers

    path = folder / spec["kind"]
    if not path.exists():
        kind = {"llama": transformers.LlamaConfig, "gpt2": transformers.GPT2Config}[spec["kind"]]
        config = kind(**{k: v for k, v in spec.items() if k != "kind"})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def recipe_for(case: Case, folder: Path) -> dict[str, Any]:
    spec = MODELS[case.model]
    model = {"hf": str(hugging_face_folder(spec, folder))} if "kind" in spec else spec
    return {
        "model": model,
        "data": {"sequence_length": case.length},
        "steps": 3,
        "batch_size": case.world * case.micro * case.passes,
        "cluster": {"device": "cpu", "devices_per_node": case.world},
        "strategy": {
            "zero_stage": case.stage,
            "replicate": case.replicate,
            "precision": case.precision,
            "micro_batch_size": case.micro,
        },
        "evaluation": {"sequences": 1},
    }


def run(case: Case, folder: Path, index: int) -> dict[str, Any]:
    """Train and return what the run's own report says."""
    recipe = folder / f"{index}.yaml"
    recipe.write_text(yaml.safe_dump(recipe_for(case, folder)), encoding="utf-8")
    out = folder / f"run-{index}"
    command = [sys.executable, "-m", "shardwise", "train", str(recipe), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    errors = [r["predicted_peak_bytes"] / r["measured_peak_bytes"] - 1 for r in report["ranks"]]
    return {"case": case.name, **vars(case), "ranks": report["ranks"], "worst_error": max(errors, key=abs)}


def table(results: dict[str, Any]) -> str:
    """The results as the documentation shows them."""
    machine, rows = results["machine"], results["rows"]
    lines = [
        "# Predicted against measured: CPU",
        "",
        "<!-- written by benchmarks/ledger.py -->",
        "",
        f"{len(rows)} runs; error of the worst rank: median {format_percent(results['median_error'], 1)},"
        f" worst {format_percent(results['worst_error'], 1)}.",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, torch {machine['torch']},"
        f" Python {machine['python']}, {machine['day']}. Repeat with `make benchmark`.",
        "",
        "| run | predicted, MiB | measured, MiB (each rank) | error of the worst rank |",
        "|---|---:|---|---:|",
    ]
    for row in rows:
        predicted = max(r["predicted_peak_bytes"] for r in row["ranks"]) / 2**20
        measured = ", ".join(f"{r['measured_peak_bytes'] / 2**20:,.0f}" for r in row["ranks"])
        lines.append(
            f"| {row['case']} | {predicted:,.0f} | {measured} | {format_change(row['worst_error'], 1)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="run the cases whose name contains this, and write nothing"
    )
    only = parser.parse_args().only
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for index, case in enumerate(c for c in CASES if only in c.name):
            rows.append(run(case, Path(scratch), index))
            measured = max(r["measured_peak_bytes"] for r in rows[-1]["ranks"]) / 2**20
            print(f"{case.name}: {measured:,.0f} MiB measured, {rows[-1]['worst_error']:+.2%}", flush=True)
            results = summary(rows)
            if not only:
                # After every run: a benchmark that is stopped leaves what it has measured.
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                TABLE.write_text(table(results), encoding="utf-8")
    print(f"median {results['median_error']:.2%}, worst {results['worst_error']:.2%}")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["worst_error"]) for row in rows]
    return {
        "machine": described(),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
