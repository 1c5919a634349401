"""How many tokens the experts of a mixture get, counted on the device and read with the other results of a step.

Every experts module writes the counts of one forward pass into a buffer, before its tokens are divided. The block
around it adds them to the sums of the step: outside of compiled code, and not when it is recomputed. One all-reduce of
layers x experts numbers sums over all ranks. Those with the same tokens count them all alike, which changes no load,
because loads are relative to the mean of the layer. Rows without a target are left out: a layout has as many of them as
it takes to fill up the last micro-batches, so they would make the load depend on the layout.

A router may balance its experts without a loss: it stands next to them and has ``adjust_bias``, which is called after
every update (Wang et al. 2024, arXiv:2408.15664).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.runtime.parallel.experts import ARGUMENTS, divisible_experts
from shardwise.runtime.torch_private import in_backward

COUNTS = "tokens_per_expert"
"""Name of the buffer of an experts module. Every forward pass writes all of it before anything reads it."""
FILLED_ROWS = "shardwise.filled_rows"
"""Key of a batch: bool [b], whether a row has a target."""
_FILLED = "filled_rows"
"""Name of the buffer of an experts module with that; compiled blocks read buffers anew in every call."""


def experts_by_name(model: nn.Module) -> dict[str, int]:
    """The number of experts of every experts module, by its name, in the order of the model."""
    return {name: int(module.num_experts) for name, module in _experts_of(model)}  # type: ignore[arg-type]


class ExpertLoad:
    """The counts of a step.

    Args:
        names: of the experts modules of the whole model, with their numbers of experts, which are all the same.
        stages: the parts of the model on this rank, each with its blocks.
    """

    def __init__(
        self, names: Mapping[str, int], stages: Iterable[tuple[nn.Module, Iterable[nn.Module]]]
    ) -> None:
        self.names = tuple(names)
        self._experts = max(names.values())
        self._rows: list[int] = []
        self._routers: list[Any] = []
        self._modules: list[Any] = []
        self._sums: Tensor | None = None
        self._index: Tensor | None = None
        for model, blocks in stages:
            rows = {module: self._watch(model, name) for name, module in _experts_of(model)}
            for block in blocks:
                for module in filter(rows.__contains__, list(block.modules())):
                    block.register_forward_hook(partial(self._add, module, rows[module]))

    def _watch(self, model: nn.Module, name: str) -> int:
        """Let an experts module count; its row of ``_sums``."""
        module = model.get_submodule(name)
        counts = torch.zeros(int(module.num_experts), dtype=torch.int64)  # type: ignore[arg-type]
        module.register_buffer(COUNTS, counts, persistent=False)
        module.register_forward_pre_hook(_Count().before)
        self._modules.append(module)
        here = len(self._rows)
        # A shortened model of a dry run may have other names than the whole one.
        self._rows.append(self.names.index(name) if name in self.names else here)
        around = model.get_submodule(name.rpartition(".")[0])
        self._routers.append(next((m for m in around.children() if hasattr(m, "adjust_bias")), None))
        return here

    def _add(self, module: nn.Module, row: int, *_: object) -> None:
        if torch.is_grad_enabled() and not in_backward():
            counts: Any = module.get_buffer(COUNTS)
            if self._sums is None:
                shape = len(self._rows), self._experts
                self._sums = torch.zeros(shape, dtype=torch.int64, device=counts.device)
                # Once: the host waits for the device while a list is copied to it.
                self._index = torch.tensor(self._rows, device=counts.device)
            self._sums[row] += counts

    def begin(self, batch: Mapping[str, Tensor]) -> None:
        """The next forward pass is of this micro-batch."""
        for module in self._modules:
            if FILLED_ROWS in batch:
                module.register_buffer(_FILLED, batch[FILLED_ROWS], persistent=False)
            else:
                module._buffers.pop(_FILLED, None)

    @property
    def balances(self) -> bool:
        """Whether a router here has a bias that moves."""
        return any(router is not None and router.adjusts_bias for router in self._routers)

    def relative(self, device: torch.device) -> Tensor:
        """Tokens of every expert since the last call, relative to the mean of its layer: fp32 [layers, experts].

        A layer whose tokens are not known is all 0. Collective.
        """
        whole = torch.zeros((len(self.names), self._experts), dtype=torch.int64, device=device)
        if self._sums is not None and self._index is not None:
            whole.index_copy_(0, self._index, self._sums)
            self._sums.zero_()
        dist.all_reduce(whole)
        mean = whole.sum(-1, keepdim=True).to(torch.float32) / self._experts
        return whole / mean.clamp(min=1 / self._experts)

    def forget(self) -> None:
        """Count from now on."""
        if self._sums is not None:
            self._sums.zero_()

    def adjust_biases(self, load: Tensor, left_out: Tensor) -> None:
        """Let the routers react to the load that ``relative`` gave; ``left_out`` is 1 where no weight was updated."""
        for number, router in zip(self._rows, self._routers, strict=True):
            if router is not None:
                router.adjust_bias(load[number], left_out)


@dataclass(eq=False)
class _Count:
    """A hook without fields: compiled blocks that have it are alike."""

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        counts: Tensor = module.get_buffer(COUNTS)
        if len(args) != ARGUMENTS:  # not called as other experts modules are: nothing is known
            counts.zero_()
        else:
            index = args[1].reshape(-1)
            counted = _counted(index, getattr(module, _FILLED, None))
            counts.copy_(torch.zeros_like(counts).scatter_add(0, index, counted))


def _counted(index: Tensor, filled: Any) -> Tensor:
    """1 for the choices of rows that count, else 0, in the shape of the choices: int64 [t k]. None counts all rows."""
    if filled is None:
        return torch.ones_like(index)
    rows = filled.to(index.dtype).unsqueeze(-1)
    return rows.expand(-1, index.numel() // filled.numel()).reshape(-1)


def _experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if divisible_experts(module)]
