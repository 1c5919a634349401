"""A form: one strategy counted at a few points, and linear between and beyond them.

Memory at every moment is linear in the number of blocks and in the size of the micro-batch; what a block keeps for the
backward pass is proportional to the size. Calls are paired in their order, so every field of them is linear, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardwise.core.cost import CountedCall
from shardwise.dryrun.moments import LEDGER_ROWS, Bytes
from shardwise.planner.compose_corner import Corner, between

ACTIVATIONS_ROW = LEDGER_ROWS.index("activations")
REST = -1
"""Instead of a micro-batch: the step outside of micro-batches."""

Calls = dict[int, Counter[CountedCall]]


class NotLinear(Exception):
    """The calls or moments of two micro-batches are not the same."""


@dataclass(frozen=True, eq=False)
class LinearForm:
    """One strategy at its points. Two are equal if they are the same object.

    Attributes:
        depth, size: blocks of the base, sequences of its micro-batch.
        deeper: with ``repeat`` blocks more; None where no other depth is asked for.
        larger: with a micro-batch twice as large; None where only the base's size is asked for.
    """

    base: Corner
    depth: int
    size: int = 1
    deeper: Corner | None = None
    repeat: int = 1
    larger: Corner | None = None
    _bytes: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    _totals: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    _calls: dict[tuple[int, int], Calls] = field(default_factory=dict)

    def with_corners(self, deeper: Corner | None = None, larger: Corner | None = None) -> LinearForm:
        """The same with further corners."""
        return LinearForm(
            self.base,
            self.depth,
            self.size,
            deeper=deeper or self.deeper,
            repeat=self.repeat,
            larger=larger or self.larger,
        )

    def of_one_size(self) -> LinearForm:
        """The same of the base's size alone."""
        return LinearForm(self.base, self.depth, self.size, deeper=self.deeper, repeat=self.repeat)

    def indices(self, role: int) -> Mapping[str, int]:
        """Row by name, of the moments of one kind of micro-batch; of the only one where the form has one."""
        return self._by_role.get(role) or self._by_role.get(0, {})

    def bytes(self, depth: int, size: int) -> Bytes:
        """[moment, row] of a model of ``depth`` blocks with micro-batches of ``size``."""
        if (depth, size) not in self._bytes:
            deeper = self._repetitions(depth) * self._per_block
            deeper[:, ACTIVATIONS_ROW] = deeper[:, ACTIVATIONS_ROW] * size // self.size
            total = self.base.bytes + deeper
            if self.larger is not None and size != self.size:
                total += (size - self.size) * self._growth // self.size
            self._bytes[depth, size] = total
        return self._bytes[depth, size]

    def totals(self, depth: int, size: int) -> Bytes:
        """[moment] of the same."""
        if (depth, size) not in self._totals:
            self._totals[depth, size] = self.bytes(depth, size).sum(axis=1)
        return self._totals[depth, size]

    def host(self, depth: int, size: int) -> Bytes:
        """Rows of the peak in host memory."""
        total = self.base.host
        if self.larger is not None:
            total = total + (size - self.size) * (self.larger.host - self.base.host) // self.size
        if self.deeper is not None:
            slope = self.deeper.host - self.base.host
            slope[ACTIVATIONS_ROW] = slope[ACTIVATIONS_ROW] * size // self.size
            total = total + self._repetitions(depth) * slope
        return total

    def number(self, attribute: str, depth: int) -> int:
        """A number that only the depth changes."""
        base = int(getattr(self.base, attribute))
        if self.deeper is None:
            return base
        return base + self._repetitions(depth) * (int(getattr(self.deeper, attribute)) - base)

    def calls(self, depth: int, size: int) -> Calls:
        """Calls by micro-batch."""
        if (depth, size) not in self._calls:
            more, result = self._repetitions(depth), {}
            for number, pairs in self._pairs.items():
                calls: Counter[CountedCall] = Counter()
                grown: dict[CountedCall, CountedCall] = {}
                for (one, two), count in pairs.items():
                    call = between(one, two, size - self.size, self.size)
                    calls[call] += count
                    grown.setdefault(one, call)
                for one, count in self._calls_per_block.get(number, {}).items():
                    calls[grown.get(one, one)] += more * count
                result[number] = calls
            self._calls[depth, size] = result
        return self._calls[depth, size]

    def _repetitions(self, depth: int) -> int:
        return (depth - self.depth) // self.repeat

    @cached_property
    def _keys(self) -> list[tuple[int, str]]:
        return list(zip(self.base.passes.tolist(), self.base.names, strict=True))

    @cached_property
    def _deeper_rows(self) -> Mapping[tuple[int, str], npt.NDArray[np.int64]]:
        if self.deeper is None:
            return dict(zip(self._keys, self.base.bytes, strict=True))
        keys = zip(self.deeper.passes.tolist(), self.deeper.names, strict=True)
        return dict(zip(keys, self.deeper.bytes, strict=True))

    @cached_property
    def _by_role(self) -> Mapping[int, Mapping[str, int]]:
        """By micro-batch: row by name, of the moments that the deeper model has, too."""
        found: dict[int, dict[str, int]] = {}
        for row, key in enumerate(self._keys):
            if key in self._deeper_rows:
                found.setdefault(key[0], {})[key[1]] = row
        return found

    @cached_property
    def _per_block(self) -> Bytes:
        """Bytes that one more repetition of blocks adds at every moment."""
        own = zip(self._keys, self.base.bytes, strict=True)
        return np.array([self._deeper_rows.get(key, row) - row for key, row in own])

    @cached_property
    def _growth(self) -> Bytes:
        """Bytes that a micro-batch twice as large adds at every moment."""
        assert self.larger is not None
        return self.larger.bytes - self.base.bytes

    def require_linear(self) -> None:
        """Raise NotLinear if the larger micro-batch has other moments or calls."""
        if self.larger is not None and self.larger.names != self.base.names:
            raise NotLinear("the operations depend on the size of the micro-batch")
        _ = self._pairs

    @cached_property
    def _pairs(self) -> Mapping[int, Mapping[tuple[CountedCall, CountedCall], int]]:
        """By micro-batch: calls of the base with the same calls of the larger micro-batch."""
        larger = self.base if self.larger is None else self.larger
        if len(larger.calls) != len(self.base.calls):
            raise NotLinear("the number of calls depends on the size of the micro-batch")
        pairs: dict[int, Counter[tuple[CountedCall, CountedCall]]] = {}
        for (number, one), (other, two) in zip(self.base.calls, larger.calls, strict=True):
            if number != other or (one != two and not same_shape(one, two)):
                raise NotLinear("the calls depend on the size of the micro-batch")
            pairs.setdefault(number, Counter())[one, two] += 1
        return pairs

    @cached_property
    def _calls_per_block(self) -> Mapping[int, Mapping[CountedCall, int]]:
        """By micro-batch: calls that one more repetition of blocks adds."""
        if self.deeper is None:
            return {}
        found: Calls = {}
        for number, call in self.deeper.calls:
            found.setdefault(number, Counter())[call] += 1
        for number, call in self.base.calls:
            found.setdefault(number, Counter())[call] -= 1
        return {n: {call: count for call, count in calls.items() if count} for n, calls in found.items()}


def same_shape(one: CountedCall, two: CountedCall) -> bool:
    """Whether two calls differ in numbers alone."""
    return type(one) is type(two) and all(
        isinstance(a, int | tuple) or a == b
        for a, b in zip(vars(one).values(), vars(two).values(), strict=True)
    )
