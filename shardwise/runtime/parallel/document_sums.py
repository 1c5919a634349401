"""Sums over the tokens of a document, also where context parallelism divides its tokens over ranks.

All ranks of a sequence then have the same sum and compute the same loss from it. Each counts 1/ranks of that loss, so
the losses of all ranks add up to it once. Their gradients of the sum are added, too: ``exchanged`` with an all-reduce
in both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.runtime.parallel.tp_collectives import TPGroup, exchanged

_GROUP = "sequence_group"


def set_sequence_group(model: nn.Module, group: TPGroup) -> None:
    """Record that the ranks of ``group`` divide the tokens of each row of the model."""
    setattr(model, _GROUP, group)


def sequence_ranks(model: nn.Module) -> int:
    """The number of ranks that divide the tokens of each row."""
    group = getattr(model, _GROUP, None)
    return 1 if group is None else group.size


def document_sums(model: nn.Module, values: Tensor, document: Tensor | None, documents: int) -> Tensor:
    """Sums of the values of each document, [b, documents], of all ranks of a sequence.

    Args:
        values: [b, s], of this rank's tokens.
        document: int64 [b, s], the document of each token; None where a row is one document.
        documents: of a row.
    """
    if document is None:
        sums = values.sum(1, keepdim=True)
    else:
        # A product with the mask, and not a scatter: atomic additions have no fixed order.
        numbers = torch.arange(documents, device=document.device).unsqueeze(1)
        sums = values.unsqueeze(1).where(document.unsqueeze(1) == numbers, 0).sum(-1)
    group = getattr(model, _GROUP, None)
    return sums if group is None else exchanged(sums, group.all_reduce, group.all_reduce)
