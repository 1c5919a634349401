"""The header of a token cache, and the rows that say where its documents end (`cache`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

import numpy as np
import xxhash

CACHE_FORMAT = 3

DOCUMENT = np.dtype([("end", "<u8"), ("hash", "<u8")])
"""`end`: position in `tokens.bin` after the document's separator. `hash`: xxh3-64 of its UTF-8 text."""

EXAMPLE = np.dtype([*DOCUMENT.descr, ("first", "<u8")])
"""A record with a completion. `hash`: of its tokens and the trained mask. `first`: position in the record of the first
trained token that has a token before it."""

PREFERENCE = np.dtype([*EXAMPLE.descr, ("shared", "<u8"), ("value", "<f8")])
"""A document of a preference. `shared`: number of leading tokens that chosen and rejected have in common, 0 of a record
alone. `value`: the margin of a pair, or 1 and 0 for a desirable record and one that is not."""


@dataclass(frozen=True)
class Header:
    """Content of `header.json`. `source` and `tokenizer` are informative; `digest` is a hash of the data files.

    `trained_tokens` is None for plain text, which has no `trained.bin`. `cursor` is that of the window after this one,
    of a stream (`windows`). Of records alone: `chats` says whether a chat template wrote them, `untrained` counts those
    left out because nothing in them is trained on, `divided` those in several parts, `endless` the answers after which
    no end of a turn is trained on; `unread` names fields that neither the format nor the chat template reads. Of
    preferences alone: `preferences` says that the rows are those, `margins` that they have some, `margin_fault` the
    parts of the error of an objective that reads them, `equal` counts the untrained pairs whose chosen and rejected
    documents are the same, `implicit` the pairs whose prompt is the text that both begin with, `empty_documents` the
    empty completions.
    """

    format: int
    source: str
    tokenizer: str
    dtype: str
    tokens: int
    documents: int
    empty_documents: int
    digest: str
    trained_tokens: int | None = None
    cursor: str | None = None
    chats: bool = False
    untrained: int = 0
    divided: int = 0
    endless: int = 0
    unread: str = ""
    preferences: bool = False
    margins: bool = False
    margin_fault: tuple[str, ...] = ()
    equal: int = 0
    implicit: int = 0

    @property
    def row(self) -> np.dtype[np.void]:
        """The type of the rows of `documents.bin`."""
        if self.trained_tokens is None:
            return DOCUMENT
        return PREFERENCE if self.preferences else EXAMPLE

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each data file."""
        sizes = {
            "tokens.bin": self.tokens * np.dtype(self.dtype).itemsize,
            "documents.bin": self.documents * self.row.itemsize,
        }
        return sizes if self.trained_tokens is None else {**sizes, "trained.bin": self.tokens}


def json_hash(value: object) -> str:
    """A hash of a JSON value."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())


def sealed(header: Header) -> bytes:
    """The content of `header.json`: the header and its hash."""
    defaults = {field.name: field.default for field in fields(Header)}
    # Without defaults, so a header of an earlier version of this format keeps its hash.
    written = {key: value for key, value in asdict(header).items() if value != defaults[key]}
    return json.dumps({**written, "xxh3_128": json_hash(written)}, indent=1).encode()


def unsealed(raw: bytes) -> Header:
    """The header in `header.json`. Raises ValueError, TypeError, LookupError or RecursionError if it has changed."""
    values = json.loads(raw)
    if not isinstance(values, dict):
        raise ValueError("the header is no JSON object")
    header = Header(**{key: value for key, value in values.items() if key != "xxh3_128"})
    # Every byte is compared, since the text of a header is a function of its values.
    if sealed(header) != raw:
        raise ValueError("the header does not match its hash")
    return header
