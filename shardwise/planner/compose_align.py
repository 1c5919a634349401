"""Which moments of several dry runs are the same, and next to which of these the others are (compose_sum.py)."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.dryrun.moments import Bytes


class NotComposable(Exception):
    """The counts of this strategy do not follow from those of others; the text says why."""


@dataclass(frozen=True)
class Alignment:
    """The moments of one kind of micro-batch in several forms, the origin's first.

    Attributes:
        shared: names of those that all forms have, in the same order.
        rows: where they are in each form.
        only: by form, the others that it has: where they are, and the number of the shared moment next to each.
    """

    shared: Sequence[str]
    rows: Sequence[Bytes]
    only: Mapping[int, tuple[Bytes, Bytes]]


def aligned(indices: Sequence[Mapping[str, int]]) -> Alignment:
    shared = [name for name in indices[0] if all(name in index for index in indices[1:])]
    for index in indices[1:]:
        shared = _in_order(shared, index)
    if not shared:
        raise NotComposable("the parts share no moment of a micro-batch")
    order = {name: number for number, name in enumerate(shared)}
    only: dict[int, tuple[Bytes, Bytes]] = {}
    for number, index in enumerate(indices[1:], 1):
        others = [other for i, other in enumerate(indices) if i not in (0, number)]
        near = _nearest_moments(index, indices[0], others, order)
        if near:
            own = np.array([index[name] for name in near])
            only[number] = own, np.array([order[name] for name in near.values()])
    return Alignment(shared, [np.array([index[name] for name in shared]) for index in indices], only)


def _in_order(names: Sequence[str], index: Mapping[str, int]) -> list[str]:
    """The most of ``names`` that keep their order in ``index``: the longest increasing subsequence."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for number, name in enumerate(names):
        length = bisect_left(tails, index[name])
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [index[name]]
        ends[length : length + 1] = [number]
    kept: list[str] = []
    last = ends[-1] if ends else -1
    while last >= 0:
        kept.append(names[last])
        last = before[last]
    return kept[::-1]


def _nearest_moments(
    index: Mapping[str, int],
    origin: Mapping[str, int],
    others: Sequence[Mapping[str, int]],
    shared: Mapping[str, int],
) -> dict[str, str]:
    """The shared moment next to every moment that only one form has, or that the others have with the origin.

    It is the one before, unless only the one after is of the same block. A block that the other forms are too shallow
    for is left out: it is between two that they have.
    """
    names = list(index)
    after: dict[str, str] = {}
    following = next(name for name in reversed(names) if name in shared)
    for name in reversed(names):
        following = name if name in shared else following
        after[name] = following
    before, moments = next(name for name in names if name in shared), {}
    for name in names:
        if name in shared:
            before = name
        elif name not in origin or all(name in other for other in others):
            block, numbered = _phase_and_block(name)
            here, there = _phase_and_block(before)[0] == block, _phase_and_block(after[name])[0] == block
            if here or there or not numbered:
                moments[name] = after[name] if there and not here else before
    return moments


_NUMBERED = re.compile(r"(.*?)\.-?\d+")


@lru_cache(maxsize=1 << 16)
def _phase_and_block(name: str) -> tuple[str, bool]:
    """The phase and the block of a moment, or its module's first name; and whether it is in a block."""
    phase, _, rest = name.partition("|")
    module = rest.partition("|")[0]
    numbered = _NUMBERED.match(module)
    return f"{phase}|{numbered[0] if numbered else module.partition('.')[0]}", numbered is not None
