"""Offload of state: optimizer state, and stored weights, in host memory or on a disk, updated by the processor.

``optimizer`` keeps moments in host memory (ZeRO-Offload, Ren et al. 2021); gradients and weights visit the processor
once per step, after clipping, or within the backward pass where that updates. ``optimizer+parameters`` keeps the
stored weights and the reduced gradients there too, by FSDP2's own policy: a layer's shard comes to the device when it
is gathered, its gradient goes back when it is reduced, and what is gathered is all that the device holds. With
ZeRO 1 and 2 that is the paper's scheme: 16-bit weights on the device, the masters on the host. ``nvme:FOLDER`` keeps
the moments in a file (ZeRO-Infinity, Rajbhandari et al. 2021). The price of each is what the link, the
processor's memory or the disk takes for it; the plan says how much of that compute hides.

``offload_fraction`` leaves a share of the optimizer's state on the device, in whole parameters: what fits there is
updated faster there, and while the processor updates the rest (DeepSpeed's Twin-Flow).

On a CPU the device's memory is the host's: only files save any, and everything else stays where it is.

Refused: a one-step delay of the updates, which hides them all and trains on stale weights; 16-bit gradients on the
way down, which halves it and does not give the weights of a run without offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site, StateOffload
from shardwise.technique.offload import folder, parts

OFFLOAD_FRACTION: Setting[float] = Setting(
    "offload_fraction",
    default=1.0,
    doc="share of the optimizer's state, in whole parameters, that offload moves; the rest stays on the device",
    kind=float,
    minimum=0.01,
    maximum=1.0,
)


def _nothing_to_divide(case: Case) -> bool:
    moved = parts(case.strategy)
    divided = "parameters" not in moved and bool(moved & {"optimizer", "nvme"})
    return case.strategy[OFFLOAD_FRACTION] < 1 and not divided


def _copies_of_files(case: Case) -> bool:
    return "nvme" in parts(case.strategy) and case.recipe.guard.snapshot_every is not None


RULES: tuple[Rule, ...] = (
    Rule(
        key="offload_fraction",
        reason="only an optimizer's state that is offloaded without the parameters can be divided",
        broken=_nothing_to_divide,
        nearest=lambda case: {"offload_fraction": 1.0},
    ),
    Rule(
        key="offload",
        reason="snapshots would hold twice in memory what is to lie on the disk",
        broken=_copies_of_files,
        fix="set guard.snapshot_every to null, or offload to host memory",
    ),
)


@dataclass(frozen=True)
class StateOffloading:
    """Says where optimizer state and stored weights are made."""

    name: str = "state_offload"
    settings: Sequence[Setting[Any]] = (OFFLOAD_FRACTION,)
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        moved = parts(strategy) - {"activations"}
        share = f"{strategy[OFFLOAD_FRACTION]:.0%} of " if strategy[OFFLOAD_FRACTION] < 1 else ""
        words = [f"{share}{'+'.join(sorted(moved - {'nvme'}))} offloaded"] if moved - {"nvme"} else []
        return " · ".join([*words, f"{share}optimizer on disk"] if "nvme" in moved else words)

    def apply(self, site: Site) -> None:
        moved = parts(site.strategy)
        if moved & {"optimizer", "nvme"}:
            fraction = site.strategy[OFFLOAD_FRACTION]
            site.state_offload = StateOffload(fraction, folder(site.strategy))
            if fraction < 1:
                site.period = 0  # which parameters make up the share depends on how many there are
        site.weights_on_host = "parameters" in moved
