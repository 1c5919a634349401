"""Masked language modelling: which tokens of a step are hidden, as in BERT (Devlin et al. 2018, section 3.1).

Of all tokens but those around documents, 15 % are targets. Of these, 80 % become the mask token, 10 % a
random token, 10 % stay.
The draw depends only on (side, seed, step, slot). So it is the same after a resume, on another number of ranks, and
with another micro-batch size. An epoch later the same sequence hides other tokens; validations hide the same ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from shardwise.data.dataset import NOT_COUNTED, Sample

TARGET_SHARE = 0.15
# Of the targets; the others stay.
MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


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

    def masked(self, row: Sample, step: tuple[str, int, int], slot: int | None) -> Sample:
        """A row with hidden tokens in ``input_ids`` and their ids in ``labels``, both [s].

        Args:
            step: side (train or held out), seed and number of the step.
            slot: of the row in the step; None is a padding row, which has no targets.
        """
        inputs = row["input_ids"].copy()
        labels = np.full_like(inputs, NOT_COUNTED)
        if slot is None:
            return {"input_ids": inputs, "labels": labels}
        digest = hashlib.blake2b(f"shardwise mask {step} {slot}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        draw, kind, other = generator.random((3, len(inputs)))  # uniform in [0, 1), [s] each
        target = (draw < TARGET_SHARE) & ~np.isin(inputs, self._never)
        labels[target] = inputs[target]  # before any input changes
        replaced = target & (kind >= MASKED_SHARE) & (kind < MASKED_SHARE + RANDOM_SHARE)
        inputs[replaced] = (other * self.vocab).astype(np.int64)[replaced]
        inputs[target & (kind < MASKED_SHARE)] = self.mask
        return {"input_ids": inputs, "labels": labels}
