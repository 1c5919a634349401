"""The token cache of records with completions: consecutive records, and a trained mask over their tokens.

It works like the cache of text (`cache`), with one more file. It stores whole records. Sequence length and packing are
applied when the cache is opened, so another `sequence_length` needs no new tokenization.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import xxhash

from shardwise.core.errors import DataError
from shardwise.data.cache import EXAMPLE, FORMAT, Header, TokenCache, cached, data_files
from shardwise.data.encoding import Encoded, Encoder
from shardwise.data.readers import Record
from shardwise.data.source import Source

_TOGETHER = 1024
"""Records written at a time."""


def open_example_cache(source: Source, encoder: Encoder, root: Path, verify: bool = False) -> TokenCache:
    """The cache of a source's records below `root`; built if it does not exist.

    Args:
        verify: read all of it, and build it again if a bit has changed.

    Raises:
        DataError: a record is malformed, or no record has a trained token.
        ResourceError: `root` cannot be written, or the disk is full.
    """
    parts = [FORMAT, "examples", encoder.fingerprint, source.identity()]
    what = f"{source.name} ({encoder.format}) with {encoder.tokenizer.name}"
    return cached(parts, root, what, lambda work: _write(source, encoder, work), verify)


def _write(source: Source, encoder: Encoder, work: Path) -> Header:
    dtype = encoder.tokenizer.dtype.newbyteorder("<")
    end = documents = trained_tokens = records = untrained = divided = endless = 0
    keys = sorted(encoder.keys)
    with data_files(work, ("tokens.bin", "documents.bin", "trained.bin")) as outputs:
        for batch in _batches(source.records(keys)):
            parts: list[Encoded] = []
            for encoded in encoder.encode_all(batch):
                parts += encoded
                records += 1
                untrained += not encoded
                divided += len(encoded) > 1
            rows = []
            for part in parts:
                end += len(part.tokens)
                rows.append((end, _hash(part.tokens, part.trained), part.trained.index(True, 1)))
            tokens = np.fromiter(chain.from_iterable(part.tokens for part in parts), dtype)
            trained = np.fromiter(chain.from_iterable(part.trained for part in parts), np.bool_)
            outputs.append(tokens, np.array(rows, EXAMPLE), trained)
            documents += len(parts)
            trained_tokens += int(trained.sum())
            endless += sum(part.endless for part in parts)
    if not documents:
        why = f"nothing is trained on in any of {records:,} records" if records else "it has no records"
        raise DataError(
            "nothing to train on in the data source", where=source.name, why=why, fix="check data.source"
        )
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
        chats=encoder.chats,
        untrained=untrained,
        divided=divided,
        endless=endless,
        unread=", ".join(sorted(encoder.unread | (source.fields() - encoder.keys))),
    )


def _hash(tokens: list[int], trained: list[bool]) -> int:
    digest = xxhash.xxh3_64(np.array(tokens, "<u8").tobytes())
    digest.update(np.array(trained, np.bool_).tobytes())
    return digest.intdigest()


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(islice(records, _TOGETHER)):
        yield batch
