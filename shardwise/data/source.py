"""The interface of data sources: documents as text, or records with fields, in a fixed order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.core.errors import DataError
from shardwise.data.readers import Record, TextPiece

SourcePosition = Any
"""A JSON value that says where a document begins in a source; None is the start."""


def after(pieces: Iterator[TextPiece], skip: int) -> Iterator[tuple[TextPiece, int]]:
    """The pieces behind the first ``skip`` documents, each with the number of documents that have ended."""
    ended = 0
    for piece in pieces:
        is_after = ended >= skip
        if piece.ends:
            ended += 1
        if is_after:
            yield piece, ended


class Source(ABC):
    """A source of documents.

    Attributes:
        name: as in the recipe.
    """

    name: str

    @abstractmethod
    def identity(self) -> object:
        """A JSON value that changes when the content changes; a cached result is valid while it is equal."""

    @abstractmethod
    def pieces(self) -> Iterator[TextPiece]:
        """The documents, in a fixed order. Raises DataError at the first malformed one."""

    def content(self) -> object:
        """As ``identity``, but equal for the same content in another place, where that is cheap to know."""
        return self.identity()

    def pieces_from(self, position: SourcePosition) -> Iterator[tuple[TextPiece, SourcePosition]]:
        """The documents from a position on; with the last piece of each, the position behind it."""
        yield from after(self.pieces(), position or 0)

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """The records, in a fixed order, with at least the fields `keys`. Raises DataError at a malformed one."""
        raise DataError("no records in this source", where=self.name, why="it is plain text")

    def fields(self) -> frozenset[str]:
        """The fields of the first record; empty if the source starts with plain text or malformed data."""
        return frozenset()
