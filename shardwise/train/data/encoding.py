"""From a record to tokens, and which of them are trained on.

A prompt is always cut into the tokens that it has alone, since that is what a model is given when it is used. What
follows keeps the tokens that the whole text has where these begin with the prompt's; where a token of the whole reaches
across the boundary, the completion is cut on its own. So the boundary lies between two tokens, and both sides have the
tokens that generation would see. The price is that every part of a chat is tokenized once for each part after it.

Prompt and completion stand next to each other with nothing between; the token that ends a text follows, and is trained
on, so that the model learns to stop. After a chat stands what its template says and nothing else. No token that begins
a text is added.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.errors import DataError
from shardwise.core.sections import DataSpec
from shardwise.train.data.chat import ChatTemplate, Part, PlainTemplate
from shardwise.train.data.formats import Completed, example_of
from shardwise.train.data.readers import Record
from shardwise.train.data.tokenizer import ByteTokenizer, Tokenizer

_CHATS = ("messages", "sharegpt")


class Encoder:
    """Cuts the records of one format.

    Attributes:
        format: of the records.
        tokenizer: what cuts text.
        template: of chats.
        fingerprint: equal for two encoders exactly when they make the same of every record.
    """

    def __init__(self, spec: DataSpec, name: str, tokenizer: Tokenizer) -> None:
        self.format, self.tokenizer = name, tokenizer
        self.template = _template(tokenizer) if name in _CHATS else None
        self._all = spec.train_on == "all"
        words = self.template.fingerprint if self.template else ""
        self.fingerprint = f"{tokenizer.fingerprint} {name} {self._all} {words}"

    def encode(self, record: Record) -> tuple[list[int], list[bool]]:
        """The tokens, and of each whether it is trained on.

        Raises:
            DataError: the record is malformed, or holds nothing to train on.
        """
        tokens, trained = encoded(self.tokenizer, self._parts(record))
        if self._all:
            trained = [True] * len(tokens)
        if not any(trained[1:]):
            raise DataError("nothing to train on", where=record.place, why=f"it has {len(tokens)} tokens")
        return tokens, trained

    def _parts(self, record: Record) -> list[Part]:
        example = example_of(record, self.format)
        if isinstance(example, Completed):
            return [(example.prompt, False), (example.completion, True), (None, True)]
        assert self.template is not None
        return self.template.parts(example, record.place)


def encoded(tokenizer: Tokenizer, parts: Sequence[Part]) -> tuple[list[int], list[bool]]:
    """The tokens of parts of a text, and of each whether its part is trained on."""
    tokens: list[int] = []
    trained: list[bool] = []
    text, start = "", 0  # of what came since the last end of a text
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
            fix="put chat_template.jinja beside it, or give prompt and completion",
        )
    return tokenizer.chat
