"""A model of blocks with dropout, for tests of saved, offloaded and recomputed tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A block with dropout, which must drop the same elements when it runs again, and attention that drops too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(x * scale)), 0.3)), 0.1)


class Dropped(nn.Module):
    """Blocks, all called with one scale; ``between``: something is computed between them; ``frozen``: some weights."""

    def __init__(self, blocks: int = 5, width: int = 16, frozen: bool = False, between: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.width, self.between = width, between
        if frozen:
            for block in self.blocks[:3]:
                block.requires_grad_(False)
            self.blocks[4].down.requires_grad_(False)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1.5, self.width, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, scale)
            x = x * 1.5 if self.between else x
        return x


def dropped(**arguments: Any) -> Any:
    """A factory: model and loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        parameter = next(model.parameters())
        width = parameter.shape[1]
        x = batch["input_ids"].to(parameter.dtype).unsqueeze(-1).expand(-1, -1, width) / width
        return model(x).square().sum().float(), (batch["labels"] != -100).sum()

    return Dropped(**arguments), loss
