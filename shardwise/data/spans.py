"""Spans of a text, and the tokens in them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

TextSpan = tuple[int, int]
"""Start and end in a text, in characters."""


def joined(spans: Sequence[TextSpan]) -> tuple[TextSpan, ...]:
    """Ordered spans, with those that touch as one."""
    whole: list[TextSpan] = []
    for start, end in spans:
        if whole and whole[-1][1] >= start:
            start = whole.pop()[0]
        whole.append((start, end))
    return tuple(whole)


def mask_of(spans: Sequence[TextSpan], offsets: Sequence[TextSpan]) -> list[bool]:
    """Which tokens have a character in one of the spans; `offsets` are the tokens' places in the text, in order.

    A tokenizer may trim the blanks from a token's offsets, so a token begins no later than the one before it ends.
    """
    mask = [False] * len(offsets)

    def begin(token: int) -> int:
        return min(offsets[token][0], offsets[token - 1][1]) if token else 0

    for start, end in spans:
        # Ends and begins both ascend, so both searches are binary.
        first = bisect_right(offsets, start, key=itemgetter(1))
        last = bisect_left(range(len(offsets)), end, lo=first, key=begin)
        mask[first:last] = [True] * (last - first)
    return mask
