"""Counts of shallow dry runs, and their linear extension to more blocks and to larger micro-batches.

Memory at every moment is linear in the number of blocks and in the size of the micro-batch; what a block keeps for the
backward pass is proportional to the size. Calls are paired in their order, so every field of them is linear, too. Three
dry runs give a whole plane: a shallow one, one with another period of blocks, and one with a larger micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.core.cost import CountedCall
from shardwise.core.strategy import Strategy
from shardwise.dryrun.moments import LEDGER_ROWS, Bytes
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, layout_of

ACTIVATIONS_ROW = LEDGER_ROWS.index("activations")
REST = -1
"""Instead of a micro-batch: the step outside of micro-batches."""

Calls = dict[int, Counter[CountedCall]]


class NotComposable(Exception):
    """The counts of this strategy do not follow from shallow dry runs; the text says why."""


class NotLinear(Exception):
    """The calls or moments of two micro-batches are not the same."""


class Point(NamedTuple):
    """One shallow dry run.

    Attributes:
        strategy: with a micro-batch size of 1.
        depth: number of blocks.
        size: sequences of a micro-batch.
        passes: micro-batches that are run.
    """

    strategy: Strategy
    depth: int
    size: int
    passes: int


@dataclass(frozen=True, eq=False)
class Counts:
    """What rank 0 holds and does at one point.

    Attributes:
        names, passes, bytes: as in dryrun/moments.py.
        calls: micro-batch (REST outside of them) and call, in order.
        host: rows of the peak in separate host memory.
        repeat_every, min_depth: hints of the techniques.
    """

    names: tuple[str, ...]
    passes: npt.NDArray[np.int64]
    bytes: Bytes
    calls: tuple[tuple[int, CountedCall], ...]
    host: Bytes
    disk_bytes: int
    communicators: int
    repeat_every: int
    min_depth: int


Counting = Callable[[Point], Counts]


def counter(recipe: Recipe, blueprint: Blueprint, cluster: Cluster) -> Counting:
    """The function that dry-runs a point."""

    def count(point: Point) -> Counts:
        layout = layout_of(point.strategy, cluster.world_size)
        batch = point.size * point.passes * layout.data_degree
        strategy = point.strategy.with_values(**{MICRO_BATCH_SIZE.key: point.size})
        asked = recipe.model_copy(update={"batch_size": batch})
        return _counts(
            dry_run(asked, blueprint, strategy, cluster, depth=point.depth, history=False, with_moments=True)
        )

    return count


def _counts(run: DryRun) -> Counts:
    moments = run.moments
    assert moments is not None
    return Counts(
        names=moments.names,
        passes=moments.passes,
        bytes=moments.bytes,
        calls=tuple((REST if number is None else number, call) for number, call in moments.calls),
        host=np.array([getattr(run.host, row) for row in LEDGER_ROWS], dtype=np.int64),
        disk_bytes=run.disk_bytes,
        communicators=run.communicators,
        repeat_every=run.hints.repeat_every,
        min_depth=run.hints.min_depth,
    )


class Envelope(NamedTuple):
    """The highest moment of every block in every phase: [``rows`` by name, row of the ledger]."""

    rows: Mapping[str, int]
    bytes: Bytes


@dataclass(frozen=True, eq=False)
class LinearCounts:
    """Counts of one strategy as a linear function of depth and micro-batch size.

    Attributes:
        base: at ``depth`` blocks and micro-batches of ``size``.
        deeper: with ``period`` blocks more; None where the depth does not matter.
        larger: with a micro-batch twice as large; None where only ``size`` is asked for.
    """

    base: Counts
    depth: int
    size: int = 1
    period: int = 1
    deeper: Counts | None = None
    larger: Counts | None = None
    _envelopes: dict[tuple[int, int, int], Envelope] = field(default_factory=dict)
    _calls: dict[tuple[int, int], Calls] = field(default_factory=dict)

    def envelope(self, role: int, depth: int, size: int) -> Envelope:
        """The highest moments of one kind of micro-batch; of the only one where there is one."""
        key = role, depth, size
        if key not in self._envelopes:
            rows, groups, names = self._groups.get(role) or self._groups[0]
            levels = self._bytes(rows, depth, size)
            order = np.argsort(levels.sum(axis=1), kind="stable")
            highest = np.empty(len(names), dtype=np.int64)
            highest[groups[order]] = order  # of equal indices, the last assignment stays
            self._envelopes[key] = Envelope({name: row for row, name in enumerate(names)}, levels[highest])
        return self._envelopes[key]

    def _bytes(self, rows: npt.NDArray[np.int64], depth: int, size: int) -> Bytes:
        """[moment, row of the ledger] at these rows of the base."""
        deeper = self._repetitions(depth) * self._per_period[rows]
        deeper[:, ACTIVATIONS_ROW] = deeper[:, ACTIVATIONS_ROW] * size // self.size
        total: Bytes = self.base.bytes[rows] + deeper
        if self.larger is not None and size != self.size:
            growth = self.larger.bytes[rows] - self.base.bytes[rows]
            total += (size - self.size) * growth // self.size
        return total

    def host(self, depth: int, size: int) -> Bytes:
        """Rows of the peak in host memory."""
        total = self.base.host.copy()
        if self.larger is not None:
            total += (size - self.size) * (self.larger.host - self.base.host) // self.size
        if self.deeper is not None:
            slope = self.deeper.host - self.base.host
            slope[ACTIVATIONS_ROW] = slope[ACTIVATIONS_ROW] * size // self.size
            total += self._repetitions(depth) * slope
        return total

    def disk_bytes(self, depth: int) -> int:
        """Bytes that are reserved on a disk."""
        more = 0 if self.deeper is None else self.deeper.disk_bytes - self.base.disk_bytes
        return self.base.disk_bytes + self._repetitions(depth) * more

    def calls(self, depth: int, size: int) -> Calls:
        """Calls by micro-batch."""
        if (depth, size) not in self._calls:
            more = self._repetitions(depth)
            result = {}
            for number, pairs in self._pairs.items():
                calls: Counter[CountedCall] = Counter()
                grown: dict[CountedCall, CountedCall] = {}
                for (one, two), count in pairs.items():
                    call = _between(one, two, size - self.size, self.size)
                    calls[call] += count
                    grown.setdefault(one, call)
                for one, count in self._calls_per_period.get(number, {}).items():
                    calls[grown.get(one, one)] += more * count
                result[number] = calls
            self._calls[depth, size] = result
        return self._calls[depth, size]

    def calls_of(self, role: int, depth: int, size: int) -> Counter[CountedCall]:
        """Calls of one kind of micro-batch; of the only one where there is one."""
        calls = self.calls(depth, size)
        return calls[role] if role in calls else Counter() if role == REST else calls.get(0, Counter())

    def require_linear(self) -> None:
        """Raise NotLinear if the larger micro-batch has other moments or calls."""
        if self.larger is not None and self.larger.names != self.base.names:
            raise NotLinear("the operations depend on the size of the micro-batch")
        _ = self._pairs

    def _repetitions(self, depth: int) -> int:
        return (depth - self.depth) // self.period

    @cached_property
    def _per_period(self) -> Bytes:
        """Bytes that one more period of blocks adds at every moment of the base."""
        if self.deeper is None:
            return np.zeros_like(self.base.bytes)
        deeper = dict(zip(_call_keys(self.deeper), self.deeper.bytes, strict=True))
        own = zip(_call_keys(self.base), self.base.bytes, strict=True)
        return np.array([deeper.get(key, row) - row for key, row in own])

    @cached_property
    def _groups(self) -> Mapping[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[str]]]:
        """By micro-batch: rows of the moments that the deeper model has, too; the group of each; the groups' names.

        A group is a block in a phase, or a module outside of blocks with the block before it: the loss holds other
        tensors before the backward pass of the blocks than after it.
        """
        common = set(_call_keys(self.deeper or self.base))
        rows: dict[int, list[int]] = {}
        for row, key in enumerate(_call_keys(self.base)):
            if key in common:
                rows.setdefault(key[0], []).append(row)
        groups = {}
        for role, own in rows.items():
            names: dict[tuple[str, str], int] = {}
            numbers = []
            block = ""
            for row in own:
                name, in_block = _phase_and_block(self.base.names[row])
                block = name if in_block else block
                numbers.append(names.setdefault((name, block), len(names)))
            groups[role] = np.array(own), np.array(numbers), [f"{name} after {last}" for name, last in names]
        return groups

    @cached_property
    def _pairs(self) -> Mapping[int, Mapping[tuple[CountedCall, CountedCall], int]]:
        """By micro-batch: calls of the base with the same calls of the larger micro-batch."""
        larger = self.base if self.larger is None else self.larger
        if len(larger.calls) != len(self.base.calls):
            raise NotLinear("the number of calls depends on the size of the micro-batch")
        pairs: dict[int, Counter[tuple[CountedCall, CountedCall]]] = {}
        for (number, one), (other, two) in zip(self.base.calls, larger.calls, strict=True):
            if number != other or (one != two and not _differ_in_numbers(one, two)):
                raise NotLinear("the calls depend on the size of the micro-batch")
            pairs.setdefault(number, Counter())[one, two] += 1
        return pairs

    @cached_property
    def _calls_per_period(self) -> Mapping[int, Mapping[CountedCall, int]]:
        """By micro-batch: calls that one more period of blocks adds."""
        if self.deeper is None:
            return {}
        more: Calls = {}
        for number, call in self.deeper.calls:
            more.setdefault(number, Counter())[call] += 1
        for number, call in self.base.calls:
            more.setdefault(number, Counter())[call] -= 1
        return {n: {call: count for call, count in calls.items() if count} for n, calls in more.items()}


def _call_keys(counts: Counts) -> list[tuple[int, str]]:
    return list(zip(counts.passes.tolist(), counts.names, strict=True))


@lru_cache(maxsize=1 << 16)
def _phase_and_block(name: str) -> tuple[str, bool]:
    """The phase of a moment with its block, or outside of blocks with its module's first name; whether in a block."""
    phase, _, rest = name.partition("|")
    parts = rest.partition("|")[0].split(".")
    number = next((i for i, part in enumerate(parts) if part.lstrip("-").isdigit()), 0)
    return "|".join((phase, *parts[: number + 1])), number > 0


def _between(one: CountedCall, two: CountedCall, steps: int, apart: int) -> CountedCall:
    """The call ``steps`` beyond ``one``, where ``two``, which is alike, is ``apart`` beyond it."""
    if one == two or steps == 0:
        return one

    def number(a: int, b: int) -> int:
        return a + steps * (b - a) // apart

    values: dict[str, Any] = {}
    for name, a in vars(one).items():
        b = getattr(two, name)
        if isinstance(a, tuple):
            values[name] = tuple(number(x, y) for x, y in zip(a, b, strict=True))
        else:
            values[name] = number(a, b) if isinstance(a, int) and not isinstance(a, bool) else a
    return replace(one, **values)


def _differ_in_numbers(one: CountedCall, two: CountedCall) -> bool:
    """Whether two calls differ in numbers alone."""
    return type(one) is type(two) and all(
        isinstance(a, int | tuple) or a == b
        for a, b in zip(vars(one).values(), vars(two).values(), strict=True)
    )
