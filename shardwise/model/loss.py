"""Cross-entropy over a large vocabulary, in fp32, without fp32 copies of the logits.

``F.cross_entropy(logits.float(), ...)`` keeps 12 bytes per token and vocabulary entry at its peak (bf16
logits, their fp32 copy, the log-softmax, its gradient; planner note 2.6). Here the backward pass keeps the
logits as they are and one number per token, and both passes work through the rows in chunks, converting one
chunk to fp32 at a time: 4 bytes in bf16, 8 in fp32. The arithmetic is the same: maximum, exponentials and sums
in fp32 (fp64 for fp64 logits), the gradient rounded to the logits' dtype once.

Refused: never forming the logits at all (fusing the projection), which belongs to a technique that must also
know how the head is sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Label of a target that does not count."""

CHUNKS = 16
"""Temporary memory is the logits' in fp32 divided by this."""


class _CrossEntropySum(torch.autograd.Function):
    """Sum over counted rows of -log softmax(logits)[label]. logits [n, v], labels [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        counted = labels != IGNORED
        index = labels.clamp(min=0).unsqueeze(1)
        rows = max(1, -(-logits.shape[0] // CHUNKS))
        log_sums = torch.cat([chunk.to(wide).logsumexp(1) for chunk in logits.split(rows)])
        picked = logits.gather(1, index).squeeze(1).to(wide)
        ctx.save_for_backward(logits, index, counted, log_sums)
        ctx.rows = rows
        return ((log_sums - picked) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, index, counted, log_sums = ctx.saved_tensors
        scale = (grads[0] * counted).unsqueeze(1)
        gradient = torch.empty_like(logits)
        pieces = (t.split(ctx.rows) for t in (logits, index, scale, log_sums.unsqueeze(1), gradient))
        for chunk, label, weight, log_sum, out in zip(*pieces, strict=True):
            probability = (chunk - log_sum).exp_()
            probability.mul_(weight).scatter_add_(1, label, -weight)
            out.copy_(probability)
        return gradient, None


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of ``logits`` [..., v] against ``labels`` [...]; -100 is not counted.

    Returns a scalar in fp32 (fp64 for fp64 logits).
    """
    return _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten())
