"""Stages of a model: consecutive blocks, with the embedding in the first and the head in the last.

Each rank builds only its own stages; interleaved schedules have several per rank. Blocks keep their numbers
(``layers.7.…``), so seeds, weight files and checkpoints are independent of the stages. Every stage runs through
``Stages.forward``, so hooks on the root module (FSDP2) see one root. model/balance.py assigns the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """The blocks of one stage; the first stage also has the embedding, the last one the head."""

    blocks: range
    first: bool = True
    last: bool = True

    def shortened(self, depth: int | None) -> Stage:
        """The same stage with at most its first ``depth`` blocks; None keeps all."""
        return self if depth is None else replace(self, blocks=self.blocks[:depth])


class Stages(nn.Module):
    """The stages of one rank, in model order."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        for index, model in enumerate(models):
            self.add_module(f"_stage{index}", model)

    def forward(self, index: int, run: Callable[[nn.Module, Tensor], T], inputs: Tensor) -> T:
        """Return ``run(stage, inputs)`` for the stage with this index on the rank."""
        return run(self.get_submodule(f"_stage{index}"), inputs)


def renumbered(blocks: nn.ModuleList, start: int) -> nn.ModuleList:
    """The same list with names counted from ``start``. It can be iterated over and sliced, not indexed."""
    # All old names go first: an old one may be another block's new one.
    modules = list(blocks._modules.items())
    for name, _ in modules:
        del blocks._modules[name]
    for name, block in modules:
        blocks._modules[str(int(name) + start)] = block
    return blocks
