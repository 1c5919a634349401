"""The recipe's `data:` as tokens and sequences, with a description for the terminal.

It needs no torch, so the command line checks and shows data before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import DataError
from shardwise.core.units import format_percent
from shardwise.data.cache import TokenCache, open_cache
from shardwise.data.encoding import Encoder
from shardwise.data.example_cache import open_example_cache
from shardwise.data.examples import Divided, Sequences, divide
from shardwise.data.formats import format_of
from shardwise.data.pairs import Pairs, divide_pairs
from shardwise.data.sources import open_source
from shardwise.data.split import Stream, split
from shardwise.data.tokenizer import Tokenizer, mask_token, open_tokenizer
from shardwise.data.windows import Windows
from shardwise.recipe.sections import DataSpec, Recipe

MOSTLY_PADDING = 0.5
"""Filled part of the sequences below which packing is advised."""

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
    objective: str = "causal"
    chats = False

    @property
    def samples(self) -> int:
        """Number of training sequences."""
        return self.train.sequences

    def note(self, sample: int) -> str:
        """Nothing: text is concatenated."""
        return ""

    def documents(self, sample: int) -> list[Document]:
        """The documents of a training sequence that attention keeps apart; else all of it as one."""
        tokens = self.train.sequence(sample).tolist()
        if self.starts is None:
            causal = self.objective == "causal"
            return [[(token, causal and at > 0) for at, token in enumerate(tokens)]]
        found: list[Document] = []
        for token, at in zip(tokens, self.train.positions(sample, self.starts).tolist(), strict=True):
            if at == 0:
                found.append([])
            found[-1].append((token, at > 0))
        return found

    def sentences(self, spec: DataSpec) -> list[str]:
        """Description of the text."""
        header = self.cache.header
        trained = (
            "every token is trained on"
            if self.objective == "causal"
            else "each step hides 15 % of its tokens"
        )
        return [
            f"{spec.source}: plain text, {header.documents:,} documents, {header.tokens:,} tokens",
            f"{self.train.sequences:,} sequences of {spec.sequence_length:,} tokens to train on and"
            f" {self.held_out.sequences:,} held out, "
            + (
                f"end to end: {trained}"
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
        """Whether a chat template writes the records."""
        return self.cache.header.chats

    @property
    def samples(self) -> int:
        """Number of training records."""
        return len(self.train.starts)

    def documents(self, sample: int) -> list[Document]:
        """A training record, as long as it is in a sequence."""
        tokens, trained = self.train.record(sample)
        return [
            [
                (token, chosen and at > 0)
                for at, (token, chosen) in enumerate(zip(tokens, trained, strict=True))
            ]
        ]

    def note(self, sample: int) -> str:
        """What happens to a training record on its way into a sequence."""
        return "cut at its end" if self.train.cut[sample] else ""

    @property
    def train(self) -> Sequences:
        return self.divided.train

    def sentences(self, spec: DataSpec) -> list[str]:
        """Description of the records."""
        header, divided, name = self.cache.header, self.divided, self.encoder.format
        how = "detected" if spec.format == "auto" else "as data.format says"
        found = (
            self.encoder.template.way
            if self.chats and self.encoder.template and spec.train_on != "all"
            else ""
        )
        sides = (divided.train, divided.held_out)
        filled = sum(side.filled * side.sequences for side in sides) / max(
            1, sum(side.sequences for side in sides)
        )
        said = [
            f"{spec.source}: format {name} ({how}), {header.documents:,} records, {header.tokens:,} tokens,"
            f" {format_percent(divided.share, 1)} of the targets trained on"
            + (f", found by {found}" if found else ""),
            f"{divided.train.sequences:,} sequences of {spec.sequence_length:,} tokens to train on and"
            f" {divided.held_out.sequences:,} held out, {'packed' if spec.packing else 'one record each'}:"
            f" {format_percent(filled, 1)} filled",
        ]
        if not spec.packing and filled < MOSTLY_PADDING:
            said.append(
                f"padding takes {format_percent(1 - filled)} of the computation: data.packing=true puts several"
                " records into a sequence, and attention keeps them apart"
            )
        return said + list(self._losses(spec))

    def _losses(self, spec: DataSpec) -> Iterator[str]:
        """Which records and fields are not trained on as they are."""
        header, divided = self.cache.header, self.divided
        if divided.truncated:
            yield (
                f"too long for a sequence: {divided.truncated:,} records cut, so the model does not see how they end;"
                " data.too_long=drop leaves them out"
                + (
                    ""
                    if spec.too_long == "split" or not self.chats
                    else ", split divides chats between exchanges"
                )
            )
        if divided.dropped:
            reason = (
                "data.too_long is drop"
                if spec.too_long == "drop"
                else "nothing trained on comes before the cut"
            )
            yield f"too long for a sequence: {divided.dropped:,} records dropped; {reason}"
        if header.divided:
            yield f"too long for a sequence: {header.divided:,} chats divided between exchanges"
        if header.untrained:
            yield f"{header.untrained:,} records dropped: none of their answers is trained on"
        if header.endless:
            yield (
                f"{header.endless:,} trained answers never end: no token that ends a turn follows them in the chat"
                " template's text, so the model does not learn to stop"
            )
        if header.unread:
            reader = "the chat template" if self.chats else f"the format {self.encoder.format}"
            yield f"not read by {reader}: {header.unread}"


@dataclass(frozen=True)
class StreamedText(Text):
    """Plain text whose tokens are made in windows; its attributes are those of the first one."""

    windows: Windows | None = None

    def sentences(self, spec: DataSpec) -> list[str]:
        """Description of the text."""
        return [
            f"{spec.source}: plain text, streamed in windows of {self.train.sequences:,} sequences of"
            f" {spec.sequence_length:,} tokens",
            f"{self.held_out.sequences:,} sequences held out, of the documents of the first window",
        ]


def tokenizer_of(spec: DataSpec) -> Tokenizer:
    """The recipe's tokenizer. Raises DataError."""
    return open_tokenizer(spec.tokenizer, spec.begin)


@dataclass(frozen=True)
class PairExamples:
    """Records for encoder-decoders: token cache, training records, held-out records."""

    cache: TokenCache
    encoder: Encoder
    train: Pairs
    held_out: Pairs
    chats = False

    @property
    def samples(self) -> int:
        """Number of training records."""
        return self.train.sequences

    def note(self, sample: int) -> str:
        """What happens to a training record on its way into a sequence."""
        return "cut at its end" if self.train.cuts(sample) else ""

    def documents(self, sample: int) -> list[Document]:
        """A training record: the prompt, and the completion, which is trained on."""
        sides = (self.train.prompt(sample), False), (self.train.completion(sample), True)
        return [[(token, trained) for token in tokens.tolist()] for tokens, trained in sides]

    def sentences(self, spec: DataSpec) -> list[str]:
        """Description of the records."""
        header, train, other = self.cache.header, self.train, self.held_out
        said = [
            f"{spec.source}: format {self.encoder.format}, {header.documents:,} records, {header.tokens:,} tokens",
            f"{train.sequences:,} records to train on and {other.sequences:,} held out: prompts of up to"
            f" {train.length:,} tokens for the encoder, completions of up to {train.target_length:,} for the decoder",
        ]
        if cut := train.truncated + other.truncated:
            said.append(
                f"too long: {cut:,} records with a prompt or a completion cut at its end; data.too_long=drop leaves"
                " them out"
            )
        if dropped := header.documents - train.sequences - other.sequences:
            said.append(f"too long: {dropped:,} records dropped; data.too_long is drop")
        if header.unread:
            said.append(f"not read by the format {self.encoder.format}: {header.unread}")
        return said


Opened = Text | Examples | PairExamples


def open_tokens(
    spec: DataSpec, tokenizer: Tokenizer, root: Path, verify: bool = False, objective: str = "causal"
) -> Opened:
    """The sequences of a source for the recipe's ``model.objective``.

    Args:
        verify: compare the content of the token cache with its digest.

    Raises:
        DataError: the source is malformed, does not suit the objective, or is shorter than one sequence.
        ResourceError: the cache cannot be written.
    """
    if spec.stream_window is not None:
        return _open_stream(spec, tokenizer, root, objective)
    source = open_source(spec.source, spec.text_key)
    name = format_of(spec, source)
    if objective == "masked":
        _require_maskable(spec, name, tokenizer)
    if objective == "seq2seq" and name not in ("prompt", "alpaca"):
        raise DataError(
            "the seq2seq objective needs prompts and completions",
            where=spec.source,
            why=f"its records are of the format {name}",
            fix="give records with prompt and completion, or instruction and output",
        )
    if name == "text":
        return replace(_open_text(open_cache(source, tokenizer, root, verify), spec), objective=objective)
    encoder = Encoder(spec, name, tokenizer, pairs=objective == "seq2seq")
    cache = open_example_cache(source, encoder, root, verify)
    return (
        _open_pairs(cache, encoder, spec) if objective == "seq2seq" else _open_examples(cache, encoder, spec)
    )


def _open_stream(spec: DataSpec, tokenizer: Tokenizer, root: Path, objective: str) -> StreamedText:
    source = open_source(spec.source, spec.text_key, streamed=True)
    name = format_of(spec, source)
    if name != "text" or objective == "seq2seq":
        raise DataError(
            "only plain text is streamed",
            where=spec.source,
            why=f"its records are of the format {name}",
            fix="remove data.stream_window, or write data.format: text",
        )
    if objective == "masked":
        mask_token(tokenizer)
    windows = Windows(source, tokenizer, spec, root)
    starts = starts_in(windows.window(0)) if spec.packing else None
    return StreamedText(windows.window(0), windows.train(0), windows.held_out(), starts, objective, windows)


def starts_in(cache: TokenCache) -> npt.NDArray[np.int64]:
    """Start of each document in a cache, [documents]."""
    ends = cache.documents()["end"].astype(np.int64)
    return np.concatenate([[0], ends[:-1]]).astype(np.int64)


def _require_maskable(spec: DataSpec, name: str, tokenizer: Tokenizer) -> None:
    if name != "text":
        raise DataError(
            "the masked objective needs plain text",
            where=spec.source,
            why=f"its records are of the format {name}",
            fix="give text, or name the field with it in data.text_key",
        )
    mask_token(tokenizer)


def _open_text(cache: TokenCache, spec: DataSpec) -> Text:
    train, held_out = split(cache.tokens, cache.documents(), spec.held_out, spec.sequence_length)
    if not train.sequences:
        raise DataError(
            "too little data for one sequence",
            where=spec.source,
            why=f"{cache.header.tokens:,} tokens; one sequence needs {spec.sequence_length + 1:,}",
            fix="give more data or a smaller data.sequence_length",
        )
    return Text(cache, train, held_out, starts_in(cache) if spec.packing else None)


def _open_examples(cache: TokenCache, encoder: Encoder, spec: DataSpec) -> Examples:
    padding = encoder.tokenizer.separator
    drop = spec.too_long == "drop"
    divided = divide(cache, spec.held_out, spec.sequence_length, spec.packing, padding, drop)
    if not divided.train.sequences:
        raise DataError(
            "no completion within a sequence",
            where=spec.source,
            why=f"none of {cache.header.documents:,} records has a trained token among its first"
            f" {spec.sequence_length + 1:,}",
            fix="raise data.sequence_length",
        )
    return Examples(cache, encoder, divided)


def _open_pairs(cache: TokenCache, encoder: Encoder, spec: DataSpec) -> PairExamples:
    drop = spec.too_long == "drop"
    train, held_out = divide_pairs(cache, spec.held_out, spec.sequence_length, spec.decoder_length, drop)
    if not train.sequences:
        why = f"all {cache.header.documents:,} records are longer, and data.too_long is drop"
        raise DataError(
            "no record fits into a sequence", where=spec.source, why=why, fix="raise data.sequence_length"
        )
    return PairExamples(cache, encoder, train, held_out)


def named_sets(recipe: Recipe) -> dict[str, DataSpec]:
    """The section of each of ``evaluation.sets``: the run's own with another source, of which nothing is held out."""
    own = {"mixture": None, "held_out": 0.0, "format": "auto"}
    return {
        name: recipe.data.model_copy(update={**own, "source": source})
        for name, source in recipe.evaluation.sets.items()
    }


def check_data(recipe: Recipe) -> list[str]:
    """Check a recipe's data before anything else starts, once per run; the tokens stay in the cache.

    Reads the whole cache, so that its ranks train on the tokens whose digest a checkpoint records.

    Returns a description of records with completions, in sentences. A factory opens its own data later.
    """
    if recipe.model.factory is not None:
        return []
    tokenizer, objective = tokenizer_of(recipe.data), recipe.model.objective
    said: list[str] = []
    for spec in recipe.data.parts:
        opened = open_tokens(spec, tokenizer, default_root(), verify=True, objective=objective)
        said += [] if isinstance(opened, Text) and not recipe.data.mixture else opened.sentences(spec)
    for spec in named_sets(recipe).values():
        open_tokens(spec, tokenizer, default_root(), verify=True, objective=objective)
    return said
