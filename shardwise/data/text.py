"""Plain text: split into training and held-out streams, and streams into sequences.

A document is held out if the hash of its text is below the requested fraction. The hash depends on the document alone,
so adding documents moves no others, the order of files does not matter, and exact duplicates are never on both sides.
A hash cannot split a book, or a few documents, evenly. If the held-out share is below half or above twice the fraction,
or has no whole sequence, the last sequences of the data are held out instead, as in nanoGPT.

Each side is a *stream*: its documents end to end, in *runs* that are contiguous in the cache. Sequence i of length s
reads tokens i*s .. (i+1)*s of its stream. The inputs are the first s of these s+1 tokens, the labels the last s. So
each token except the first is a target exactly once per epoch. There is no padding. The last tokens of a stream, fewer
than a sequence, are never used.

Attention crosses document boundaries, which the separator marks. With `data.packing` it does not: samples have
`positions` and `starts`. Then the first token of a document is no target: only the document before it would predict it
(Llama 3, arXiv:2407.21783, sec. 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.core.errors import DataError
from shardwise.data.cache import TokenCache, open_cache
from shardwise.data.cache_header import json_hash
from shardwise.data.dataset import (
    NOT_COUNTED,
    MaskedTokens,
    OpenedSource,
    Sample,
    Splits,
    TokenDataset,
    TokenIds,
    document_fields,
    padding_row,
)
from shardwise.data.tokenizer import Tokenizer, Tokens, mask_token


@dataclass(frozen=True)
class Stream:
    """Runs of a token file, read as one stream.

    Attributes:
        tokens: the whole file.
        starts: start of each run in the file, [runs].
        offsets: start of each run in the stream, and the stream's length, [runs + 1].
        length: tokens in a sequence.
    """

    tokens: Tokens
    starts: TokenIds
    offsets: TokenIds
    length: int

    @classmethod
    def of_runs(cls, tokens: Tokens, starts: TokenIds, ends: TokenIds, length: int) -> Stream:
        """The stream of the runs starts[i]..ends[i]-1, in their order."""
        return cls(tokens, starts, np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64), length)

    @property
    def sequences(self) -> int:
        """Number of whole sequences."""
        return max(0, (int(self.offsets[-1]) - 1) // self.length)  # one token more is the last label

    def sequence(self, index: int) -> Tokens:
        """The `length` + 1 tokens of a sequence; a view if they are in one run.

        Raises:
            IndexError: the stream has no sequence `index`.
        """
        parts = [self.tokens[start:end] for start, end in self.spans(index)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Where the tokens of a sequence are in the file, as (start, end), one for each run. Raises IndexError."""
        if not 0 <= index < self.sequences:
            raise IndexError(f"sequence {index} of {self.sequences}")
        position = index * self.length
        missing = self.length + 1
        run = int(np.searchsorted(self.offsets, position, side="right")) - 1
        spans = []
        while missing:
            start = int(self.starts[run]) + position - int(self.offsets[run])
            taken = min(missing, int(self.offsets[run + 1]) - position)
            spans.append((start, start + taken))
            position += taken
            missing -= taken
            run += 1
        return spans

    def positions(self, index: int, starts: TokenIds) -> TokenIds:
        """The position of each token of a sequence in its document, [length + 1].

        A document that began before the sequence counts from the start of the sequence.

        Args:
            starts: start of each document in the file, ascending, [documents].

        Raises:
            IndexError: the stream has no sequence `index`.
        """
        positions = []
        for first, end in self.spans(index):
            tokens = np.arange(first, end)
            begins = starts[np.searchsorted(starts, tokens, side="right") - 1]  # of each token's document
            positions.append(tokens - np.maximum(begins, first))
        return np.concatenate(positions)


def split_text(
    tokens: Tokens, documents: npt.NDArray[np.void], fraction: float, length: int
) -> tuple[Stream, Stream]:
    """(training stream, held-out stream).

    Args:
        tokens: all tokens, [n].
        documents: records of type `cache.DOCUMENT`, [documents].
        fraction: the fraction of tokens to hold out, 0 <= fraction < 1.
        length: tokens in a sequence.

    The training stream has at least one sequence if the data has one. The held-out stream has one if the data has two
    and `fraction` is not 0.
    """
    ends = documents["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    # The hash is uniform over 64 bits, so this share of the documents is below the bound.
    is_held_out = documents["hash"] < np.uint64(int(fraction * 2.0**64))
    # Neighbours on one side are one run, since they are contiguous in the file.
    edges = np.flatnonzero(is_held_out[1:] != is_held_out[:-1]) + 1
    first = np.concatenate([[0], edges])
    last = np.concatenate([edges, [len(is_held_out)]]) - 1
    side = is_held_out[first]
    train, held_out = (
        Stream.of_runs(tokens, starts[first[runs]], ends[last[runs]], length) for runs in (~side, side)
    )
    share = int(held_out.offsets[-1]) / len(tokens)
    if fraction == 0 or (fraction / 2 <= share <= 2 * fraction and train.sequences and held_out.sequences):
        return train, held_out
    return _split_at_the_end(tokens, fraction, length)


def _split_at_the_end(tokens: Tokens, fraction: float, length: int) -> tuple[Stream, Stream]:
    """Hold out the last sequences. The token at the boundary is a target in training and an input in validation."""
    sequences = max(0, (len(tokens) - 1) // length)
    count = min(max(1, round(fraction * sequences)), max(0, sequences - 1))
    boundary = (sequences - count) * length
    end = boundary + 1 if count else len(tokens)
    zero = np.zeros(1, np.int64)
    none = np.zeros(0, np.int64)
    train = Stream.of_runs(tokens, zero, zero + end, length)
    if not count:
        return train, Stream.of_runs(tokens, none, none, length)
    return train, Stream.of_runs(tokens, zero + boundary, zero + len(tokens), length)


@dataclass(frozen=True)
class PlainText(TokenDataset):
    """The sequences of a stream.

    Attributes:
        starts: start of each document in the cache, [documents], if attention keeps documents apart; else None.
    """

    stream: Stream
    cache: TokenCache
    tokenizer: Tokenizer
    starts: TokenIds | None = None
    objective: str = "causal"

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.stream.length

    def __len__(self) -> int:
        return self.stream.sequences

    def sample(self, index: int) -> Sample:
        tokens = self.stream.sequence(index).astype(np.int64)
        inputs = tokens[:-1]
        labels = tokens[1:]
        if self.starts is None:
            return {"input_ids": inputs, "labels": labels}
        positions = self.stream.positions(index, self.starts)
        # A position of 0 is the first token of a document, which only another document would predict.
        labels = np.where(positions[1:] == 0, NOT_COUNTED, labels)
        return {"input_ids": inputs, "labels": labels, **document_fields(positions[:-1])}

    def padding(self) -> Sample:
        return padding_row(self.length, self.tokenizer.separator, self.starts is not None)

    def text(self, index: int) -> str:
        return self.tokenizer.decode(self.stream.sequence(index)[:-1].tolist())

    def record(self, index: int) -> tuple[list[int], list[bool]]:
        tokens = self.stream.sequence(index).tolist()
        return tokens, [True] * len(tokens)

    def documents(self, index: int) -> list[MaskedTokens]:
        tokens = self.stream.sequence(index).tolist()
        if self.starts is None:
            causal = self.objective == "causal"
            return [[(token, causal and index > 0) for index, token in enumerate(tokens)]]
        documents: list[MaskedTokens] = []
        positions = self.stream.positions(index, self.starts).tolist()
        for token, position in zip(tokens, positions, strict=True):
            if position == 0:
                documents.append([])
            documents[-1].append((token, position > 0))
        return documents


def open_text(opened: OpenedSource) -> Splits[PlainText]:
    """All of a source through the token cache. Raises DataError if it is shorter than one sequence."""
    spec = opened.spec
    tokenizer = opened.tokenizer
    require_maskable(opened)
    cache = open_cache(opened.source, tokenizer, opened.root, opened.verify)
    streams = split_text(cache.tokens, cache.documents(), spec.held_out, spec.sequence_length)
    if not streams[0].sequences:
        raise DataError(
            "too little data for one sequence",
            where=spec.source,
            why=f"{cache.header.tokens:,} tokens; one sequence needs {spec.sequence_length + 1:,}",
            fix="give more data or a smaller data.sequence_length",
        )
    starts = document_starts(cache) if spec.packing else None
    train, held_out = (PlainText(stream, cache, tokenizer, starts, opened.kind) for stream in streams)

    def sentences() -> list[str]:
        if spec.packing:
            form = "packed: no document sees another, and its first token is not trained on"
        elif opened.kind == "causal":
            form = "end to end: every token is trained on"
        else:
            form = "end to end: each step hides 15 % of its tokens"
        return [
            f"{spec.source}: plain text, {cache.header.documents:,} documents, {cache.header.tokens:,} tokens",
            f"{len(train):,} sequences of {spec.sequence_length:,} tokens to train on and {len(held_out):,} held out,"
            f" {form}",
        ]

    # The fingerprint leaves out the tokenizer: equal tokens are equal data.
    parts = [cache.header.digest, spec.sequence_length, spec.held_out] + (["packed"] if spec.packing else [])
    return Splits(train, held_out, json_hash(parts), sentences)


def document_starts(cache: TokenCache) -> TokenIds:
    """Start of each document in a cache, [documents]."""
    ends = cache.documents()["end"].astype(np.int64)
    return np.concatenate([[0], ends[:-1]]).astype(np.int64)


def require_maskable(opened: OpenedSource) -> None:
    """Raise DataError if the objective hides tokens, and the tokenizer has no mask token."""
    if opened.kind == "masked":
        mask_token(opened.tokenizer)
