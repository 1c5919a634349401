"""Kernels that a step launches, by technique: the table of docs/concepts/how-one-step-runs.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise.dryrun.run import dry_run
from shardwise.dryrun.tracker import Tracker
from shardwise.engine.phase import current_phase
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import strategy_from

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "how-one-step-runs.md"
MODEL = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 704, "vocab": 4096}
BF16 = {"precision": "bf16", "zero_stage": 1}
CASES: Mapping[str, tuple[int, Mapping[str, Any], Mapping[str, Any]]] = {
    "fp32": (1, {}, {}),
    "bf16": (1, BF16, {}),
    "bf16, ZeRO 3 on 8 GPUs": (8, BF16 | {"zero_stage": 3}, {}),
    "bf16, full checkpointing": (1, BF16 | {"activation_checkpointing": "full"}, {}),
    "bf16, LoRA of all layers": (1, BF16, {"adapter": {"name": "lora", "rank": 8, "targets": "all"}}),
    "bf16, 8-bit AdamW": (1, BF16, {"optimizer": {"name": "adamw_8bit"}}),
    "bf16 weights alone": (1, {"precision": "bf16", "master_weights": False}, {}),
}


def launches(ranks: int, settings: Mapping[str, Any], sections: Mapping[str, Any]) -> Counter[str]:
    """Calls that launch kernels, by phase. One call for all tensors of a list is one launch."""
    recipe = recipe_of(
        {
            "model": MODEL,
            "steps": 9,
            "batch_size": 8 * ranks,
            "data": {"sequence_length": 256},
            "cluster": {"preset": f"{ranks}xH100-80GB"},
            **sections,
        }
    )
    counts: Counter[str] = Counter()
    spend = Tracker._spend

    def counted(tracker: Tracker, kernels: Any = (), collectives: Any = (), transfers: Any = ()) -> None:
        counts[current_phase()] += bool(kernels)
        spend(tracker, kernels, collectives, transfers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracker, "_spend", counted)
        strategy = strategy_from({"micro_batch_size": 8, **settings})
        dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), history=False)
    return counts


def test_the_page_has_the_launches_of_every_technique() -> None:
    rows = []
    for name, case in CASES.items():
        by_phase = launches(*case)
        columns = [by_phase["forward"], by_phase["backward"], by_phase["clip"], by_phase["optimizer"]]
        rows.append("| " + " | ".join([name, *(f"{n:,}" for n in (*columns, sum(columns)))]) + " |")
    table = "\n".join(rows)
    assert table in PAGE.read_text(encoding="utf-8"), f"the page needs this table:\n{table}"
