"""The ledger: device memory of one rank at one instant, by category.

The plan, the report and the tests use the same nine categories. They sum to the total: bytes that the tracker cannot
attribute to another category are *temporaries*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwise.core.json_file import CLOSED, Size


@dataclass(frozen=True)
class Ledger:
    """Bytes on one device at one instant, by category.

    Attributes:
        parameters: weights in the dtype of the forward pass, sharded or all-gathered.
        master_weights: the higher-precision copy that the optimizer updates, if any.
        gradients: gradients of weights, before and after reduction.
        optimizer_state: moments and step counts.
        activations: tensors saved for the backward pass, including inputs.
        temporaries: tensors that exist only within one operation or one layer.
        communication: buffers of collectives.
        fragmentation: reserved by the allocator but not allocated.
        overhead: context, library workspaces and communicators, from the device's profile. On the CPU also kernels
            compiled by oneDNN and the guard's snapshots, which are counted.
    """

    __pydantic_config__ = CLOSED

    parameters: Size = 0
    master_weights: Size = 0
    gradients: Size = 0
    optimizer_state: Size = 0
    activations: Size = 0
    temporaries: Size = 0
    communication: Size = 0
    fragmentation: Size = 0
    overhead: Size = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(**{k: v + getattr(other, k) for k, v in self.as_dict().items()})

    def extrapolated(self, deeper: Ledger, blocks: int) -> Ledger:
        """This ledger plus ``blocks`` times the difference to ``deeper``, which has one more block.

        The total is extrapolated exactly. Rows that would become negative (the two peaks are at different places)
        are 0, and the others shrink in proportion.
        """
        raw = {k: v + blocks * (getattr(deeper, k) - v) for k, v in self.as_dict().items()}
        positive = {k: max(0, v) for k, v in raw.items()}
        total = max(0, sum(raw.values()))
        kept = sum(positive.values())
        if total == kept:
            return Ledger(**positive)
        scaled = {k: v * total // kept for k, v in positive.items()}
        return Ledger(**scaled).plus(temporaries=total - sum(scaled.values()))

    def plus(self, **rows: int) -> Ledger:
        return self + Ledger(**rows)


CATEGORIES: tuple[str, ...] = tuple(f.name for f in fields(Ledger))


def ledger_from(rows: Mapping[str, int]) -> Ledger:
    """A ledger from a mapping; missing rows are 0. Raises TypeError for an unknown row."""
    return Ledger(**rows)


@dataclass(frozen=True)
class Peak:
    """The instant of a rank's peak memory: its ledger, phase and module."""

    ledger: Ledger
    phase: str
    where: str

    @property
    def bytes(self) -> int:
        return self.ledger.total
