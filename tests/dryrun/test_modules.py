"""Naming the running module without changing what is counted."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.dryrun.modules import RunningModule


class Spy(torch.autograd.Function):
    """Reports the running module in its forward and in its backward pass."""

    seen: list[str] = []
    names: RunningModule

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        Spy.seen.append(f"forward {Spy.names.name()}")
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        Spy.seen.append(f"backward {Spy.names.name()}")
        return grads[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(Spy.apply(self.inner(x)))  # sin keeps its input: recomputation reaches it


def test_names_in_both_directions_and_in_recomputation() -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.ones(2, 3, requires_grad=True)
    with RunningModule(model) as names:
        Spy.names, Spy.seen = names, []
        checkpoint(model[1], model[0](x), use_reentrant=False).sum().backward()
        assert names.name() == ""
    assert Spy.seen[:2] == ["forward 0", "forward 1"]
    assert "forward 1" in Spy.seen[2:], "the recomputation is in module 1 again"
    assert [line for line in Spy.seen if line.startswith("backward")] == ["backward 1", "backward 0"]


def test_a_recomputed_graph_is_freed_as_without_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    alive: list[weakref.ref[Tensor]] = []

    def watched(x: Tensor) -> Tensor:
        middle = torch.relu(model[0](x))
        alive.append(weakref.ref(middle))
        return model[2](middle)

    with RunningModule(model):
        loss = checkpoint(watched, torch.ones(2, 3, requires_grad=True), use_reentrant=False).sum()
        loss.backward()
        gc.collect()
        assert len(alive) == 2 and all(reference() is None for reference in alive)
