"""Completions with a label as samples: each is desirable or not (Ethayarajh et al. 2024, KTO, arXiv:2402.01306).

    padded   input_ids, labels, counted [s]; present, desirable [1]
    packed   input_ids, labels, counted, positions, document [s]; starts [documents]; present, desirable [records]

`counted` is 1 at the first trained target of each record. `document` is the record's number in the row.

KTO's reference point is a divergence, estimated by mismatched records: the prompt of a record with a completion of
the next prompt of this side of the split, in the order of the source; the last takes the first that is another.
Records with one prompt that follow each other take its completions in turn, because another completion of the same
prompt is no mismatch. They are in `kl_input_ids` and `kl_labels`; packed, also `kl_positions`, `kl_starts` and
`kl_document`. They are joined as tokens.

A source of pairs gives two records each, first the chosen one, which is desirable. Both are on the same side of the
split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.core.units import format_percent
from shardwise.data.cache import TokenCache
from shardwise.data.cache_header import json_hash
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
from shardwise.data.preference_encoding import LabelEncoder, PairEncoder
from shardwise.data.preferences import (
    LeftOut,
    inputs_of_documents,
    left_out_sentences,
    opening_sentence,
    require_completions,
    rows_of_records,
)
from shardwise.recipe.sections import DataSpec

MISMATCHED = "kl_"
"""Before the names of the arrays of mismatched records."""


@dataclass(frozen=True)
class Unpaired(CachedDocuments):
    """Records of one document with a label.

    Attributes:
        firsts: position of its first trained target, [records].
        borders: position of its first token behind the prompt, [records].
        desirable: 1 or 0, [records].
        others: the record that gives the completion of a mismatched one, [records].
        one_prompt: whether all records have the same prompt, so that no completion is mismatched.
    """

    firsts: TokenIds
    borders: TokenIds
    desirable: TokenIds
    others: TokenIds
    one_prompt: bool

    @property
    def fill(self) -> Mapping[str, int]:
        starts = super().fill["starts"]
        return {"starts": starts, f"{MISMATCHED}starts": starts, "present": 0, "desirable": 0}

    def sample(self, index: int) -> Sample:
        records = self.members(index)
        inputs = self.inputs_in(index)
        counted = np.zeros(self.length, np.int64)
        # Where each record begins in the row, and in it the input that predicts its first target.
        counted[np.cumsum(inputs) - inputs + self.firsts[records] - 1] = 1
        mismatched = self._row([self.mismatched(record) for record in records])
        return {
            **self._row(self.documents_in(index)),
            "counted": counted,
            "present": np.ones(len(records), np.int64),
            "desirable": self.desirable[records],
            **{f"{MISMATCHED}{name}": values for name, values in mismatched.items()},
        }

    def padding(self) -> Sample:
        row = padding_row(self.length, self.tokenizer.separator, self.packed)
        nothing = np.zeros(self.length, np.int64)
        row = {**row, "document": nothing} if self.packed else row
        absent = np.zeros(1, np.int64)
        mismatched = {f"{MISMATCHED}{name}": values for name, values in row.items()}
        return {**row, "counted": nothing, "present": absent, "desirable": absent, **mismatched}

    def _row(self, documents: list[Document]) -> Sample:
        row = document_row(documents, self.length, self.tokenizer.separator)
        if self.packed:
            return {**row, **document_fields(row["positions"])}
        return {name: row[name] for name in ("input_ids", "labels")}

    def mismatched(self, record: int) -> Document:
        """The prompt of a record with the completion of another one, cut to a row."""
        other = int(self.others[record])
        start = int(self.starts[record])
        border = int(self.starts[other] + self.borders[other])
        prompt = self.cache.document(start, start + int(self.borders[record]))
        completion = self.cache.document(border, int(self.ends[other]))
        tokens, trained = (
            np.concatenate(parts)[: self.length + 1] for parts in zip(prompt, completion, strict=True)
        )
        return tokens, trained

    def note(self, index: int) -> str:
        label = "desirable" if self.desirable[index] else "not desirable"
        return ", ".join(filter(None, (label, super().note(index))))


def open_unpaired(opened: OpenedSource) -> Splits[Unpaired]:
    """Labelled records through the token cache; pairs share that of pairs. Raises DataError if none fits into a row."""
    spec = opened.spec
    require_completions(spec)
    encoder: Encoder
    if opened.format == "preference":
        encoder = PairEncoder(spec, opened.tokenizer)
    else:
        encoder = LabelEncoder(spec, opened.tokenizer)
    cache = open_record_cache(opened.source, encoder, opened.root, opened.verify)
    train, held_out, left_out = divide_unpaired(cache, encoder, spec)
    if not len(train):
        whole = inputs_of_documents(cache, encoder.documents)
        raise no_room(spec, "completion", whole.size, whole.max(1))
    parts = [
        cache.header.digest,
        spec.sequence_length,
        spec.held_out,
        "unpaired, of other prompts",
        spec.packing,
        spec.too_long,
    ]
    return Splits(
        train, held_out, json_hash(parts), lambda: _label_sentences(train, held_out, left_out, spec)
    )


def divide_unpaired(
    cache: TokenCache, encoder: Encoder, spec: DataSpec
) -> tuple[Unpaired, Unpaired, LeftOut]:
    """(training records, held-out records, counts of those left out) of a cache of preferences."""
    length = spec.sequence_length
    step = encoder.documents  # records of one record of the source: two of a pair
    rows, starts, hashes = rows_of_records(cache, step)
    desirable = rows["value"].astype(np.int64) if step == 1 else np.tile([1, 0], (len(rows), 1))
    whole = rows["end"].astype(np.int64) - starts - 1  # inputs of each document
    room = np.minimum(whole, length)
    firsts = rows["first"].astype(np.int64)
    borders = np.where(cache.trained[starts], 0, firsts)  # without a prompt, the first token is no target
    cut = room < whole
    if spec.too_long == "drop":
        fits = ~cut.any(1)
        left_out = LeftOut(long=step * int((~fits).sum()))
    else:
        fits = (firsts <= room).all(1)
        left_out = LeftOut(untrained=step * int((~fits).sum()))
    is_held_out = held_out_records(hashes[fits], spec.held_out)

    def side(mask: npt.NDArray[np.bool_]) -> Unpaired:
        first, inputs, border = (values[fits][mask].ravel() for values in (starts, room, borders))
        others, one_prompt = with_other_prompts(cache, first, border, step)
        if spec.packing:
            # A row has room for its records, and for their mismatched ones.
            mismatched = border + (inputs - border)[others]
            order, offsets = best_fit(np.maximum(inputs, np.minimum(mismatched, length)), length)
        else:
            order = np.arange(len(first))
            offsets = np.arange(len(first) + 1)
        trained, label, shortened = (values[fits][mask].ravel() for values in (firsts, desirable, cut))
        return Unpaired(
            cache, encoder, first, first + inputs + 1, shortened, order, offsets, length, spec.packing, trained,
            border, label, others, one_prompt,
        )  # fmt: skip

    return side(~is_held_out), side(is_held_out), left_out


def with_other_prompts(
    cache: TokenCache, starts: TokenIds, borders: TokenIds, known: int
) -> tuple[TokenIds, bool]:
    """Of each record, one with the next prompt; several of a prompt take its first, second and so on.

    And whether there is one prompt only; then they have it, too.

    Args:
        borders: number of tokens of the prompts.
        known: so many records after each other are known to have one prompt.
    """

    def prompt(record: int) -> TokenIds:
        return cache.document(int(starts[record]), int(starts[record] + borders[record]))[0]

    count = len(starts)
    records = np.arange(count)
    # Whether a record begins a group of one prompt. Only prompts of equal length need a look at their tokens.
    begins = records % known == 0
    same_length = begins[known:] & (borders[known:] == borders[:-known])
    for record in (np.flatnonzero(same_length) + known).tolist():
        begins[record] = not np.array_equal(prompt(record - known), prompt(record))
    firsts = np.flatnonzero(begins)
    if len(firsts) < 2:
        cache.release()
        return (records + known) % max(1, count), count > 0
    first_again = np.array_equal(prompt(firsts[0]), prompt(firsts[-1]))
    cache.release()
    group_of = np.cumsum(begins) - 1
    sizes = np.diff(firsts, append=count)
    following = (group_of + 1) % len(firsts)
    # The last group takes the first one, or the second if the first has its prompt.
    following[group_of == len(firsts) - 1] = int(first_again)
    others: TokenIds = firsts[following] + (records - firsts[group_of]) % sizes[following]
    return others, False


def _label_sentences(train: Unpaired, held_out: Unpaired, left_out: LeftOut, spec: DataSpec) -> list[str]:
    header = train.cache.header
    sides = (train, held_out)
    targets = sum(side.targets for side in sides)
    filled = targets / max(1, spec.sequence_length * sum(len(side) for side in sides))
    share = sum(side.trained_targets for side in sides) / max(1, targets)
    desirable = sum(int(side.desirable.sum()) for side in sides)
    count = train.records + held_out.records
    said = [
        opening_sentence(header, train.encoder, spec, f"{header.documents:,} records", share),
        f"{len(train):,} sequences of {spec.sequence_length:,} tokens to train on and {len(held_out):,} held out,"
        f" {'packed' if spec.packing else 'one record each'}: {format_percent(filled, 1)} filled",
        f"{desirable:,} records are desirable, {count - desirable:,} are not",
    ]
    if len(kinds := set(train.desirable.tolist())) == 1:
        kind, other = ("desirable", "less") if kinds == {1} else ("undesirable", "more")
        said.append(f"all records of this source are {kind}: nothing in it is made {other} likely")
    if train.one_prompt:
        said.append(
            "all records have one prompt: no answer is mismatched, so the objective's estimate of the KL divergence is"
            " of trained answers"
        )
    if not spec.packing and filled < MOSTLY_PADDING:
        said.append(
            f"padding takes {format_percent(1 - filled)} of the computation: data.packing=true puts several"
            " records into a row, and attention keeps them apart"
        )
    cut = sum(int(side.cut.sum()) for side in sides)
    return said + list(left_out_sentences(header, cut, left_out, "records"))
