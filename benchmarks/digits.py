"""The handwritten digits of scikit-learn and a small network for them, as ``model.factory`` wants them.

1,797 images of 8 × 8, which come with the package. They are shuffled once and for all; the last third is the test
set, which is what the recipe holds out (``data.held_out``).
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

PIXELS, CLASSES = 64, 10
START = 1.5
"""Steeper than usual at the beginning, which is what a warmup is for."""


class Digits(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images with values from 0 to 1, and their labels."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.images = torch.tensor(images / 16, dtype=torch.float32)[order]
        self.labels = torch.tensor(labels, dtype=torch.int64)[order]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Layer(nn.Linear):
    """Starts at ``START`` times what He et al. 2015 have: the rectifier's gain, or 1 where none follows."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        self.gain = gain
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=START * self.gain / math.sqrt(self.in_features))
        nn.init.zeros_(self.bias)


def network(hidden: int = 3, width: int = 64) -> tuple[nn.Module, object, type[Digits]]:
    """A network without normalisation, its loss and its data."""
    layers: list[nn.Module] = []
    for index in range(hidden):
        layers += [Layer(PIXELS if index == 0 else width, width, math.sqrt(2)), nn.ReLU()]
    layers.append(Layer(width, CLASSES, 1.0))

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = module(batch["images"])
        total = nn.functional.cross_entropy(scores, batch["labels"], ignore_index=-100, reduction="sum")
        return total, (batch["labels"] != -100).sum()

    return nn.Sequential(*layers), loss, Digits
