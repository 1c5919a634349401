"""CPU and NVMe offload of optimizer state and stored weights; the CPU runs the optimizer step.

``optimizer`` keeps moments in host memory (ZeRO-Offload, Ren et al. 2021). Gradients and weights travel over PCIe once
per step, after clipping, or within the backward pass if parameters are updated there. ``optimizer+parameters`` also
keeps the stored weights and the reduced gradients there, by FSDP2's own policy: a layer's shard moves to the device
when it is gathered, and its gradient returns when it is reduced. With ZeRO 1 and 2 that is the paper's scheme: 16-bit
weights on the device, master weights on the host. ``nvme:FOLDER`` keeps the moments in a file (ZeRO-Infinity,
Rajbhandari et al. 2021). The plan says how much of the transfers overlaps with compute.

``offload_fraction`` leaves a share of the optimizer state on the device, in whole parameters. The device updates that
share while the CPU updates the rest (DeepSpeed's Twin-Flow).

On a CPU the device's memory is the host's, so only files save memory. Refused: a one-step delay of the updates, which
trains on stale weights; 16-bit gradients on the way to the host, which change the trained weights.
"""

from __future__ import annotations

from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.core.units import format_percent
from shardwise.technique.base import STATES, Wrapping
from shardwise.technique.offload import folder, parts, weights_on_host
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site, StateOffload

OFFLOAD_FRACTION: Setting[float] = Setting(
    "offload_fraction",
    default=1.0,
    doc="fraction of the optimizer state to offload, in whole parameters; the rest stays on the device",
    kind=float,
    minimum=0.01,
    maximum=1.0,
)


def _nothing_to_divide(case: Case) -> bool:
    moved = parts(case.strategy)
    divided = not weights_on_host(case.strategy) and bool(moved & {"optimizer", "nvme"})
    return case.strategy[OFFLOAD_FRACTION] < 1 and not divided


def _copies_of_files(case: Case) -> bool:
    copies = case.recipe.guard.snapshot_every is not None or case.recipe.checkpoint.background
    return "nvme" in parts(case.strategy) and copies


RULES: tuple[Rule, ...] = (
    Rule(
        key="offload",
        reason="an optimizer of a library updates its parameters where they are",
        broken=lambda case: (
            case.recipe.optimizer.factory is not None and bool(parts(case.strategy) - {"activations"})
        ),
        fix="set offload to none or activations, or optimizer.factory to null",
    ),
    Rule(
        key="offload_fraction",
        reason="only an optimizer's state that is offloaded without the parameters can be divided",
        broken=_nothing_to_divide,
        nearest=lambda case: {"offload_fraction": 1.0},
    ),
    Rule(
        key="offload",
        reason="copies in host memory would hold the disk's state",
        broken=_copies_of_files,
        fix="set guard.snapshot_every to null and checkpoint.background to false, or offload to host memory",
    ),
)


class StateOffloading(Wrapping):
    """Says where optimizer state and stored weights are made."""

    name = "state_offload"
    part = STATES
    settings = (OFFLOAD_FRACTION,)
    rules = RULES

    def label(self, strategy: Strategy, layout: Layout) -> str:
        moved = parts(strategy) - {"activations"}
        share = f"{format_percent(strategy[OFFLOAD_FRACTION])} of " if strategy[OFFLOAD_FRACTION] < 1 else ""
        words = [f"{share}{'+'.join(sorted(moved - {'nvme'}))} offloaded"] if moved - {"nvme"} else []
        return " · ".join([*words, f"{share}optimizer on disk"] if "nvme" in moved else words)

    def apply(self, site: Site) -> None:
        moved = parts(site.strategy)
        if moved & {"optimizer", "nvme"}:
            fraction = site.strategy[OFFLOAD_FRACTION]
            site.options.state_offload = StateOffload(fraction, folder(site.strategy))
            if fraction < 1:
                site.hints.repeats(0)  # the parameters that make up the share depend on their number
        site.options.weights_on_host = weights_on_host(site.strategy)
