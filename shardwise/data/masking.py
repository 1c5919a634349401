"""Masked language modelling: which tokens of a step are hidden, as in BERT (Devlin et al. 2018, section 3.1).

Of all tokens but those around documents, 15 % are targets. Of these, 80 % become the mask token, 10 % a
random token, 10 % stay.
The draw depends only on (side, seed, step, slot). So it is the same after a resume, on another number of ranks, and
with another micro-batch size. An epoch later the same sequence hides other tokens; validations hide the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.data.samples import NOT_COUNTED, Batch

TARGETS, HIDDEN, REPLACED = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """Hides tokens of the sequences of a step.

    Attributes:
        mask: id of the mask token.
        never: ids that are never targets: the tokens around documents.
        vocab: number of token ids.
    """

    mask: int
    never: tuple[int | None, ...]
    vocab: int

    @property
    def _never(self) -> list[int]:
        return [token for token in self.never if token is not None]

    def masked(self, batch: Batch, step: tuple[str, int, int], slots: Sequence[int | None]) -> Batch:
        """The batch with hidden tokens in ``input_ids`` and their ids in ``labels``, both [b, s].

        Args:
            step: side (train or held out), seed and number of the step.
            slots: place of each row in the step; None is a padding row, which has no targets.
        """
        inputs = batch["input_ids"].numpy().copy()
        labels = np.full_like(inputs, NOT_COUNTED)
        for row, slot in enumerate(slots):
            if slot is None:
                continue
            digest = hashlib.blake2b(f"shardwise mask {step} {slot}".encode(), digest_size=16).digest()
            draw = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
            chosen, kind, other = draw.random((3, inputs.shape[1]))
            target = (chosen < TARGETS) & ~np.isin(inputs[row], self._never)
            labels[row, target] = inputs[row, target]
            replaced = target & (kind >= HIDDEN) & (kind < HIDDEN + REPLACED)
            inputs[row, replaced] = (other * self.vocab).astype(np.int64)[replaced]
            inputs[row, target & (kind < HIDDEN)] = self.mask
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
