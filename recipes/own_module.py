"""A module of one's own with its loss and data, for own-module.yaml: points in a plane, and the ring of each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Rings(Dataset[dict[str, Tensor]]):
    """4,096 points; the label is the number of the ring around the origin."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point = torch.rand(2, generator=torch.Generator().manual_seed(index)) * 2 - 1
        return {"x": point, "labels": (point.norm() * 3).long().clamp(max=3)}


class Classifier(nn.Module):
    """Layers of one width; ``units`` names the blocks that are sharded and recomputed one by one."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)
        )
        self.leave = nn.Linear(width, 4)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.leave(x)
        return out


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum over the valid targets, their number)."""
    labels = batch["labels"]
    return F.cross_entropy(model(batch["x"]), labels, reduction="sum"), (labels != -100).sum()


def make(width: int = 128, layers: int = 4) -> tuple[nn.Module, object, Dataset[dict[str, Tensor]]]:
    """The factory that the recipe names."""
    return Classifier(width, layers), loss, Rings()
