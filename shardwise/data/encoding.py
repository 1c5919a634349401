"""From a record to its tokens and its trained mask.

A prompt is always tokenized alone, as it is in generation. If the tokens of the whole text start with the prompt's
tokens, the rest are the completion's tokens. If a token crosses the boundary, the completion is tokenized alone. So the
boundary is always between two tokens, and both sides have the tokens that generation would see. As a result, every part
of a chat is tokenized once for each later part.

The completion follows the prompt directly. The end-of-text token comes last and is trained on, so the model learns to
stop. A chat begins and ends as its template says. Any other record begins with the tokenizer's `begin`, if it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.errors import DataError
from shardwise.data.chat import ChatTemplate, Part, PlainTemplate
from shardwise.data.formats import Completed, example_of, tools_of
from shardwise.data.readers import Record
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer
from shardwise.recipe.sections import DataSpec

CHATS = ("messages", "sharegpt")
"""Formats whose records a chat template turns into text."""


class Encoder:
    """Tokenizes the records of one format.

    Args:
        pairs: frame prompt and completion as two texts, for encoder-decoder models (pairs.py).

    Attributes:
        format: format of the records.
        tokenizer: tokenizer of the text.
        template: template of chats.
        fingerprint: equal for two encoders exactly if they encode every record alike.
    """

    def __init__(self, spec: DataSpec, name: str, tokenizer: Tokenizer, pairs: bool = False) -> None:
        self.format, self.tokenizer = name, tokenizer
        self.template = _template(tokenizer) if name in CHATS else None
        self._all = spec.train_on == "all"
        words = self.template.fingerprint if self.template else ""
        self._pairs = pairs
        self.fingerprint = f"{tokenizer.fingerprint} {name} {self._all} {words}" + (" pairs" if pairs else "")

    def encode(self, record: Record) -> tuple[list[int], list[bool]]:
        """(tokens, trained mask): the mask is True for tokens that the loss counts.

        Raises:
            DataError: the record is malformed, or has no trained token.
        """
        if self._pairs:
            tokens, trained = self._framed(record)
        else:
            tokens, trained = encoded(self.tokenizer, self._parts(record))
            if self.template is None and self.tokenizer.begin is not None:
                tokens, trained = [self.tokenizer.begin, *tokens], [False, *trained]
        if self._all:
            trained = [True] * len(tokens)
        if not any(trained[1:]):
            raise DataError("nothing to train on", where=record.place, why=f"it has {len(tokens)} tokens")
        return tokens, trained

    def _framed(self, record: Record) -> tuple[list[int], list[bool]]:
        example = example_of(record, self.format)
        assert isinstance(example, Completed)
        prompt, completion = self.tokenizer.framed(example.prompt), self.tokenizer.framed(example.completion)
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)

    def _parts(self, record: Record) -> list[Part]:
        example = example_of(record, self.format)
        if isinstance(example, Completed):
            return [(example.prompt, False), (example.completion, True), (None, True)]
        assert self.template is not None
        return self.template.parts(example, record.place, tools_of(record))


def encoded(tokenizer: Tokenizer, parts: Sequence[Part]) -> tuple[list[int], list[bool]]:
    """(tokens, trained mask) of the parts of a text."""
    tokens: list[int] = []
    trained: list[bool] = []
    text, start = "", 0  # since the last end-of-text token
    for part, chosen in parts:
        if part is None:
            added, text = [tokenizer.separator], ""
            start = len(tokens) + 1
        else:
            text += part
            whole, before = tokenizer.encode(text), tokens[start:]
            added = whole[len(before) :] if whole[: len(before)] == before else tokenizer.encode(part)
        tokens += added
        trained += [chosen] * len(added)
    return tokens, trained


def _template(tokenizer: Tokenizer) -> ChatTemplate | PlainTemplate:
    if isinstance(tokenizer, ByteTokenizer):
        return PlainTemplate()
    if tokenizer.chat is None:
        raise DataError(
            f"tokenizer '{tokenizer.name}' has no chat template",
            where="data.tokenizer",
            why="the records are chats",
            fix="put chat_template.jinja next to it, or give prompt and completion",
        )
    return tokenizer.chat
