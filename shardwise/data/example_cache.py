"""The token cache of records with completions: consecutive records, and a trained mask over their tokens.

It works like the cache of text (`cache`), with one more file. It stores whole records. Sequence length and packing are
applied when the cache is opened, so another `sequence_length` needs no new tokenization.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from shardwise.core.errors import DataError
from shardwise.data.cache import EXAMPLE, FORMAT, Header, TokenCache, cached, data_files
from shardwise.data.encoding import Encoder
from shardwise.data.formats import KEYS
from shardwise.data.readers import Record
from shardwise.data.source import Source

_TOGETHER = 1024
"""Records written at a time."""


def open_example_cache(source: Source, encoder: Encoder, root: Path, verify: bool = False) -> TokenCache:
    """The cache of a source's records below `root`; built if it does not exist.

    Args:
        verify: read all of it, and build it again if a bit has changed.

    Raises:
        DataError: a record is malformed, or the source has no record.
        ResourceError: `root` cannot be written, or the disk is full.
    """
    parts = [FORMAT, "examples", encoder.fingerprint, source.identity()]
    what = f"{source.name} ({encoder.format}) with {encoder.tokenizer.name}"
    return cached(parts, root, what, lambda work: _write(source, encoder, work), verify)


def _write(source: Source, encoder: Encoder, work: Path) -> Header:
    dtype = encoder.tokenizer.dtype.newbyteorder("<")
    end = documents = trained_tokens = 0
    with data_files(work, ("tokens.bin", "documents.bin", "trained.bin")) as outputs:
        for records in _batches(source.records(KEYS)):
            ids: list[int] = []
            chosen: list[bool] = []
            rows: list[tuple[int, int, int]] = []
            for record in records:
                tokens, trained = encoder.encode(record)
                end += len(tokens)
                rows.append((end, _hash(tokens, trained), trained.index(True, 1)))
                ids += tokens
                chosen += trained
            outputs.append(np.array(ids, dtype), np.array(rows, EXAMPLE), np.array(chosen, np.bool_))
            documents += len(rows)
            trained_tokens += sum(chosen)
    if not documents:
        raise DataError("no records in the data source", where=source.name, fix="check data.source")
    return Header(
        format=FORMAT,
        source=source.name,
        tokenizer=encoder.tokenizer.name,
        dtype=dtype.str,
        tokens=end,
        documents=documents,
        empty_documents=0,
        digest=outputs.digest,
        trained_tokens=trained_tokens,
    )


def _hash(tokens: list[int], trained: list[bool]) -> int:
    digest = xxhash.xxh3_64(np.array(tokens, "<u8").tobytes())
    digest.update(np.array(trained, np.bool_).tobytes())
    return digest.intdigest()


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(islice(records, _TOGETHER)):
        yield batch
