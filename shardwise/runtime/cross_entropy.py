"""Cross-entropy of a large vocabulary without fp32 copies of the logits.

``F.cross_entropy(logits.float(), ...)`` needs 12 bytes per token and vocabulary entry at its peak: bf16 logits, their
fp32 copy, the log-softmax and its gradient. Here the backward pass saves the logits and one number per token, and both
passes convert one chunk of rows to fp32 at a time: 4 bytes in bf16, 8 in fp32. The arithmetic is unchanged, and the
gradient is rounded to the logits' dtype once.

With a sharded vocabulary, each rank has the logits of its classes (vocabulary.py). chunked_cross_entropy.py avoids the
logits altogether.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.parallel.vocabulary import IGNORED, WHOLE_VOCABULARY, Vocabulary

__all__ = ["IGNORED", "cross_entropies", "cross_entropy_sum"]

LOGIT_CHUNKS = 16
"""Temporary memory is the fp32 size of the logits divided by this."""


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[label] of every row, 0 where the label is ignored. logits [n, v], labels [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        index, here = vocabulary.local_index(labels)
        counted = labels != IGNORED if vocabulary.sharded else here
        index = index.unsqueeze(1)
        rows = max(1, -(-logits.shape[0] // LOGIT_CHUNKS))
        log_sums = torch.cat([chunk.to(wide).logsumexp(1) for chunk in logits.split(rows)])
        picked = logits.gather(1, index).squeeze(1).to(wide)
        if vocabulary.sharded:
            log_sums, picked = vocabulary.combined(log_sums, picked * here)
        ctx.save_for_backward(logits, index, counted, here, log_sums)
        ctx.rows, ctx.sharded = rows, vocabulary.sharded
        return (log_sums - picked) * counted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, index, counted, here, log_sums = ctx.saved_tensors
        scale = (grads[0] * counted).unsqueeze(1)
        pull = (grads[0] * here).unsqueeze(1) if ctx.sharded else scale
        gradient = torch.empty_like(logits)
        pieces = (t.split(ctx.rows) for t in (logits, index, scale, pull, log_sums.unsqueeze(1), gradient))
        for chunk, label, weight, own, log_sum, out in zip(*pieces, strict=True):
            probability = (chunk - log_sum).exp_()
            probability.mul_(weight).scatter_add_(1, label, -own)
            out.copy_(probability)
        return gradient, None, None


def cross_entropy_sum(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> Tensor:
    """Summed cross-entropy of ``logits`` [..., v] against ``labels`` [...]; label -100 is ignored.

    With a sharded ``vocabulary``, the logits are those of this rank's classes and the sum is over all classes. Returns
    a scalar in fp32 (fp64 for fp64 logits).
    """
    return cross_entropies(logits, labels, vocabulary).sum()


def cross_entropies(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> Tensor:
    """The cross-entropy of every token, of the shape of ``labels``; 0 for label -100. Arguments as above."""
    rows: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocabulary)
    return rows.view(labels.shape)
