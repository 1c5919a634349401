"""Split tokens into training and held-out (validation) streams, and streams into sequences.

A document is held out if the hash of its text is below the requested fraction. The hash depends on the document alone,
so adding documents moves no others, the order of files does not matter, and exact duplicates are never on both sides.
A hash cannot split a book, or a few documents, evenly. If the held-out share is below half or above twice the fraction,
or has no whole sequence, the last sequences of the data are held out instead, as in nanoGPT.

Each side is a *stream*: its documents end to end, in *runs* that are contiguous in the cache. Sequence i of length s
reads tokens i*s .. (i+1)*s of its stream. The inputs are the first s of these s+1 tokens, the labels the last s. So
each token except the first is a target exactly once per epoch. There is no padding. Attention crosses document
boundaries, which the separator marks; with `data.packing` it does not, and the first token of a document is no target
(`samples`). The last tokens of a stream, fewer than a sequence, are never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.data.tokenizer import Tokens

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """Runs of a token file, read as one stream.

    Attributes:
        tokens: the whole file.
        starts: start of each run in the file, [runs].
        offsets: start of each run in the stream, and the stream's length, [runs + 1].
        length: tokens in a sequence.
    """

    tokens: Tokens
    starts: Positions
    offsets: Positions
    length: int

    @classmethod
    def of_runs(cls, tokens: Tokens, starts: Positions, ends: Positions, length: int) -> Stream:
        """The stream of the runs starts[i]..ends[i]-1, in their order."""
        return cls(tokens, starts, np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64), length)

    @property
    def sequences(self) -> int:
        """Number of whole sequences."""
        return max(0, (int(self.offsets[-1]) - 1) // self.length)

    def sequence(self, index: int) -> Tokens:
        """The `length` + 1 tokens of a sequence; a view if they are in one run.

        Raises:
            IndexError: the stream has no sequence `index`.
        """
        parts = [self.tokens[start:end] for start, end in self.spans(index)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Where the tokens of a sequence are in the file, as (start, end), one for each run. Raises IndexError."""
        if not 0 <= index < self.sequences:
            raise IndexError(f"sequence {index} of {self.sequences}")
        position, missing = index * self.length, self.length + 1
        run = int(np.searchsorted(self.offsets, position, side="right")) - 1
        found = []
        while missing:
            start = int(self.starts[run]) + position - int(self.offsets[run])
            taken = min(missing, int(self.offsets[run + 1]) - position)
            found.append((start, start + taken))
            position, missing, run = position + taken, missing - taken, run + 1
        return found

    def positions(self, index: int, starts: Positions) -> Positions:
        """The position of each token of a sequence in its document, [length + 1].

        A document that began before the sequence counts from the start of the sequence.

        Args:
            starts: start of each document in the file, ascending, [documents].

        Raises:
            IndexError: the stream has no sequence `index`.
        """
        found = []
        for first, end in self.spans(index):
            at = np.arange(first, end)
            begun = starts[np.searchsorted(starts, at, side="right") - 1]
            found.append(at - np.maximum(begun, first))
        return np.concatenate(found)


def split(
    tokens: Tokens, documents: npt.NDArray[np.void], fraction: float, length: int
) -> tuple[Stream, Stream]:
    """(training stream, held-out stream).

    Args:
        tokens: all tokens, [n].
        documents: records of type `cache.DOCUMENT`, [documents].
        fraction: the fraction of tokens to hold out, 0 <= fraction < 1.
        length: tokens in a sequence.

    The training stream has at least one sequence if the data has one. The held-out stream has one if the data has two
    and `fraction` is not 0.
    """
    ends = documents["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    held = documents["hash"] < np.uint64(int(fraction * 2.0**64))
    edges = np.flatnonzero(held[1:] != held[:-1]) + 1
    first, last = np.concatenate([[0], edges]), np.concatenate([edges, [len(held)]]) - 1
    side = held[first]
    train, held_out = (
        Stream.of_runs(tokens, starts[first[chosen]], ends[last[chosen]], length) for chosen in (~side, side)
    )
    share = int(held_out.offsets[-1]) / len(tokens)
    if fraction == 0 or (fraction / 2 <= share <= 2 * fraction and train.sequences and held_out.sequences):
        return train, held_out
    return _trailing(tokens, fraction, length)


def _trailing(tokens: Tokens, fraction: float, length: int) -> tuple[Stream, Stream]:
    """Hold out the last sequences. The token at the boundary is a target in training and an input in validation."""
    sequences = max(0, (len(tokens) - 1) // length)
    held = min(max(1, round(fraction * sequences)), max(0, sequences - 1))
    boundary = (sequences - held) * length
    end = boundary + 1 if held else len(tokens)
    zero, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    train = Stream.of_runs(tokens, zero, zero + end, length)
    if not held:
        return train, Stream.of_runs(tokens, none, none, length)
    return train, Stream.of_runs(tokens, zero + boundary, zero + len(tokens), length)
