"""A stream of plain text in windows: tokens are made while the run needs them, and not all of them before it.

    document, document, ...  ──tokens──▶  window 0: W sequences │ window 1 │ window 2 │ ...

A window is ``data.stream_window`` tokens of the source in its order, cut into sequences end to end as in a whole cache.
Its sequences are shuffled. Where a window begins is its *cursor*: the epoch, the place of a document in the source, and
the tokens of it that came before. A window follows from its cursor alone, so a run resumes at its window with the same
sequences on any number of ranks, and reads nothing before. Checkpoints hold the cursor.

A window is a token cache (``cache``), which the first process of a machine writes; others wait for it. While a window
is read, the next one is written in a thread. Windows before the last but one are removed, except the first: it ends
with the documents of its part of the source that are held out. In later windows held-out documents are left out.

Refused: one long buffer of shuffled samples, as ``datasets`` has it. Its state is its content.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from shardwise.core.errors import DataError, ShardwiseError
from shardwise.core.units import format_percent
from shardwise.data.cache import (
    DOCUMENT,
    FORMAT,
    Header,
    Outputs,
    TokenCache,
    batches,
    cached,
    data_files,
    lock_of,
)
from shardwise.data.readers import TextPiece
from shardwise.data.source import Place, Source
from shardwise.data.split import Stream
from shardwise.data.tokenizer import Tokenizer, Tokens
from shardwise.recipe.sections import DataSpec


@dataclass(frozen=True)
class Cursor:
    """Where a window begins.

    Attributes:
        epoch: passes over the source that are complete.
        place: of the document with its first token; None is the start of the source.
        skip: tokens of that document before it.
    """

    epoch: int = 0
    place: Place = None
    skip: int = 0


@dataclass(frozen=True)
class _Document:
    epoch: int
    place: Place
    tokens: Tokens
    hash: int


class Windows:
    """The windows of one source.

    Attributes:
        sequences: of a window.
        fingerprint: equal for equal sequences.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, spec: DataSpec, root: Path) -> None:
        assert spec.stream_window is not None
        self._source, self._tokenizer, self._root = source, tokenizer, root
        self.length, self._held_out = spec.sequence_length, spec.held_out
        self.sequences = max(1, spec.stream_window // self.length)
        self._size = self.sequences * self.length
        said = [source.content(), tokenizer.fingerprint, self.length, self._held_out, self._size]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(said).encode())
        self._cursors = {0: Cursor()}
        self._open: dict[int, TokenCache] = {}
        self._ahead: dict[int, threading.Thread] = {}

    def cursor(self, window: int) -> str:
        """The cursor of a window as text, for a checkpoint; "" if it is not known here."""
        found = self._cursors.get(window)
        return "" if found is None else json.dumps([window, asdict(found)])

    def begin_at(self, text: str) -> None:
        """Take the cursor of a window from a checkpoint."""
        if text:
            window, values = json.loads(text)
            self._cursors[int(window)] = Cursor(**values)

    def window(self, number: int) -> TokenCache:
        """The tokens of a window. Writes it if it does not exist, and then those between it and the last known one."""
        if number not in self._open:
            for earlier in range(max(known for known in self._cursors if known <= number), number):
                self._written(earlier)
            self._open[number] = self._written(number)
            self._forget(number)
            self._write_ahead(number + 1)
        return self._open[number]

    def train(self, number: int) -> Stream:
        """The training sequences of a window."""
        ends = np.array([self._size + 1])
        return Stream.of_runs(self.window(number).tokens, np.zeros(1, np.int64), ends, self.length)

    def held_out(self) -> Stream:
        """The held-out sequences."""
        tokens = self.window(0).tokens
        ends = np.array([len(tokens)])
        return Stream.of_runs(tokens, np.array([self._size + 1]), ends, self.length)

    def _written(self, number: int) -> TokenCache:
        writer, cursor = self._ahead.pop(number, None), self._cursors[number]
        if writer is not None:
            writer.join()
        cache = self._cache(number, cursor)
        self._cursors[number + 1] = Cursor(**json.loads(cache.header.cursor or "{}"))
        return cache

    def _cache(self, number: int, cursor: Cursor) -> TokenCache:
        parts = [FORMAT, "window", self._tokenizer.fingerprint, self._source.identity(), self._size]
        what = f"window {number} of {self._source.name} with {self._tokenizer.name}"
        keyed = [*parts, self.length, self._held_out, number == 0, asdict(cursor)]
        return cached(keyed, self._root, what, lambda work: self._write(work, cursor, keep_held=number == 0))

    def _write_ahead(self, number: int) -> None:
        cursor = self._cursors[number]

        def write() -> None:
            with suppress(ShardwiseError):  # it comes again when the window is opened
                self._cache(number, cursor)

        self._ahead[number] = threading.Thread(target=write, daemon=True, name=f"window {number}")
        self._ahead[number].start()

    def _forget(self, number: int) -> None:
        """Close the windows before the last but one and remove them. Other ranks that still map one keep its pages."""
        for old in [each for each in self._open if 0 < each < number - 1]:
            folder = self._open.pop(old).folder
            shutil.rmtree(folder, ignore_errors=True)
            lock_of(folder).unlink(missing_ok=True)

    def _write(self, work: Path, cursor: Cursor, keep_held: bool) -> Header:
        """Write a window's two data files; return the header, with the cursor of the next window."""
        dtype = self._tokenizer.dtype.newbyteorder("<")
        held: list[_Document] = []
        missing, documents, skip = self._size + 1, 0, cursor.skip
        with data_files(work, ("tokens.bin", "documents.bin")) as outputs:
            for document in self._documents(cursor):
                if document.hash < int(self._held_out * 2.0**64):
                    held += [document] if keep_held and document.epoch == 0 else []
                    continue
                taken = document.tokens[skip : skip + missing]
                missing, documents = missing - len(taken), documents + 1
                _append(outputs, taken.astype(dtype, copy=False), self._size + 1 - missing, document.hash)
                if not missing:
                    break
                skip = 0
            following = Cursor(document.epoch, document.place, skip + len(taken) - 1)
            size = self._size + 1
            for document in held:
                size += len(document.tokens)
                _append(outputs, document.tokens.astype(dtype, copy=False), size, document.hash)
        self._require_held(size, keep_held)
        return Header(
            format=FORMAT,
            source=self._source.name,
            tokenizer=self._tokenizer.name,
            dtype=dtype.str,
            tokens=size,
            documents=documents + len(held),
            empty_documents=0,
            digest=outputs.digest,
            cursor=json.dumps(asdict(following)),
        )

    def _require_held(self, size: int, keep_held: bool) -> None:
        if self._held_out and keep_held and size < self._size + 2 + self.length:
            raise DataError(
                "no held-out sequence in the first window of the stream",
                where=self._source.name,
                why=f"{format_percent(self._held_out, 1)} of its documents are held out,"
                f" and a sequence is {self.length + 1:,} tokens",
                fix="raise data.held_out or data.stream_window, or set data.held_out to 0",
            )

    def _documents(self, cursor: Cursor) -> Iterator[_Document]:
        """The documents from a cursor on, without end: after the last one comes the first."""
        epoch, place = cursor.epoch, cursor.place
        while True:
            found = False
            for document in self._pass(epoch, place):
                found = True
                yield document
            if not found and place is None:
                raise DataError(
                    "no text in the data source",
                    where=self._source.name,
                    why="all its documents are empty",
                    fix="check data.source",
                )
            epoch, place = epoch + 1, None

    def _pass(self, epoch: int, place: Place) -> Iterator[_Document]:
        """The documents of one pass that are not empty, tokenized some MiB at a time."""
        parts: list[Tokens] = []
        text, tokenizer = xxhash.xxh3_64(), self._tokenizer
        separator = np.array([tokenizer.separator], dtype=tokenizer.dtype)
        begin = [] if tokenizer.begin is None else [np.array([tokenizer.begin], dtype=tokenizer.dtype)]
        for several in batches(self._source.pieces_from(place), _size_of):
            encoded = tokenizer.encode_pieces([piece.data for piece, _ in several])
            for (piece, behind), tokens in zip(several, encoded, strict=True):
                parts += [tokens] if len(tokens) else []
                text.update(piece.data)
                if not piece.ends:
                    continue
                if parts:
                    whole = np.concatenate([*begin, *parts, separator])
                    yield _Document(epoch, place, whole, text.intdigest())
                parts, place = [], behind
                text.reset()


def _append(outputs: Outputs, tokens: Tokens, end: int, text: int) -> None:
    outputs.append(tokens, np.array([(end, text)], dtype=DOCUMENT))


def _size_of(found: tuple[TextPiece, Place]) -> int:
    return len(found[0].data)
