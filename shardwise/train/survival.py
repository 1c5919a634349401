"""Going on after memory ran out: every rank, the same step, half the micro-batch, the same global batch.

The loss of a step is a sum over its samples divided once by the number of targets, so a step made of twice as many
micro-batches of half the size has the same gradient to rounding; only dropout draws other numbers. What is repeated
is the very step that broke off: weights, moments, loss scale, the guard's memory and the order of samples are those
after the step before, because a forward or backward pass changes none of them.

An update does. Once some rank may have begun one while another broke off, the ranks no longer hold the same run, and
all of them go back to the newest snapshot, else to where a resume of the folder would start; steps since then are
trained again. That is rare: an update asks for little memory, unless it is part of the backward pass.

At a micro-batch of 1 there is nothing left to halve: the run ends with exit code 7, its checkpoints as they were.
Which plan would fit is for the planner to say, which is not part of this package; what it needs for that is in the
folder (``shortage.py``). Refused: going on with a smaller *global* batch, which trains another model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from shardwise.core.errors import ResourceError
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes
from shardwise.engine.build import Run
from shardwise.engine.persistent import parameters_of
from shardwise.engine.rebuild import free, rebuild, strip
from shardwise.technique import MICRO_BATCH_SIZE
from shardwise.train.alarm import Alarm
from shardwise.train.process import meet_again
from shardwise.train.shortage import Shortage

_GENERATIONS = count()
"""Of this process's groups; the ranks make them in step. The store keeps what was written for earlier ones."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stood when a part of the run broke off.

    Attributes:
        step: optimizer steps that are done, read or not.
        rewinds: as in the training state.
        ahead: whether its weights may be newer than that.
        copy: steps done at its newest snapshot; None when it has none.
        short: whether its own memory ran out, in the part that counts.
        held_bytes, asked_bytes: what it had been given, and what found no room, if its memory ran out.
    """

    step: int
    rewinds: int
    ahead: bool
    copy: int | None
    short: bool = False
    held_bytes: int = 0
    asked_bytes: int = 0


class Survival:
    """Watches over the parts of a run, and builds it anew when one of them broke off for want of memory."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._store = c10d._get_default_store()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._watch()

    def _watch(self) -> None:
        self._parameters = parameters_of(self._run)
        self._generation = next(_GENERATIONS)
        store = PrefixStore(f"shortage-{self._generation}", self._store)
        self.alarm = Alarm(store, self._run.device, self._run.void)

    def meet(self, standing: Standing) -> list[Standing]:
        """Leave what broke off, on all ranks; where each of them stood. Until ``again`` the run is stripped."""
        self.alarm.close()
        self._kept = strip(self._run, self._parameters)
        del self._parameters
        free(self._run.device)
        store = PrefixStore(f"again-{self._generation}", self._store)
        meet_again(store, self._rank, self._world_size, self._run.device)
        everyone: list[Standing] = [standing] * self._world_size
        dist.all_gather_object(everyone, standing)
        return everyone

    def again(self, everyone: list[Standing], short: Shortage) -> Strategy:
        """Build the run with the micro-batch that ``short`` says. Where the ranks differ, with initial weights."""
        strategy = self._run.strategy.with_values(micro_batch_size=short.micro_batch_size)
        kept, self._kept = self._kept if agree(everyone) else None, {}
        rebuild(self._run, strategy, kept)
        self._share_what_is_equal(next(rank for rank, each in enumerate(everyone) if each.short))
        self._watch()
        return strategy

    def _share_what_is_equal(self, source: int) -> None:
        """Loss scale and what clipping learned, from a rank that ran out: it has not begun to change them."""
        for tensor in (self._run.loss_scale.state() | self._run.norm_limit.state()).values():
            dist.broadcast(tensor, source)


def agree(everyone: list[Standing]) -> bool:
    """Whether all ranks hold the same run, unhurt."""
    return len({(each.step, each.rewinds) for each in everyone}) == 1 and not any(e.ahead for e in everyone)


def shortage_of(run: Run, world_size: int, everyone: list[Standing]) -> Shortage:
    """What to remember and say: the first rank of those that ran out, and the micro-batch to go on with."""
    rank = next(rank for rank, each in enumerate(everyone) if each.short)
    size = run.strategy[MICRO_BATCH_SIZE]
    return Shortage(
        strategy=dict(run.strategy.values),
        world_size=world_size,
        micro_batch_size=0 if size == 1 else -(-size // 2),
        rank=rank,
        step=min(each.step for each in everyone) + 1,
        held_bytes=everyone[rank].held_bytes,
        asked_bytes=everyone[rank].asked_bytes,
    )


def exhausted(short: Shortage, fix: str = "shard more, or recompute activations") -> ResourceError:
    """The error of a run that has nothing left to halve."""
    asked = f"{format_bytes(short.asked_bytes)} found no room" if short.asked_bytes else "no room was left"
    return ResourceError(
        "out of memory with a micro-batch of 1",
        where=f"rank {short.rank}, step {short.step}",
        why=f"{asked} beside {format_bytes(short.held_bytes)}",
        fix=fix,
    )
