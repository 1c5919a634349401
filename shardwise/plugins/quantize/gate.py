"""What quantization lost: perplexity of both models, and the KL divergence from the base, on held-out tokens.

Both heads run over a few tokens at a time, so logits take little memory. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.data.dataset import NOT_COUNTED

LOGIT_ROWS = 256
"""Tokens of a batch whose logits are in memory at once."""


@dataclass(frozen=True)
class Lost:
    """Means over the held-out tokens. ``kl`` is KL(base || quantized) in nats per token."""

    base_loss: float
    quantized_loss: float
    kl: float
    tokens: int

    @property
    def perplexity(self) -> dict[str, float]:
        return {"base": _exp(self.base_loss), "quantized": _exp(self.quantized_loss)}


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def losses(
    heads: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    base: Sequence[Tensor],
    quantized: Sequence[Tensor],
    labels: Sequence[Tensor],
) -> Tensor:
    """Sums over the tokens with a label, fp64 [4]: loss of the base, of the quantized model, KL, number of tokens.

    Args:
        heads: hidden states [b, s, h] to logits [b, s, vocab], of both models.
        base, quantized: hidden states after the last block, a batch each.
        labels: [b, s], already shifted; -100 is not counted.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    base_head, head = heads
    for base_hidden, hidden, targets in zip(base, quantized, labels, strict=True):
        step = max(2, LOGIT_ROWS // targets.shape[0])
        for start in range(0, targets.shape[1], step):
            part = slice(start, start + step)
            sums += _loss_sums(base_head(base_hidden[:, part]), head(hidden[:, part]), targets[:, part])
    return sums


def _loss_sums(base: Tensor, quantized: Tensor, targets: Tensor) -> Tensor:
    """Sums of one part of a batch."""
    base, quantized = F.log_softmax(base.float(), -1), F.log_softmax(quantized.float(), -1)
    counted = targets != NOT_COUNTED
    ids = targets.clamp(min=0).unsqueeze(-1)  # -100 is no index for gather; ``counted`` drops its terms below
    terms = [-log_probabilities.gather(-1, ids).squeeze(-1) for log_probabilities in (base, quantized)]
    # In place: logits are the largest tensors here. The terms above have read both before.
    difference = quantized.neg_().add_(base)
    terms.append(base.exp_().mul_(difference).sum(-1))  # sum of p (log p - log q)
    return torch.stack([(term.double() * counted).sum() for term in (*terms, counted)])


def lost(sums: Tensor) -> Lost:
    """The means of ``losses``."""
    base, quantized, kl, tokens = sums.tolist()
    count = max(1.0, tokens)
    # Rounding may leave a small negative KL. As the first argument, NaN stays NaN.
    return Lost(base / count, quantized / count, max(kl / count, 0.0), int(tokens))
