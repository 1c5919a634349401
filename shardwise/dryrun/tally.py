"""Costs of a part of the step: counts of kernels, collectives and transfers, which add and subtract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwise.core.cost import Collective, Kernel, StepCost, Transfer

T = TypeVar("T")


@dataclass
class Tally:
    """Number of calls by kernel, collective and transfer. The keys themselves have ``calls=0``."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    transfers: Counter[Transfer] = field(default_factory=Counter)

    def add_calls(
        self, kernels: Sequence[Kernel], collectives: Sequence[Collective], transfers: Sequence[Transfer]
    ) -> None:
        """Count one call of each."""
        for kernel in kernels:
            self.kernels[kernel] += 1
        for collective in collectives:
            self.collectives[collective] += 1
        for transfer in transfers:
            self.transfers[transfer] += 1

    def add(self, other: Tally, times: float = 1) -> None:
        """Add the counts of ``other``, multiplied by ``times``: a fraction for work of some steps only."""
        _add_counts(self.kernels, other.kernels, times)
        _add_counts(self.collectives, other.collectives, times)
        _add_counts(self.transfers, other.transfers, times)

    def cost(self, micro_batches: int = 1, passes: Mapping[Collective, int] | None = None) -> StepCost:
        """The cost of a step of ``micro_batches``; ``passes``: in how many of them a collective is called."""
        passes = passes or {}
        return StepCost(
            tuple(replace(kernel, calls=calls) for kernel, calls in self.kernels.items()),
            tuple(replace(c, calls=calls, passes=passes.get(c, 1)) for c, calls in self.collectives.items()),
            tuple(replace(transfer, calls=calls) for transfer, calls in self.transfers.items()),
            micro_batches,
        )


def _add_counts(counter: Counter[T], other: Counter[T], times: float) -> None:
    for key, calls in other.items():
        counter[key] += times * calls  # type: ignore[assignment]  # a Counter is typed for whole numbers
