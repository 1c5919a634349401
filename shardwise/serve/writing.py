"""From tokens to text as it comes: whole characters only, and nothing of a stop text.

A token may end in the middle of a character, and how it is written may depend on the one before it. So the newest
tokens are decoded together with a few before them, and what is longer is new; text is kept back while it ends in half a
character, or while it may be the beginning of a stop text. Refused: decoding the whole answer for every token, which is
quadratic.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.train.data.tokenizer import Tokenizer

_BEFORE = 8
"""Tokens of the prompt that the first new ones are decoded with."""
_HALF = "\ufffd"
"""What incomplete characters are decoded to."""


class Writer:
    """The text of one answer. ``stopped`` says that a stop text was met; nothing comes after it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = list(prompt[-_BEFORE:])
        self._from, self._shown = 0, len(self._tokens)
        self._kept = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        decode = self._tokenizer.decode
        known, longer = decode(self._tokens[self._from : self._shown]), decode(self._tokens[self._from :])
        if longer.endswith(_HALF) and len(self._tokens) - self._shown < _BEFORE:
            return ""
        # Of the tokens before, only as many are decoded again as make a difference.
        self._from, self._shown = self._shown, len(self._tokens)
        return self._checked(longer[len(known) :])

    def rest(self) -> str:
        """What was kept back for a stop text that did not come."""
        kept, self._kept = self._kept, ""
        return kept

    def _checked(self, text: str) -> str:
        text, self._kept = self._kept + text, ""
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((_begun(text, stop) for stop in self._stop), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
