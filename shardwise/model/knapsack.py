"""Which results of a block to keep for its backward pass, so that computing the others again costs least.

A block is a graph: operations, and the values that they write. The backward pass needs some values. Each of those is
kept, which takes its bytes, or computed again, which takes the operation and whatever that reads, and so on down to
what is kept and to the block's inputs. An operation is paid for once, however many of its results are wanted, and not
at all when nothing asks for it: a kept result of a rotation spares the product before it too. So results may be
kept that the backward pass never reads, when others follow from them cheaply.

``front`` gives all choices worth making: each keeps more bytes than the one before it and costs less. Operations are
visited from the last to the first. What lies behind matters only through the set of values that are now wanted, so
for each such set the best choices so far are carried along (bytes, cost), and of two with the same set the one that
is worse in both is dropped. Operations that no best choice could part are joined first. Both lose nothing. Where a
set has more than ``LABELS`` choices they are thinned out to about as many, evenly in bytes, which may cost the best
one by a five-hundredth of the block. Every choice in the front is one that can be made, thinned out or not.

Cost is FLOPs first and bytes moved second. Refused: seconds, for which one would have to know how many bytes a device
moves in the time of a FLOP, where all that is known is the model; the plan and the run, and all ranks, must
choose alike. The price: where products are so narrow that they cost less than a norm they are spared first all
the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

LABELS = 512

Cost = tuple[int, int]
"""FLOPs, then bytes moved."""


@dataclass(frozen=True)
class Value:
    """What an operation has written.

    Attributes:
        size: bytes that keeping it takes.
        required: whether the backward pass reads it.
        keepable: False for what is written over later in the block.
        free: whether it lives in any case, so that keeping it takes nothing.
    """

    size: int
    required: bool
    keepable: bool = True
    free: bool = False


@dataclass(frozen=True)
class Operation:
    """One call: what it costs, and which values, by their number, it reads and writes.

    ``once``: it cannot be run again, so what is wanted of it is kept at any price.
    """

    cost: Cost
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    once: bool = False


@dataclass(frozen=True)
class Choice:
    """Values to keep, the bytes they take, and what computing the rest again costs."""

    size: int
    cost: Cost
    kept: frozenset[int]


@dataclass(frozen=True)
class Graph:
    """The operations of a block in the order in which they ran, and their values."""

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]

    @property
    def required_bytes(self) -> int:
        """What keeping everything takes that the backward pass reads."""
        return sum(value.size for value in self.values if value.required and not value.free)

    def of_required(self) -> Graph:
        """The same block where nothing may be kept but what is required."""
        values = (replace(value, keepable=value.keepable and value.required) for value in self.values)
        return Graph(self.operations, tuple(values))


def best(graph: Graph, share: float) -> Choice:
    """The cheapest choice that keeps at most this share of the bytes required."""
    choices, limit = front(graph), share * graph.required_bytes
    return max((c for c in choices if c.size <= limit), key=lambda c: c.size, default=choices[0])


_Label = tuple[int, int, int, int]
"""Bytes, FLOPs, bytes moved, and the values kept as bits."""


@functools.lru_cache(maxsize=64)
def front(graph: Graph) -> tuple[Choice, ...]:
    """All choices worth making, the one that keeps least first."""
    labels: dict[int, list[_Label]] = {0: [(0, 0, 0, 0)]}
    required = _bits(number for number, value in enumerate(graph.values) if value.required)
    spacing = max(1, graph.required_bytes // LABELS)
    for operation in reversed(_joined(graph)):
        behind: dict[int, list[_Label]] = {}
        writes = _bits(operation.writes)
        for wanted, found in labels.items():
            _decide(graph, operation, wanted, writes, required, found, behind)
        labels = {wanted: _undominated(found, spacing) for wanted, found in behind.items()}
    (found,) = labels.values()  # nothing lies before the first operation
    return tuple(
        Choice(size, (flops, moved), frozenset(n for n in range(len(graph.values)) if kept >> n & 1))
        for size, flops, moved, kept in found
    )


def _decide(
    graph: Graph,
    operation: Operation,
    wanted: int,
    writes: int,
    required: int,
    found: list[_Label],
    behind: dict[int, list[_Label]],
) -> None:
    """Continue every label past one operation, by keeping what is wanted of it and by running it again."""
    asked, rest = (wanted | required) & writes, wanted & ~writes
    if not asked:
        behind.setdefault(rest, []).extend(found)
        return
    values = [number for number in operation.writes if asked >> number & 1]
    if operation.once or all(graph.values[number].keepable for number in values):
        taken = sum(graph.values[number].size for number in values if not graph.values[number].free)
        kept = [(size + taken, flops, moved, mask | asked) for size, flops, moved, mask in found]
        behind.setdefault(rest, []).extend(kept)
    if not operation.once:
        flops, moved = operation.cost
        again = [(s, f + flops, m + moved, mask) for s, f, m, mask in found]
        # What is required is wanted in any case: left out, so that sets that differ in nothing else are one.
        behind.setdefault(rest | (_bits(operation.reads) & ~required), []).extend(again)


def _undominated(labels: list[_Label], spacing: int) -> list[_Label]:
    """The labels by bytes, without those that cost no less than a smaller one; thinned out where they are many."""
    labels.sort()
    found: list[_Label] = []
    for label in labels:
        if not found or label[1:3] < found[-1][1:3]:
            found.append(label)
    if len(found) <= LABELS:
        return found
    thin: dict[int, _Label] = {}
    for label in found[1:]:
        thin[label[0] // spacing] = label  # the last and cheapest of those of about the same size
    return [found[0], *thin.values()]


def _joined(graph: Graph) -> list[Operation]:
    """The operations, those that only one other reads joined to it where keeping theirs cannot pay.

    It cannot where the other's results take no more room: they spare the other as well.
    """
    operations: list[Operation | None] = list(graph.operations)
    readers: dict[int, set[int]] = {}
    for index, operation in enumerate(graph.operations):
        for number in operation.reads:
            readers.setdefault(number, set()).add(index)
    for index in reversed(range(len(operations))):
        first = graph.operations[index]
        values = [graph.values[number] for number in first.writes]
        read_by = {r for number in first.writes for r in readers.get(number, ())}
        if any(value.required for value in values) or first.once or len(read_by) > 1:
            continue
        operations[index] = None
        if not read_by:
            for number in first.reads:
                readers[number].discard(index)
            continue
        (reader,) = read_by
        second = operations[reader]
        assert second is not None, "what is joined has no reader but the one that it was joined to"
        if not _spares(graph, first, second):
            operations[index] = first
            continue
        cost = (second.cost[0] + first.cost[0], second.cost[1] + first.cost[1])
        reads = tuple(sorted({*second.reads, *first.reads} - {*first.writes}))
        operations[reader] = Operation(cost, reads, second.writes, second.once)
        for number in first.reads:
            readers[number] = readers[number] - {index} | {reader}
    return [operation for operation in operations if operation is not None]


def _spares(graph: Graph, first: Operation, second: Operation) -> bool:
    """Whether keeping all that ``second`` writes is as good as keeping what it reads of ``first``."""
    writes = [graph.values[number] for number in second.writes]
    read = [graph.values[number] for number in first.writes if number in second.reads]
    if not all(value.keepable for value in read):
        return True  # there is no choice
    return all(value.keepable for value in writes) and sum(value.size for value in writes) <= min(
        (value.size for value in read), default=0
    )


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits
