"""Chunked cross-entropy: the output layer and the loss are computed chunk by chunk, without the whole logits.

Logits have tokens x vocabulary elements, and so has their gradient: often the peak of a step.
runtime/chunked_cross_entropy.py computes a chunk and says what that costs. It comes before precision and sharding,
because it replaces a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.technique.base import LOSS_PART, Wrapping
from shardwise.technique.rules import Case
from shardwise.technique.site import Site

LOSS: Setting[str] = Setting(
    "loss",
    default="logits",
    doc="cross-entropy from all logits at once (logits), or fused with the output head, one chunk at a time (chunked)",
    choices=("logits", "chunked"),
    candidates=("logits", "chunked"),
)


class ChunkedLoss(Wrapping):
    """Puts a LossHead in the place of the model's output layer."""

    name = "loss"
    part = LOSS_PART
    settings = (LOSS,)

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "chunked loss" if strategy[LOSS] == "chunked" else ""

    def has_effect(self, setting: Setting[Any], case: Case) -> bool:
        """Not for a module of the user: which of its layers makes the logits is not known."""
        return case.recipe.model.factory is None

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        return setting.candidates if self.has_effect(setting, case) else ()

    def apply(self, site: Site) -> None:
        view = site.view
        if site.strategy[LOSS] != "chunked" or not view.has_loss:
            return
        from shardwise.runtime.chunked_cross_entropy import LossHead

        if view.output is None:
            site.hints.note(
                "a chunked loss changes nothing: this model has no linear output layer that is known"
            )
            return
        chunked = LossHead(view.output)
        view.replace({view.output: chunked})
        view.output = chunked
