"""Packed against padded pairs of preferences: ``python benchmarks/packed_pairs.py [ROUNDS]``.

One process trains DPO on the same pairs in both ways, a step of each in turn, with as many tokens in a micro-batch. The
figure is the pairs per second of the packed steps over those of the padded ones: the median of all rounds. Lengths of
answers are log-normal with the spread of UltraFeedback's (a standard deviation of 0.7 in the logarithm), cut to a row.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.launch.process import join
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.batches import RankBatches

ROW, TYPICAL, SPREAD, PAIRS = 512, 100, 0.7, 600


def write_pairs(path: Path) -> None:
    """Pairs of random letters; a byte is a token."""
    chance = random.Random(0)

    def words(mean: float) -> str:
        length = min(ROW // 2 - 1, max(2, round(math.exp(chance.gauss(math.log(mean), SPREAD)))))
        return "".join(chance.choices("abcdefgh ", k=length))

    rows = [
        {"prompt": words(TYPICAL / 2), "chosen": words(TYPICAL), "rejected": words(TYPICAL)}
        for _ in range(PAIRS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


class Way:
    """A run with packed or padded pairs."""

    def __init__(self, path: Path, packing: bool) -> None:
        rows = 8 if packing else 4  # a padded sample has two rows
        values: dict[str, Any] = {
            "model": {"layers": 4, "width": 256, "heads": 4, "vocab": 257},
            "objective": "dpo",
            "data": {"source": str(path), "sequence_length": ROW, "packing": packing},
            "steps": 1000,
            "batch_size": rows,
        }
        recipe = recipe_of(values, SETTINGS)
        strategy = strategy_from({"precision": "fp32", "micro_batch_size": rows // 2})
        self.run = build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))
        self.batches, self.number = RankBatches(open_data(recipe), self.run), 0

    def pairs_per_second(self) -> float:
        """Of the next step."""
        batches, began = self.batches.at(self.number), time.perf_counter()
        result = step(self.run, batches, 1e-5)
        pairs, self.number = int(result.tokens), self.number + 1
        return pairs / (time.perf_counter() - began)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    with tempfile.TemporaryDirectory() as folder, join("cpu"):
        write_pairs(Path(folder) / "pairs.jsonl")
        padded, packed = (Way(Path(folder) / "pairs.jsonl", packing) for packing in (False, True))
        for way in (padded, packed):
            way.pairs_per_second()  # warms the kernels
        seen = [(padded.pairs_per_second(), packed.pairs_per_second()) for _ in range(rounds)]
    print("| padded, pairs/s | packed, pairs/s | ratio |\n|---:|---:|---:|")
    alone, together = (statistics.median(rates) for rates in zip(*seen, strict=True))
    print(f"| {alone:.2f} | {together:.2f} | {statistics.median(b / a for a, b in seen):.2f} |")


if __name__ == "__main__":
    main()
