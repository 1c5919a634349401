"""Pipeline schedules as data: the actions of every rank in order, and their simulated duration.

A model is split into stages. Stage s is on rank s % ranks, so a rank has one stage, or several with the interleaved
schedule. A *schedule* lists the actions of each rank: the forward pass of a micro-batch through one stage (F), its
backward pass (B), or the two halves of a backward pass: the gradient of the stage's input (I), which the stage before
needs, and the gradients of its weights (W).

    naive         one micro-batch passes through all stages and back before the next begins
    gpipe         all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)
    1f1b          a backward pass as soon as there is one: at most p - s micro-batches are in flight on rank s of p
                  (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1)
    interleaved   the same with v stages on each rank: 1/v of the bubble for v times the messages (section 2.2.2)
    zero_bubble   1f1b with the backward passes halved: weights' gradients fill the gaps, with no more micro-batches in
                  flight than on 1f1b's first rank (ZB-H1 of Qi et al. 2023, arXiv:2401.10241)
    pipedream     1f1b without an end: weights are updated while the pipeline is full (Harlap et al. 2018,
                  arXiv:1806.03377), so a backward pass needs the weights of its own forward pass again

One function lists the orders, and ``play`` simulates any orders with any durations. The executor, the planner's time,
the pictures and the tests of the papers' formulas use the same lists.

The orders follow the papers' rules. The paper gives zero_bubble's rule as a picture, so its order comes from a
slot-by-slot simulation. A solver for measured durations (the paper's ZB-2p and automatic schedules) would make the
order of messages depend on a timing. Without it a bubble remains where the durations of F, I and W differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

PassKind = Literal["F", "B", "I", "W"]

SCHEDULE_NAMES: tuple[str, ...] = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream")


@dataclass(frozen=True, order=True)
class Action:
    """One pass of one micro-batch through one stage, both counted from 0."""

    kind: PassKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[Action, ...]
"""What one rank does, one after the other."""


def orders(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> tuple[Order, ...]:
    """The order of every rank for one optimizer step; for pipedream, of a run of ``micro_batches``.

    Raises ValueError for an unknown schedule, and for several stages per rank where it is not the interleaved one.
    """
    if schedule not in SCHEDULE_NAMES:
        raise ValueError(f"no such schedule: {schedule}")
    if schedule != "interleaved" and stages_per_rank != 1:
        raise ValueError(f"{schedule} has one stage per rank")
    if schedule == "zero_bubble":
        return _zero_bubble_orders(ranks, micro_batches)
    return tuple(_rank_order(schedule, rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks))


def _rank_order(schedule: str, rank: int, ranks: int, stages_per_rank: int, count: int) -> Order:
    after = ranks - rank - 1
    forward = [Action("F", rank, m) for m in range(count)]
    backward = [Action("B", rank, m) for m in range(count)]
    ahead = {"naive": 0, "gpipe": count}.get(schedule, after)
    if stages_per_rank > 1:
        stages = range(rank, ranks * stages_per_rank, ranks)
        whole = -(-count // ranks) * ranks  # fills the last group; the excess is removed below
        forward = _in_groups("F", stages, ranks, whole)
        backward = _in_groups("B", stages[::-1], ranks, whole)
        # The last stage's first micro-batch comes round after all groups of the stages before it.
        ahead = (stages_per_rank - 1) * ranks + 2 * after
    merged = _merged(forward, backward, ahead)
    return tuple(action for action in merged if action.micro_batch < count)


def _in_groups(kind: PassKind, stages: range, ranks: int, count: int) -> list[Action]:
    """As many micro-batches as there are ranks through one stage, then the same through the next."""
    return [
        Action(kind, stage, m)
        for start in range(0, count, ranks)
        for stage in stages
        for m in range(start, start + ranks)
    ]


def _merged(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> list[Action]:
    """``ahead`` forward passes, then one and a backward pass by turns, then the backward passes that are left."""
    ahead = min(ahead, len(forward))
    merged = list(forward[:ahead])
    for index, action in enumerate(forward[ahead:]):
        merged += [action, backward[index]]
    return merged + list(backward[len(forward) - ahead :])


def _zero_bubble_orders(ranks: int, count: int) -> tuple[Order, ...]:
    """ZB-H1, played in slots of one pass each.

    A rank prefers F, as far as 1f1b would be ahead of I and no more than ``ranks`` micro-batches hold anything; then I,
    for which the rank before waits; and W when there is nothing else.
    """
    done: dict[Action, int] = {}  # the slot in which it was done
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    numbers = [dict.fromkeys(("F", "I", "W"), 0) for _ in range(ranks)]
    slot = 0
    while any(n["W"] < count for n in numbers):
        chosen = [_next_action(rank, ranks, count, numbers[rank], done, slot) for rank in range(ranks)]
        for rank, action in enumerate(chosen):
            if action is not None:
                done[action] = slot
                lists[rank].append(action)
                numbers[rank][action.kind] += 1
        slot += 1
    return tuple(tuple(actions) for actions in lists)


def _next_action(
    rank: int, ranks: int, count: int, number: Mapping[str, int], done: Mapping[Action, int], slot: int
) -> Action | None:
    def ready(action: Action) -> bool:
        return all(done.get(before, slot) < slot for before in needs(action, ranks, halved=True))

    forward, inputs, weights = (Action(kind, rank, number[kind]) for kind in ("F", "I", "W"))
    ahead = number["F"] - number["I"] < ranks - rank and number["F"] - number["W"] < ranks
    if number["F"] < count and ahead and ready(forward):
        return forward
    if number["I"] < count and ready(inputs):
        return inputs
    return weights if number["W"] < number["I"] else None


def needs(action: Action, stages: int, halved: bool) -> list[Action]:
    """Actions on other ranks that an action depends on.

    ``halved``: backward passes are split into I and W.
    """
    stage = action.stage
    micro_batch = action.micro_batch
    back = "I" if halved else "B"
    if action.kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage > 0 else []
    if action.kind == "W":
        return [Action("I", stage, micro_batch)]
    own = [Action("F", stage, micro_batch)]
    return [*own, Action(back, stage + 1, micro_batch)] if stage + 1 < stages else own  # type: ignore[arg-type]


@dataclass(frozen=True)
class Played:
    """When every action begins and ends, by rank, in seconds or slots from the start of the first."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def end(self) -> float:
        return max(end for spans in self.spans for _, _, end in spans)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(end - start for _, start, end in self.spans[rank])

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - sum(self.busy(rank) for rank in range(len(self.spans))) / (self.end * len(self.spans))


def play(
    lists: Sequence[Sequence[Action]], seconds: Callable[[Action], float], sending: float = 0.0
) -> Played:
    """Play orders: every rank does the next of its actions as soon as what that needs has arrived.

    Args:
        lists: of every rank; stage s must lie on rank s % ranks.
        seconds: how long an action takes.
        sending: how long a result is on its way to another rank. The ranks do not wait for it themselves.

    Raises ValueError when the ranks wait for each other.
    """
    ranks = len(lists)
    halved = any(a.kind == "I" for a in lists[0])
    stages = 1 + max(action.stage for order in lists for action in order)
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(lists):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                before = needs(action, stages, halved)
                if any(earlier not in ends for earlier in before):
                    break
                arrived = [ends[b] + (sending if (b.stage - rank) % ranks else 0.0) for b in before]
                start = max([*arrived, spans[rank][-1][2] if spans[rank] else 0.0])
                ends[action] = start + seconds(action)
                spans[rank].append((action, start, ends[action]))
                moved = True
    if any(len(done) < len(order) for done, order in zip(spans, lists, strict=True)):
        raise ValueError("the ranks of this schedule wait for each other")
    return Played(tuple(tuple(span) for span in spans))


def steps(lists: Sequence[Sequence[Action]], number: int, micro_batches: int) -> tuple[Order, ...]:
    """The orders of several optimizer steps after each other. Micro-batches are counted on."""
    return tuple(
        tuple(
            replace(a, micro_batch=a.micro_batch + step * micro_batches)
            for step in range(number)
            for a in order
        )
        for order in lists
    )


def step_time(
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    micro_batches: int,
    seconds: Callable[[Action], float],
    sending: float = 0.0,
) -> float:
    """How long an optimizer step takes; under pipedream, one of many in a pipeline that is full."""
    filling = -(-2 * ranks // micro_batches) if schedule == "pipedream" else 0
    lengths = [
        play(orders(schedule, ranks, stages_per_rank, count * micro_batches), seconds, sending).end
        if count
        else 0.0
        for count in (filling, filling + 1)
    ]
    return lengths[1] - lengths[0]


def in_flight(order: Sequence[Action]) -> int:
    """The most passes of micro-batches through stages of one rank that hold activations at the same time.

    They hold them until their whole backward pass is done: until W, where it comes in halves.
    """
    passes = most = 0
    for action in order:
        passes += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, passes)
    return most
