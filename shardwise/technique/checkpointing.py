"""Activation checkpointing: keep only the input of every block and run it again in the backward pass.

(Chen et al. 2016.) One block's activations live at a time, for one more forward pass of every block: a third
more FLOPs. Non-reentrant, so it works with frozen weights and leaves gradients bit-identical; the generator's
state is restored before the second pass, so dropout repeats itself.

Wrapping comes before sharding: FSDP2 then gathers a block once for the second forward pass and the backward
pass together. Refused: the reentrant form, which needs inputs that require gradients, and wrapping after
sharding, which gathers twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site

ACTIVATION_CHECKPOINTING: Setting[str] = Setting(
    "activation_checkpointing",
    default="none",
    doc="what is recomputed in the backward pass: none, or full (every block)",
    choices=("none", "full"),
    candidates=("none", "full"),
    note="selective, sqrt and budget are not in this version yet",
)


@dataclass(frozen=True)
class Checkpointing:
    """Wraps every unit so that it is recomputed."""

    name: str = "checkpointing"
    settings: Sequence[Setting[Any]] = (ACTIVATION_CHECKPOINTING,)
    rules: Sequence[Rule] = ()

    def degrees(self, strategy: Strategy, world_size: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "full checkpointing" if strategy[ACTIVATION_CHECKPOINTING] == "full" else ""

    def apply(self, site: Site) -> None:
        if site.strategy[ACTIVATION_CHECKPOINTING] == "none":
            return
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        names = {module: name for name, module in site.model.named_modules()}
        for index, unit in enumerate(site.units):
            wrapped = checkpoint_wrapper(unit)
            site.model.set_submodule(names[unit], wrapped)
            site.units[index] = wrapped
