"""From a record of preferences to its documents: the tokens and the trained mask of each.

A document is a prompt with one completion, rendered and tokenized as a whole like any other record (`encoding`). The
documents of a pair differ after the prompt alone: what comes before the first trained token is the same in both. A
token that crosses the border of prompt and completion may begin earlier in one of them. Then both are trained on from
there, so that their log-probabilities are of the same prompt. A chat whose prompt the template writes in two ways is
refused.

A pair trains nothing if its two documents are equal, or if one side has no trained token. Such pairs are dropped and
counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwise.core.errors import DataError
from shardwise.data.cache_header import PREFERENCE
from shardwise.data.encoding import Encoded, Encoder
from shardwise.data.formats import QUESTION, Chat
from shardwise.data.preference_formats import (
    Preference,
    is_empty,
    labelled_of,
    margin_of,
    preference_of,
    shared_length,
)
from shardwise.data.readers import Record
from shardwise.data.tokenizer import Tokenizer
from shardwise.recipe.sections import DataSpec


class PairEncoder(Encoder):
    """Tokenizes records of `preference`: a chosen document, then the rejected one.

    Attributes:
        equal: number of records so far that were left out because both are the same.
        margins: whether the records have a margin; None before the first one.
        margin_fault: the parts of the error for objectives that read margins.
        implicit: number of records so far whose prompt is the text that both completions begin with.
    """

    documents = 2
    row = PREFERENCE

    def __init__(self, spec: DataSpec, tokenizer: Tokenizer) -> None:
        super().__init__(spec, "preference", tokenizer)
        self.keys |= {QUESTION}
        self.equal = self.implicit = 0
        self.margins: bool | None = None
        self.margin_fault: tuple[str, ...] = ()

    def nothing_trained(self, records: int) -> tuple[str, str]:
        if self.equal == records:
            return f"chosen and rejected are the same in all {records:,} records", "check these fields"
        why = f"a completion of {records - self.equal:,} records has nothing that is trained on"
        same = f", and chosen and rejected of {self.equal:,} are the same" if self.equal else ""
        return why + same, super().nothing_trained(records)[1]

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"margin_fault": self.margin_fault}
        facts |= {"equal": self.equal, "margins": bool(self.margins), "implicit": self.implicit}
        return {"preferences": True, **facts}

    def encode_all(self, records: Sequence[Record]) -> Iterator[list[Encoded]]:
        pairs = [self._pair(record) for record in records]
        examples = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
        encoded = iter(self._encoded(examples, [record.where for record in records for _ in range(2)]))
        # One iterator twice: zip takes the chosen and then the rejected document from it.
        for record, pair, chosen, rejected in zip(records, pairs, encoded, encoded, strict=False):
            if chosen.tokens == rejected.tokens:
                self.equal += 1
                yield []
            elif any(chosen.trained[1:]) and any(rejected.trained[1:]):
                yield list(_aligned(chosen, rejected, pair, record.where))
            else:
                yield []

    def _pair(self, record: Record) -> Preference:
        pair = preference_of(record, self.template is not None)
        self.implicit += pair.implicit
        for example in (pair.chosen, pair.rejected):
            self._note(example, record, pair.read)
            self.empty += is_empty(example)
        # Only objectives that read margins refuse records for them, so the fault goes into the header.
        try:
            return replace(pair, margin=self._margin(record))
        except DataError as error:
            self.margin_fault = self.margin_fault or (error.what, error.where, error.why, error.fix)
            return pair

    def _margin(self, record: Record) -> float | None:
        """Raises DataError if it is no number, or if only some records have one."""
        margin = margin_of(record.fields, record.where)
        has_margin = margin is not None
        if self.margins is None:
            self.margins = has_margin
        elif has_margin != self.margins:
            have = "the records before have one" if self.margins else "the records before have none"
            what = "a 'margin'" if has_margin else "no 'margin'"
            raise DataError(what, where=record.where, why=have, fix="give every record a margin, or none")
        return margin


def _aligned(chosen: Encoded, rejected: Encoded, pair: Preference, where: str) -> tuple[Encoded, Encoded]:
    """Both documents, trained on from the same token."""
    shared = shared_length(chosen.tokens, rejected.tokens)
    first = min(side.trained.index(True) for side in (chosen, rejected))
    if isinstance(pair.chosen, Chat) and shared < first:
        raise DataError(
            "the chat template writes the prompt in two ways",
            where=where,
            why=f"the tokens of chosen and rejected differ from token {shared}, before their answers",
            fix="end both after an answer to the same turns",
        )
    if _answer_alike(pair):
        first = min(first, shared)
        chosen, rejected = (
            replace(side, trained=_mask_from(side.trained, first)) for side in (chosen, rejected)
        )
    value = pair.margin or 0.0
    return replace(chosen, shared=shared, value=value), replace(rejected, shared=shared, value=value)


def _answer_alike(pair: Preference) -> bool:
    """Whether the same turn of both is the first that is trained on; of texts, always."""
    sides = [side.turns for side in (pair.chosen, pair.rejected) if isinstance(side, Chat)]
    answers = [[turn.role == "assistant" and turn.trained for turn in turns] for turns in sides]
    return len({trained.index(True) for trained in answers}) <= 1


def _mask_from(trained: list[bool], first: int) -> list[bool]:
    """A trained mask that begins at a token at the latest."""
    begin = trained.index(True)
    return trained[:first] + [True] * (begin - first) + trained[begin:]


class LabelEncoder(Encoder):
    """Tokenizes records of `unpaired`."""

    row = PREFERENCE

    def __init__(self, spec: DataSpec, tokenizer: Tokenizer) -> None:
        super().__init__(spec, "unpaired", tokenizer)

    def facts(self) -> dict[str, Any]:
        return {"preferences": True}

    def encode_all(self, records: Sequence[Record]) -> Iterator[list[Encoded]]:
        labelled = [labelled_of(record, self.template is not None) for record in records]
        for record, one in zip(records, labelled, strict=True):
            self._note(one.example, record, one.read)
            self.empty += is_empty(one.example)
        encoded = self._encoded([one.example for one in labelled], [record.where for record in records])
        for one, document in zip(labelled, encoded, strict=True):
            yield [replace(document, value=float(one.desirable))] if any(document.trained[1:]) else []
