"""Perplexity and KL divergence of a trained model after quantization: ``python benchmarks/quantization.py MODEL``.

Each method and scheme goes through the pass of ``shardwise quantize``: calibration on the source of the standard
library, loss on held-out text of it. MODEL is a folder that transformers loads; ``--tokenizer`` names its tokenizer,
``bytes`` by default. ``gaps`` are the shares of the perplexity lost by round to nearest, with clipped ranges, that
Kashin's method wins back at as many bits.

Rows that are there are not measured again (``--again`` does). One to two minutes per row for six million weights.
Writes benchmarks/results/quantization.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import described

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import check_method, scheme_of
from shardwise.plugins.quantize.job import quantize_model
from shardwise.plugins.quantize.settings import Settings

RESULTS = Path(__file__).parent / "results" / "quantization.json"
SCHEMES = ("w4a16-channel", "w3a16-channel", "w4a16-g64", "w8a16", "nf4")
METHODS = ("rtn", "kashin", "gptq", "awq", "hqq")
SEQUENCES, LENGTH = 16, 256
Rows = dict[str, dict[str, Any]]


def measured(model: str, scheme: str, method: str, tokenizer: str) -> dict[str, Any]:
    """One row."""
    started = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(
            model, Path(scratch) / "out", scheme, method, None, None, tokenizer, SEQUENCES, LENGTH
        )
        found = quantize_model(settings).as_dict()
    weights = sum(row["shape"][0] * row["shape"][1] for row in found["layers"])
    return {
        **{key: found[key] for key in ("perplexity", "kl", "predicted_peak_bytes", "measured_peak_bytes")},
        "bits": found["block_bits"],
        "kept": [row["name"] for row in found["layers"] if row.get("why")],
        "seconds": time.process_time() - started,
        "seconds_per_million": (time.process_time() - started) * 1e6 / weights,
    }


def in_order(rows: Rows) -> Rows:
    """The rows by scheme and method, however they were measured."""
    names = (f"{scheme} {method}" for scheme in SCHEMES for method in METHODS)
    return {name: rows[name] for name in names if name in rows}


def table(rows: Rows) -> str:
    """The figures as the documentation shows them."""
    lines = [
        "| scheme | method | bits | perplexity | lost | KL, nats | in 16 bits |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        scheme, method = name.split(" ")
        base, after = row["perplexity"]["base"], row["perplexity"]["quantized"]
        lines.append(
            f"| `{scheme}` | {method} | {row['bits']:.2f} | {after:.4f} | {after / base - 1:+.2%} | {row['kl']:.5f} |"
            f" {len(row['kept'])} |"
        )
    return "\n".join([*lines, "", "Repeat with `benchmarks/quantization.py MODEL`."])


def gaps(rows: Rows) -> dict[str, float]:
    """Share of the perplexity lost by round to nearest that Kashin's method wins back, by scheme."""
    found = {}
    for scheme in SCHEMES:
        plain, kashin = rows.get(f"{scheme} rtn"), rows.get(f"{scheme} kashin")
        if plain and kashin:
            lost = [row["perplexity"]["quantized"] - row["perplexity"]["base"] for row in (plain, kashin)]
            found[scheme] = 1 - lost[1] / lost[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--again", action="store_true", help="also repeat existing results")
    asked = parser.parse_args()
    rows: Rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and not asked.again else {}
    for scheme in SCHEMES:
        for method in METHODS:
            name = f"{scheme} {method}"
            try:
                check_method(method, scheme_of(scheme))
            except RecipeError:
                continue
            if name in rows:
                continue
            rows[name] = measured(asked.model, scheme, method, asked.tokenizer)
            print(name, rows[name]["perplexity"], rows[name]["kl"], flush=True)
            settings = {"sequences": SEQUENCES, "length": LENGTH}
            results = {
                "machine": described(),
                **settings,
                "rows": in_order(rows),
                "gaps": gaps(rows),
                "table": table(in_order(rows)),
            }
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(rows), gaps(rows), sep="\n")


if __name__ == "__main__":
    main()
