"""The base of samples that are made of documents in a token cache: records, pairs and labelled completions.

A *record* has one document, or several with the same number for all records. A sample is a row of one record, or of
several that are packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.data.cache import TokenCache
from shardwise.data.dataset import Document, MaskedTokens, TokenDataset, TokenIds
from shardwise.data.encoding import Encoder
from shardwise.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class CachedDocuments(TokenDataset):
    """Records of one side of the split.

    Attributes:
        cache: the cache with their tokens.
        encoder: wrote the cache.
        starts, ends: range of each document in the cache, cut, [records] or [records, documents].
        cut: whether a document of a record is cut, [records].
        order: record numbers by sample, [records].
        offsets: start of each sample in `order`, [samples + 1].
        length: tokens of a row.
        packed: whether several records share a row.
    """

    cache: TokenCache
    encoder: Encoder
    starts: TokenIds
    ends: TokenIds
    cut: npt.NDArray[np.bool_]
    order: TokenIds
    offsets: TokenIds
    length: int
    packed: bool

    from_records = True

    @property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]
        return self.encoder.tokenizer

    @property
    def chats(self) -> bool:
        return self.cache.header.chats

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members(self, index: int) -> TokenIds:
        """The numbers of the records of a sample, in their order in it. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def documents_of(self, record: int) -> list[Document]:
        """The documents of a record: tokens, and which of them are trained on."""
        ranges = zip(np.ravel(self.starts[record]), np.ravel(self.ends[record]), strict=True)
        return [self.cache.document(int(start), int(end)) for start, end in ranges]

    def documents_in(self, index: int) -> list[Document]:
        """The documents of a sample."""
        return [document for record in self.members(index) for document in self.documents_of(record)]

    def inputs_in(self, index: int) -> TokenIds:
        """The number of inputs of every document of a sample."""
        records = self.members(index)
        return (self.ends[records] - self.starts[records]).ravel() - 1

    def filled(self, index: int) -> int:
        return int(self.inputs_in(index).sum())

    def text(self, index: int) -> str:
        return "\n".join(self.tokenizer.decode(tokens.tolist()) for tokens, _ in self.documents_in(index))

    # -- records, in the order of the source

    @property
    def records(self) -> int:
        return len(self.starts)

    def record(self, index: int) -> tuple[list[int], list[bool]]:
        """(tokens, which of them are trained on) of its first document."""
        tokens, trained = self.documents_of(index)[0]
        return tokens.tolist(), trained.tolist()

    def documents(self, index: int) -> list[MaskedTokens]:
        return [masked_tokens(document) for document in self.documents_of(index)]

    def note(self, index: int) -> str:
        return "cut at its end" if self.cut[index] else ""

    @property
    def targets(self) -> int:
        """Number of tokens that have a token before them."""
        return int((self.ends - self.starts - 1).sum())

    @property
    def trained_targets(self) -> int:
        """Number of those that the loss counts."""
        ranges = zip(self.starts.ravel().tolist(), self.ends.ravel().tolist(), strict=True)
        # From the second token on: no token comes before the first one, so nothing predicts it.
        return sum(int(self.cache.trained[start + 1 : end].sum()) for start, end in ranges)


def masked_tokens(document: Document) -> MaskedTokens:
    """The tokens of a document, each with whether it is a trained target; its first token is none."""
    tokens, trained = document
    pairs = zip(tokens.tolist(), trained.tolist(), strict=True)
    return [(token, counted and index > 0) for index, (token, counted) in enumerate(pairs)]
