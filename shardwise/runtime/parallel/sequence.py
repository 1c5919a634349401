"""Context parallelism (``sequence_parallel``): each rank has part of every sequence; attention sees all parts.

Only attention mixes tokens, so a rank runs the unchanged model on its tokens. A torch function mode, active inside
each block and its recomputation, routes ``scaled_dot_product_attention`` to ring or Ulysses attention.

Packed documents keep their positions, which are sharded like tokens, and each rank gets the starts of all documents. So
the model builds the mask of whole rows, or the offsets that replace it, and Ulysses attention applies it. No rank sends
anything for it.

Attention with another mask, or not causal, is refused. So is a model with a block that does not call
``scaled_dot_product_attention``. A layer that mixes tokens in addition to attention (a convolution along the sequence)
goes unnoticed.

Labels are shifted before they are sharded, so the last token of a part has its target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.errors import RecipeError
from shardwise.runtime.compiled import compiled_as
from shardwise.runtime.documents import Documents, set_sequence_ranks
from shardwise.runtime.parallel.document_sums import set_sequence_group
from shardwise.runtime.parallel.ring import ring_attention
from shardwise.runtime.parallel.tp_collectives import TPGroup
from shardwise.runtime.parallel.ulysses import ulysses_attention

Mask = Tensor | Documents | None
"""Of whole rows, [b, 1, s, s], for packed documents; None for causal attention."""

Attend = Callable[[Tensor, Tensor, Tensor, Mask, float, float], Tensor]
"""Attention over all parts: (q, k, v, mask, dropout, scale) -> output. q, k, v and output are [b, heads, s, d]."""


@dataclass(frozen=True)
class TokenShard:
    """This rank's tokens of each sequence: one contiguous part or, if balanced, chunks r and 2n-1-r of 2n.

    Attributes:
        per_token, per_sample: names of further tensors of a batch: [b, s], which are divided, and others.
    """

    rank: int
    ranks: int
    balanced: bool
    per_token: frozenset[str] = frozenset()
    per_sample: frozenset[str] = frozenset()

    def shard_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch of token ids and labels, with the ``positions`` [s/n] of its tokens.

        Packed documents have positions [b, s/n] of their own, and keep their ``starts``.
        """
        own = {"input_ids", "labels"}
        whole = {"starts"}
        packed = {"positions", "starts"} <= batch.keys()
        known = own | self.per_token | self.per_sample | ({"positions", "starts"} if packed else set())
        if not own <= batch.keys() <= known:
            raise refusal(f"its samples hold {', '.join(sorted(batch))} instead of input_ids and labels")
        whole |= self.per_sample
        parts = {n: tensor if n in whole else self.shard(tensor, 1) for n, tensor in batch.items()}
        if packed:
            return parts
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device)
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
    """Routes every attention in a model's blocks to ``attend``.

    Attributes:
        ranks: among which the tokens of each row are divided.
        packed: whether attention may have a mask of whole rows, which keeps packed documents apart.
        group: these ranks.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    attend: Attend
    ranks: int
    packed: bool
    group: TPGroup
    _running: list[nn.Module] = field(default_factory=list)
    _met: set[nn.Module] = field(default_factory=set)
    _divided: bool = True

    def __post_init__(self) -> None:
        self._router = _AttentionRouter(self.attend, self.ranks if self.packed else None, self._meet)
        for block in self.blocks:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave, always_call=True)
        self.model.register_forward_hook(self._require_all)
        set_sequence_ranks(self.model, self.ranks)
        set_sequence_group(self.model, self.group)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Within it the model gets all tokens, on every rank, and its attention is its own."""
        self._divided = False
        try:
            yield
        finally:
            self._divided = True

    def _enter(self, block: nn.Module, args: Any) -> None:
        if self._divided:
            self._running.append(block)
            self._router.__enter__()

    def _leave(self, *_: object) -> None:
        if self._running:
            self._running.pop()
            self._router.__exit__(None, None, None)

    def _meet(self) -> None:
        self._met.add(self._running[-1])

    def _require_all(self, *_: object) -> None:
        """Every block called attention. Of compiled blocks that share a graph, only the traced one did."""
        if not self._divided:
            return
        _traced.update(shared for block in self._met if (shared := compiled_as(block)) is not block)
        met = self._met | _traced
        missing = next((block for block in self.blocks if compiled_as(block) not in met), None)
        if missing is not None:
            raise not_replaced(type(missing).__name__)
        self._met.update(self.blocks)


_traced: set[object] = set()
"""What compiled blocks share that called attention when they were traced, in this model or in one before it."""


@dataclass(eq=False)
class _AttentionRouter(TorchFunctionMode):
    """Replaces ``scaled_dot_product_attention`` while it is active.

    Attributes:
        ranks: among which rows of packed documents are divided; None if rows are not packed.
        meet: called at every attention.
    """

    attend: Attend
    ranks: int | None
    meet: Callable[[], None] = field(compare=False)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.meet()
        return self._attend_all(*args, **(kwargs or {}))

    def _attend_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Mask = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and not self._of_whole_rows(attn_mask, query.shape[2]):
            raise refusal("this model passes a mask to its attention")
        if is_causal == (attn_mask is not None) or query.shape[2] != key.shape[2]:
            raise refusal("this model has attention that is not causal self-attention")
        return self.attend(query, key, value, attn_mask, dropout_p, scale or query.shape[-1] ** -0.5)

    def _of_whole_rows(self, mask: Tensor | Documents, tokens: int) -> bool:
        """Whether a mask is that of packed documents, and not one that the model makes of its own tokens."""
        length = mask.length if isinstance(mask, Documents) else mask.shape[-1]
        return self.ranks is not None and length == self.ranks * tokens


def attend_by_ulysses(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float, scale: float, *, group: dist.ProcessGroup
) -> Tensor:
    """Ulysses attention, as ``Attend``."""
    return ulysses_attention(q, k, v, dropout, scale, group, mask)


def attend_by_ring(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float, scale: float, *, group: dist.ProcessGroup
) -> Tensor:
    """Ring attention, as ``Attend``. Raises RecipeError for dropout."""
    assert mask is None  # a rule refuses packed documents
    if dropout:
        raise refusal("the ring has no dropout of attention's probabilities; sequence_method ulysses has")
    return ring_attention(q, k, v, scale, group)


def not_replaced(name: str) -> RecipeError:
    """The error for a class with attention of its own."""
    return refusal(f"{name} does not call scaled_dot_product_attention, which context parallelism replaces")


def refusal(why: str) -> RecipeError:
    """The error for a model or setting that context parallelism does not support."""
    return RecipeError(
        "context parallelism (sequence_parallel) does not support this model",
        where="strategy.sequence_parallel",
        why=why,
        fix="the nearest that works is sequence_parallel: 1",
    )
