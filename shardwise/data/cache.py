"""The token cache: one process tokenizes a source once, into a file that every rank memory-maps.

A cache is a folder `KEY/` of three files: `tokens.bin` (all documents, each followed by the separator, and after the
tokenizer's BOS token if it adds one, in the narrowest unsigned type, little-endian), `documents.bin` (for each document
its end and a hash of its text) and `header.json`. KEY is a hash of the inputs: the source's identity (paths, sizes,
modification times), the tokenizer's fingerprint and the version of this format. The header's `digest` is a hash of the
data files. It does not depend on paths and times, so a checkpoint compares the digest. A cache of records with
completions has a fourth file, `trained.bin`: one byte per token, 1 for tokens that the loss counts (`encoding`).

The cache is written in one pass with bounded memory to `KEY.*.tmp/`. Every file and folder is synced, then the folder
is renamed, so a folder named KEY is complete. Other processes wait on a lock (flock, which the kernel releases when the
holder dies) and then use the result. The next builder removes the rest of a killed one. Opening a cache checks sizes,
and a damaged cache is built again.

`verified_cache` also compares the content with the digest, at several GB/s. A run does so once at its start, in the
launcher; its ranks then open the cache without reading it all. The header ends with its own hash.

One file per source needs one memory map, and one slice per sample. In return, a source that grew is tokenized again
from its start. Nothing is evicted; delete the folder at any time.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import filelock
import numpy as np
import numpy.typing as npt
import xxhash

from shardwise.core.atomic_file import sync_folder
from shardwise.core.errors import DataError, ResourceError
from shardwise.core.file_hash import hash_of
from shardwise.data.cache_header import CACHE_FORMAT, DOCUMENT, Header, json_hash, sealed, unsealed
from shardwise.data.readers import TextPiece
from shardwise.data.source import Source
from shardwise.data.tokenizer import Tokenizer, Tokens

T = TypeVar("T")

_BATCH_BYTES = 1 << 22
_BATCH_PIECES = 4096

log = logging.getLogger(__name__)


class TokenCache:
    """A complete cache on the disk.

    Attributes:
        header: counts and digest.
        folder: where it is.
        tokens: all tokens, [header.tokens], mapped read-only.
        trained: 1 for each token that the loss counts, [header.tokens] bytes, mapped; empty for plain text.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.header = header
        self.folder = folder
        # NumPy's views keep the maps open; the list is for ``release``.
        self._maps: list[mmap.mmap] = []
        self.tokens: Tokens = np.frombuffer(self._mapped("tokens.bin"), dtype=header.dtype)
        self._documents = self._mapped("documents.bin")  # now: another run may remove a window of a stream
        self.trained: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        if header.trained_tokens is not None:
            self.trained = np.frombuffer(self._mapped("trained.bin"), dtype=np.bool_)

    def _mapped(self, name: str) -> mmap.mmap:
        with (self.folder / name).open("rb") as file:
            self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[-1]

    def documents(self) -> npt.NDArray[np.void]:
        """A row per document, read into memory: 16 to 40 bytes each (`cache_header`)."""
        return np.frombuffer(self._documents, dtype=self.header.row).copy()

    def document(self, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The tokens from `start` to `end`, and which of them the loss counts."""
        return self.tokens[start:end].astype(np.int64), self.trained[start:end]

    def release(self) -> None:
        """Unmap the touched pages; they stay in the system's page cache.

        Mapped pages count in the process's high-water mark, which must measure training only.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)


def open_cache(source: Source, tokenizer: Tokenizer, root: Path, verify: bool = False) -> TokenCache:
    """The cache of `source` and `tokenizer` below `root`; built if it does not exist.

    Args:
        verify: read all of it, and build it again if a bit has changed.

    Raises:
        DataError: the source is malformed or holds no text.
        ResourceError: `root` cannot be written, or the disk is full.
    """
    parts = [CACHE_FORMAT, tokenizer.fingerprint, source.identity()]
    log_as = f"{source.name} with {tokenizer.name}"
    return cached(parts, root, log_as, lambda work: _write_text(source, tokenizer, work), verify)


def cached(
    parts: object, root: Path, what: str, write: Callable[[Path], Header], verify: bool = False
) -> TokenCache:
    """The cache with key `parts`. If it does not exist, `write` writes its data files to a folder."""
    folder = root / json_hash(parts)
    # A complete cache needs no lock, so a read-only folder of caches works.
    if cache := _complete_cache(folder, verify):
        return cache
    with _writing_cache(root):
        root.mkdir(parents=True, exist_ok=True)
    with _locked(_lock_of(folder)):
        if cache := _complete_cache(folder, verify):  # another process built it while this one waited
            return cache
        log.info("tokenizing %s into %s", what, folder)
        _build(write, folder)
        if built := _complete_cache(folder):
            return built
    raise ResourceError("the token cache vanished", where=str(folder), why="another process removed it")


def _lock_of(folder: Path) -> Path:
    """The file that its writer locks."""
    return folder.with_name(f"{folder.name}.lock")


def remove_cache(folder: Path) -> None:
    """Remove a cache that no process writes now, or has just written and not opened.

    Its lock stays: with a new file of that name, two processes could write the same cache.
    """
    with suppress(filelock.Timeout, OSError), filelock.FileLock(_lock_of(folder), timeout=0):
        shutil.rmtree(folder, ignore_errors=True)


def _complete_cache(folder: Path, verify: bool = False) -> TokenCache | None:
    """The cache in `folder`, or None if it is missing or damaged."""
    try:
        header = unsealed((folder / "header.json").read_bytes())
        if all((folder / name).stat().st_size == size for name, size in header.sizes.items()):
            if not verify or _joint_digest(hash_of(folder / name) for name in header.sizes) == header.digest:
                return TokenCache(folder, header)
            log.warning("the token cache %s has changed on the disk; building it again", folder)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        pass  # missing, or not written by `_build`
    return None


def _joint_digest(digests: Iterable[str]) -> str:
    """The hash of a cache's data files, from the hash of each."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(path)
    with _writing_cache(path):
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            log.info("another process is tokenizing this data; waiting for it (%s)", path)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(write: Callable[[Path], Header], folder: Path) -> None:
    """Write the cache to a temporary folder and rename it to `folder`. The caller holds the lock."""
    with _writing_cache(folder):
        # A killed builder left them: this process has the lock, so no other writes there.
        for left_over in folder.parent.glob(f"{folder.name}.*.tmp"):
            shutil.rmtree(left_over)
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        header = write(work)
        with _writing_cache(folder):
            with (work / "header.json").open("wb") as file:
                file.write(sealed(header))
                _sync(file)
            sync_folder(work)  # before the rename: a folder named KEY must be complete after a power cut too
            if folder.exists():  # damaged: `_complete_cache` refused it
                shutil.rmtree(folder)
            work.rename(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_text(source: Source, tokenizer: Tokenizer, work: Path) -> Header:
    """Tokenize `source` into the two data files of `work`; return the header."""
    with data_files(work, ("tokens.bin", "documents.bin")) as outputs:
        writer = _Writer(tokenizer, outputs)
        for pieces in grouped(source.pieces(), lambda piece: len(piece.data)):
            writer.write(pieces)
    if not writer.documents:
        raise DataError(
            "no text in the data source",
            where=source.name,
            why="all its documents are empty",
            fix="check data.source",
        )
    return Header(
        format=CACHE_FORMAT,
        source=source.name,
        tokenizer=tokenizer.name,
        dtype=tokenizer.dtype.newbyteorder("<").str,
        tokens=writer.tokens,
        documents=writer.documents,
        empty_documents=writer.empty_documents,
        digest=outputs.digest,
    )


class Outputs:
    """Data files that are written and hashed together."""

    def __init__(self, files: Sequence[IO[bytes]]) -> None:
        self._outputs = [(file, xxhash.xxh3_128()) for file in files]

    @property
    def digest(self) -> str:
        """Hash of the content of all files."""
        return _joint_digest(digest.hexdigest() for _, digest in self._outputs)

    def append(self, *chunks: npt.NDArray[Any]) -> None:
        """Append one chunk to each file."""
        for (file, digest), chunk in zip(self._outputs, chunks, strict=True):
            digest.update(chunk.tobytes())
            with _writing_cache(Path(file.name)):
                file.write(chunk.tobytes())


@contextmanager
def data_files(work: Path, names: Sequence[str]) -> Iterator[Outputs]:
    """Open data files in the folder `work`; sync them at the end. Raises ResourceError if the disk is full."""
    with _writing_cache(work):
        files = [(work / name).open("wb") for name in names]
    try:
        yield Outputs(files)
        with _writing_cache(work):
            for file in files:
                _sync(file)
    finally:
        for file in files:
            _close_file(file)


class _Writer:
    """Appends documents to the two data files and counts them."""

    def __init__(self, tokenizer: Tokenizer, outputs: Outputs) -> None:
        self.tokens = self.documents = self.empty_documents = 0
        self._tokenizer = tokenizer
        self._outputs = outputs
        self._dtype = tokenizer.dtype.newbyteorder("<")
        self._separator = np.array([tokenizer.separator], dtype=self._dtype)
        begin = tokenizer.begin
        self._begin = None if begin is None else np.array([begin], dtype=self._dtype)
        self._start = 0  # of the current document
        self._last = -1  # the last token of it
        self._text = xxhash.xxh3_64()

    def write(self, pieces: list[TextPiece]) -> None:
        tokens: list[Tokens] = []
        records: list[tuple[int, int]] = []
        encoded = self._tokenizer.encode_pieces([piece.data for piece in pieces])
        for piece, piece_tokens in zip(pieces, encoded, strict=True):
            # Empty documents get neither token, so BOS waits for the first piece that has tokens.
            begins = self.tokens == self._start and len(piece_tokens)
            if self._begin is not None and begins and piece_tokens[0] != self._begin:
                tokens.append(self._begin)
                self.tokens += 1
            tokens.append(piece_tokens)
            self.tokens += len(piece_tokens)
            if len(piece_tokens):
                self._last = int(piece_tokens[-1])
            self._text.update(piece.data)
            if not piece.ends:
                continue
            if self.tokens > self._start:
                # A text that ends with the separator, such as a rendered chat, gets no second one.
                if self._last != self._separator:
                    tokens.append(self._separator)
                    self.tokens += 1
                records.append((self.tokens, self._text.intdigest()))
            else:
                self.empty_documents += 1
            self._start = self.tokens
            self._text.reset()
        self.documents += len(records)
        joined = np.concatenate(tokens).astype(self._dtype, copy=False)
        self._outputs.append(joined, np.array(records, dtype=DOCUMENT))


def grouped(items: Iterator[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Group pieces in lists of a few MiB; a tokenizer distributes a list over the cores."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= _BATCH_BYTES or len(group) == _BATCH_PIECES:
            yield group
            group = []
            size = 0
    if group:
        yield group


@contextmanager
def _writing_cache(path: Path) -> Iterator[None]:
    """Turn an OSError from writing the cache at `path` into a ResourceError."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # filelock: NotImplementedError without flock
        why = getattr(error, "strerror", None) or str(error)
        raise ResourceError(
            "cannot write the token cache",
            where=str(path),
            why=f"{why}{_free_bytes(path)}",
            fix="free some space, or set SHARDWISE_CACHE to another folder",
        ) from None


def _free_bytes(path: Path) -> str:
    for parent in path.parents:
        try:
            return f" ({shutil.disk_usage(parent).free:,} bytes free)"
        except OSError:
            continue
    return ""


def _close_file(file: IO[bytes]) -> None:
    with suppress(OSError):  # on a full disk the flush fails again; the first error is already raised
        file.close()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
