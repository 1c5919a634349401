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
"""Number of prompt tokens that are decoded together with the first new tokens, at least."""
_INCOMPLETE = "\ufffd"
"""The replacement character: incomplete characters decode to it."""


class Writer:
    """The text of one answer. ``stopped`` is True after a stop text; no text follows it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = _end_of(prompt, tokenizer)
        self._shown = len(self._tokens)
        self._from = 0
        self._kept = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The new text that is final after this token."""
        self._tokens.append(token)
        text = self._new_text()
        if text.endswith(_INCOMPLETE) and len(self._tokens) - self._shown < _BEFORE:
            return ""
        # Decode again only as many earlier tokens as can change the text: the newest that have a text.
        self._from = self._shown if text else self._from
        self._shown = len(self._tokens)
        return self._checked(text)

    def rest(self) -> str:
        """The text that was held back: before an incomplete character, and for a stop text that did not come."""
        text = self._checked(self._new_text().rstrip(_INCOMPLETE))
        kept, self._kept, self._shown = self._kept, "", len(self._tokens)
        return text + kept

    def _new_text(self) -> str:
        """The text of the tokens that are not shown yet."""
        decode = self._tokenizer.decode
        known = decode(self._tokens[self._from : self._shown])
        return decode(self._tokens[self._from :])[len(known) :]

    def _checked(self, text: str) -> str:
        text = self._kept + text
        self._kept = ""
        positions = [position for stop in self._stop if (position := text.find(stop)) >= 0]
        if positions:
            self.stopped = True
            return text[: min(positions)]
        keep = max((_partial_stop(text, stop) for stop in self._stop), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The last tokens of a prompt: they have a text, and do not begin in the middle of a character."""
    size = _BEFORE
    while size < len(prompt) and tokenizer.decode(prompt[-size:])[:1] in ("", _INCOMPLETE):
        size *= 2
    return list(prompt[-size:])


def _partial_stop(text: str, stop: str) -> int:
    """Number of characters at the end of ``text`` that are a prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
