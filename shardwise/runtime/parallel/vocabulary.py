"""A vocabulary sharded over tensor-parallel ranks, and the loss over its sharded logits.

No rank has the logits of all classes. Softmax needs three numbers per token from other ranks: the maximum logit, the
sum of exponentials, and the logit of the label. They are combined exactly from each rank's log-sum-exp, by two
all-reduces of one and two numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from shardwise.runtime.parallel.tp_collectives import TPGroup, gathered_last_dim

IGNORED = -100
"""Label of a target that is not counted."""


class Vocabulary:
    """``size`` classes sharded over ``ranks``; without ranks, all classes are local."""

    def __init__(self, size: int = 0, ranks: TPGroup | None = None) -> None:
        self._size = size
        self._ranks = ranks
        self._local = False
        self.start, self.stop = ranks.span(size) if ranks is not None else (0, size)

    @property
    def sharded(self) -> bool:
        return self._ranks is not None

    def local_index(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(label indices among the local classes, 0 elsewhere; whether each label is valid and local).

        The index of a label that is neither a class nor IGNORED is none of a class, so ``gather`` refuses it.
        """
        if self._ranks is None:
            valid = labels != IGNORED
            return labels * valid, valid
        inside = (labels >= self.start) & (labels < self.stop)
        known = (labels == IGNORED) | ((labels >= 0) & (labels < self._size))
        return (labels - self.start).where(inside, known.to(labels.dtype) - 1), inside

    def combined(self, log_sums: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """(log-sum-exp, label logit) over all classes, from each rank's values.

        Both are [n]; ``picked`` is 0 for labels on other ranks.
        """
        if self._ranks is None:
            return log_sums, picked
        largest = self._ranks.all_reduce(log_sums, "max")
        sums, picked = self._ranks.all_reduce(torch.stack([(log_sums - largest).exp(), picked])).unbind()
        return sums.log() + largest, picked

    @contextmanager
    def local_logits(self) -> Iterator[None]:
        """Inside the context the output layer returns this rank's logits only."""
        before = self._local
        self._local = True
        try:
            yield
        finally:
            self._local = before

    def full_logits(self, logits: Tensor) -> Tensor:
        """The output layer's result for this rank's logits [..., part]: all-gathered, unless ``local_logits`` is
        active.
        """
        if self._ranks is None or self._local:
            return logits
        return gathered_last_dim(logits, self._ranks, self._size)


WHOLE_VOCABULARY = Vocabulary()
_VOCABULARY_BUFFER = "sharded_vocabulary"


def set_vocabulary(model: nn.Module, vocabulary: Vocabulary) -> None:
    """Record that the model's output layer returns sharded logits."""
    setattr(model, _VOCABULARY_BUFFER, vocabulary)


def vocabulary_of(model: nn.Module) -> Vocabulary:
    """The vocabulary of the model's logits."""
    return cast("Vocabulary", getattr(model, _VOCABULARY_BUFFER, WHOLE_VOCABULARY))
