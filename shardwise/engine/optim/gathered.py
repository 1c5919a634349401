"""Steps an optimizer that looks at whole matrices (Adafactor, Muon, one of another library) on sharded parameters.

One parameter after the other is gathered with its gradient and its state, updated on every rank alike, and cut again.
So the result is that of one process, and at most one whole parameter is in memory. State of the parameter's shape is
sharded like it between steps; other state, such as Adafactor's factors, is on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.optim.chunk import distributed_as
from shardwise.runtime.parallel.shard_slices import gather, local_part, local_slices

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers of torch whose update of an element depends on that element alone: they work on shards."""


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer may look at more than the shard of a parameter."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return type(optimizer) not in ELEMENTWISE and any(isinstance(p, DTensor) for p in parameters)


class GatheredOptimizer:
    """An optimizer of a library over stand-ins, which hold a whole parameter during its update.

    Attributes:
        state: by the sharded parameter.
    """

    def __init__(self, made: torch.optim.Optimizer, begin: Callable[[torch.optim.Optimizer], None]) -> None:
        """``begin`` makes the state of all parameters of an optimizer."""
        self._made, self.state = made, dict[nn.Parameter, dict[str, Any]]()
        self._held: list[tuple[dict[str, Any], nn.Parameter, nn.Parameter]] = []
        for group in made.param_groups:
            own, group["params"] = group["params"], []
            self._held += [(group, p, nn.Parameter(_nothing(p), p.requires_grad)) for p in own]
        for group, parameter, stand_in in self._held:
            with self._alone(group, stand_in):
                stand_in.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                begin(made)
                stand_in.data = _nothing(parameter)
            state = made.state[stand_in]
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    state[name] = distributed_as(parameter, value[local_slices(parameter)].clone())
            self.state[parameter] = state

    def step(self) -> None:
        for group, parameter, stand_in in self._held:
            if parameter.grad is not None:
                with self._alone(group, stand_in):
                    self._update(parameter, stand_in)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, stand_in: nn.Parameter) -> None:
        assert parameter.grad is not None
        stand_in.data, stand_in.grad = gather(parameter), gather(parameter.grad)
        state, cut = self.state[parameter], local_slices(parameter)
        sharded = {name: value for name, value in state.items() if isinstance(value, DTensor)}
        state.update({name: gather(value) for name, value in sharded.items()})
        self._made.step()
        local_part(parameter).copy_(stand_in.data[cut])
        for name, value in sharded.items():
            local_part(value).copy_(state[name][cut])
        state.update(sharded)
        stand_in.data, stand_in.grad = _nothing(parameter), None

    @contextmanager
    def _alone(self, group: dict[str, Any], stand_in: nn.Parameter) -> Iterator[None]:
        group["params"] = [stand_in]
        try:
            yield
        finally:
            group["params"] = []


def _nothing(parameter: Tensor) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
