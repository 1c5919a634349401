"""Activation offload: blocks' saved activations move to host memory, and return before the backward pass needs them.

runtime/offload/activations.py does it: the activations of two blocks stay on the device, and copies run on a stream of
their own. Copies are hidden if a block computes longer than the link to the host takes for its bytes. The plan says so,
from counted copies and the device's profile. With checkpointing, the kept activations move: the blocks' inputs under
``full``, products and attention under ``selective``.

In the order it comes after checkpointing, to see what that keeps, and before sharding, so that weights are not mistaken
for activations. Hooks on the blocks leave names as they are. On a CPU the device's memory is the host's, and nothing
moves. Refused: to move less than a block's activations; recomputation does that without a link. Activations outside the
blocks (the embedding's result, the logits) stay: they are saved last and needed first.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.core.strategy import Layout, Strategy
from shardwise.technique.base import MICRO_BATCH_SIZE, Wrapping
from shardwise.technique.offload import OFFLOAD, of_part, parts
from shardwise.technique.site import Site


class ActivationOffload(Wrapping):
    """Moves what units keep for the backward pass to host memory."""

    name = "activation_offload"
    settings = (OFFLOAD,)

    def within(self, strategy: Strategy, part: str | None) -> Mapping[str, object]:
        """The setting says where activations are and where states are: two parts."""
        return {OFFLOAD.key: of_part(strategy, part)}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "activations offloaded" if "activations" in parts(strategy) else ""

    def apply(self, site: Site) -> None:
        if "activations" not in parts(site.strategy):
            return
        import torch

        from shardwise.runtime.offload.activations import ON_DEVICE, SMALLEST, OffloadedBlocks
        from shardwise.runtime.offload.host import has_separate_host_memory

        if not has_separate_host_memory(torch.device(site.context.mesh.device_type)):
            site.hints.note("activations are not offloaded: the memory of this device is the host's")
            return
        site.hints.needs_depth(2 * ON_DEVICE)  # with fewer, most of the blocks never leave
        if len(site.view.blocks) > ON_DEVICE:
            # The same storages for every size of micro-batch: a plan composes sizes from counts of other sizes.
            smallest = SMALLEST * site.strategy[MICRO_BATCH_SIZE]
            OffloadedBlocks(site.view.model, site.view.blocks, smallest)
        else:
            site.hints.note(
                f"activations are not offloaded: of {len(site.view.blocks)} blocks all are needed at once"
            )
