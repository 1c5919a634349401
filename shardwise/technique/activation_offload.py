"""Activation offload: what blocks keep for the backward pass lies in host memory, and comes back before it is used.

The mechanism is model/kept.py: two blocks' activations lie on the device, copies run on a stream beside the blocks
that compute. Whether they are hidden is a matter of the block's arithmetic against its bytes and of the link to the
host; the plan says so, from counted copies and the device's profile. With checkpointing, what is left to keep is what
is moved: the blocks' inputs under ``full``, products and attention under ``selective``, what was chosen under a budget.

After checkpointing in the order, so that it sees what checkpointing keeps, and before sharding, so that weights are
gathered when a block begins and are told from activations. Hooks on the blocks, not wrappers: names stay. On a CPU
the device's memory is the host's, and nothing is done. Refused: moving less than a whole block's activations by a
budget; recomputing does that with no link to wait for. What lies outside the blocks (the embedding's result, the
logits) stays: it is kept last and needed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site
from shardwise.technique.offload import OFFLOAD, parts


@dataclass(frozen=True)
class ActivationOffload:
    """Moves what units keep for the backward pass to host memory."""

    name: str = "activation_offload"
    settings: Sequence[Setting[Any]] = (OFFLOAD,)
    rules: Sequence[Rule] = ()

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "activations offloaded" if "activations" in parts(strategy) else ""

    def apply(self, site: Site) -> None:
        if "activations" not in parts(site.strategy):
            return
        import torch

        from shardwise.model.host import apart
        from shardwise.model.kept import ON_DEVICE, OffloadedBlocks

        if not apart(torch.device(site.mesh.device_type)):
            site.notes.append("activations are not offloaded: the memory of this device is the host's")
            return
        site.shallowest = 2 * ON_DEVICE  # with fewer, most of the blocks never leave
        if len(site.units) > ON_DEVICE:
            OffloadedBlocks(site.model, site.units)
        else:
            site.notes.append(
                f"activations are not offloaded: of {len(site.units)} blocks all are needed at once"
            )
