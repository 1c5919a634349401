"""Modules of users planned, trained and verified on two ranks: ``python benchmarks/own_modules.py [--only TEXT]``.

A convolution net with batch norms, a ViT and a regression by squared errors, each in fp32, bf16 and fp16 and in ZeRO 0
to 3: ``shardwise.plan(module=...)``, four steps of ``train_module``, and the peaks that both ranks measured against
the planned ones. Then ``shardwise.verify`` trains two steps of a smaller net of the same kind. 36 rows take about 25
minutes on two cores. Writes benchmarks/results/own-modules.json after each row, and goes on with the rows it lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import described
from torch import Tensor, nn

import shardwise
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

RESULTS = Path(__file__).parent / "results" / "own-modules.json"
Batch = dict[str, Tensor]


class Samples(torch.utils.data.Dataset[Batch]):
    """Random samples, the same in every process."""

    def __init__(self, inputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Batch:
        chance = torch.Generator().manual_seed(index)
        x = torch.randn(self.inputs, generator=chance)
        y = torch.randn(self.targets, generator=chance) if self.targets else torch.tensor(index % 10)
        return {"x": x, "y": y}


def classes(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def squares(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class ConvNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.leave = nn.Linear(width, 10)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((2, 3)))


class Positions(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, tokens, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ViT(nn.Module):
    def __init__(self, width: int, depth: int, image: int, patch: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = Positions((image // patch) ** 2, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, 10)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.patch(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x).mean(1))


class Regression(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        )

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def convolutions(small: bool = False) -> tuple[nn.Module, Any, Any]:
    width, depth, image = (8, 2, 16) if small else (64, 5, 64)
    return ConvNet(width, depth), classes, Samples((3, image, image), ())


def vit(small: bool = False) -> tuple[nn.Module, Any, Any]:
    width, depth, image = (16, 2, 16) if small else (256, 6, 96)
    return ViT(width, depth, image), classes, Samples((3, image, image), ())


def regression(small: bool = False) -> tuple[nn.Module, Any, Any]:
    width, depth = (16, 2) if small else (448, 6)
    return Regression(width, depth), squares, Samples((width,), (width,))


KINDS = {"convolutions": (convolutions, 8), "vit": (vit, 16), "regression": (regression, 32)}
"""The factory, and the samples of a micro-batch; half of them in fp16, which a CPU without its instructions computes
30 times as slowly."""


def measured(kind: str, strategy: dict[str, Any]) -> dict[str, Any]:
    """One row: the peaks in bytes and the greatest error of both ranks, and the verdict."""
    factory, micro = KINDS[kind]
    micro //= 1 + (strategy["precision"] == "fp16")
    strategy = {**strategy, "micro_batch_size": micro}
    module, loss, dataset = factory()
    sections: dict[str, Any] = {
        "steps": 4,  # memory is measured in three; a histogram of gradients follows in fp16
        "batch_size": 4 * micro,
        "cluster": {"device": "cpu", "devices_per_node": 2},
    }
    given = {"module": module, "loss": loss, "dataset": dataset, "strategy": strategy, **sections}
    plan = shardwise.plan(**given)
    with tempfile.TemporaryDirectory() as folder:
        record = shardwise.train_module(**given, out=Path(folder) / "run", progress=False)
        record.load_into(module)
    assert record.outcome is not None and record.plan.peak.bytes == plan.peak.bytes
    ranks = [(rank.predicted_peak_bytes, rank.measured_peak_bytes) for rank in record.outcome.ranks]
    small = {"factory": f"own_modules:{kind}", "arguments": {"small": True}}
    recipe = recipe_of({**sections, "model": small, "strategy": strategy}, SETTINGS)
    verdict = shardwise.verify(recipe, shardwise.plan(recipe), steps=2)
    return {
        "line": plan.line,
        "ranks": ranks,
        "error": max((predicted / peak - 1 for predicted, peak in ranks), key=abs),
        "verified": verdict.passed,
        "parameter_difference": verdict.max_parameter_difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name has this text")
    only = parser.parse_args().only
    os.chdir(Path(__file__).parent)
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for kind in KINDS:
        for precision in ("fp32", "bf16", "fp16"):
            for stage in range(4):
                name = f"{kind} {precision} zero{stage}"
                if only not in name or (name in rows and not only):
                    continue
                rows[name] = measured(kind, {"precision": precision, "zero_stage": stage})
                print(name, f"{rows[name]['error']:+.1%}", "verified" if rows[name]["verified"] else "WRONG")
                RESULTS.write_text(json.dumps({"machine": described(), "rows": rows}, indent=1) + "\n")
    errors = [abs(row["error"]) for row in rows.values()]
    passed = sum(row["verified"] for row in rows.values())
    print(f"{len(rows)} rows, {passed} verified; memory off by at most {max(errors):.1%}")


if __name__ == "__main__":
    main()
