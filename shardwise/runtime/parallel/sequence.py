"""Context parallelism (``sequence_parallel``): each rank has part of every sequence; attention sees all parts.

Only attention mixes tokens, so a rank runs the unchanged model on its tokens. A torch function mode, active inside
each block and its recomputation, routes ``scaled_dot_product_attention`` to ring or Ulysses attention.

Attention with a mask, or not causal, is refused. So is a model with a block that does not call
``scaled_dot_product_attention``. A layer that mixes tokens in addition to attention (a convolution along the sequence)
goes unnoticed.

Labels are shifted before they are sharded, so the last token of a part has its target. Positions are sharded like
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.errors import RecipeError

Attend = Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
"""Causal attention over all parts: (q, k, v, dropout, scale) -> output. [b, heads, s, d] each."""


@dataclass(frozen=True)
class TokenShard:
    """This rank's tokens of each sequence: one contiguous part or, if balanced, chunks r and 2n-1-r of 2n."""

    rank: int
    ranks: int
    balanced: bool

    def shard_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch of token ids and labels, with the ``positions`` [s/n] of its tokens."""
        if batch.keys() != {"input_ids", "labels"}:
            raise refusal(f"its samples hold {', '.join(sorted(batch))} instead of input_ids and labels")
        whole = batch["input_ids"]
        positions = torch.arange(whole.shape[1], device=whole.device)
        parts = {name: self.shard(tensor, 1) for name, tensor in batch.items()}
        return {**parts, "positions": self.shard(positions, 0)}

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along one dim; a view if contiguous. Raises RecipeError."""
        pieces = 2 * self.ranks if self.balanced else self.ranks
        if tensor.shape[dim] % pieces:
            raise refusal(f"a sample has {tensor.shape[dim]} tokens, not a multiple of {pieces}")
        chunks = tensor.chunk(pieces, dim)
        if not self.balanced:
            return chunks[self.rank]
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim)


@dataclass
class ContextParallelAttention:
    """Routes every attention in a model's blocks to ``attend``."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    attend: Attend
    _open: list[ExitStack] = field(default_factory=list)
    _met: set[nn.Module] = field(default_factory=set)

    def __post_init__(self) -> None:
        for block in self.blocks:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave, always_call=True)
        self.model.register_forward_hook(self._require_all)

    def _enter(self, block: nn.Module, args: Any) -> None:
        self._open.append(stack := ExitStack())
        stack.enter_context(_AttentionRouter(self.attend, lambda: self._met.add(block)))

    def _leave(self, *_: object) -> None:
        if self._open:
            self._open.pop().close()

    def _require_all(self, *_: object) -> None:
        missing = next((block for block in self.blocks if block not in self._met), None)
        if missing is not None:
            raise refusal(
                f"{type(missing).__name__} does not call scaled_dot_product_attention, which context parallelism"
                " replaces"
            )


class _AttentionRouter(TorchFunctionMode):
    """Replaces ``scaled_dot_product_attention`` while it is active."""

    def __init__(self, attend: Attend, met: Callable[[], None]) -> None:
        super().__init__()
        self._attend = attend
        self._met = met

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self._met()
        return self._attend_all(*args, **(kwargs or {}))

    def _attend_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise refusal("this model passes a mask to its attention")
        if not is_causal or query.shape[2] != key.shape[2]:
            raise refusal("this model has attention that is not causal self-attention")
        return self._attend(query, key, value, dropout_p, scale or query.shape[-1] ** -0.5)


def refusal(why: str) -> RecipeError:
    """The error for a model or setting that context parallelism does not support."""
    return RecipeError(
        "context parallelism (sequence_parallel) does not support this model",
        where="strategy.sequence_parallel",
        why=why,
        fix="the nearest that works is sequence_parallel: 1",
    )
