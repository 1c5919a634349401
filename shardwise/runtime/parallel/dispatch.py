"""Experts on other ranks: a token goes once to each rank that has experts of it, and their results come back.

    x [t, h], index [t, k], weight [t, k] of this rank's tokens; expert e is on rank e // (E / R)
    arrived  [R c, h], c from each rank: a row for each (token, rank)         an all-to-all of rows, numbers, weights
    rows     [p, h], one for each (token, expert) here
    results  [p, h] of the experts here, times their weights; [R c, h], summed for each arrived row
    out [t, h] = sum over ranks of the results of a token's rows              an all-to-all back

c and p are ``factor`` times what a balanced router needs, whatever the router says, so all shapes are static. Rows
without a token have the number of no expert, which experts modules of transformers leave out. Where more rows go to one
rank, or more pairs arrive there, those over it are left out, and ``Room.used`` is above 1: the engine then updates
nothing and runs the step again with more room. Sums are in the order of ranks, and of a token's experts: the same every
time.

The weights go with the rows. So results are weighted where their inputs are kept for the backward pass, and none is
kept here. Ranks with the same tokens (of tensor parallelism) each send a share of them.

Legend: t tokens, k experts of a token, h width, E experts, R ranks, c and p capacities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
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
    """How many rows and pairs ranks have room for, in all layers (technique/site.py's ``Capacity``).

    Attributes:
        factor: rows from each rank, and pairs of a token and an expert from all, relative to a balanced router.
        used: rows or pairs that went to a rank, relative to its room for them: the largest since it was set to zero.
    """

    used: Tensor | None = None

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def see(self, share: Tensor) -> None:
        """Note what share of its room a layer asked for; the same when it is recomputed."""
        if self.used is None:
            self.used = torch.zeros((), dtype=torch.float32, device=share.device)
        torch.maximum(self.used, share, out=self.used)

    def sizes(self, tokens: int, chosen: int, ranks: int, experts: int) -> tuple[int, int]:
        """Rows that a rank takes from each other one, and its pairs from all; ``experts`` are those of a rank."""
        pairs = tokens * chosen
        most = tokens * ranks * min(chosen, experts)
        self.factor = min(self.factor, most / pairs)
        # The part of the tokens that choose none of the experts of a rank, if they choose at random.
        missed = math.comb(experts * (ranks - 1), chosen) / math.comb(experts * ranks, chosen)
        rows = min(math.ceil(self.factor * tokens * (1 - missed)), tokens)
        return rows, min(math.ceil(self.factor * pairs), most)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Within it there is room for all tokens, and its use does not count: few may all have the same expert."""
        before = self.factor, self.used
        self.factor = math.inf
        self.used = None
        try:
            yield
        finally:
            self.factor, self.used = before

    def enlarge(self, used: float, factor: float) -> str:
        self.factor = max(self.factor, used * factor * _MARGIN)
        return (
            f"a rank's experts got {used * factor:.2f} times their balanced share of tokens, and had room for"
            f" {factor:.2f}; the step is run again with room for {self.factor:.2f} (strategy.expert_capacity)"
        )


def divide_experts(
    model: nn.Module, mesh: DeviceMesh, shares: dist.ProcessGroup | None, room: Room
) -> list[nn.Module]:
    """Leave this rank's experts on the meta device, as DTensors, and put the exchange around them; the modules.

    A stage of a pipeline may have none.

    Args:
        mesh: one axis, of the ranks that divide experts.
        shares: the ranks that have the same tokens; None where all differ.
    """
    ranks = TPGroup.of(mesh.get_group())
    modules = [module for module in model.modules() if divisible_experts(module)]
    for module in modules:
        experts: Any = module
        if experts.num_experts % ranks.size:
            raise RecipeError(
                f"expert_parallel cannot be {ranks.size}",
                where="strategy.expert_parallel",
                why=f"it does not divide the {experts.num_experts} experts of a layer",
                fix=f"the nearest that works is expert_parallel: {math.gcd(ranks.size, experts.num_experts)}",
            )
        # transformers then takes the index num_experts for the experts of other ranks.
        experts.num_experts = experts.num_experts // ranks.size
        experts._is_expert_parallel = True
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, _part(weight, mesh, experts.num_experts))
        weights = LocalWeights(ranks, ())
        tokens = Dispatch(ranks, experts.num_experts, None if shares is None else TPGroup.of(shares), room)
        module.register_forward_pre_hook(tokens.before)
        module.register_forward_pre_hook(weights.before)
        module.register_forward_hook(weights.after, always_call=True)
        module.register_forward_hook(tokens.after)
    return modules


def _part(weight: nn.Parameter, mesh: DeviceMesh, experts: int) -> nn.Parameter:
    piece = torch.empty((experts, *weight.shape[1:]), dtype=weight.dtype, device="meta")
    shape = weight.shape
    stride = weight.stride()
    whole = DTensor.from_local(piece, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=weight.requires_grad)


class Routes(NamedTuple):
    """Which row a token is sent in to each rank.

    Attributes:
        token: of each row sent, [R c]; t where it has none.
        row: of each token, for each rank, [t, R]; R c where it has none.
        most: tokens for one rank, the largest number.
    """

    token: Tensor
    row: Tensor
    most: Tensor


def routes(index: Tensor, ranks: int, experts: int, capacity: int) -> Routes:
    """The routes of tokens with these experts [t, k], ``experts`` on each rank, ``capacity`` rows for each."""
    tokens = index.shape[0]
    rows = ranks * capacity
    goes = torch.zeros(ranks, tokens, dtype=torch.bool, device=index.device)
    goes = goes.scatter(0, (index // experts).T, True)
    ends = goes.cumsum(1)
    starts = torch.arange(0, rows, capacity, device=index.device).unsqueeze(1)
    row = torch.where(goes & (ends <= capacity), starts + ends - 1, rows)
    return Routes(_chosen_by(row, rows, torch.arange(tokens, device=index.device)), row.T, ends[:, -1].max())


class ArrivedPairs(NamedTuple):
    """The pairs of an arrived row and an expert here.

    Attributes:
        choice: of each pair, its number among all of arrived rows, [p]; R c k where it has none.
        pair: of each choice, [R c, k]; p where it has none.
        expert: of each pair, [p]; the number of experts here where it has none.
        total: the number of pairs, of those that have no place as well.
    """

    choice: Tensor
    pair: Tensor
    expert: Tensor
    total: Tensor


def pairs_of(number: Tensor, experts: int, capacity: int) -> ArrivedPairs:
    """The pairs of arrived rows with these experts [R c, k]; others' experts have the number ``experts``."""
    flat = number.flatten()
    here = flat < experts
    ends = here.cumsum(0)
    pair = torch.where(here & (ends <= capacity), ends - 1, capacity)
    choice = _chosen_by(pair, capacity, torch.arange(flat.shape[0], device=flat.device))
    expert = torch.cat([flat, torch.full_like(flat[:1], experts)])[choice].to(torch.int64)
    return ArrivedPairs(choice, pair.view_as(number), expert, ends[-1])


def _chosen_by(positions: Tensor, size: int, numbers: Tensor) -> Tensor:
    """Of each of ``size`` places, the number of the entry (in the last dim of ``positions``) there, or their count."""
    empty = torch.full((size + 1,), numbers.shape[0], dtype=torch.int64, device=positions.device)
    return empty.scatter(0, positions.flatten(), numbers.expand(positions.shape).flatten())[:size]


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
    _way: tuple[Tensor, Tensor, Tensor, Tensor] | None = field(default=None, init=False, compare=False)
    _tokens: int = field(default=0, init=False, compare=False)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        require_arguments(module, args, "expert_parallel")
        self._tokens = args[0].shape[0]
        x, index, weight = args if self.shares is None else (local_share(x, self.shares) for x in args)
        (tokens, chosen) = index.shape
        ranks = self.ranks.size
        capacity, room = self.room.sizes(tokens, chosen, ranks, self.experts)
        token, row, most = routes(index, ranks, self.experts, capacity)
        number = self._exchange(self._numbers(index, token, capacity))
        choice, pair, expert, total = pairs_of(number, self.experts, room)
        self.room.see(total.to(torch.float32) / room)
        # Room for every token is never exceeded.
        if capacity < tokens:
            self.room.see(most.to(torch.float32) / capacity)
        # A row without a token, and one without a pair, may have any contents.
        token = token.clamp(max=tokens - 1)
        choice = choice.clamp(max=number.numel() - 1)
        arrived = rows_of(x, token, row, self._exchange)
        factors = rows_of(weight, token, row, self._exchange).view(-1, 1)
        source = choice // chosen
        self._way = source, pair, token, row
        factors = rows_of(factors, choice, pair.view(-1, 1))
        return rows_of(arrived, source, pair), expert.unsqueeze(1), factors

    def _numbers(self, index: Tensor, token: Tensor, capacity: int) -> Tensor:
        """The experts of each row sent [R c, k], as numbered on the rank it goes to."""
        first = torch.arange(0, self.ranks.size * self.experts, self.experts, device=index.device)
        absent = torch.full_like(index[:1], self.ranks.size * self.experts)
        number = torch.cat([index, absent])[token] - first.repeat_interleave(capacity).unsqueeze(1)
        elsewhere = (number < 0) | (number >= self.experts)
        return number.masked_fill(elsewhere, self.experts).to(torch.int32)

    def _exchange(self, rows: Tensor) -> Tensor:
        return all_to_all(rows, self.ranks)

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        way = self._way
        self._way = None
        assert way is not None
        source, pair, token, row = way
        out = sums_of(sums_of(result, source, pair), token, row, self._exchange)
        return out if self.shares is None else gathered_tokens(out, self.shares, self._tokens)


def local_share(x: Tensor, ranks: TPGroup) -> Tensor:
    """This rank's share [ceil(t / ranks), ...] of tokens [t, ...] that all ranks have; its gradient is gathered.

    Zeros complete the last share: tokens whose results have the weight 0.
    """
    if missing := -x.shape[0] % ranks.size:
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    start, stop = ranks.span(x.shape[0])
    # Indices of experts have no gradient.
    if not x.is_floating_point():
        return x[start:stop]
    return exchanged(x, lambda whole: whole[start:stop], ranks.all_gather)


def gathered_tokens(part: Tensor, ranks: TPGroup, tokens: int) -> Tensor:
    """All tokens [t, h], of the shares of the ranks; the gradient is this rank's share."""
    start, stop = ranks.span(part.shape[0] * ranks.size)
    out = exchanged(part, ranks.all_gather, lambda x: x[start:stop].contiguous())
    return out if out.shape[0] == tokens else out[:tokens]
