"""Speeds of one process of a machine, measured by ``shardwise doctor --calibrate``, as the time model reads them.

A process shares the machine with ``processes - 1`` equal ones, which were busy while its speeds were measured.

- **Products** interpolate a grid of shapes (m, n, k): linear in the logarithms of sizes and seconds. Beyond the grid
  they grow in proportion, below it they stay.
- **Attention** takes seconds per FLOP by (keys, head dimension); outside of the grid, those of its edge.
- **Memory-bound kernels** take the curve of a plain kernel by bytes, times the ratio of the operation to that curve.
  The timed steps of small models gave the ratio. New memory and memory in place have different curves: the system
  clears each page of new memory when it is first touched.
- **Host**: each kernel also takes the seconds that Python, autograd and the dispatcher need around it, by phase. The
  host of an accelerator launches kernels ahead of it, in these seconds.
- **Collectives** take a curve by bytes of payload times the share that a step waits, since some of it is overlapped;
  plus the seconds of the host around each. Both are those of the mesh axis.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Self

from pydantic import model_validator

from shardwise.core.cost import Collective, Kernel
from shardwise.core.json_file import Positive, PositiveInt, Seconds

SpeedPoint = tuple[Positive, Positive]
"""Bytes and seconds, or bytes and a ratio."""

Curve = tuple[SpeedPoint, ...]
"""Points of growing bytes; at least one."""

NEW, IN_PLACE = "new memory", "in place"
"""Names of the curves of plain kernels."""


@dataclass(frozen=True)
class Grid:
    """Seconds at every combination of sizes: ``seconds`` lists them with the last axis fastest."""

    axes: tuple[tuple[PositiveInt, ...], ...]
    seconds: tuple[Positive, ...]

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if not all(map(_grows, self.axes)) or math.prod(map(len, self.axes)) != len(self.seconds):
            raise ValueError("a grid has seconds for every combination of growing sizes")
        return self

    def at(self, sizes: Sequence[float], grows: bool = True) -> float:
        """Seconds for these sizes, one per axis; multilinear in the logarithms.

        Above the grid they grow in proportion, or stay where ``grows`` is False.
        """
        beyond = 1.0
        corners = []
        for axis, size in zip(self.axes, sizes, strict=True):
            beyond *= max(1.0, size / axis[-1]) if grows else 1.0
            corners.append(_grid_neighbours(axis, min(max(size, axis[0]), axis[-1])))
        log_seconds = 0.0
        for picks in product(*corners):
            index, weight = 0, 1.0
            for (position, share), axis in zip(picks, self.axes, strict=True):
                index = index * len(axis) + position
                weight *= share
            if weight:
                log_seconds += weight * math.log(self.seconds[index])
        return beyond * math.exp(log_seconds)


def _grows(sizes: Sequence[float]) -> bool:
    return len(sizes) > 0 and all(size < larger for size, larger in pairwise(sizes))


def _grid_neighbours(axis: Sequence[float], size: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """The two places next to a size within the axis, with their weights in the logarithm."""
    right = min(max(bisect_left(axis, size), 1), len(axis) - 1)
    if len(axis) == 1:
        return (0, 1.0), (0, 0.0)
    low, high = math.log(axis[right - 1]), math.log(axis[right])
    share = (math.log(size) - low) / (high - low)
    return (right - 1, 1 - share), (right, share)


def on_curve(curve: Curve, size: float, grows: bool = True) -> float:
    """The value at ``size``, linear in the logarithms; outside of the curve the end's, above it in proportion."""
    (first, lowest) = curve[0]
    (last, highest) = curve[-1]
    if size <= first:
        return lowest
    if size >= last:
        return highest * (size / last if grows else 1.0)
    right = bisect_left(curve, (size, 0.0))
    (low, below) = curve[right - 1]
    (high, above) = curve[right]
    share = math.log(size / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(below) + share * math.log(above))


@dataclass(frozen=True)
class MeasuredSpeeds:
    """Speeds of one of ``processes`` processes with ``threads`` threads each, all busy.

    Attributes:
        products: by dtype, seconds of one product over (m, n, k).
        attention: by dtype and "forward" or "backward", seconds per FLOP over (keys, head dimension).
        plain: the curves NEW and IN_PLACE.
        ratios: by operation and dtype, (bytes, seconds over those of the plain curve).
        host: seconds around each kernel, by phase.
        collectives: by kind, the curve over the bytes of the payload. Empty for a process that is alone.
        around: seconds of the host around each collective, by mesh axis.
        waiting: seconds that a step waits for a collective over those of the curve, by mesh axis.
        slower: factor on all kernels, where the processes are more than were measured.
        attention_order: the backends of attention, the fastest first; () where they were not compared.
        busy: whether the machine did other work meanwhile; an idle one is measured again before the next plan.
    """

    processes: PositiveInt
    threads: PositiveInt
    products: Mapping[str, Grid] = field(hash=False)
    attention: Mapping[str, Grid] = field(hash=False)
    plain: Mapping[str, Curve] = field(hash=False)
    ratios: Mapping[str, Curve] = field(hash=False, default_factory=dict)
    host: Mapping[str, Seconds] = field(hash=False, default_factory=dict)
    collectives: Mapping[str, Curve] = field(hash=False, default_factory=dict)
    around: Mapping[str, Seconds] = field(hash=False, default_factory=dict)
    waiting: Mapping[str, Seconds] = field(hash=False, default_factory=dict)
    slower: Positive = 1.0
    attention_order: tuple[str, ...] = ()
    busy: bool = False

    @model_validator(mode="after")
    def _checked(self) -> Self:
        curves = [*self.plain.values(), *self.ratios.values(), *self.collectives.values()]
        if not {NEW, IN_PLACE} <= self.plain.keys() or not all(_grows([at for at, _ in c]) for c in curves):
            raise ValueError("kernels have a curve in new memory and one in place, of growing sizes")
        sizes = [(3, grid) for grid in self.products.values()] + [
            (2, grid) for grid in self.attention.values()
        ]
        if any(len(grid.axes) != axes for axes, grid in sizes):
            raise ValueError("products are over (m, n, k), attention over (keys, head dimension)")
        return self

    def shared_by(self, processes: int, threads: int, cores: int) -> MeasuredSpeeds:
        """The speeds of one of another number of processes: they divide the cores, and beyond these also the host."""
        before, after = (min(t, cores / p) for p, t in ((self.processes, self.threads), (processes, threads)))
        host = max(processes, cores) / max(self.processes, cores)
        return replace(
            self,
            processes=processes,
            threads=threads,
            slower=self.slower * before / after,
            host={phase: host * spent for phase, spent in self.host.items()},
            around={axis: host * spent for axis, spent in self.around.items()},
        )

    @cached_property
    def _known(self) -> dict[tuple[str, str, int, int, tuple[int, ...]], float | None]:
        return {}

    def kernel_seconds(self, kernel: Kernel) -> float | None:
        """Seconds of one call on the device, without the host's part; None where its dtype was not measured."""
        key = (kernel.operation, kernel.dtype, kernel.flops, kernel.bytes, kernel.shape)
        if key not in self._known:
            seconds = self._kernel_seconds(kernel)
            self._known[key] = None if seconds is None else self.slower * seconds
        return self._known[key]

    def _kernel_seconds(self, kernel: Kernel) -> float | None:
        if len(kernel.shape) != 4:
            return None if kernel.flops else self.memory_seconds(kernel)
        if "attention" in kernel.operation:
            way = "backward" if "backward" in kernel.operation else "forward"
            heads = self.attention.get(f"{kernel.dtype} {way}")
            return None if heads is None else kernel.flops * heads.at(kernel.shape[2:], grows=False)
        count, *sizes = kernel.shape
        grid = self.products.get(kernel.dtype)
        return None if grid is None else count * grid.at(sizes)

    def memory_seconds(self, kernel: Kernel) -> float:
        """Seconds of a kernel that moves bytes."""
        curve = self.plain[IN_PLACE if in_place(kernel.operation) else NEW]
        seconds = on_curve(curve, kernel.bytes)
        ratio = self.ratios.get(f"{kernel.operation} {kernel.dtype}")
        return seconds * on_curve(ratio, kernel.bytes, grows=False) if ratio else seconds

    def host_seconds(self, kernel: Kernel) -> float:
        """Seconds of the host around one call."""
        return self.host.get(kernel.phase, 0.0)

    def collective_seconds(self, collective: Collective) -> float | None:
        """Seconds of one call, the host's part included; None where this kind was not measured."""
        curve = self.collectives.get(collective.kind)
        if curve is None:
            return None
        share = self.waiting.get(collective.axis, 1.0)
        return share * on_curve(curve, collective.bytes) + self.around.get(collective.axis, 0.0)


def in_place(operation: str) -> bool:
    """Whether an operation writes to an argument: its name ends with an underscore, before the overload."""
    name = operation.partition("::")[2].partition(".")[0]
    return name.endswith("_") or name in ("chunk_cat", "split_with_sizes_copy", "all_gather_copy_in")
