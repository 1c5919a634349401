"""Activation offload: what autograd keeps of a block goes to host memory, and comes back before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site
from shardwise.technique.offload import OFFLOAD, RULES, parts


@dataclass(frozen=True)
class ActivationOffload:
    """Moves what units keep for the backward pass to host memory."""

    name: str = "activation_offload"
    settings: Sequence[Setting[Any]] = (OFFLOAD,)
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, world_size: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "activations offloaded" if "activations" in parts(strategy) else ""

    def apply(self, site: Site) -> None:
        return
