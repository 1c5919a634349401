"""Budgeted recomputation: a block keeps a share of what it would keep, and what that spares is as much as can be.

The choice is made where shapes and dtypes are known: at a block's first call. That one keeps all that autograd saves,
as a block without recomputation does, notes what every operation costs and what it reads, and when it ends lets
go of what the choice does not keep (model/knapsack.py). Later calls, and all blocks that are called with the same
shapes and hold the same, keep from the start what was chosen. A block whose operations turn out to be others keeps
nothing more in that call and chooses for itself at its next one. Nothing is asked of the device, so the plan's dry
run, the training run and all ranks choose alike.

What is chosen decides memory and time, never values: whatever was not kept is computed again (model/tape.py).

Refused: choosing before the run from a trial on fake tensors, which would need the block's weights twice and the
trial's own operations hidden from whoever counts; PyTorch's ``torch._functorch.config.activation_memory_budget``, which
needs torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._pytree import tree_iter

from shardwise.model.knapsack import Graph, best
from shardwise.model.tape import Choice, Tape


def within_budget(blocks: Sequence[nn.Module], share: float) -> list[nn.Module]:
    """Wrappers of the blocks, each of which keeps at most this share of its activations; 0 <= share <= 1."""
    if share == 1:
        return list(blocks)
    shared: dict[Any, Choice] = {}
    return [Budgeted(block, share, shared) for block in blocks]


class Budgeted(ActivationWrapper):
    """One block, and what it keeps when it is called with given shapes."""

    def __init__(self, block: nn.Module, share: float, shared: dict[Any, Choice]) -> None:
        super().__init__(block)
        self.share = share
        self._shared = shared
        self._own: dict[Any, Choice | None] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        call = self._call(args, kwargs)
        tape = Tape(self._own[call] if call in self._own else self._shared.get(call))
        with saved_tensors_hooks(tape.pack, tape.unpack), tape:
            result = block(*args, **kwargs)
        chosen = tape.finish(result, self._choose)
        if chosen is not None:
            self._own[call] = self._shared.setdefault(call, chosen) if call not in self._own else chosen
        elif tape.surprised:
            self._own[call] = None
        return result

    def _choose(self, graph: Graph) -> frozenset[int]:
        return best(graph, self.share).kept

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What tells calls apart that keep unlike things."""
        block = self._checkpoint_wrapped_module
        given = [_kind(leaf) for leaf in tree_iter((args, kwargs))]
        return block.training, *given, *map(_kind, block.parameters())


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
