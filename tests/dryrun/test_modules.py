"""Naming the running module without changing the counts."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwise.dryrun.modules import RunningModule


class Ask(TorchDispatchMode):
    """Asks for the running module at every operation, as the tracker does at every allocation."""

    def __init__(self, names: RunningModule) -> None:
        super().__init__()
        self.names, self.heard = names, list[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.heard.append((func.name(), self.names.name()))
        return out

    def of(self, operation: str) -> list[str]:
        return [name for heard, name in self.heard if heard == operation]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(x))


def test_names_in_both_directions_and_in_recomputation() -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.ones(2, 3, requires_grad=True)
    with RunningModule(model) as names, Ask(names) as asked:
        checkpoint(model[1], model[0](x), use_reentrant=False).sum().backward()
        assert names.name() == ""
    assert asked.of("aten::addmm") == ["0.inner", "1.inner", "1.inner"], "block 1 twice, once recomputed"
    assert asked.of("aten::cos") == ["1", "0"], "the gradient of sin, in the backward pass"


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
