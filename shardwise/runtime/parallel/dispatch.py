"""Experts on other ranks: every row goes to the rank of its expert, and its result comes back.

    x [t, h], index [t, k], weight [t, k] of this rank's tokens; expert e is on rank e // (E / R)
    rows     [R c, h], c for each rank: tokens by the rank of their expert    an all-to-all of rows, numbers, weights
    results  [R c, h] of the experts here, times their weights                an all-to-all back
    out [t, h] = sum over k of the results of a token's rows

c is the capacity: ``factor`` x t k / R rows, whatever the router says, so all shapes are static. Rows without a token
have the number of no expert, which experts modules of transformers leave out. Where more than c rows go to one rank,
those over it are left out, and ``Room.used`` is above 1: the engine then updates nothing and runs the step again with
more room. Sums are over rows in the order of a token's experts: the same every time.

The weights go with the rows. So results are weighted where their inputs are kept for the backward pass, and none is
kept here. Ranks with the same tokens (of tensor parallelism) each send a share of them.

Legend: t tokens, k experts of a token, h width, E experts, R ranks, c capacity, n = t k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.core.errors import RecipeError
from shardwise.runtime.parallel.experts import divisible_experts, require_arguments
from shardwise.runtime.parallel.tensor_hooks import LocalWeights
from shardwise.runtime.parallel.tp_collectives import TPGroup, exchanged
from shardwise.runtime.routed_rows import rows_of, sums_of
from shardwise.runtime.torch_private import functional_collectives

_MARGIN = 1.1
"""Room after a step that needed more, relative to its need: the next ones differ a little."""


class Room:
    """How many rows ranks have room for, in all layers (technique/site.py's ``Capacity``).

    Attributes:
        factor: rows from each rank, relative to a balanced router.
        used: rows that went to a rank, relative to those it has room for: the largest since it was set to zero.
    """

    used: Tensor | None = None

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def see(self, share: Tensor) -> None:
        """Note what share of its room a layer asked for; the same when it is recomputed."""
        if self.used is None:
            self.used = torch.zeros((), dtype=torch.float32, device=share.device)
        torch.maximum(self.used, share, out=self.used)

    def rows(self, pairs: int, ranks: int, most: int) -> int:
        """Rows that a rank takes from each other one, of ``pairs`` of a token and an expert there."""
        self.factor = min(self.factor, most * ranks / pairs)
        return min(math.ceil(self.factor * pairs / ranks), most)

    def imbalance(self, used: float) -> float:
        return used * self.factor

    def enlarge(self, used: float) -> str:
        before, self.factor = self.factor, used * self.factor * _MARGIN
        return (
            f"a rank's experts got {used * before:.2f} times their balanced share of tokens, and had room for"
            f" {before:.2f}; the step is run again with room for {self.factor:.2f} (strategy.expert_capacity)"
        )


def divide_experts(
    model: nn.Module, mesh: DeviceMesh, shares: dist.ProcessGroup | None, room: Room
) -> list[nn.Module]:
    """Leave this rank's experts on the meta device, as DTensors, and put the exchange around them; the modules.

    Args:
        mesh: one axis, of the ranks that divide experts.
        shares: the ranks that have the same tokens; None where all differ.
    """
    ranks = TPGroup.of(mesh.get_group())
    modules = [module for module in model.modules() if divisible_experts(module)]
    if not modules:
        raise RecipeError(
            "no module has experts that can be divided",
            where="strategy.expert_parallel",
            why="experts are modules of 3-D weights, as transformers 5 has them",
            fix="the nearest that works is expert_parallel: 1",
        )
    for module in modules:
        held: Any = module
        if held.num_experts % ranks.size:
            raise RecipeError(
                f"expert_parallel cannot be {ranks.size}",
                where="strategy.expert_parallel",
                why=f"it does not divide the {held.num_experts} experts of a layer",
                fix=f"the nearest that works is expert_parallel: {math.gcd(ranks.size, held.num_experts)}",
            )
        held.num_experts, held._is_expert_parallel = held.num_experts // ranks.size, True
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, _part(weight, mesh, held.num_experts))
        weights = LocalWeights(ranks, ())
        tokens = Dispatch(ranks, held.num_experts, None if shares is None else TPGroup.of(shares), room)
        module.register_forward_pre_hook(tokens.before)
        module.register_forward_pre_hook(weights.before)
        module.register_forward_hook(weights.after, always_call=True)
        module.register_forward_hook(tokens.after)
    return modules


def _part(weight: nn.Parameter, mesh: DeviceMesh, experts: int) -> nn.Parameter:
    piece = torch.empty((experts, *weight.shape[1:]), dtype=weight.dtype, device="meta")
    shape, stride = weight.shape, weight.stride()
    whole = DTensor.from_local(piece, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=weight.requires_grad)


class Routes(NamedTuple):
    """Which row a pair of a token and an expert is sent in.

    Attributes:
        pair: of each row sent, [R c]; n where it has none.
        row: of each pair, [n]; R c where it has none.
        expert: of each row, its number on the rank it goes to, [R c]; the number of experts there where it has none.
        most: pairs for one rank, the largest number.
    """

    pair: Tensor
    row: Tensor
    expert: Tensor
    most: Tensor


def routes(index: Tensor, ranks: int, experts: int, capacity: int) -> Routes:
    """The routes of pairs [n] with these experts, ``experts`` on each rank, ``capacity`` rows for each."""
    pairs, rows = index.shape[0], ranks * capacity
    rank = index // experts
    counts = torch.zeros(ranks, dtype=torch.int64, device=index.device)
    counts = counts.scatter_add(0, rank, torch.ones_like(rank))
    order = torch.argsort(rank, stable=True)
    there = rank[order]
    position = torch.arange(pairs, device=index.device) - (counts.cumsum(0) - counts)[there]
    sent = torch.where(position < capacity, there * capacity + position, rows)
    row = torch.empty_like(sent).scatter(0, order, sent)
    pair = torch.full((rows + 1,), pairs, dtype=torch.int64, device=index.device)
    pair = pair.scatter(0, sent, order)[:rows]  # of pairs that have no row, any is in the last place
    expert = torch.where(pair < pairs, (index % experts)[pair.clamp(max=pairs - 1)], experts)
    return Routes(pair, row, expert, counts.max())


def all_to_all(rows: Tensor, ranks: TPGroup) -> Tensor:
    """Rows [R c, ...]: the r-th c of them to rank r. It is its own gradient."""
    sizes = [1] * ranks.size
    parts = rows.contiguous().unflatten(0, (ranks.size, -1))
    arrived = functional_collectives.all_to_all_single(parts, sizes, sizes, ranks.group.group_name)
    result: Tensor = functional_collectives.wait_tensor(arrived)
    return result.flatten(0, 1)


@dataclass(eq=False)
class Dispatch:
    """Hooks before and after the experts of a rank."""

    ranks: TPGroup
    experts: int
    shares: TPGroup | None
    room: Room
    _way: tuple[Tensor, Tensor] | None = field(default=None, init=False, compare=False)
    _tokens: int = field(default=0, init=False, compare=False)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        require_arguments(module, args, "expert_parallel")
        self._tokens = args[0].shape[0]
        x, index, weight = args if self.shares is None else (share(x, self.shares) for x in args)
        (tokens, chosen), ranks = index.shape, self.ranks
        pairs, most = tokens * chosen, tokens * min(chosen, self.experts)
        capacity = self.room.rows(pairs, ranks.size, most)
        way = routes(index.flatten(), ranks.size, self.experts, capacity)
        self.room.see(way.most.to(torch.float32) / capacity)
        pair = way.pair.clamp(max=pairs - 1)  # a row without a pair may have any contents
        self._way = source, row = pair // chosen, way.row.view(tokens, chosen)
        expert = all_to_all(way.expert, ranks)
        rows = rows_of(x, source, row, self._exchange)
        factors = rows_of(weight.reshape(-1, 1), pair, way.row.unsqueeze(1), self._exchange)
        return rows, expert.unsqueeze(1), factors

    def _exchange(self, rows: Tensor) -> Tensor:
        return all_to_all(rows, self.ranks)

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        way, self._way = self._way, None
        assert way is not None
        out = sums_of(result, *way, self._exchange)
        return out if self.shares is None else whole(out, self.shares, self._tokens)


def share(x: Tensor, ranks: TPGroup) -> Tensor:
    """This rank's share [t / ranks, ...] of tokens [t, ...] that all ranks have; its gradient is gathered."""
    if x.shape[0] % ranks.size:
        raise RecipeError(
            "the tokens of a micro-batch cannot be shared out",
            where="strategy.expert_parallel",
            why=f"tensor_parallel {ranks.size} does not divide {x.shape[0]} tokens",
            fix="change data.sequence_length or strategy.micro_batch_size",
        )
    start, stop = ranks.span(x.shape[0])
    if not x.is_floating_point():
        return x[start:stop]
    return exchanged(x, lambda whole: whole[start:stop], ranks.all_gather)


def whole(part: Tensor, ranks: TPGroup, tokens: int) -> Tensor:
    """All tokens [t, h], of the shares of the ranks; the gradient is this rank's share."""
    start, stop = ranks.span(tokens)
    return exchanged(part, ranks.all_gather, lambda x: x[start:stop].contiguous())
