"""Pairs of preferences as samples: two documents with the same prompt, the chosen one first.

Padded, a sample is one pair: a row for each document. Packed, it is a sequence of several pairs (`packing.best_fit` by
the length of both documents), whose documents attention keeps apart. A pair is never divided.

    padded   input_ids, labels, counted [2, s]; present [1]
    packed   input_ids, labels, counted, positions, document [s]; starts [documents]; present [pairs]

`counted` is 1 at one target of each pair, the first trained one of its chosen document, so its sum is the number of
pairs. `document` is 2k for the chosen and 2k + 1 for the rejected document of pair k. `present` is 1 for a pair and 0
for padding.

A pair that is *scored*, for a reward model, has all its tokens as inputs, and one target for each document: at its last
token, where the score is read. If the records have margins, `margin` fp32 is next to `present`.

A document that is too long is cut: padded, to a sequence; packed, so that both documents fit into one. Then neither has
less than half of it, unless it is shorter. A pair is dropped if one document would train nothing after the cut, or if
both would be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.core.errors import DataError
from shardwise.core.units import format_percent
from shardwise.data.cache import TokenCache
from shardwise.data.cache_header import Header, json_hash
from shardwise.data.cached_documents import CachedDocuments
from shardwise.data.completions import MOSTLY_PADDING, held_out_records, no_room
from shardwise.data.dataset import (
    Document,
    OpenedSource,
    Sample,
    Splits,
    TokenIds,
    document_fields,
    document_row,
    padding_row,
)
from shardwise.data.encoding import Encoder, open_record_cache
from shardwise.data.packing import best_fit
from shardwise.data.preference_encoding import PairEncoder
from shardwise.data.preference_formats import SIDES
from shardwise.recipe.sections import DataSpec


@dataclass(frozen=True)
class Preferences(CachedDocuments):
    """Pairs: records of two documents, the chosen and the rejected one.

    Attributes:
        firsts: position of the first trained target in each document, [pairs, 2].
        margins: fp32 [pairs] of pairs that are scored, or None.
        scored: whether each document has one target, at its last token. Then ``ends`` count one token more, of no
            meaning, which that target is.
    """

    firsts: TokenIds
    margins: npt.NDArray[np.float32] | None
    scored: bool

    names = SIDES

    @property
    def fill(self) -> Mapping[str, int]:
        return {**super().fill, "present": 0, "margin": 0}

    def documents_of(self, record: int) -> list[Document]:
        if not self.scored:
            return super().documents_of(record)
        return [self._scored(int(self.starts[record, side]), int(self.ends[record, side])) for side in (0, 1)]

    def _scored(self, start: int, end: int) -> Document:
        # The added token has no meaning: it is the target at the last input, where the score is read.
        tokens, _ = self.cache.document(start, end - 1)
        return np.append(tokens, self.tokenizer.separator), np.arange(end - start) == end - start - 1

    def sample(self, index: int) -> Sample:
        pairs = self.members(index)
        documents = self.documents_in(index)
        separator = self.tokenizer.separator
        if self.packed:
            row = document_row(documents, self.length, separator)
            inputs = self.inputs_in(index)
            row["counted"] = np.zeros(self.length, np.int64)
            # Where each chosen document begins in the row, and in it the input that predicts its first target.
            row["counted"][(np.cumsum(inputs) - inputs)[::2] + self.firsts[pairs, 0] - 1] = 1
            row = {**row, **document_fields(row["positions"])}
        else:
            rows = [document_row([document], self.length, separator) for document in documents]
            row = {name: np.stack([one[name] for one in rows]) for name in ("input_ids", "labels")}
            row["counted"] = np.zeros((2, self.length), np.int64)
            row["counted"][0, self.firsts[pairs, 0] - 1] = 1
        return {**row, **self._of_pairs(np.ones(len(pairs), np.int64), pairs)}

    def padding(self) -> Sample:
        row = padding_row(self.length, self.tokenizer.separator, self.packed)
        nothing = np.zeros(self.length, np.int64)
        if self.packed:
            row = {**row, "document": nothing, "counted": nothing}
        else:
            row = {name: np.stack([values, values]) for name, values in {**row, "counted": nothing}.items()}
        return {**row, **self._of_pairs(np.zeros(1, np.int64), None)}

    def _of_pairs(self, present: TokenIds, pairs: TokenIds | None) -> Sample:
        """The arrays with one value per pair."""
        if self.margins is None:
            return {"present": present}
        margins = np.zeros(len(present), np.float32) if pairs is None else self.margins[pairs]
        return {"present": present, "margin": margins}

    def note(self, index: int) -> str:
        margin = "" if self.margins is None else f"margin {self.margins[index]:g}"
        return ", ".join(filter(None, (margin, super().note(index))))

    @property
    def trained_targets(self) -> int:
        return self.starts.size if self.scored else super().trained_targets


@dataclass(frozen=True)
class LeftOut:
    """How many records or pairs are not trained on: `long` under data.too_long: drop, the others because of the cut."""

    long: int = 0
    untrained: int = 0
    equal: int = 0


def open_preferences(opened: OpenedSource) -> Splits[Preferences]:
    """Pairs through the token cache. Raises DataError if none fits into a row."""
    spec = opened.spec
    require_completions(spec)
    encoder = PairEncoder(spec, opened.tokenizer)
    cache = open_record_cache(opened.source, encoder, opened.root, opened.verify)
    scored = opened.kind == "scored"
    if scored and cache.header.margin_fault:
        what, where, why, fix = cache.header.margin_fault
        raise DataError(what, where=where, why=why, fix=fix)
    train, held_out, left_out = divide_preferences(cache, encoder, spec, scored)
    if not len(train):
        whole = inputs_of_documents(cache, 2) + (1 if scored else 0)
        raise no_room(spec, "pair", len(whole), whole.sum(1) if spec.packing else whole.max(1))
    parts = [
        cache.header.digest,
        spec.sequence_length,
        spec.held_out,
        opened.kind,
        "packed, cut alike" if spec.packing else False,
        spec.too_long,
    ]
    return Splits(train, held_out, json_hash(parts), lambda: _sentences(train, held_out, left_out, spec))


def require_completions(spec: DataSpec) -> None:
    """Raises DataError if all of a record would be trained on."""
    if spec.train_on == "all":
        raise DataError(
            "data.train_on cannot be all for preferences",
            where=spec.source,
            why="the log-probabilities are those of the completions, given the prompt",
            fix="remove that key",
        )


def rows_of_records(
    cache: TokenCache, documents: int
) -> tuple[npt.NDArray[np.void], TokenIds, npt.NDArray[np.uint64]]:
    """The rows and the starts of the documents of a cache, both [records, documents], and a hash of each record."""
    rows = cache.documents().reshape(-1, documents)
    ends = rows["end"].astype(np.int64).ravel()
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64).reshape(-1, documents)
    hashes = rows["hash"][:, 0]
    for other in rows["hash"].T[1:]:  # rotated, so that the order counts
        hashes = (hashes << np.uint64(1) | hashes >> np.uint64(63)) ^ other
    return rows, starts, hashes


def inputs_of_documents(cache: TokenCache, documents: int) -> TokenIds:
    """Number of inputs of each document of a cache, whole, [records, documents]."""
    rows, starts, _ = rows_of_records(cache, documents)
    lengths: TokenIds = rows["end"].astype(np.int64) - starts - 1
    return lengths


def divide_preferences(
    cache: TokenCache, encoder: Encoder, spec: DataSpec, scored: bool = False
) -> tuple[Preferences, Preferences, LeftOut]:
    """(training pairs, held-out pairs, counts of those left out) of a cache that a PairEncoder wrote."""
    length = spec.sequence_length
    rows, starts, hashes = rows_of_records(cache, 2)
    whole = rows["end"].astype(np.int64) - starts - (0 if scored else 1)  # inputs of each document
    room = sharing(whole, length) if spec.packing else np.minimum(whole, length)
    firsts = rows["first"].astype(np.int64)
    cut = np.any(room < whole, axis=1)
    untrained = np.any(firsts > room, axis=1)
    # Both are cut at the same token, which is among those that they have in common.
    equal = ~untrained & (room[:, 0] == room[:, 1]) & (room[:, 0] < rows["shared"][:, 0])
    if spec.too_long == "drop":
        left_out = LeftOut(long=int(cut.sum()))
        fits = ~cut
    else:
        left_out = LeftOut(0, int(untrained.sum()), int(equal.sum()))
        fits = ~untrained & ~equal
    is_held_out = held_out_records(hashes[fits], spec.held_out)
    if scored:
        firsts = room
    margins = rows["value"][:, 0].astype(np.float32) if scored and cache.header.margins else None

    def side(mask: npt.NDArray[np.bool_]) -> Preferences:
        first = starts[fits][mask]
        last = first + room[fits][mask] + 1  # n + 1 tokens are n inputs and n labels
        if spec.packing:
            order, offsets = best_fit((last - first - 1).sum(1), length)
        else:
            order = np.arange(len(first))
            offsets = np.arange(len(first) + 1)
        margins_of_side = None if margins is None else margins[fits][mask]
        return Preferences(
            cache, encoder, first, last, cut[fits][mask], order, offsets, length, spec.packing, firsts[fits][mask],
            margins_of_side, scored,
        )  # fmt: skip

    return side(~is_held_out), side(is_held_out), left_out


def sharing(whole: TokenIds, room: int) -> TokenIds:
    """How many inputs of the two documents of each pair fit into `room` together.

    Two that are both cut get the same, so that what they have in common ends at the same token.

    Args:
        whole: their inputs, [pairs, 2].
    """
    return np.minimum(whole, np.maximum(room // 2, room - whole[:, ::-1]))


# -- in words


def _sentences(train: Preferences, held_out: Preferences, left_out: LeftOut, spec: DataSpec) -> list[str]:
    header = train.cache.header
    sides = (train, held_out)
    targets = sum(side.targets for side in sides)
    rows = sum(len(side) for side in sides) * (1 if spec.packing else 2)
    filled = targets / max(1, spec.sequence_length * rows)
    share = sum(side.trained_targets for side in sides) / max(1, targets)
    cut = sum(int(side.cut.sum()) for side in sides)
    shape = "packed" if spec.packing else "two sequences a pair"
    said = [
        opening_sentence(train.cache.header, train.encoder, spec, f"{header.documents // 2:,} pairs", share),
        f"{train.records:,} pairs to train on and {held_out.records:,} held out, {shape},"
        f" {len(train):,} and {len(held_out):,} samples of {spec.sequence_length:,} tokens a row:"
        f" {format_percent(filled, 1)} filled",
    ]
    if not spec.packing and filled < MOSTLY_PADDING:
        said.append(
            f"padding takes {format_percent(1 - filled)} of the computation: data.packing=true puts several"
            " pairs into a row, and attention keeps their documents apart"
        )
    if header.margins and not train.scored:
        said.append("not read by this objective: margin")
    return said + list(left_out_sentences(header, cut, left_out, "pairs"))


def opening_sentence(header: Header, encoder: Encoder, spec: DataSpec, records: str, share: float) -> str:
    """What the records of a source are."""
    how = "detected" if spec.format == "auto" else "as data.format says"
    way = f", found by {encoder.template.way}" if header.chats and encoder.template else ""
    return (
        f"{spec.source}: format {encoder.format} ({how}), {records}, {header.tokens:,} tokens,"
        f" {format_percent(share, 1)} of the targets trained on{way}"
    )


def left_out_sentences(header: Header, cut: int, left_out: LeftOut, what: str) -> Iterator[str]:
    """Which records or pairs are not trained on as they are."""
    if cut:
        yield (
            f"too long: {cut:,} {what} cut, so the model does not see how they end;"
            " data.too_long=drop leaves them out"
        )
    if left_out.long:
        yield f"too long: {left_out.long:,} {what} dropped; data.too_long is drop"
    if left_out.untrained:
        yield f"too long: {left_out.untrained:,} {what} dropped; nothing trained on comes before the cut"
    if left_out.equal:
        yield f"too long: {left_out.equal:,} {what} dropped; chosen and rejected differ after the cut alone"
    if header.equal:
        yield f"{header.equal:,} {what} dropped: chosen and rejected are the same"
    if untrained := header.untrained - header.equal:
        yield f"{untrained:,} {what} dropped: a completion has nothing that is trained on"
    if header.implicit:
        yield f"{header.implicit:,} pairs have no 'prompt': theirs is the text that chosen and rejected begin with"
    if header.empty_documents:
        yield f"{header.empty_documents:,} completions are empty: their end alone is trained on"
    if header.endless:
        yield (
            f"{header.endless:,} trained answers never end: no token that ends a turn follows them in the chat"
            " template's text, so the model does not learn to stop"
        )
    if header.unread:
        yield f"not read: {header.unread}"
