"""The ledger: bytes by category. The same nine rows everywhere, in the plan, the report and the tests.

``bytes`` here are what one rank holds on its device at one instant. The rows sum to the total by
construction (there is no "other"): what the tracker cannot name more precisely is *temporaries*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Ledger:
    """Bytes on one device at one instant, by what they are for.

    Attributes:
        parameters: weights in the dtype the forward pass computes with, sharded or gathered.
        master_weights: the higher-precision copy that the optimizer updates, when there is one.
        gradients: gradients of weights, before and after reduction.
        optimizer_state: moments and step counts.
        activations: what the forward pass keeps for the backward pass, inputs included.
        temporaries: everything that lives within one operation or one layer.
        communication: buffers that collectives read and write.
        fragmentation: reserved by the allocator but not allocated.
        overhead: context, library workspaces, communicators; from the device's profile, not from the dry run.
            On the CPU also, counted, the kernels that oneDNN compiles and the guard's snapshots.
    """

    parameters: int = 0
    master_weights: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    temporaries: int = 0
    communication: int = 0
    fragmentation: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(**{k: v + getattr(other, k) for k, v in self.as_dict().items()})

    def extrapolated(self, deeper: Ledger, blocks: int) -> Ledger:
        """This ledger plus ``blocks`` times the difference that one more block makes.

        The total follows that line exactly. Rows that it would make negative (two peaks that lie at different
        places) are 0, and the others give way in proportion.
        """
        raw = {k: v + blocks * (getattr(deeper, k) - v) for k, v in self.as_dict().items()}
        positive = {k: max(0, v) for k, v in raw.items()}
        total, kept = max(0, sum(raw.values())), sum(positive.values())
        if total == kept:
            return Ledger(**positive)
        scaled = {k: v * total // kept for k, v in positive.items()}
        return Ledger(**scaled).plus(temporaries=total - sum(scaled.values()))

    def plus(self, **rows: int) -> Ledger:
        return self + Ledger(**rows)


CATEGORIES: tuple[str, ...] = tuple(f.name for f in fields(Ledger))


def ledger_from(rows: Mapping[str, int]) -> Ledger:
    """A ledger from a mapping that may lack rows. Raises TypeError for a row that does not exist."""
    return Ledger(**rows)


@dataclass(frozen=True)
class Peak:
    """The instant at which a rank holds most: how much, in which phase, and in which module."""

    ledger: Ledger
    phase: str
    where: str

    @property
    def bytes(self) -> int:
        return self.ledger.total
