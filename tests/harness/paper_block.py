"""The transformer of Korthikanti et al. 2022 (arXiv:2205.05198, figure 2): attention unfused, dropout where it says.

Its blocks say how they are split over ranks, and work on whole sequences or shares of them. There is no causal mask,
which the paper's count leaves out; dropout probabilities are an argument, for tests that compare with one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.runtime.language_loss import token_loss


class PaperBlock(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.head_width, self.drop = width // heads, drop
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.out(self.attention(self.norm_1(x))), self.drop)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.drop)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = F.softmax(q @ (k * self.head_width**-0.5).transpose(2, 3), -1)
        return (F.dropout(weights, self.drop) @ v).transpose(1, 2).flatten(2)


class PaperModel(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, length: int, drop: float) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PaperBlock(width, heads, drop) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def tensor_plan(self) -> dict[str, str]:
        heads = f"column:{self.heads}"
        return {
            "tokens": "vocabulary",
            "positions": "positions",
            "blocks.*.query": heads,
            "blocks.*.key": heads,
            "blocks.*.value": heads,
            "blocks.*.out": "row",
            "blocks.*.up": "column",
            "blocks.*.down": "row",
            "head": "logits",
        }

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def paper(drop: float = 0.1, **shape: Any) -> Any:
    """A factory: model and loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return token_loss(model(batch["input_ids"]), batch["labels"])

    return PaperModel(drop=drop, **shape), loss
