"""The recipe's `data:` as tokens and sequences, with a description for the terminal.

It needs no torch, so the command line checks and shows data before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.core.errors import DataError
from shardwise.data.cache import TokenCache, default_root, open_cache
from shardwise.data.encoding import Encoder
from shardwise.data.example_cache import open_example_cache
from shardwise.data.examples import Divided, Sequences, divide
from shardwise.data.formats import format_of
from shardwise.data.sources import open_source
from shardwise.data.split import Stream, split
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.recipe.sections import DataSpec, Recipe

Document = list[tuple[int, bool]]
"""(tokens, trained mask)."""


@dataclass(frozen=True)
class Text:
    """Plain text: token cache, training sequences, held-out sequences.

    Attributes:
        starts: start of each document in the cache, [documents], if attention keeps documents apart; else None.
    """

    cache: TokenCache
    train: Stream
    held_out: Stream
    starts: npt.NDArray[np.int64] | None
    chats = False

    def documents(self, sample: int) -> list[Document]:
        """The documents of a training sequence that attention keeps apart; else all of it as one."""
        tokens = self.train.sequence(sample).tolist()
        if self.starts is None:
            return [[(token, at > 0) for at, token in enumerate(tokens)]]
        found: list[Document] = []
        for token, at in zip(tokens, self.train.positions(sample, self.starts).tolist(), strict=True):
            if at == 0:
                found.append([])
            found[-1].append((token, at > 0))
        return found

    def sentences(self, spec: DataSpec) -> list[str]:
        """Description of the text."""
        header = self.cache.header
        return [
            f"{spec.source}: plain text, {header.documents:,} documents, {header.tokens:,} tokens",
            f"{self.train.sequences:,} sequences of {spec.sequence_length:,} tokens to train on and"
            f" {self.held_out.sequences:,} held out, "
            + (
                "end to end: every token is trained on"
                if self.starts is None
                else "packed: no document sees another, and its first token is not trained on"
            ),
        ]


@dataclass(frozen=True)
class Examples:
    """Records with completions: token cache and sequences."""

    cache: TokenCache
    encoder: Encoder
    divided: Divided

    @property
    def chats(self) -> bool:
        """Whether a chat template writes the records' special tokens."""
        return self.encoder.template is not None

    def documents(self, sample: int) -> list[Document]:
        """The records of a training sequence."""
        return [
            [
                (token, trained and at > 0)
                for at, (token, trained) in enumerate(zip(tokens, chosen, strict=True))
            ]
            for tokens, chosen in self.divided.train.records(sample)
        ]

    @property
    def train(self) -> Sequences:
        return self.divided.train

    def sentences(self, spec: DataSpec) -> list[str]:
        """Description of the records."""
        header, divided, name = self.cache.header, self.divided, self.encoder.format
        how = "detected" if spec.format == "auto" else "as data.format says"
        found = self.encoder.template.way if self.encoder.template and spec.train_on != "all" else ""
        sides = (divided.train, divided.held_out)
        filled = sum(side.filled * side.sequences for side in sides) / max(
            1, sum(side.sequences for side in sides)
        )
        said = [
            f"{spec.source}: format {name} ({how}), {header.documents:,} records, {header.tokens:,} tokens,"
            f" {divided.share:.1%} of the targets trained on" + (f", found by {found}" if found else ""),
            f"{divided.train.sequences:,} sequences of {spec.sequence_length:,} tokens to train on and"
            f" {divided.held_out.sequences:,} held out, {'packed' if spec.packing else 'one record each'}:"
            f" {filled:.1%} filled",
        ]
        if divided.truncated or divided.dropped:
            said.append(
                f"too long for a sequence: {divided.truncated:,} records cut at their end,"
                f" {divided.dropped:,} left out, in which nothing trained on comes so early"
            )
        return said


def tokenizer_of(spec: DataSpec) -> Tokenizer:
    """The recipe's tokenizer. Raises DataError."""
    return open_tokenizer(spec.tokenizer, spec.begin)


def open_tokens(spec: DataSpec, tokenizer: Tokenizer, root: Path, verify: bool = False) -> Text | Examples:
    """The sequences of a source.

    Args:
        verify: compare the content of the token cache with its digest.

    Raises:
        DataError: the source is malformed, or shorter than one sequence.
        ResourceError: the cache cannot be written.
    """
    source = open_source(spec.source, spec.text_key)
    name = format_of(spec, source)
    if name == "text":
        return _open_text(open_cache(source, tokenizer, root, verify), spec)
    encoder = Encoder(spec, name, tokenizer)
    return _open_examples(open_example_cache(source, encoder, root, verify), encoder, spec)


def _open_text(cache: TokenCache, spec: DataSpec) -> Text:
    train, held_out = split(cache.tokens, cache.documents(), spec.held_out, spec.sequence_length)
    if not train.sequences:
        raise DataError(
            "too little data for one sequence",
            where=spec.source,
            why=f"{cache.header.tokens:,} tokens; one sequence needs {spec.sequence_length + 1:,}",
            fix="give more data or a smaller data.sequence_length",
        )
    return Text(cache, train, held_out, _starts(cache) if spec.packing else None)


def _starts(cache: TokenCache) -> npt.NDArray[np.int64]:
    """Start of each document in the cache, [documents]."""
    ends = cache.documents()["end"].astype(np.int64)
    return np.concatenate([[0], ends[:-1]]).astype(np.int64)


def _open_examples(cache: TokenCache, encoder: Encoder, spec: DataSpec) -> Examples:
    padding = encoder.tokenizer.separator
    divided = divide(cache, spec.held_out, spec.sequence_length, spec.packing, padding)
    if not divided.train.sequences:
        raise DataError(
            "no completion within a sequence",
            where=spec.source,
            why=f"none of {cache.header.documents:,} records has a trained token among its first"
            f" {spec.sequence_length + 1:,}",
            fix="raise data.sequence_length",
        )
    return Examples(cache, encoder, divided)


def check_data(recipe: Recipe) -> list[str]:
    """Check a recipe's data before anything else starts, once per run; the tokens stay in the cache.

    Reads the whole cache, so that its ranks train on the tokens whose digest a checkpoint records.

    Returns a description of records with completions, in sentences. A factory opens its own data later.
    """
    if recipe.model.factory is not None:
        return []
    opened = open_tokens(recipe.data, tokenizer_of(recipe.data), default_root(), verify=True)
    return opened.sentences(recipe.data) if isinstance(opened, Examples) else []
