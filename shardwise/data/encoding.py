"""From a record to its tokens and its trained mask.

A text is tokenized as a whole, so that training has the tokens that the whole text has. A token is trained on if a
character of it is in a trained span; so a token that crosses the border of prompt and completion is. transformers' mask
of an assistant's tokens follows the same rule.

The completion follows the prompt directly. The end-of-text token comes last and is trained on, so the model learns to
stop; a completion that has it already gets no second one. A chat begins and ends as its template says. Any other record
begins with the tokenizer's `begin`, if it has one and the text does not.

Under `data.too_long: split`, a chat that is longer than a sequence is divided between two exchanges. Each part begins
with the system turn. An exchange that is too long alone is cut like any other record (`completions`).

The token cache (`cache`) has whole records, one after the other, and the mask as one more file. Sequence length and
packing are applied when it is opened, so another `sequence_length` needs no new tokenization.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardwise.core.errors import DataError
from shardwise.data.cache import TokenCache, cached, data_files
from shardwise.data.cache_header import CACHE_FORMAT, EXAMPLE, Header
from shardwise.data.chat import ChatTemplate
from shardwise.data.formats import KEYS, TEXT_KEYS, Chat, Completed, Example, example_of
from shardwise.data.readers import Record
from shardwise.data.source import Source
from shardwise.data.spans import TextSpan
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.turns import TRAINED_KEYS, Turn
from shardwise.recipe.sections import DataSpec

ENCODING_VERSION = 5
"""Of the rules in this file and in `chat`: another version encodes some records otherwise."""

_RECORDS_AT_A_TIME = 1024
_PERHAPS_CHATS = ("prompt", "preference", "unpaired")
"""Formats of chats or texts."""


@dataclass(frozen=True)
class Encoded:
    """A record, or a part of a chat: its tokens and the mask of those that the loss counts.

    Attributes:
        endless: how many of its trained answers do not end with a token that ends a turn.
        shared, value: of preferences (`cache_header.PREFERENCE`).
    """

    tokens: list[int]
    trained: list[bool]
    endless: int = 0
    shared: int = 0
    value: float = 0.0


@dataclass(frozen=True)
class _Text:
    """A text with its trained spans; `ends` adds the end-of-text token, which is trained on if a span is."""

    text: str
    spans: tuple[TextSpan, ...]
    ends: bool = False
    endless: int = 0


class Encoder:
    """Tokenizes the records of one format.

    Args:
        pairs: frame prompt and completion as two texts, for encoder-decoder models (pairs.py).

    Attributes:
        format: format of the records.
        tokenizer: tokenizer of the text.
        template: template of chats, or None.
        chats: whether a record so far was a chat.
        keys: the fields of a record that it reads, or that the template reads.
        unread: names of fields, and of keys of turns as `turn.KEY`, that no record so far had a reader for.
        documents: number of documents of a record that is not divided.
        row: type of a document's row in the cache.
        empty: number of completions so far that are empty.
    """

    documents = 1
    row = EXAMPLE
    empty = 0

    def __init__(self, spec: DataSpec, name: str, tokenizer: Tokenizer, pairs: bool = False) -> None:
        self.format = name
        self.tokenizer = tokenizer
        self.template = tokenizer.chat
        self._all = spec.train_on == "all"
        self._pairs = pairs
        self._today = date.fromisoformat(spec.date) if spec.date else date.today()
        self._length = spec.sequence_length if spec.too_long == "split" else None
        reads: frozenset[str] = frozenset()
        if name != "alpaca" and self.template is not None:
            # A prompt may be a chat, but a template that does not compile matters only to chats.
            with suppress(DataError) if name in _PERHAPS_CHATS else nullcontext():
                reads = self.template.variables
        self.keys = KEYS[name] | reads
        self.unread: set[str] = set()
        self.chats = False
        parts = [ENCODING_VERSION, tokenizer.fingerprint, name, self._all, pairs, self._length]
        if name != "alpaca" and self.template is not None:
            parts += [self.template.fingerprint, str(self._today) if self.template.dated else ""]
        self.fingerprint = repr(parts)

    def encode(self, record: Record) -> tuple[list[int], list[bool]]:
        """(tokens, trained mask) of a record that is not divided.

        Raises:
            DataError: the record is malformed, or has no trained token.
        """
        encoded = self._encoded([self._example(record)], [record.where])[0]
        if not any(encoded.trained[1:]):
            why = f"it has {len(encoded.tokens)} tokens"
            raise DataError("nothing to train on", where=record.where, why=why)
        return encoded.tokens, encoded.trained

    def nothing_trained(self, records: int) -> tuple[str, str]:
        """The reason that no record has a trained token, and the fix.

        Args:
            records: number of records so far.
        """
        if self.chats:
            why = f"none of the answers of {records:,} records is trained on"
            return why, f"give answers a {', '.join(TRAINED_KEYS)} that is not 0"
        return f"nothing is trained on in any of {records:,} records", "check data.source"

    def facts(self) -> dict[str, Any]:
        """What the records so far add to the header of the cache."""
        return {}

    def encode_all(self, records: Sequence[Record]) -> Iterator[list[Encoded]]:
        """The parts of each record, in order. Parts in which nothing is trained on are left out.

        Raises:
            DataError: a record is malformed.
        """
        examples = [self._example(record) for record in records]
        wholes = self._encoded(examples, [record.where for record in records])
        for record, example, whole in zip(records, examples, wholes, strict=True):
            parts = [whole]
            if (
                self._length is not None
                and isinstance(example, Chat)
                and len(whole.tokens) > self._length + 1
            ):
                parts = list(self._divided(example, record.where, len(whole.tokens)))
            yield [part for part in parts if any(part.trained[1:])]

    def _example(self, record: Record) -> Example:
        example = example_of(record, self.format)
        self._note(example, record, TEXT_KEYS[self.format])
        return example

    def _note(self, example: Example, record: Record, read: frozenset[str]) -> None:
        """Note the fields of a record that are not read; a text reads the fields `read`. Raises DataError."""
        if isinstance(example, Chat):
            self.chats = True
            if self._pairs:
                why = "an encoder-decoder takes a prompt and a completion as texts"
                raise DataError("a chat under the seq2seq objective", where=record.where, why=why)
            self.unread |= require_template(self.tokenizer).unread(example)
            if self._all:
                self.unread |= {
                    f"turn.{turn.weight_key}"
                    for turn in example.turns
                    if turn.weight_key and turn.role == "assistant"
                }
        else:
            present = {key for key, value in record.fields.items() if value not in (None, "", [])}
            self.unread |= present - read

    def _encoded(self, examples: Sequence[Example], origins: Sequence[str]) -> list[Encoded]:
        if self._pairs:
            return [self._framed(example) for example in examples]
        # All texts of a group go to the tokenizer at once, which may distribute them over the cores.
        texts = [list(self._texts(example, where)) for example, where in zip(examples, origins, strict=True)]
        tokenized = self.tokenizer.encode_spans(
            [(text.text, text.spans) for parts in texts for text in parts]
        )
        encoded: list[Encoded] = []
        for example, parts in zip(examples, texts, strict=True):
            tokens: list[int] = []
            trained: list[bool] = []
            for text in parts:
                ids, mask = next(tokenized)
                tokens += ids
                trained += mask
                if text.ends and ids[-1:] != [self.tokenizer.separator]:
                    tokens.append(self.tokenizer.separator)
                    trained.append(bool(text.spans))
            # ``begun`` returns the same list if the tokenizer has no such token, or the text wrote it itself.
            if isinstance(example, Completed) and (whole := self.tokenizer.begun(tokens)) is not tokens:
                tokens = whole
                trained = [False, *trained]
            if self._all:
                trained = [True] * len(tokens)
            encoded.append(Encoded(tokens, trained, sum(text.endless for text in parts)))
        return encoded

    def _texts(self, example: Example, where: str) -> Iterator[_Text]:
        if isinstance(example, Completed):
            for number, (prompt, completion) in enumerate(example.pairs):
                spans = ((len(prompt), len(prompt) + len(completion)),)
                trained = not example.only_last or number == len(example.pairs) - 1
                yield _Text(prompt + completion, spans if trained else (), ends=True)
        elif self._all:
            yield _Text(require_template(self.tokenizer).checked(example, where, self._today), ())
        else:
            written = require_template(self.tokenizer).written(example, where, self._today)
            yield _Text(written.text, written.trained, endless=written.endless)

    def _framed(self, example: Example) -> Encoded:
        assert isinstance(example, Completed)
        prompt = self.tokenizer.framed(example.prompt)
        completion = self.tokenizer.framed(example.completion)
        return Encoded(prompt + completion, [False] * len(prompt) + [True] * len(completion))

    def _divided(self, chat: Chat, where: str, tokens: int) -> Iterator[Encoded]:
        """Parts of a chat of `tokens` tokens: as many exchanges as fit into a sequence, at least one."""
        assert self._length is not None
        opening = tuple(turn for turn in chat.turns[:2] if turn.role in ("system", "developer"))
        exchanges = _exchanges(chat.turns[len(opening) :])
        # The search renders and tokenizes at every count it tries, so it stays near the likely one.
        usual = max(1, len(exchanges) * self._length // tokens)  # exchanges in a part, by their mean length

        def part(count: int) -> Encoded:
            turns = itertools.chain(opening, *exchanges[:count])
            return self._encoded([replace(chat, turns=tuple(turns))], [where])[0]

        while exchanges:
            # More exchanges give more tokens, so a binary search finds the most that fit (n + 1 tokens are n inputs).
            counts = range(1, min(len(exchanges), 2 * usual) + 1)
            count = max(1, bisect_right(counts, self._length + 1, key=lambda count: len(part(count).tokens)))
            yield part(count)
            del exchanges[:count]


def _exchanges(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns from each user's turn to the next one."""
    exchanges: list[list[Turn]] = []
    for turn in turns:
        if turn.role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(turn)
    return exchanges


def require_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's chat template. Raises DataError if there is none."""
    if tokenizer.chat is None:
        raise DataError(
            f"tokenizer '{tokenizer.name}' has no chat template",
            where="data.tokenizer",
            why="the records are chats",
            fix="put chat_template.jinja next to it, or give the prompt as a text in 'prompt' alone",
        )
    return tokenizer.chat


# -- the token cache of records


def open_record_cache(source: Source, encoder: Encoder, root: Path, verify: bool = False) -> TokenCache:
    """The cache of a source's records below `root`; built if it does not exist.

    Args:
        verify: read all of it, and build it again if a bit has changed.

    Raises:
        DataError: a record is malformed, or no record has a trained token.
        ResourceError: `root` cannot be written, or the disk is full.
    """
    parts = [CACHE_FORMAT, "examples", encoder.fingerprint, source.identity()]
    what = f"{source.name} ({encoder.format}) with {encoder.tokenizer.name}"
    return cached(parts, root, what, lambda work: _write_records(source, encoder, work), verify)


def _write_records(source: Source, encoder: Encoder, work: Path) -> Header:
    dtype = encoder.tokenizer.dtype.newbyteorder("<")
    end = documents = trained_tokens = records = untrained = divided = endless = 0
    keys = sorted(encoder.keys)
    with data_files(work, ("tokens.bin", "documents.bin", "trained.bin")) as outputs:
        remaining = source.records(keys)
        while group := list(itertools.islice(remaining, _RECORDS_AT_A_TIME)):
            parts: list[Encoded] = []
            for encoded in encoder.encode_all(group):
                parts += encoded
                records += 1
                if not encoded:
                    untrained += 1
                if len(encoded) > encoder.documents:
                    divided += 1
            rows = []
            for part in parts:
                end += len(part.tokens)
                # From 1: the first token is no target. The columns that the encoder's rows lack are the last ones.
                row = (end, _hash_of(part), part.trained.index(True, 1), part.shared, part.value)
                rows.append(row[: len(encoder.row.fields or ())])
            tokens = np.fromiter(itertools.chain.from_iterable(part.tokens for part in parts), dtype)
            trained = np.fromiter(itertools.chain.from_iterable(part.trained for part in parts), np.bool_)
            outputs.append(tokens, np.array(rows, encoder.row), trained)
            documents += len(parts)
            trained_tokens += int(trained.sum())
            endless += sum(part.endless for part in parts)
    if not documents:
        why = "it has no records"
        fix = "check data.source"
        if records:
            why, fix = encoder.nothing_trained(records)
        raise DataError("nothing to train on in the data source", where=source.name, why=why, fix=fix)
    return Header(
        format=CACHE_FORMAT,
        source=source.name,
        tokenizer=encoder.tokenizer.name,
        dtype=dtype.str,
        tokens=end,
        documents=documents,
        empty_documents=encoder.empty,
        digest=outputs.digest,
        trained_tokens=trained_tokens,
        chats=encoder.chats,
        untrained=untrained,
        divided=divided,
        endless=endless,
        **encoder.facts(),
        unread=", ".join(sorted(encoder.unread | (source.fields() - encoder.keys))),
    )


def _hash_of(record: Encoded) -> int:
    digest = xxhash.xxh3_64(np.array(record.tokens, "<u8").tobytes())
    digest.update(np.array(record.trained, np.bool_).tobytes())
    return digest.intdigest()
