"""Measures of a step, such as the accuracy of preferences: means over the whole global batch.

A loss notes sums and counts (``note``). The engine adds those of all micro-batches and ranks and divides once, so a
measure does not depend on how the batch was divided. Without a collector ``note`` does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Measures:
    """Sums and counts by name, fp64 [names, 2], on the device."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._index = {name: number for number, name in enumerate(names)}
        self.sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add to a measure; names that are not collected are left out."""
        if (number := self._index.get(name)) is not None:
            self.sums[number] += torch.stack([total.detach().double(), count.detach().double()])


_collectors: list[Measures] = []


@contextmanager
def collecting(measures: Measures) -> Iterator[None]:
    """Within it ``note`` adds to ``measures``."""
    _collectors.append(measures)
    try:
        yield
    finally:
        _collectors.remove(measures)


def note(name: str, total: Tensor, count: Tensor) -> None:
    """Add a sum and the number of its items, both scalars, to a measure of the step.

    Ranks that see the same samples may all note them: sum and count then grow alike.
    """
    for measures in _collectors:
        measures.add(name, total, count)
