"""A vocabulary whose classes lie on several ranks: what the loss must know to be taken from parts of the logits.

Logits of all classes never lie on one rank. Softmax needs three numbers per token from the others: the largest
logit, the sum of exponentials, and the logit of the label, which one rank has. They are combined from each rank's own
log of its sum of exponentials, exactly, in two all-reduces of one and two numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from shardwise.model.exchange import Ranks, side_by_side

IGNORED = -100
"""Label of a target that does not count."""


class Vocabulary:
    """``size`` classes in parts over ``ranks``; all of them here without ranks."""

    def __init__(self, size: int = 0, ranks: Ranks | None = None) -> None:
        self._size = size
        self._ranks = ranks
        self._apart = False
        self.start, self.stop = ranks.span(size) if ranks is not None else (0, size)

    @property
    def divided(self) -> bool:
        return self._ranks is not None

    def place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(indices of the labels among the classes here, 0 where they are not; whether they count and are here)."""
        if self._ranks is None:
            return labels.clamp(min=0), labels != IGNORED
        inside = (labels >= self.start) & (labels < self.stop)
        return (labels - self.start).where(inside, 0), inside

    def combined(self, log_sums: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """From each rank's logs of sums of exponentials, and logits of the labels it has: those of all classes.

        Both are [n] and 0 is the picked logit of a label that is elsewhere.
        """
        if self._ranks is None:
            return log_sums, picked
        largest = self._ranks.reduced(log_sums, "max")
        sums, picked = self._ranks.reduced(torch.stack([(log_sums - largest).exp(), picked])).unbind()
        return sums.log() + largest, picked

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it the output layer returns this rank's logits alone."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def joined(self, logits: Tensor) -> Tensor:
        """What the output layer returns for this rank's logits [..., part]."""
        if self._ranks is None or self._apart:
            return logits
        return side_by_side(logits, self._ranks, self._size)


WHOLE = Vocabulary()
_NAME = "divided_vocabulary"


def divide(model: nn.Module, vocabulary: Vocabulary) -> None:
    """Say that this model's output layer yields logits of a part of the classes."""
    setattr(model, _NAME, vocabulary)


def vocabulary_of(model: nn.Module) -> Vocabulary:
    """How the classes of this model's logits are divided."""
    return cast("Vocabulary", getattr(model, _NAME, WHOLE))
