"""What one optimizer step of one rank costs: kernels, collectives, seconds.

Traffic is counted in the ring convention: an all-gather or reduce-scatter of S bytes over n ranks moves
(n-1)/n*S through each of them, an all-reduce twice that (Patarasuk & Yuan 2009; the ZeRO paper's Ψ units).
FLOPs count a multiply-add as two; matrix products, convolutions and attention only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True)
class Kernel:
    """All calls of one operation with one shape in one phase: how many, and what each costs."""

    phase: str
    operation: str
    dtype: str
    calls: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Collective:
    """All calls of one collective on one mesh axis with one payload.

    ``elements`` and ``bytes`` are the full (gathered, or not yet scattered) payload of one call.
    """

    kind: str  # all_gather | reduce_scatter | all_reduce | broadcast | all_to_all | send
    axis: str
    degree: int
    calls: int
    elements: int
    bytes: int

    @property
    def rounds(self) -> int:
        """How many times the payload crosses the ring: 2 for an all-reduce, else 1."""
        return 2 if self.kind == "all_reduce" else 1

    @property
    def traffic_bytes(self) -> float:
        """Bytes that each rank sends in all calls, ring convention."""
        return self.calls * self.rounds * self.bytes * (self.degree - 1) / self.degree

    @property
    def traffic_elements(self) -> float:
        """Elements times rounds in all calls, without the factor (n-1)/n: the Ψ units of the ZeRO paper."""
        return float(self.calls * self.rounds * self.elements)


@dataclass(frozen=True)
class StepCost:
    """One optimizer step of one rank, counted by the dry run."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]

    @property
    def flops(self) -> int:
        return sum(k.calls * k.flops for k in self.kernels)

    @property
    def model_flops(self) -> int:
        """FLOPs without recomputation: three times the forward pass (two for the backward)."""
        return 3 * sum(k.calls * k.flops for k in self.kernels if k.phase == "forward")

    def traffic_by_axis(self) -> dict[str, int]:
        """Bytes each rank sends per optimizer step, by mesh axis."""
        traffic: dict[str, float] = {}
        for c in self.collectives:
            traffic[c.axis] = traffic.get(c.axis, 0.0) + c.traffic_bytes
        return {axis: round(sent) for axis, sent in traffic.items()}

    def extrapolated(self, deeper: StepCost, blocks: int) -> StepCost:
        """This cost plus ``blocks`` times the calls that one more identical block adds."""
        kernels = _more_calls(
            {replace(k, calls=0): k.calls for k in self.kernels},
            {replace(k, calls=0): k.calls for k in deeper.kernels},
            blocks,
        )
        collectives = _more_calls(
            {replace(c, calls=0): c.calls for c in self.collectives},
            {replace(c, calls=0): c.calls for c in deeper.collectives},
            blocks,
        )
        return StepCost(
            tuple(replace(k, calls=n) for k, n in kernels.items()),
            tuple(replace(c, calls=n) for c, n in collectives.items()),
        )


Counted = TypeVar("Counted", bound=Kernel | Collective)


def _more_calls(
    shallow: Mapping[Counted, int], deep: Mapping[Counted, int], blocks: int
) -> dict[Counted, int]:
    keys = list(dict.fromkeys([*shallow, *deep]))
    calls = {k: shallow.get(k, 0) + blocks * (deep.get(k, 0) - shallow.get(k, 0)) for k in keys}
    return {k: n for k, n in calls.items() if n > 0}
