"""Records for encoder-decoder models: the prompt for the encoder, the completion for the decoder.

Both are tokenized alone and as the tokenizer frames a text (T5 appends ``</s>``, BART puts ``<s>`` before it too), and
each ends with the end-of-text token. The cache stores a record as prompt, then completion; the trained mask begins with
the completion. A longer prompt is cut before its last token, a longer completion at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.data.cache import TokenCache
from shardwise.data.examples import IGNORED, held_out
from shardwise.data.packing import Numbers


@dataclass(frozen=True)
class Pairs:
    """Records of one side of the split.

    Attributes:
        cache: the cache with their tokens.
        starts, borders, ends: of prompt, completion and the next record in the cache, [records].
        length: tokens of the encoder's sequence.
        target_length: tokens of the decoder's sequence.
    """

    cache: TokenCache
    starts: Numbers
    borders: Numbers
    ends: Numbers
    length: int
    target_length: int

    @property
    def sequences(self) -> int:
        return len(self.starts)

    @cached_property
    def truncated(self) -> int:
        """Number of records with a prompt or a completion that was cut."""
        prompts, completions = self.borders - self.starts, self.ends - self.borders
        return int(((prompts > self.length) | (completions > self.target_length)).sum())

    def cuts(self, index: int) -> bool:
        """Whether a record's prompt or completion is cut."""
        prompt, completion = self.borders[index] - self.starts[index], self.ends[index] - self.borders[index]
        return bool(prompt > self.length or completion > self.target_length)

    def prompt(self, index: int) -> Numbers:
        """The encoder's tokens of a record, at most `length`."""
        tokens = self.cache.tokens[self.starts[index] : self.borders[index]].astype(np.int64)
        return tokens if len(tokens) <= self.length else np.append(tokens[: self.length - 1], tokens[-1])

    def completion(self, index: int) -> Numbers:
        """The decoder's targets of a record, at most `target_length`."""
        found: Numbers = self.cache.tokens[self.borders[index] : self.ends[index]].astype(np.int64)
        return found[: self.target_length]

    def padded(self, samples: Sequence[int | None], padding: int) -> tuple[Numbers, Numbers, Numbers]:
        """(encoder's tokens [b, s], their mask [b, s], targets [b, t]) of records; None is a padding row.

        A padding row attends to its own padding: attention over nothing is not a number.
        """
        inputs = np.full((len(samples), self.length), padding, np.int64)
        mask = np.zeros_like(inputs)
        labels = np.full((len(samples), self.target_length), IGNORED, np.int64)
        for row, sample in enumerate(samples):
            if sample is None:
                mask[row] = 1
                continue
            prompt, completion = self.prompt(sample), self.completion(sample)
            inputs[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
            labels[row, : len(completion)] = completion
        self.cache.release()
        return inputs, mask, labels


def divide_pairs(
    cache: TokenCache, fraction: float, length: int, target_length: int, drop: bool = False
) -> tuple[Pairs, Pairs]:
    """(training records, held-out records) of a cache that an encoder of pairs wrote.

    Args:
        fraction: the fraction of records to hold out. drop: leave out records of which a part would be cut.
    """
    records = cache.documents()
    ends = records["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    borders = starts + records["first"].astype(np.int64)
    if drop:
        fits = (borders - starts <= length) & (ends - borders <= target_length)
        records, starts, borders, ends = records[fits], starts[fits], borders[fits], ends[fits]
    held = held_out(records["hash"], fraction)
    train, other = (
        Pairs(cache, starts[side], borders[side], ends[side], length, target_length) for side in (~held, held)
    )
    return train, other
