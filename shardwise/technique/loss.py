"""The loss without the logits: the output layer and the cross-entropy are computed chunk by chunk.

Logits take tokens x vocabulary values, and their gradient as many: often the peak of a step. See model/head.py for
how a chunk is computed and what it costs. Before precision and sharding in the order, for it replaces a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site

LOSS: Setting[str] = Setting(
    "loss",
    default="logits",
    doc="what the loss is computed from: logits, all at once; or chunked, a part of them at a time",
    choices=("logits", "chunked"),
    compared=("logits", "chunked"),
)


@dataclass(frozen=True)
class ChunkedLoss:
    """Puts a LossHead in the place of the model's output layer."""

    name: str = "loss"
    settings: Sequence[Setting[Any]] = (LOSS,)
    rules: Sequence[Rule] = ()

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "chunked loss" if strategy[LOSS] == "chunked" else ""

    def apply(self, site: Site) -> None:
        if site.strategy[LOSS] != "chunked" or not site.has_end:
            return
        from shardwise.model.head import LossHead

        if site.output is None:
            site.notes.append(
                "a chunked loss changes nothing: this model has no linear output layer that is known"
            )
            return
        replaced = LossHead(site.output)
        names = {module: name for name, module in site.model.named_modules()}
        site.model.set_submodule(names[site.output], replaced)
        site.head = [replaced if module is site.output else module for module in site.head]
        site.output = replaced
