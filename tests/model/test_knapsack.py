"""What to keep of a block: against every choice there is, on random graphs."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import pytest

from shardwise.model.knapsack import LABELS, Graph, Operation, Value, best, front


def random_graph(seed: int) -> Graph:
    """Some operations with one or two results each, that read results of earlier ones."""
    chance = random.Random(seed)
    values: list[Value] = []
    operations: list[Operation] = []
    while len(values) < 9:
        reads = chance.sample(range(len(values)), min(len(values), chance.randint(0, 3)))
        writes = range(len(values), len(values) + chance.choice((1, 1, 2)))
        once = chance.random() < 0.1
        for _ in writes:
            required, unkeepable = chance.random() < 0.6, not once and chance.random() < 0.1
            values.append(Value(chance.randint(1, 9), required, not unkeepable, chance.random() < 0.1))
        cost = (chance.choice((0, 0, chance.randint(1, 9))), chance.randint(1, 9))
        operations.append(Operation(cost, tuple(reads), tuple(writes), once))
    return Graph(tuple(operations), tuple(values))


def outcome(graph: Graph, kept: frozenset[int]) -> tuple[int, tuple[int, int]] | None:
    """Bytes and cost when exactly these are kept; None where that cannot be done."""
    writer = {number: operation for operation in graph.operations for number in operation.writes}
    if not all(graph.values[n].keepable or writer[n].once for n in kept):
        return None
    runs: set[int] = set()
    wanted = [n for n, value in enumerate(graph.values) if value.required]
    while wanted:
        number = wanted.pop()
        operation = writer[number]
        if number in kept or id(operation) in runs:
            continue
        if operation.once:
            return None
        runs.add(id(operation))
        wanted += operation.reads
    costs = [operation.cost for operation in graph.operations if id(operation) in runs]
    size = sum(graph.values[n].size for n in kept if not graph.values[n].free)
    return size, (sum(c[0] for c in costs), sum(c[1] for c in costs))


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_better(seed: int) -> None:
    graph = random_graph(seed)
    every = [
        found
        for count in range(len(graph.values) + 1)
        for kept in itertools.combinations(range(len(graph.values)), count)
        if (found := outcome(graph, frozenset(kept))) is not None
    ]
    choices = front(graph)
    assert all(outcome(graph, choice.kept) == (choice.size, choice.cost) for choice in choices)
    for choice in choices:
        assert min(cost for size, cost in every if size <= choice.size) == choice.cost
    assert choices[0].size == min(size for size, _ in every)
    assert choices[-1].cost == min(cost for _, cost in every)


def chain(length: int) -> Graph:
    """Powers of two: 2^length sets, no two of which take the same room."""
    values = tuple(Value(2**n + 1, True) for n in range(length))
    operations = tuple(Operation((3**n, 1), (n - 1,) if n else (), (n,)) for n in range(length))
    return Graph(operations, values)


def test_more_room_never_costs_more_and_is_never_exceeded() -> None:
    """Also where there are too many choices to carry all of them along."""
    for graph in (*(random_graph(seed) for seed in range(20)), chain(16)):
        found = [best(graph, share / 50) for share in range(51)]
        assert all(later.cost <= earlier.cost for earlier, later in pairwise(found))
        least = found[0].size
        limits = [max(least, share / 50 * graph.required_bytes) for share in range(51)]
        assert all(choice.size <= limit for choice, limit in zip(found, limits, strict=True))
    assert len(front(chain(16))) <= 2 * LABELS


def test_what_follows_cheaply_from_little_is_not_kept() -> None:
    """A product in 16 bits, of which the backward pass reads a copy in 32: the product is kept."""
    product, copy = Value(2, required=False), Value(4, required=True)
    graph = Graph((Operation((100, 1), (), (0,)), Operation((0, 1), (0,), (1,))), (product, copy))
    assert best(graph, 0.5).kept == {0}
    assert best(graph, 0.5).cost == (0, 1)
    assert best(graph, 1).kept == {1}
    assert best(graph.of_required(), 0.5).kept == frozenset()
