"""Records with completions as sequences: one record per sequence with padding, or several packed records.

A record of n tokens gives n-1 inputs, and a label for every input whose next token is trained on. A record longer than
a sequence is truncated, or dropped under `data.too_long: drop`. It is dropped too if its first trained token comes
after the cut, because it would train nothing. Both are counted and reported: truncation hides from the model how a
record ends, dropping loses the longest conversations.

Packed: each record is a document. Its positions start at 0, so attention knows the boundaries (model/decoder). The rest
of a sequence is padding, a document of its own that the loss ignores. Not packed: the padding follows the record, where
causal attention does not see it, and no positions are needed.

A record is held out by a hash of its tokens and trained mask, as a document of plain text is (`text`). If that holds
out too few or too many, the last records are held out instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shardwise.core.errors import DataError
from shardwise.core.units import format_percent
from shardwise.data.cache import TokenCache
from shardwise.data.cache_header import json_hash
from shardwise.data.cached_documents import CachedDocuments
from shardwise.data.dataset import (
    OpenedSource,
    Sample,
    Splits,
    document_fields,
    document_row,
    padding_row,
)
from shardwise.data.encoding import Encoder, open_record_cache
from shardwise.data.packing import best_fit
from shardwise.recipe.sections import DataSpec

MOSTLY_PADDING = 0.5
"""Filled part of the sequences below which packing is advised."""


class Completions(CachedDocuments):
    """Records of one document."""

    def sample(self, index: int) -> Sample:
        row = document_row(self.documents_in(index), self.length, self.tokenizer.separator)
        sample = {"input_ids": row["input_ids"], "labels": row["labels"]}
        return {**sample, **document_fields(row["positions"])} if self.packed else sample

    def padding(self) -> Sample:
        return padding_row(self.length, self.tokenizer.separator, self.packed)


def open_completions(opened: OpenedSource) -> Splits[Completions]:
    """Records with completions through the token cache. Raises DataError if no completion fits into a sequence."""
    spec = opened.spec
    encoder = Encoder(spec, opened.format, opened.tokenizer)
    cache = open_record_cache(opened.source, encoder, opened.root, opened.verify)
    train, held_out = divide(cache, encoder, spec)
    if not len(train):
        ends = cache.documents()["end"].astype(np.int64)
        whole = np.diff(ends, prepend=0) - 1  # inputs of each record
        raise no_room(spec, "completion", len(whole), whole)
    parts = [cache.header.digest, spec.sequence_length, spec.held_out, "packed" if spec.packing else "padded"]
    return Splits(train, held_out, json_hash(parts), lambda: _record_sentences(train, held_out, spec))


def no_room(spec: DataSpec, what: str, count: int, needed: npt.NDArray[np.int64]) -> DataError:
    """The error where no record, or no pair, has a trained token within a sequence.

    Args:
        what: a completion, or a pair.
        count: number of records or pairs.
        needed: sequence length that each record needs, [records].
    """
    records = "pairs" if what == "pair" else "records"
    where = "in both documents" if what == "pair" else "in its completion"
    why = f"none of {count:,} {records} has trained tokens {where} before the cut at {spec.sequence_length:,}"
    if spec.too_long == "drop":
        why = f"all {count:,} {records} are longer than {spec.sequence_length:,}, and data.too_long is drop"
    return DataError(f"no {what} within a sequence", where=spec.source, why=why, fix=longer_sequences(needed))


def longer_sequences(needed: npt.NDArray[np.int64], key: str = "data.sequence_length") -> str:
    """The fix where no record fits into a sequence, by the length that each of them needs, [records]."""
    if len(needed) == 1:
        return f"raise {key} to {needed[0]:,}"
    shortest, median, longest = np.sort(needed)[[0, (len(needed) - 1) // 2, -1]]
    return (
        f"raise {key}: the shortest record needs {shortest:,}, the median {median:,}, the longest {longest:,}"
    )


def divide(cache: TokenCache, encoder: Encoder, spec: DataSpec) -> tuple[Completions, Completions]:
    """(training sequences, held-out sequences) of the records of a cache."""
    length = spec.sequence_length
    records = cache.documents()
    ends = records["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    cut = np.minimum(ends, starts + length + 1)  # n + 1 tokens are n inputs and n labels
    fits = cut == ends if spec.too_long == "drop" else records["first"] <= length
    is_held_out = held_out_records(records["hash"][fits], spec.held_out)

    def side(mask: npt.NDArray[np.bool_]) -> Completions:
        first = starts[fits][mask]
        last = cut[fits][mask]
        truncated = (cut < ends)[fits][mask]
        if spec.packing:
            order, offsets = best_fit(last - first - 1, length)
        else:
            order = np.arange(len(first))
            offsets = np.arange(len(first) + 1)
        return Completions(cache, encoder, first, last, truncated, order, offsets, length, spec.packing)

    return side(~is_held_out), side(is_held_out)


def held_out_records(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Mask of the held-out records: at least one if there are two records and `fraction` is not 0."""
    # A hash is uniform over 64 bits, so this share of the records is below the bound.
    is_held_out = hashes < np.uint64(int(fraction * 2.0**64))
    count = len(hashes)
    if not fraction or not count:
        return np.asarray(is_held_out)
    # Few records, or many equal ones, may be far from the share: then it is the last ones.
    if fraction / 2 <= is_held_out.mean() <= 2 * fraction and not is_held_out.all():
        return np.asarray(is_held_out)
    last = min(max(1, round(fraction * count)), max(0, count - 1))
    return np.arange(count) >= count - last


def _record_sentences(train: Completions, held_out: Completions, spec: DataSpec) -> list[str]:
    """Description of the records."""
    header = train.cache.header
    encoder = train.encoder
    how = "detected" if spec.format == "auto" else "as data.format says"
    template = encoder.template if train.chats and spec.train_on != "all" else None
    way = template.way if template else ""
    targets = train.targets + held_out.targets
    share = (train.trained_targets + held_out.trained_targets) / max(1, targets)
    filled = targets / max(1, spec.sequence_length * (len(train) + len(held_out)))
    sentences = [
        f"{spec.source}: format {encoder.format} ({how}), {header.documents:,} records, {header.tokens:,} tokens,"
        f" {format_percent(share, 1)} of the targets trained on" + (f", found by {way}" if way else ""),
        f"{len(train):,} sequences of {spec.sequence_length:,} tokens to train on and"
        f" {len(held_out):,} held out, {'packed' if spec.packing else 'one record each'}:"
        f" {format_percent(filled, 1)} filled",
    ]
    if not spec.packing and filled < MOSTLY_PADDING:
        sentences.append(
            f"padding takes {format_percent(1 - filled)} of the computation: data.packing=true puts several"
            " records into a sequence, and attention keeps them apart"
        )
    return sentences + list(_left_out(train, held_out, spec))


def _left_out(train: Completions, held_out: Completions, spec: DataSpec) -> Iterator[str]:
    """Which records and fields are not trained on as they are."""
    header = train.cache.header
    if truncated := int(train.cut.sum() + held_out.cut.sum()):
        split = ", split divides chats between exchanges" if train.chats and spec.too_long != "split" else ""
        yield (
            f"too long for a sequence: {truncated:,} records cut, so the model does not see how they end;"
            f" data.too_long=drop leaves them out{split}"
        )
    if dropped := header.documents - train.records - held_out.records:
        nothing = "nothing trained on comes before the cut"
        reason = "data.too_long is drop" if spec.too_long == "drop" else nothing
        yield f"too long for a sequence: {dropped:,} records dropped; {reason}"
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
        reader = "the chat template" if train.chats else f"the format {train.encoder.format}"
        yield f"not read by {reader}: {header.unread}"
