"""Datasets: numbered samples, each a mapping of named arrays. One interface for every kind of training data.

A *source* (`source`) has documents or records. A *dataset* has the samples that a model trains on: `input_ids`,
`labels`, and whatever else its kind adds, per token or per sample. Batching stacks a sample's arrays by name
(`batches.collate`) and knows none of the names. So a new kind of data is one file with a subclass of `TokenDataset`,
and one line in `opening.OPENERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.data.cache import TokenCache
from shardwise.data.shuffle import samples_of_step
from shardwise.data.source import Source
from shardwise.data.tokenizer import Tokenizer
from shardwise.recipe.sections import DataSpec

Sample = Mapping[str, Any]
"""Arrays or tensors by name, without a batch dimension."""

TokenIds = npt.NDArray[np.int64]

MaskedTokens = list[tuple[int, bool]]
"""Tokens, each with whether it is trained on."""

NOT_COUNTED = -100
"""The label that the loss ignores: the `ignore_index` of PyTorch's cross entropy."""


class Dataset(ABC):
    """Numbered samples, in an order that follows from the seed and the step alone.

    Attributes:
        endless: whether samples have numbers beyond the first epoch (a stream).
    """

    endless = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Sample `index`. All samples have the same names."""

    @abstractmethod
    def padding(self) -> Sample:
        """A row that the loss ignores: it gives every rank as many equally shaped micro-batches as the others.

        Where no such row is known, it is any sample with the key PADDING. It is then left out of a batch that has
        another row, and a batch of nothing else has a loss of zero (``model/factory.py``).
        """

    def rows(self, indices: Sequence[int | None], keys: Sequence[object] = ()) -> list[Sample]:
        """The samples, and a padding row for None.

        Args:
            keys: of each row; what a user's code draws at random for a sample follows from its key.
        """
        return [self.padding() if index is None else self.sample(index) for index in indices]

    @abstractmethod
    def text(self, index: int) -> str:
        """Sample `index` as readable text."""

    @property
    def fill(self) -> Mapping[str, int]:
        """By name, the value that fills up arrays that differ in length within a batch; others must be equal."""
        return {}

    def release(self) -> None:
        """Called after samples were copied into a batch: give back the memory that reading them mapped."""
        return

    def filled(self, index: int) -> int | None:
        """Number of tokens of a sample before its padding; None if it has no padding."""
        return None

    def where(self, indices: Sequence[int]) -> str:
        """The samples, as error messages name them."""
        return f"samples {', '.join(map(str, indices))}"

    # -- order

    @property
    def epoch(self) -> int:
        """Number of samples that are shuffled together."""
        return len(self)

    def samples(self, step: int, batch_size: int, seed: int) -> list[int]:
        """The `batch_size` sample numbers of optimizer step `step`, which counts from 0."""
        return samples_of_step(step, batch_size, self.epoch, seed, self.endless)

    def cursor(self, consumed: int) -> tuple[str, ...]:
        """The state after `consumed` samples, for a checkpoint; empty if sample numbers say everything."""
        return ()

    def begin_at(self, cursor: Sequence[str]) -> None:
        """Go on at the `cursor` of a checkpoint of the same data."""
        return


class TokenDataset(Dataset):
    """Samples of tokens, with what `shardwise data` shows of them.

    Attributes:
        tokenizer: of the tokens.
        cache: holds the tokens.
        length: of `input_ids`.
        from_records: whether it is made of records with completions, and not of plain text.
        names: of the documents of a record, where they have some.
    """

    tokenizer: Tokenizer
    cache: TokenCache
    length: int
    from_records = False
    names: Sequence[str] = ()

    @property
    def chats(self) -> bool:
        """Whether a chat template wrote the records."""
        return False

    @property
    def fill(self) -> Mapping[str, int]:
        return {"starts": self.length}

    def release(self) -> None:
        self.cache.release()

    @property
    def records(self) -> int:
        """Number of records that can be shown: of plain text, sequences."""
        return len(self)

    @abstractmethod
    def record(self, index: int) -> tuple[list[int], list[bool]]:
        """(tokens, which of them are trained on) of a record."""

    @abstractmethod
    def documents(self, index: int) -> list[MaskedTokens]:
        """The documents of a record that attention keeps apart. A sequence's first token is never trained on."""

    def note(self, index: int) -> str:
        """What happens to a record on its way into a sequence; "" if nothing."""
        return ""

    def lengths(self) -> Lengths:
        """The tokens of all records of the source."""
        ends = self.cache.documents()["end"].astype(np.int64)
        lengths = np.diff(ends, prepend=0) - 1
        return Lengths(int(lengths.max()), float(lengths.mean()))


@dataclass(frozen=True)
class Lengths:
    """Tokens of the records of a source.

    Attributes:
        longest, mean: of a record; of encoder-decoders, of its prompt.
        completion: the longest completion where the decoder has a sequence of its own, else None.
    """

    longest: int
    mean: float
    completion: int | None = None


@dataclass(frozen=True)
class OpenedSource:
    """A source of the recipe before its samples are made.

    Attributes:
        format: of its records (`formats`).
        root: the folder of token caches.
        kind: of samples (``opening.OPENERS``).
        verify: compare the content of the token cache with its digest.
        prompt_tokens: most tokens of a prompt without a completion; None is all but one of a sequence.
    """

    spec: DataSpec
    source: Source
    format: str
    tokenizer: Tokenizer
    root: Path
    kind: str = "causal"
    verify: bool = False
    prompt_tokens: int | None = None


D = TypeVar("D", bound=Dataset, covariant=True)


@dataclass(frozen=True)
class Splits(Generic[D]):
    """The training and held-out samples of a source.

    Attributes:
        fingerprint: equal for two sources exactly if sample numbers mean the same samples.
        sentences: describes the data for the terminal.
    """

    train: D
    held_out: D
    fingerprint: str
    sentences: Callable[[], list[str]] = list


Document = tuple[TokenIds, npt.NDArray[np.bool_]]
"""The tokens of a document and its trained mask, both [n + 1] for n inputs."""


def document_row(documents: Sequence[Document], length: int, separator: int) -> dict[str, TokenIds]:
    """Documents one after the other in a sequence, whose rest is separators without targets.

    Returns:
        `input_ids` and `labels`; `positions`: of each token in its document (the padding is one); `document`:
        its number, 0 in the padding. All [length].
    """
    inputs = np.full(length, separator, np.int64)
    labels = np.full(length, NOT_COUNTED, np.int64)
    positions = np.zeros(length, np.int64)
    numbers = np.zeros(length, np.int64)
    start = 0
    for number, (tokens, trained) in enumerate(documents):
        # n + 1 tokens are n inputs, each with the next token as its label.
        end = start + len(tokens) - 1
        inputs[start:end] = tokens[:-1]
        labels[start:end] = np.where(trained[1:], tokens[1:], NOT_COUNTED)
        positions[start:end] = np.arange(end - start)
        numbers[start:end] = number
        start = end
    # The padding is a document of its own, which no other one attends to.
    positions[start:] = np.arange(length - start)
    return {"input_ids": inputs, "labels": labels, "positions": positions, "document": numbers}


def document_fields(positions: TokenIds) -> Sample:
    """The arrays that keep the documents of a sequence apart in attention.

    Args:
        positions: of each token in its document, [s]; 0 where a document begins.

    Returns:
        `positions`, and `starts`: where the documents begin, int32 [documents].
    """
    return {"positions": positions, "starts": np.flatnonzero(positions == 0).astype(np.int32)}


def padding_row(length: int, separator: int, packed: bool) -> Sample:
    """A sequence of separators without targets, and with one document where documents are kept apart."""
    row = {"input_ids": np.full(length, separator), "labels": np.full(length, NOT_COUNTED)}
    return {**row, **document_fields(np.arange(length))} if packed else row
