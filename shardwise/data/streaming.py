"""A stream of plain text in windows: tokens are made while the run needs them, and not all of them before it.

    document, document, ...  ──tokens──▶  window 0: W sequences │ window 1 │ window 2 │ ...

A window is ``data.stream_window`` tokens of the source in its order, cut into sequences end to end as in a whole cache.
Its sequences are shuffled. Where a window begins is its *cursor*: the epoch, the position of a document in the source,
and the tokens of it that came before. A window follows from its cursor alone. So a run resumes at its window with the
same sequences on any number of ranks, and reads nothing before. Checkpoints hold the cursor.

A window is a token cache (``cache``), which the first process of a machine writes; others wait for it. While a window
is read, the next one is written in a thread. Windows before the last but one are removed, except the first: it ends
with the documents of its part of the source that are held out. In later windows held-out documents are left out.

Refused: one long buffer of shuffled samples, as ``datasets`` has it. Its state is its content.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from shardwise.core.errors import DataError, ShardwiseError
from shardwise.core.units import format_percent
from shardwise.data.cache import TokenCache, cached, data_files, grouped, remove_cache
from shardwise.data.cache_header import CACHE_FORMAT, DOCUMENT, Header, json_hash
from shardwise.data.dataset import MaskedTokens, OpenedSource, Sample, Splits, TokenDataset, padding_row
from shardwise.data.source import SourcePosition
from shardwise.data.text import PlainText, Stream, document_starts, require_maskable
from shardwise.data.tokenizer import Tokens

ENDLESS = 1 << 44
"""The number of samples of a stream: more than any run reads, and small enough to add up in int64."""


@dataclass(frozen=True)
class Cursor:
    """Where a window begins.

    Attributes:
        epoch: passes over the source that are complete.
        place: position of the document with its first token; None is the start of the source. Checkpoints and keys of
            caches have the names of these fields.
        skip: tokens of that document before it.
    """

    epoch: int = 0
    place: SourcePosition = None
    skip: int = 0


@dataclass(frozen=True)
class _Document:
    epoch: int
    position: SourcePosition
    tokens: Tokens
    hash: int


class StreamedText(TokenDataset):
    """The training sequences of a stream: sample n is sequence n mod W of window n // W.

    Attributes:
        epoch: W, the sequences of a window.
        fingerprint: equal for equal sequences.
    """

    endless = True

    def __init__(self, opened: OpenedSource) -> None:
        spec = opened.spec
        source = opened.source
        tokenizer = opened.tokenizer
        assert spec.stream_window is not None
        self.tokenizer = tokenizer
        self.length = spec.sequence_length
        self._opened = opened
        self._source = source
        self._held_out = spec.held_out
        self._sequences = max(1, spec.stream_window // self.length)
        self._size = self._sequences * self.length
        parts = [source.content(), tokenizer.fingerprint, self.length, self._held_out, self._size]
        self.fingerprint = json_hash(parts)
        self._cursors = {0: Cursor()}
        self._open: dict[int, PlainText] = {}
        self._ahead: dict[int, threading.Thread] = {}

    # -- samples

    def __len__(self) -> int:
        return ENDLESS

    @property
    def epoch(self) -> int:
        return self._sequences

    def sample(self, index: int) -> Sample:
        number, sequence = divmod(index, self._sequences)
        return self.window(number).sample(sequence)

    def padding(self) -> Sample:
        return padding_row(self.length, self.tokenizer.separator, self._opened.spec.packing)

    def text(self, index: int) -> str:
        number, sequence = divmod(index, self._sequences)
        return self.window(number).text(sequence)

    def release(self) -> None:
        for window in self._open.values():
            window.release()

    @property
    def cache(self) -> TokenCache:  # type: ignore[override]
        """That of the first window."""
        return self.window(0).cache

    @property
    def records(self) -> int:
        """The first window is shown."""
        return self._sequences

    def record(self, index: int) -> tuple[list[int], list[bool]]:
        return self.window(0).record(index)

    def documents(self, index: int) -> list[MaskedTokens]:
        return self.window(0).documents(index)

    def held_out(self) -> PlainText:
        """The held-out sequences, which follow those of the first window in its cache."""
        first = self.window(0)
        tokens = first.cache.tokens
        stream = Stream.of_runs(tokens, np.array([self._size + 1]), np.array([len(tokens)]), self.length)
        return replace(first, stream=stream)

    # -- windows

    def cursor(self, consumed: int) -> tuple[str, ...]:
        """The cursor of the window after `consumed` samples; "" if it is not known here."""
        window = consumed // self._sequences
        cursor = self._cursors.get(window)
        return ("" if cursor is None else json.dumps([window, asdict(cursor)]),)

    def begin_at(self, cursor: Sequence[str]) -> None:
        for text in filter(None, cursor):
            window, values = json.loads(text)
            self._cursors[int(window)] = Cursor(**values)

    def window(self, number: int) -> PlainText:
        """The sequences of a window. If it does not exist, it and those after the last known one are written."""
        if number not in self._open:
            # A window's cursor is in the header of the window before it.
            for earlier in range(max(known for known in self._cursors if known <= number), number):
                self._written(earlier)
            cache = self._written(number)
            # One more token than the sequences have inputs: the last label. The held-out documents come after it.
            stream = Stream.of_runs(
                cache.tokens, np.zeros(1, np.int64), np.array([self._size + 1]), self.length
            )
            starts = document_starts(cache) if self._opened.spec.packing else None
            self._open[number] = PlainText(stream, cache, self.tokenizer, starts, self._opened.kind)
            self._forget(number)
            self._write_ahead(number + 1)
        return self._open[number]

    def _written(self, number: int) -> TokenCache:
        writer = self._ahead.pop(number, None)
        cursor = self._cursors[number]
        if writer is not None:  # the cache is there when it ends
            writer.join()
        cache = self._cache(number, cursor)
        self._cursors[number + 1] = Cursor(**json.loads(cache.header.cursor or "{}"))
        return cache

    def _cache(self, number: int, cursor: Cursor) -> TokenCache:
        is_first = number == 0
        parts = [CACHE_FORMAT, "window", self.tokenizer.fingerprint, self._source.identity(), self._size]
        parts += [self.length, self._held_out, is_first, asdict(cursor)]
        what = f"window {number} of {self._source.name} with {self.tokenizer.name}"
        return cached(parts, self._opened.root, what, lambda work: self._write_window(work, cursor, is_first))

    def _write_ahead(self, number: int) -> None:
        cursor = self._cursors[number]

        def write() -> None:
            with suppress(ShardwiseError):  # it comes again when the window is opened
                self._cache(number, cursor)

        self._ahead[number] = threading.Thread(target=write, daemon=True, name=f"window {number}")
        self._ahead[number].start()

    def _forget(self, number: int) -> None:
        """Close the windows before the last but one and remove them. Other ranks that still map one keep its pages."""
        for old in [window for window in self._open if 0 < window < number - 1]:
            remove_cache(self._open.pop(old).cache.folder)

    def _write_window(self, work: Path, cursor: Cursor, is_first: bool) -> Header:
        """Write a window's two data files; return the header, with the cursor of the next window."""
        dtype = self.tokenizer.dtype.newbyteorder("<")
        held_out: list[_Document] = []
        missing = self._size + 1
        documents = 0
        skip = cursor.skip
        with data_files(work, ("tokens.bin", "documents.bin")) as outputs:

            def append(tokens: Tokens, end: int, text_hash: int) -> None:
                outputs.append(tokens.astype(dtype, copy=False), np.array([(end, text_hash)], dtype=DOCUMENT))

            for document in self._documents(cursor):
                if self._holds_out(document):
                    if (
                        is_first and document.epoch == 0
                    ):  # in a short source the first window has several passes
                        held_out.append(document)
                    continue
                # The last document of a window is divided: the next window skips what this one took.
                taken = document.tokens[skip : skip + missing]
                missing -= len(taken)
                documents += 1
                append(taken, self._size + 1 - missing, document.hash)
                if not missing:
                    break
                skip = 0  # only the first document begins before the window
            # The last token is a label here, and the first input of the next window.
            following = Cursor(document.epoch, document.position, skip + len(taken) - 1)
            size = self._size + 1
            for document in held_out:
                size += len(document.tokens)
                append(document.tokens, size, document.hash)
        if is_first and self._held_out and size < self._size + 2 + self.length:
            raise DataError(
                "no held-out sequence in the first window of the stream",
                where=self._source.name,
                why=f"{format_percent(self._held_out, 1)} of its documents are held out,"
                f" and a sequence is {self.length + 1:,} tokens",
                fix="raise data.held_out or data.stream_window, or set data.held_out to 0",
            )
        return Header(
            format=CACHE_FORMAT,
            source=self._source.name,
            tokenizer=self.tokenizer.name,
            dtype=dtype.str,
            tokens=size,
            documents=documents + len(held_out),
            empty_documents=0,
            digest=outputs.digest,
            cursor=json.dumps(asdict(following)),
        )

    def _documents(self, cursor: Cursor) -> Iterator[_Document]:
        """The documents from a cursor on, without end: after the last one comes the first."""
        epoch = cursor.epoch
        position = cursor.place
        while True:
            empty = True
            trained = False
            for document in self._one_pass(epoch, position):
                empty = False
                trained = trained or not self._holds_out(document)
                yield document
            # A pass from the start shows all documents: another one would find nothing else.
            if not trained and position is None:
                raise self._no_text(empty)
            epoch += 1
            position = None

    def _no_text(self, empty: bool) -> DataError:
        """The error for a source without documents to train on; ``empty``: all its documents are empty."""
        what = "no text to train on in the data source"
        why = f"all its documents are held out: {format_percent(self._held_out, 1)} of them shall be"
        fix = "lower data.held_out, or give more documents"
        if empty:
            what = "no text in the data source"
            why = "all its documents are empty"
            fix = "check data.source"
        return DataError(what, where=self._source.name, why=why, fix=fix)

    def _holds_out(self, document: _Document) -> bool:
        """As `text.split_text`."""
        return document.hash < int(self._held_out * 2.0**64)

    def _one_pass(self, epoch: int, position: SourcePosition) -> Iterator[_Document]:
        """The documents of one pass that are not empty, tokenized some MiB at a time."""
        parts: list[Tokens] = []
        text = xxhash.xxh3_64()
        tokenizer = self.tokenizer
        separator = np.array([tokenizer.separator], dtype=tokenizer.dtype)
        begin = [] if tokenizer.begin is None else [np.array([tokenizer.begin], dtype=tokenizer.dtype)]
        # ``position`` is that of the document being read; with its last piece comes the one behind it.
        pieces = self._source.pieces_from(position)
        for group in grouped(pieces, lambda pair: len(pair[0].data)):
            encoded = tokenizer.encode_pieces([piece.data for piece, _ in group])
            for (piece, behind), tokens in zip(group, encoded, strict=True):
                if len(tokens):
                    parts.append(tokens)
                text.update(piece.data)
                if not piece.ends:
                    continue
                if parts:
                    # A text that has these tokens already gets no second ones, as in a whole cache.
                    if parts[0][0] != tokenizer.begin:
                        parts = [*begin, *parts]
                    if parts[-1][-1] != tokenizer.separator:
                        parts.append(separator)
                    yield _Document(epoch, position, np.concatenate(parts), text.intdigest())
                parts = []
                position = behind
                text.reset()


def open_stream(opened: OpenedSource) -> Splits[TokenDataset]:
    """A source in windows. Raises DataError if its first window has no held-out sequence."""
    require_maskable(opened)
    train = StreamedText(opened)
    spec = opened.spec
    held_out = train.held_out()

    def sentences() -> list[str]:
        return [
            f"{spec.source}: plain text, streamed in windows of {train.epoch:,} sequences of"
            f" {spec.sequence_length:,} tokens",
            f"{len(held_out):,} sequences held out, of the documents of the first window",
        ]

    return Splits(train, held_out, train.fingerprint, sentences)
