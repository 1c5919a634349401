"""A model of one layer that mixes its tokens, for tests of context parallelism's requirements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixing(nn.Module):
    """Attention in one of several ways, of which only ``causal`` can be divided over ranks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding, self.out = nn.Embedding(257, 8), nn.Linear(8, 257)

    def forward(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        x = self.embedding(ids)
        if positions is not None:
            x = x + positions.to(x.dtype).unsqueeze(-1) / 32
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        if self.how == "mask":
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            x = F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).flatten(2)
        elif self.how == "products":
            x = ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)
        else:
            causal = self.how != "both ways"
            dropout = 0.1 if self.how == "dropout" else 0.0
            x = F.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=causal)
            x = x.transpose(1, 2).flatten(2)
        return self.out(x)


def mixing(how: str) -> Any:
    """A factory: model and loss, which with ``nowhere`` does not look at positions."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        positions = None if how == "nowhere" else batch.get("positions")
        logits = model(batch["input_ids"], positions).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"), (
            batch["labels"] >= 0
        ).sum()

    return Mixing(how), loss
