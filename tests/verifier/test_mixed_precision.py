"""The plain process in 16 bits runs the layers that a user's module has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.mixed_precision import MixedPrecision


class Recurrent(nn.Module):
    """A recurrent net over vectors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = getattr(nn, kind)(5, 8, 2, batch_first=True, bidirectional=True)
        self.leave = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.net(x)[0]
        return self.leave(states).squeeze(-1)


def recurrent(kind: str) -> tuple[nn.Module, Any, Any]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()

    return Recurrent(kind), loss, lambda: [{"x": torch.zeros(6, 5), "y": torch.zeros(6)}] * 4


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_recurrent_nets_train_on_a_cpu(kind: str, precision: str) -> None:
    """oneDNN has no LSTM in fp16 for most CPUs, and autocast asks for it."""
    model = {"factory": f"{__name__}:recurrent", "arguments": {"kind": kind}}
    recipe = recipe_of({"model": model, "steps": 2, "batch_size": 2}, SETTINGS)
    strategy = strategy_from({"precision": precision})
    plain = MixedPrecision(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))
    chance = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(2, 6, 5, generator=chance), "y": torch.randn(2, 6, generator=chance)}
    wide = MixedPrecision(
        recipe, blueprint_of(recipe), strategy_from({"precision": "fp32"}), torch.device("cpu")
    )
    first, exact = plain.gradients([batch], 1.0), wide.gradients([batch], 1.0)
    assert first.step.loss == pytest.approx(exact.step.loss, rel=2e-2)
    for name, gradient in exact.gradients.items():
        assert (first.gradients[name] - gradient).norm() < 0.05 * gradient.norm() + 5e-3, name
