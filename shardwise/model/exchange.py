"""What the ranks that compute parts of the same activations send each other, as steps of the computation.

The four exchanges of Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022, arXiv:2205.05198, figures 4 and 5)
are each other's gradients:

    copied    forward nothing is sent; backward gradients are summed                                   (f)
    summed    forward partial sums are summed; backward nothing is sent                                (f-bar)
    gathered  forward shares of the sequence become the whole; backward gradients are summed and shared  (g)
    shared    forward partial sums are summed and shared out; backward gradients are gathered          (g-bar)

The sequence is the last dim but one. Activations are plain tensors; only weights are DTensors.

Chosen: functional collectives, whose results are new tensors, so whoever records or repeats a block's operations
(model/tape.py, model/selective.py) sees ordinary ones. Refused: DTensor for activations, which decides by itself what
is sent and when, and keeps for the backward pass whatever it has gathered; and collectives in place, writes that a
recomputation would have to undo. The price is a second payload while one is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Tensor], Tensor]
"""What ranks do together with a tensor of each."""

_functional: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """The ranks that compute parts of the same activations, and which of them this is."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def span(self, size: int) -> tuple[int, int]:
        """This rank's part of [0, size), cut as ``torch.chunk`` cuts."""
        step = -(-size // self.size)
        return min(self.rank * step, size), min((self.rank + 1) * step, size)

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """The sum (or the ``max``) over the ranks, a new tensor."""
        return _arrived(_functional.all_reduce(tensor.contiguous(), how, self.group.group_name))

    def send_shares(self, share: Tensor) -> Tensor:
        """Begin to gather all ranks' tensors of one shape, [ranks, ...]: not to be read before ``arrived``.

        Into a tensor made here: the collective that makes its own corrupts the heap while anything else is on its way.
        gloo's threads note what each has done in one string, unguarded (``lastCompletedWorkName``; seen with torch
        2.13), which holds 15 letters in place and frees what is longer; and that one is called ALLGATHER_COALESCED.
        """
        whole = share.new_empty(self.size, *share.shape)
        name = self.group.group_name
        _functional.all_gather_into_tensor_out(share.unsqueeze(0).contiguous(), self.size, name, out=whole)
        return whole

    def arrived(self, sent: Tensor, dim: int = -2) -> Tensor:
        """What ``send_shares`` has sent, side by side along ``dim``. A view where nothing lies before that dim."""
        return _arrived(sent).movedim(0, dim - 1).flatten(dim - 1, dim)

    def whole(self, share: Tensor) -> Tensor:
        """Shares of the sequence as the whole of it."""
        return self.arrived(self.send_shares(share))

    def summed_share(self, tensor: Tensor) -> Tensor:
        """This rank's share of the sequence of the sum over the ranks."""
        parts = tensor.unflatten(-2, (self.size, -1)).movedim(-3, 0).contiguous()
        name = self.group.group_name
        return _arrived(_functional.reduce_scatter_tensor(parts, "sum", self.size, name)).squeeze(0)


def _arrived(tensor: Tensor) -> Tensor:
    arrived: Tensor = _functional.wait_tensor(tensor)
    return arrived


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def exchanged(x: Tensor, there: Exchange, back: Exchange) -> Tensor:
    """``there(x)``, through which a gradient g becomes ``back(g)``. Nothing is kept for the backward pass."""
    out: Tensor = _Exchanged.apply(x, there, back)
    return out


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)  # what a function of autograd returns must not be its argument


class _SideBySide(torch.autograd.Function):
    """Parts of the last dim as the whole of it, for whoever computes the same from it on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, size: int) -> Tensor:
        ctx.span = ranks.span(size)
        missing = -(-size // ranks.size) - part.shape[-1]
        padded = torch.nn.functional.pad(part, (0, missing)) if missing else part
        whole = ranks.arrived(ranks.send_shares(padded), -1)
        return whole if whole.shape[-1] == size else whole[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.span
        return grads[0][..., start:stop].contiguous(), None, None


def copied(x: Tensor, ranks: Ranks) -> Tensor:
    """``x``, which is the same on all ranks; its gradient is the sum of theirs."""
    return exchanged(x, _as_it_is, ranks.reduced)


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of the ranks' ``x``, the same on all of them."""
    return exchanged(x, ranks.reduced, _as_it_is)


def gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """The whole sequence [..., s, h] of the ranks' shares [..., s / ranks, h]."""
    return exchanged(x, ranks.whole, ranks.summed_share)


def shared(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's share [..., s / ranks, h] of the sum of the ranks' ``x`` [..., s, h]."""
    return exchanged(x, ranks.summed_share, ranks.whole)


def side_by_side(part: Tensor, ranks: Ranks, size: int) -> Tensor:
    """[..., size] of the ranks' parts of the last dim, which may be uneven."""
    out: Tensor = _SideBySide.apply(part, ranks, size)
    return out
