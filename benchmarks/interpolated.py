"""Costs on the line through two counts, kernel by kernel and collective by collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stacks import CASTS, OF_WEIGHT

from shardwise.core.cost import Kernel, StepCost


def between(here: StepCost, there: StepCost, weight: float) -> StepCost:
    """The cost on the line through two, at 0 and at 1. Raises ValueError where their calls differ."""
    return StepCost(
        tuple(_line(a, b, weight) for a, b in _paired(here.kernels, there.kernels)),
        tuple(_line(a, b, weight) for a, b in _paired(here.collectives, there.collectives)),
        (),
        here.micro_batches,
    )


def _paired(here: Sequence[Any], there: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The same calls of two counts: in order, or by size where one count has two sizes and the other one."""
    groups: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {}
    for side, counted in enumerate((here, there)):
        for each in counted:
            groups.setdefault(_named(each), ([], []))[side].append(each)
    for name, (one, other) in groups.items():
        if sum(each.calls for each in one) != sum(each.calls for each in other):
            raise ValueError(f"the counts of {name} differ")
        if [each.calls for each in one] == [each.calls for each in other]:
            yield from zip(one, other, strict=True)
        else:
            yield from _split(sorted(one, key=_size), sorted(other, key=_size))


def _named(each: Any) -> tuple[str, str]:
    return (
        (each.phase, each.operation) if isinstance(each, Kernel) else (each.phase, f"{each.kind} {each.axis}")
    )


def _size(each: Any) -> tuple[int, int]:
    return (each.flops if isinstance(each, Kernel) else 0, each.bytes)


def _split(here: list[Any], there: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of equally many calls."""
    while here:
        one, other = here.pop(0), there.pop(0)
        calls = min(one.calls, other.calls)
        yield replace(one, calls=calls), replace(other, calls=calls)
        for rest, each in ((here, one), (there, other)):
            if each.calls > calls:
                rest.insert(0, replace(each, calls=each.calls - calls))


def _line(here: Any, there: Any, weight: float) -> Any:
    def at(a: int, b: int) -> int:
        return max(1, round(a + weight * (b - a))) if a or b else 0

    if isinstance(here, Kernel):
        shape = tuple(at(a, b) for a, b in zip(here.shape, there.shape, strict=False))
        of_weight = here.operation in CASTS and here.bytes == there.bytes
        return replace(
            here,
            operation=f"{here.operation}{OF_WEIGHT}" if of_weight else here.operation,
            flops=at(here.flops, there.flops),
            bytes=at(here.bytes, there.bytes),
            shape=shape,
        )
    return replace(
        here,
        elements=at(here.elements, there.elements),
        bytes=at(here.bytes, there.bytes),
        degree=there.degree,
    )
