"""A user's mixture of experts: stacked matrices, a bare router, and a table in each block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mixture(nn.Module):
    """A block whose experts are one parameter [4, width, width]; every token goes to all, by the router's weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.router = nn.Parameter(torch.empty(4, width))
        self.experts = nn.Parameter(torch.empty(4, width, width))
        self.scale = nn.Parameter(torch.empty(1, 1, width))  # a vector, whatever its number of dimensions

    def reset_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        share = (x @ self.router.T).softmax(-1)
        return x + self.scale * torch.einsum("bsi,eoi,bse->bso", self.mix(x), self.experts, share)


class Mixtures(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Mixture(width) for _ in range(blocks))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T


def stacked(**arguments: Any) -> Any:
    """A factory: model and loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["input_ids"] % 64)
        labels = batch["labels"] % 64
        total = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return total, torch.ones_like(labels).sum()

    return Mixtures(**arguments), loss
