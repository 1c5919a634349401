"""Records with completions as sequences: one record per sequence with padding, or several packed records.

A record of n tokens gives n-1 inputs, and a label for every input whose next token is trained on. A record longer than
a sequence is truncated, or dropped under `data.too_long: drop`. It is dropped too if its first trained token comes
after the cut, because it would train nothing. Both are counted and reported: truncation hides from the model how a
record ends, dropping loses the longest conversations.

Packed: each record is a document. Its positions start at 0, so attention knows the boundaries (model/decoder). The rest
of a sequence is padding, a document of its own that the loss ignores. Not packed: the padding follows the record, where
causal attention does not see it, and no positions are needed.

A record is held out by a hash of its tokens and trained mask, as a document of plain text is (`split`). If that holds
out too few or too many, the last records are held out instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.data.cache import TokenCache
from shardwise.data.packing import Numbers, best_fit

IGNORED = -100
"""The label that the loss ignores."""


@dataclass(frozen=True)
class Sequence:
    """Inputs, labels and positions, [length] each. The first `filled` belong to records, the rest is padding."""

    inputs: Numbers
    labels: Numbers
    positions: Numbers
    filled: int


@dataclass(frozen=True)
class Sequences:
    """Records in sequences.

    Attributes:
        cache: the cache with their tokens.
        starts, ends: range of each record in the cache, truncated to length + 1 tokens, [records].
        cut: whether a record is truncated, [records].
        order: record numbers by sequence, [records].
        offsets: start of each sequence in `order`, [sequences + 1].
        length: tokens in a sequence.
        padding: the padding token.
    """

    cache: TokenCache
    starts: Numbers
    ends: Numbers
    cut: npt.NDArray[np.bool_]
    order: Numbers
    offsets: Numbers
    length: int
    padding: int

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def filled(self) -> float:
        """The fraction of all tokens that is not padding."""
        return float((self.ends - self.starts - 1).sum()) / max(1, self.sequences * self.length)

    def sequence(self, index: int) -> Sequence:
        """Sequence `index`. Raises IndexError if there is none."""
        if not 0 <= index < self.sequences:
            raise IndexError(f"sequence {index} of {self.sequences}")
        inputs = np.full(self.length, self.padding, np.int64)
        labels = np.full(self.length, IGNORED, np.int64)
        positions = np.zeros(self.length, np.int64)
        at = 0
        for start, end in self._places(index):
            tokens, until = self.cache.tokens[start:end].astype(np.int64), at + end - start - 1
            inputs[at:until] = tokens[:-1]
            labels[at:until] = np.where(self.cache.trained[start + 1 : end], tokens[1:], IGNORED)
            positions[at:until] = np.arange(until - at)
            at = until
        positions[at:] = np.arange(self.length - at)
        return Sequence(inputs, labels, positions, at)

    def filled_tokens(self, index: int) -> int:
        """The number of tokens of sequence `index` that belong to records."""
        return sum(end - start - 1 for start, end in self._places(index))

    def record(self, index: int) -> tuple[list[int], list[bool]]:
        """(tokens, trained mask) of record `index` of this side, in the order of the source."""
        start, end = int(self.starts[index]), int(self.ends[index])
        return self.cache.tokens[start:end].tolist(), self.cache.trained[start:end].tolist()

    def records(self, index: int) -> list[tuple[list[int], list[bool]]]:
        """(tokens, trained mask) of each record of a sequence."""
        cache = self.cache
        return [(cache.tokens[a:b].tolist(), cache.trained[a:b].tolist()) for a, b in self._places(index)]

    def _places(self, index: int) -> list[tuple[int, int]]:
        records = self.order[self.offsets[index] : self.offsets[index + 1]]
        return list(zip(self.starts[records].tolist(), self.ends[records].tolist(), strict=True))


@dataclass(frozen=True)
class Divided:
    """Training and held-out sequences of a cache.

    Attributes:
        truncated: number of truncated records.
        dropped: number of dropped records.
    """

    train: Sequences
    held_out: Sequences
    truncated: int
    dropped: int

    @property
    def share(self) -> float:
        """The fraction of the remaining tokens that the loss counts."""
        sides = (self.train, self.held_out)
        chosen = sum(
            int(side.cache.trained[start + 1 : end].sum())
            for side in sides
            for start, end in zip(side.starts.tolist(), side.ends.tolist(), strict=True)
        )
        return chosen / max(1, sum(int((side.ends - side.starts - 1).sum()) for side in sides))


def divide(
    cache: TokenCache, fraction: float, length: int, packing: bool, padding: int, drop: bool = False
) -> Divided:
    """Split the records of a cache into training and held-out sequences.

    Args:
        fraction: the fraction of records to hold out, 0 <= fraction < 1.
        length: tokens in a sequence.
        packing: whether several records share a sequence.
        padding: the padding token.
        drop: drop the records that are longer than a sequence, instead of truncating them.
    """
    records = cache.documents()
    ends = records["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    cut = np.minimum(ends, starts + length + 1)
    kept = cut == ends if drop else records["first"] <= length
    held = held_out(records["hash"][kept], fraction)

    def side(chosen: npt.NDArray[np.bool_]) -> Sequences:
        first, last = starts[kept][chosen], cut[kept][chosen]
        truncated = (cut < ends)[kept][chosen]
        if packing:
            order, offsets = best_fit(last - first - 1, length)
        else:
            order, offsets = np.arange(len(first)), np.arange(len(first) + 1)
        return Sequences(cache, first, last, truncated, order, offsets, length, padding)

    truncated = int((cut < ends)[kept].sum())
    return Divided(side(~held), side(held), truncated, int((~kept).sum()))


def held_out(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Mask of the held-out records: at least one if there are two records and `fraction` is not 0."""
    held = hashes < np.uint64(int(fraction * 2.0**64))
    count = len(hashes)
    wanted = min(max(1, round(fraction * count)), max(0, count - 1)) if fraction else 0
    if not fraction or not count or (fraction / 2 <= held.mean() <= 2 * fraction and not held.all()):
        return np.asarray(held)
    return np.arange(count) >= count - wanted
