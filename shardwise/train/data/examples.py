"""Records with completions as sequences: one in each, padded, or several, each apart from the others.

A record of n tokens has n-1 inputs, and labels where the token that follows is trained on. What is longer than a
sequence is cut at its end; a record whose first trained token lies beyond that is left out, for it would train nothing.
Both are counted, and said. Refused: leaving out all long records, which loses the conversations with most in them; the
price is that the model does not see how these end.

Packed, each record is a document: positions begin anew at 0, by which attention knows where one ends (model/decoder).
What is left of a sequence is padding, a document of its own that no loss counts. Not packed, padding stands after the
record, where causal attention does not see it, and positions need not be told.

A record is held out as a document of plain text is, by a hash of itself (`split`): of its tokens and what is trained
on. Where that holds out too few or too many, the last records are held out instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.train.data.cache import TokenCache
from shardwise.train.data.packing import Numbers, best_fit

IGNORED = -100
"""The label that no loss counts."""


@dataclass(frozen=True)
class Sequence:
    """Inputs, labels and positions, [length] each, of which the first `filled` are records' and not padding."""

    inputs: Numbers
    labels: Numbers
    positions: Numbers
    filled: int


@dataclass(frozen=True)
class Sequences:
    """Records in sequences.

    Attributes:
        cache: where their tokens lie.
        starts, ends: of each record in the cache, cut at a sequence's length and a token, [records].
        order: the records by sequence, [records].
        offsets: where each sequence begins among them, [sequences + 1].
        length: tokens in a sequence.
        padding: the token that fills a sequence.
    """

    cache: TokenCache
    starts: Numbers
    ends: Numbers
    order: Numbers
    offsets: Numbers
    length: int
    padding: int

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def filled(self) -> float:
        """The share of all sequences that is not padding."""
        return float((self.ends - self.starts - 1).sum()) / max(1, self.sequences * self.length)

    def sequence(self, index: int) -> Sequence:
        """Raises IndexError when there are not so many sequences."""
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

    def records(self, index: int) -> list[tuple[list[int], list[bool]]]:
        """The tokens of each record of a sequence, and of each whether it is trained on."""
        cache = self.cache
        return [(cache.tokens[a:b].tolist(), cache.trained[a:b].tolist()) for a, b in self._places(index)]

    def _places(self, index: int) -> list[tuple[int, int]]:
        records = self.order[self.offsets[index] : self.offsets[index + 1]]
        return list(zip(self.starts[records].tolist(), self.ends[records].tolist(), strict=True))


@dataclass(frozen=True)
class Divided:
    """Records of a cache in sequences, and what became of the long ones.

    Attributes:
        truncated: records that were cut.
        dropped: records that were left out.
    """

    train: Sequences
    held_out: Sequences
    truncated: int
    dropped: int

    @property
    def share(self) -> float:
        """Of the tokens that are left, how many are trained on."""
        sides = (self.train, self.held_out)
        chosen = sum(
            int(side.cache.trained[start + 1 : end].sum())
            for side in sides
            for start, end in zip(side.starts.tolist(), side.ends.tolist(), strict=True)
        )
        return chosen / max(1, sum(int((side.ends - side.starts - 1).sum()) for side in sides))


def divide(cache: TokenCache, fraction: float, length: int, packing: bool, padding: int) -> Divided:
    """The sequences that are trained on, and those held out.

    Args:
        fraction: the share of records to hold out, 0 <= fraction < 1.
        length: tokens in a sequence.
        packing: whether several records share one.
        padding: the token that fills it.
    """
    records = cache.documents()
    ends = records["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    kept = records["first"] <= length
    cut = np.minimum(ends, starts + length + 1)
    held = _held(records["hash"][kept], fraction)

    def side(chosen: npt.NDArray[np.bool_]) -> Sequences:
        first, last = starts[kept][chosen], cut[kept][chosen]
        if packing:
            order, offsets = best_fit(last - first - 1, length)
        else:
            order, offsets = np.arange(len(first)), np.arange(len(first) + 1)
        return Sequences(cache, first, last, order, offsets, length, padding)

    truncated = int((cut < ends)[kept].sum())
    return Divided(side(~held), side(held), truncated, int((~kept).sum()))


def _held(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Which records are held out: at least one where there are two and any shall be."""
    held = hashes < np.uint64(int(fraction * 2.0**64))
    count = len(hashes)
    wanted = min(max(1, round(fraction * count)), max(0, count - 1)) if fraction else 0
    if not fraction or not count or (fraction / 2 <= held.mean() <= 2 * fraction and not held.all()):
        return np.asarray(held)
    return np.arange(count) >= count - wanted
