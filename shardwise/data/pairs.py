"""Records for encoder-decoder models: the prompt for the encoder, the completion for the decoder.

Both are tokenized alone and as the tokenizer frames a text (T5 appends ``</s>``, BART puts ``<s>`` before it too), and
each ends with the end-of-text token. The cache stores a record as prompt, then completion; the trained mask begins with
the completion. A longer prompt is cut before its last token, a longer completion at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.core.errors import DataError
from shardwise.data.cache import TokenCache
from shardwise.data.cache_header import json_hash
from shardwise.data.completions import held_out_records, longer_sequences
from shardwise.data.dataset import (
    NOT_COUNTED,
    Lengths,
    MaskedTokens,
    OpenedSource,
    Sample,
    Splits,
    TokenDataset,
    TokenIds,
)
from shardwise.data.encoding import Encoder, open_record_cache
from shardwise.data.tokenizer import Tokenizer
from shardwise.recipe.sections import DataSpec


@dataclass(frozen=True)
class Pairs(TokenDataset):
    """Records of one side of the split: `input_ids` and `attention_mask` [s], `labels` [t] not shifted; int64.

    Attributes:
        cache: the cache with their tokens.
        starts, borders, ends: of prompt, completion and the next record in the cache, [records].
        length: tokens of the encoder's sequence.
        target_length: tokens of the decoder's sequence.
    """

    cache: TokenCache
    tokenizer: Tokenizer
    starts: TokenIds
    borders: TokenIds
    ends: TokenIds
    length: int
    target_length: int

    from_records = True

    def __len__(self) -> int:
        return len(self.starts)

    def sample(self, index: int) -> Sample:
        row = {name: array.copy() for name, array in self.padding().items()}
        prompt = self.prompt(index)
        completion = self.completion(index)
        row["input_ids"][: len(prompt)] = prompt
        row["attention_mask"][len(prompt) :] = 0
        row["labels"][: len(completion)] = completion
        return row

    def padding(self) -> Sample:
        """It attends to its own padding: attention over nothing is not a number."""
        return {
            "input_ids": np.full(self.length, self.tokenizer.separator),
            "attention_mask": np.ones(self.length, np.int64),
            "labels": np.full(self.target_length, NOT_COUNTED),
        }

    def text(self, index: int) -> str:
        sides = (self.prompt(index), self.completion(index))
        return "".join(self.tokenizer.decode(side.tolist()) for side in sides)

    def prompt(self, index: int) -> TokenIds:
        """The encoder's tokens of a record, at most `length`."""
        tokens = self.cache.tokens[self.starts[index] : self.borders[index]].astype(np.int64)
        if len(tokens) <= self.length:
            return tokens
        return np.append(tokens[: self.length - 1], tokens[-1])  # the end-of-text token stays

    def completion(self, index: int) -> TokenIds:
        """The decoder's targets of a record, at most `target_length`."""
        tokens: TokenIds = self.cache.tokens[self.borders[index] : self.ends[index]].astype(np.int64)
        return tokens[: self.target_length]

    def record(self, index: int) -> tuple[list[int], list[bool]]:
        prompt = self.prompt(index).tolist()
        completion = self.completion(index).tolist()
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)

    def documents(self, index: int) -> list[MaskedTokens]:
        sides = ((self.prompt(index), False), (self.completion(index), True))
        return [[(token, trained) for token in tokens.tolist()] for tokens, trained in sides]

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """Whether a prompt or a completion is cut, [records]."""
        prompts = self.borders - self.starts
        completions = self.ends - self.borders
        return (prompts > self.length) | (completions > self.target_length)

    def note(self, index: int) -> str:
        return "cut at its end" if self.cut[index] else ""

    def lengths(self) -> Lengths:
        """Of the training records."""
        prompts = self.borders - self.starts
        completions = self.ends - self.borders
        return Lengths(int(prompts.max()), float(prompts.mean()), int(completions.max()))


def open_pairs(opened: OpenedSource) -> Splits[Pairs]:
    """Prompts and completions through the token cache. Raises DataError if no record fits into a sequence."""
    spec = opened.spec
    encoder = Encoder(spec, opened.format, opened.tokenizer, pairs=True)
    cache = open_record_cache(opened.source, encoder, opened.root, opened.verify)
    train, held_out = divide_pairs(cache, opened.tokenizer, spec)
    if not len(train):
        why = f"all {cache.header.documents:,} records are longer, and data.too_long is drop"
        firsts, ends = (cache.documents()[name].astype(np.int64) for name in ("first", "end"))
        lengths: TokenIds = ends - np.concatenate([[0], ends[:-1]]) - firsts
        fixes = [
            longer_sequences(needed, key)
            for needed, room, key in (
                (firsts, spec.sequence_length, "data.sequence_length"),
                (lengths, spec.decoder_length, "data.completion_length"),
            )
            if needed.max() > room
        ]
        raise DataError("no record fits into a sequence", where=spec.source, why=why, fix="; ".join(fixes))

    def sentences() -> list[str]:
        header = cache.header
        said = [
            f"{spec.source}: format {encoder.format}, {header.documents:,} records, {header.tokens:,} tokens",
            f"{len(train):,} records to train on and {len(held_out):,} held out: prompts of up to"
            f" {train.length:,} tokens for the encoder, completions of up to {train.target_length:,} for the decoder",
        ]
        if cut := int(train.cut.sum() + held_out.cut.sum()):
            said.append(
                f"too long: {cut:,} records with a prompt or a completion cut at its end; data.too_long=drop leaves"
                " them out"
            )
        if dropped := header.documents - len(train) - len(held_out):
            said.append(f"too long: {dropped:,} records dropped; data.too_long is drop")
        if header.unread:
            said.append(f"not read by the format {encoder.format}: {header.unread}")
        return said

    parts = [cache.header.digest, spec.sequence_length, spec.held_out, "pairs", train.target_length]
    return Splits(train, held_out, json_hash(parts), sentences)


def divide_pairs(cache: TokenCache, tokenizer: Tokenizer, spec: DataSpec) -> tuple[Pairs, Pairs]:
    """(training records, held-out records) of a cache that an encoder of pairs wrote."""
    length = spec.sequence_length
    target_length = spec.decoder_length
    records = cache.documents()
    ends = records["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    borders = starts + records["first"].astype(np.int64)  # the first trained token is the completion's first
    if spec.too_long == "drop":
        fits = (borders - starts <= length) & (ends - borders <= target_length)
        records = records[fits]
        starts = starts[fits]
        borders = borders[fits]
        ends = ends[fits]
    mask = held_out_records(records["hash"], spec.held_out)
    train, held_out = (
        Pairs(cache, tokenizer, starts[side], borders[side], ends[side], length, target_length)
        for side in (~mask, mask)
    )
    return train, held_out
