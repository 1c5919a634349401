"""Sums of gradients over replicas (DDP)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.runtime.parallel.replicas import Replicas
from tests.harness.pool import Pool


class Two(nn.Module):
    """Two layers that share a bias, a scale of the whole, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(3, 3) for _ in range(3))
        self.second.bias = self.first.bias
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) * self.scale).square().sum()


def made() -> Two:
    torch.manual_seed(0)
    return Two().double()


def inputs(rank: int) -> list[Tensor]:
    return list(torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)))


def summed(nested: bool) -> dict[str, Any]:
    """Gradients of two micro-batches of each rank. ``nested``: the first layer has a backward pass of its own."""
    model = made()
    replicas = Replicas([model.second, model.first, model], dist.group.WORLD)  # type: ignore[arg-type]
    for number, x in enumerate(inputs(dist.get_rank())):
        replicas.before_backward(number == 1)
        if nested:
            hidden = model.first(x)
            cut = hidden.detach().requires_grad_()
            (model.second(cut) * model.scale).square().sum().backward()
            hidden.backward(cut.grad)
        else:
            model(x).backward()
    replicas.finish()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def alone() -> dict[str, Any]:
    model = made()
    for rank in range(2):
        for x in inputs(rank):
            model(x).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_are_those_of_all_samples(pool: Pool) -> None:
    """Also of a parameter of two groups, whose gradient is accumulated twice in a pass; unused ones have none."""
    expected = alone()
    for nested in (False, True):
        for found in pool.run(2, summed, nested):
            assert found.keys() == expected.keys()
            assert found["unused.weight"] is expected["unused.weight"] is None
            used = {name: gradient for name, gradient in expected.items() if gradient is not None}
            assert len(used) == 4
            for name, gradient in used.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
