"""Streaming detokenization: whole characters only, and no part of a stop text.

A token may end in the middle of a character, and its text may depend on the token before. So the newest tokens are
decoded together with a few earlier ones, and the additional text is new. Text is held back while it ends in an
incomplete character, or while it may be the start of a stop text. Decoding the whole answer for every token would be
quadratic.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.data.tokenizer import Tokenizer

_BEFORE = 8
"""Number of prompt tokens that are decoded together with the first new tokens."""
_INCOMPLETE = "\ufffd"
"""The replacement character: incomplete characters decode to it."""


class Writer:
    """The text of one answer. ``stopped`` is True after a stop text; no text follows it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = list(prompt[-_BEFORE:])
        self._from, self._shown = 0, len(self._tokens)
        self._kept = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The new text that is final after this token."""
        self._tokens.append(token)
        decode = self._tokenizer.decode
        known, longer = decode(self._tokens[self._from : self._shown]), decode(self._tokens[self._from :])
        if longer.endswith(_INCOMPLETE) and len(self._tokens) - self._shown < _BEFORE:
            return ""
        # Decode again only as many earlier tokens as can change the text.
        self._from, self._shown = self._shown, len(self._tokens)
        return self._checked(longer[len(known) :])

    def rest(self) -> str:
        """The text that was held back for a stop text that did not come."""
        kept, self._kept = self._kept, ""
        return kept

    def _checked(self, text: str) -> str:
        text, self._kept = self._kept + text, ""
        positions = [position for stop in self._stop if (position := text.find(stop)) >= 0]
        if positions:
            self.stopped = True
            return text[: min(positions)]
        keep = max((_partial_stop(text, stop) for stop in self._stop), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def _partial_stop(text: str, stop: str) -> int:
    """Number of characters at the end of ``text`` that are a prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
