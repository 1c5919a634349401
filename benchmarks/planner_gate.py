"""Choices of the planner for random recipes: ``python benchmarks/planner_gate.py [--number N] [--out FILE]``.

Every recipe is drawn from its number: dimensions of a decoder, sequence length, batch, a cluster, sometimes an adapter,
another objective, or a pinned setting. ``--against FILE`` compares with the choices of another revision, by the full
dry run's figures: a choice is the same, better, or worse than the other by more than the planner tells apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

CLUSTERS = (
    *("1xRTX4090-24GB", "1xH100-80GB", "2xA100-80GB", "4xL4-24GB", "8xA100-40GB", "8xH100-80GB"),
    *("16xH100-80GB", "64xH100-80GB", "32xV100-32GB", "8xB200-180GB"),
)
DIMENSIONS = (  # layers, width, heads, kv_heads, ffn
    *((6, 512, 8, 8, 1408), (12, 768, 12, 12, 3072), (16, 2048, 32, 8, 8192), (24, 1024, 16, 16, 4096)),
    *((28, 3072, 24, 8, 8192), (32, 4096, 32, 8, 14336), (40, 5120, 40, 40, 13824), (48, 6144, 48, 8, 16384)),
)


def drawn(number: int) -> dict[str, Any]:
    """The recipe of a number."""
    draw = random.Random(number)
    layers, width, heads, kv_heads, ffn = draw.choice(DIMENSIONS)
    cluster, length = draw.choice(CLUSTERS), draw.choice((512, 2048, 4096, 8192))
    devices = int(cluster.partition("x")[0])
    pins = draw.choice(
        (
            *({}, {}, {}, {"zero_stage": 3}, {"activation_checkpointing": "full"}),
            *({"micro_batch_size": 1}, {"tensor_parallel": 2} if devices > 1 else {}),
        )
    )
    values: dict[str, Any] = {
        "model": {
            "layers": layers,
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn": ffn,
            "vocab": draw.choice((32000, 128256)),
            "context": length,
        },
        "data": {"sequence_length": length},
        "steps": draw.choice((200, 20_000)),
        "batch_size": devices * draw.choice((1, 4, 16)),
        "cluster": {"preset": cluster},
        "strategy": {"precision": "fp16" if "V100" in cluster else "bf16", **pins},
    }
    if draw.random() < 0.2:
        values["adapter"] = {"name": "lora", "rank": 16, "targets": "all"}
    if draw.random() < 0.15:
        values["plan"] = {"objective": "memory"}
    return values


def chosen(number: int) -> dict[str, Any]:
    """The plan of a number's recipe."""
    from shardwise.core.errors import ShardwiseError
    from shardwise.hardware.cluster import cluster_of
    from shardwise.model.open import blueprint_of
    from shardwise.planner.search import plan_for
    from shardwise.recipe.load import recipe_of
    from shardwise.technique import SETTINGS

    recipe = recipe_of(drawn(number), SETTINGS)
    cluster, began = cluster_of(recipe.cluster), time.process_time()
    try:
        plan = plan_for(recipe, blueprint_of(recipe), cluster, compare=False)
    except ShardwiseError as error:
        return {"line": f"refused: {error}"}
    return {
        "line": plan.line,
        "fits": plan.fits,
        "peak": plan.peak.bytes,
        "seconds": plan.step.seconds,
        "objective": recipe.plan.objective,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def verdict(one: dict[str, Any], two: dict[str, Any]) -> str:
    """How a choice compares with another revision's."""
    from shardwise.core.answer import TELLS

    if one["line"] == two["line"] or "seconds" not in one or "seconds" not in two:
        return "same" if one["line"] == two["line"] else "other error"
    if one["fits"] != two["fits"]:
        return "better" if one["fits"] else "worse"
    key = "peak" if one["objective"] == "memory" or not one["fits"] else "seconds"
    ratio = one[key] / two[key]
    return "equal" if abs(ratio - 1) <= TELLS else "better" if ratio < 1 else f"worse ({ratio - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    os.environ["SHARDWISE_CACHE"] = os.devnull
    others = json.loads(asked.against.read_text()) if asked.against else {}
    rows: dict[str, Any] = {}
    for number in range(asked.number):
        row = rows[str(number)] = chosen(number)
        print(number, row, verdict(row, others[str(number)]) if str(number) in others else "", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
