"""Messages between the ranks of a pipeline, and the action at which a sender knows that a message has arrived.

A stage's forward pass sends its output to the next stage. Its backward pass sends the gradient of its input to the
stage before. Messages between two ranks arrive in the order of sending, so a receiver follows the sender's order, which
it reads from the schedule.

A sent tensor must live until it is received. A rank that has received a message knows the earlier actions of its sender
(Lamport's happened-before). So the schedule gives, for every message, a later action of the sender at which the message
has certainly arrived. The tensor is freed there, at the same point on every backend and in a dry run, and waiting there
never blocks. Asking the backend whether a send is complete does not work (gloo never reports it before a wait). Waiting
for the previous send at every send would deadlock under the interleaved schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.pipeline.schedule import Action, Order, needs, orders


@dataclass(frozen=True)
class Message:
    """What the action ``of`` sends: the rank that receives it, and the action there that needs it."""

    of: Action
    to: int
    needed_by: Action
    wraps: bool

    @property
    def forward(self) -> bool:
        return self.of.kind == "F"


@dataclass(frozen=True)
class Post:
    """The messages of one rank.

    Attributes:
        sent: by the action that sends.
        received: by the action that needs it, with the rank that it comes from.
        asked: for every rank and channel, the messages that come from there, in the order in which they are sent.
        arrived: for every action of this rank, what it has sent before and has surely been received when the
            action's own message is here.
    """

    sent: dict[Action, Message]
    received: dict[Action, tuple[int, Message]]
    asked: dict[tuple[int, bool, bool], tuple[Message, ...]]
    arrived: dict[Action, tuple[Message, ...]]


@functools.lru_cache(maxsize=16)
def posts(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, forward_only: bool = False
) -> tuple[Post, ...]:
    """The messages of every rank for one optimizer step, or for its forward passes alone."""
    lists = orders(schedule, ranks, stages_per_rank, micro_batches)
    if forward_only:
        lists = tuple(tuple(action for action in order if action.kind == "F") for order in lists)
    return tuple(_post(rank, lists, _clocks(lists)) for rank in range(len(lists)))


def message_of(action: Action, ranks: int, stages: int) -> Message | None:
    """What an action sends; None for the last stage's forward pass, the first one's backward pass, and W."""
    step = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
    stage = action.stage + step
    if step == 0 or not 0 <= stage < stages or ranks == 1:
        return None
    wraps = min(stage, action.stage) % ranks == ranks - 1
    return Message(action, stage % ranks, Action(action.kind, stage, action.micro_batch), wraps)


def _post(rank: int, lists: Sequence[Order], clocks: dict[Action, tuple[int, ...]]) -> Post:
    ranks = len(lists)
    stages = 1 + max(action.stage for order in lists for action in order)
    index = {action: i for order in lists for i, action in enumerate(order)}
    asked: dict[tuple[int, bool, bool], list[Message]] = {}
    received: dict[Action, tuple[int, Message]] = {}
    for sender, order in enumerate(lists):
        for action in order:
            message = message_of(action, ranks, stages)
            if message is not None and message.to == rank:
                asked.setdefault((sender, message.forward, message.wraps), []).append(message)
                received[message.needed_by] = sender, message
    sent: dict[Action, Message] = {}
    arrived: dict[Action, tuple[Message, ...]] = {}
    waiting: list[Message] = []
    for action in lists[rank]:
        known = clocks[action]
        arrived[action] = tuple(m for m in waiting if known[m.to] > index[m.needed_by])
        waiting = [m for m in waiting if known[m.to] <= index[m.needed_by]]
        message = message_of(action, ranks, stages)
        if message is not None:
            sent[action] = message
            waiting.append(message)
    return Post(sent, received, {key: tuple(messages) for key, messages in asked.items()}, arrived)


def _clocks(lists: Sequence[Order]) -> dict[Action, tuple[int, ...]]:
    """How many actions of every rank are surely done when an action begins."""
    halved = any(action.kind == "I" for action in lists[0])
    stages = 1 + max(action.stage for order in lists for action in order)
    begun: dict[Action, tuple[int, ...]] = {}
    ended: dict[Action, tuple[int, ...]] = {}
    done = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(lists):
            while done[rank] < len(order):
                action = order[done[rank]]
                before = needs(action, stages, halved)
                if any(dependency not in ended for dependency in before):
                    break
                own = [ended[order[done[rank] - 1]]] if done[rank] else []
                known = [ended[dependency] for dependency in before]
                begun[action] = tuple(map(max, zip([0] * len(lists), *own, *known, strict=True)))
                done[rank] += 1
                ended[action] = tuple(done[rank] if r == rank else n for r, n in enumerate(begun[action]))
                moved = True
    return begun
