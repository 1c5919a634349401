"""One sequence over several ranks: each rank's part of a batch, and attention that sees the other parts.

Everything in a decoder but attention looks at one token at a time, so a rank runs the model on its part of the tokens
as it is. Attention is met where every model calls it, in ``scaled_dot_product_attention``: within the blocks a mode
stands between the call and the kernel. It is entered with each block, so it is there too when a block is
run again in the backward pass. No model is rewritten.

What the mode cannot do in parts it refuses in words: attention with a mask, or that is not causal. And a block that
never calls it mixes its tokens in another way, if it does; a model with such a block is refused as well. A layer
that mixes tokens beside its attention (a convolution along the sequence) is not noticed: nothing in PyTorch tells.

Labels are shifted before they are divided, so a part's last token has its target although the next token is on
another rank. Positions are divided like tokens and given to the model.
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
"""Causal attention over all parts: (q, k, v, dropout, scale) -> mixed values. [b, heads, s, d] each."""


@dataclass(frozen=True)
class Share:
    """Which tokens of each sequence are this rank's: one contiguous part, or two chunks, one from each end.

    Two chunks balance causal attention: of 2n chunks, rank r has chunks r and 2n-1-r.
    """

    rank: int
    ranks: int
    balanced: bool

    def of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch of token ids and labels, with the ``positions`` [s/n] of its tokens."""
        if batch.keys() != {"input_ids", "labels"}:
            raise refusal(f"its samples hold {', '.join(sorted(batch))} and not input_ids and labels alone")
        whole = batch["input_ids"]
        positions = torch.arange(whole.shape[1], device=whole.device)
        divided = {name: self.part(tensor, 1) for name, tensor in batch.items()}
        return {**divided, "positions": self.part(positions, 0)}

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along one dim; a view where it is contiguous. Raises RecipeError."""
        pieces = 2 * self.ranks if self.balanced else self.ranks
        if tensor.shape[dim] % pieces:
            raise refusal(f"a sample has {tensor.shape[dim]} tokens, which {pieces} does not divide")
        chunks = tensor.chunk(pieces, dim)
        if not self.balanced:
            return chunks[self.rank]
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim)


@dataclass
class DividedAttention:
    """Has every attention within a model's blocks see all parts of the sequence."""

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
        stack.enter_context(_Between(self.attend, lambda: self._met.add(block)))

    def _leave(self, *_: object) -> None:
        if self._open:
            self._open.pop().close()

    def _require_all(self, *_: object) -> None:
        missing = next((block for block in self.blocks if block not in self._met), None)
        if missing is not None:
            raise refusal(
                f"{type(missing).__name__} does not call scaled_dot_product_attention, through which ranks see"
                " each other's tokens"
            )


class _Between(TorchFunctionMode):
    """Stands between a model and ``scaled_dot_product_attention``."""

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
        return self._divided(*args, **(kwargs or {}))

    def _divided(
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
            raise refusal("this model gives its attention a mask, which is of one part of the sequence")
        if not is_causal or query.shape[2] != key.shape[2]:
            raise refusal("this model has attention that is not causal self-attention")
        return self._attend(query, key, value, dropout_p, scale or query.shape[-1] ** -0.5)


def refusal(why: str) -> RecipeError:
    """What to raise where a model, or what it is asked to do, does not go with divided sequences."""
    return RecipeError(
        "the sequences of this model cannot be divided over ranks",
        where="strategy.sequence_parallel",
        why=why,
        fix="the nearest that works is sequence_parallel: 1",
    )
