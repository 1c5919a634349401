"""The guard's judgement: from losses and gradient norms to go on, rewind, or give up. Values in, values out.

What it is told is all-reduced and thus equal on all ranks, so every rank judges alike without a message, and
what it remembers is a value (``Memory``) that lies in the training state: a resumed or rewound run judges as
the uninterrupted one did.

*Spikes.* A step stands out when its loss, or the logarithm of its gradient norm, lies above the median of the
last ``window`` clean steps by more than ``threshold`` robust deviations (1.4826 times the median absolute
deviation), and by more than a least excess as well: recent steps may lie so close together that a deviation
says nothing. Medians, because a mean chases the very spike that it should measure. Steps that stand out, are
skipped or are not finite never enter the window. One step that stands out may be an odd batch, whose clipped
update does no harm: it is noted. Clean runs of a small decoder had norms of 25 times the median alone, and of 4
times the median two in a row. It is a spike when another follows within PROBATION steps, or when its loss is
EXTREME times as high as it need be. A rewind waits until the burst has been over for CALM steps, or is LONGEST
steps old, so that one rewind leaves all of it out. With these figures benchmarks/guard.py sees no rewind in 20
clean runs of 500 steps.

*Skips.* Skipped updates cost their batch and nothing else; more than ``skips`` in a row end the run, for
something is broken that waiting does not mend. In fp16 an overflow of the scaled gradients is how the loss
scale finds its height: it counts only once the scale lies at its floor, or when the loss itself is not finite.

*Torn.* With the optimizer in the backward pass a gradient may turn out not to be finite when other parameters
have been updated. That calls for a rewind at once.

Price: nothing is a spike before the window is full, and a loss that rises slowly over a window never is one. The
medians sort the window at every step: microseconds for the usual 64, tens of milliseconds for 100,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Any, Self

from shardwise.core.sections import GuardSpec

LEAST_LOSS = 0.1
"""Excess of the loss, relative to its median, below which it is no spike."""

LEAST_NORM = 8.0
"""Factor over the median norm below which a norm is no spike."""

EXTREME = 2.0
PROBATION = 2
CALM = 2
LONGEST = 16

_TO_DEVIATION = 1.4826  # of a normal distribution, from its median absolute deviation


class Action(Enum):
    """What to do after a step."""

    GO_ON = "go on"
    REWIND = "rewind"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Burst:
    """Steps that stand out, close together: index of the first and the last, and whether it is a spike."""

    first: int
    last: int
    spike: bool


@dataclass(frozen=True)
class Memory:
    """What the guard remembers from step to step: clean losses and norms, skips in a row, an open burst."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    skips: int = 0
    burst: Burst | None = None

    def forgetting(self) -> Memory:
        """Without what it compared with: after a spike that nothing could undo, a new level is learned."""
        return replace(self, losses=(), norms=(), burst=None)

    def to_json(self) -> dict[str, Any]:
        burst = None if self.burst is None else asdict(self.burst)
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "skips": self.skips,
            "burst": burst,
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Raises ValueError for anything that ``to_json`` has not written."""
        if not isinstance(values, dict) or values.keys() != {"losses", "norms", "skips", "burst"}:
            raise ValueError("the guard's memory has losses, norms, skips and burst")
        losses, norms = (_numbers(values[key]) for key in ("losses", "norms"))
        skips, burst = values["skips"], values["burst"]
        if len(losses) != len(norms) or type(skips) is not int or skips < 0:
            raise ValueError("the guard's memory holds as many losses as norms, and a number of skips")
        return cls(losses, norms, skips, None if burst is None else _burst(burst))


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(v) is float and math.isfinite(v) for v in values):
        raise ValueError("the guard remembers finite numbers")
    return tuple(values)


def _burst(values: Any) -> Burst:
    if not isinstance(values, dict) or values.keys() != {"first", "last", "spike"}:
        raise ValueError("a burst has first, last and spike")
    first, last, spike = values["first"], values["last"], values["spike"]
    if type(first) is not int or type(last) is not int or type(spike) is not bool or not 0 <= first <= last:
        raise ValueError("a burst is from a step to a step")
    return Burst(first, last, spike)


@dataclass(frozen=True)
class Seen:
    """One step as the guard sees it.

    Attributes:
        index: of the step, from 0.
        loss, norm: as the step returned them.
        skipped: whether its update was left out.
        overflow: whether that is the loss scale finding its height.
        final: whether no step follows.
    """

    index: int
    loss: float
    norm: float
    skipped: bool = False
    overflow: bool = False
    final: bool = False


@dataclass(frozen=True)
class Verdict:
    """What follows from a step.

    Attributes:
        action: what to do.
        event: what to log: overflow, skipped, torn, odd (stands out alone so far), spike, or nothing ("").
        first, last: indices of the steps whose batches a rewind leaves out.
        against: what was compared: medians, and heights, in units of what it takes to stand out.
    """

    action: Action = Action.GO_ON
    event: str = ""
    first: int = 0
    last: int = 0
    against: dict[str, float] = field(default_factory=dict)


def judge(spec: GuardSpec, memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
    """The memory after a step, and what to do."""
    if seen.overflow:
        return memory, Verdict(event="overflow")
    if seen.skipped or not (math.isfinite(seen.loss) and math.isfinite(seen.norm)):
        return _not_finite(spec, memory, seen)
    memory = replace(memory, skips=0)
    heights = _heights(spec, memory, seen)
    highest = max(heights["loss_height"], heights["norm_height"]) if heights else 0.0
    if highest > 1:
        memory, event = _standing_out(memory, seen, heights.get("loss_height", 0.0) >= EXTREME)
    else:
        memory, event = _clean(spec, memory, seen), ""
    memory, verdict = _burst_over(memory, seen)
    return memory, replace(verdict, event=event, against=heights if event else {})


def _not_finite(spec: GuardSpec, memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
    """A skipped or torn update. It prolongs a burst, for nothing is calm."""
    burst, event = memory.burst, "skipped" if seen.skipped else "torn"
    if burst is not None:
        memory = replace(memory, burst=replace(burst, last=seen.index))
    memory = replace(memory, skips=memory.skips + 1)
    if memory.skips > spec.skips:
        return memory, Verdict(Action.GIVE_UP, event, seen.index, seen.index)
    first = seen.index if burst is None else burst.first
    if event == "torn":
        return memory, Verdict(Action.REWIND, event, first, seen.index)
    return memory, Verdict(event=event)


def _heights(spec: GuardSpec, memory: Memory, seen: Seen) -> dict[str, float]:
    """How far loss and norm lie above recent ones, where 1 stands out; {} before the window is full."""
    if len(memory.losses) < spec.window:
        return {}
    logs = [_log(norm) for norm in memory.norms]
    loss_median, norm_median = median(memory.losses), median(logs)
    return {
        "loss_median": loss_median,
        "norm_median": math.exp(norm_median),
        "loss_height": _height(
            seen.loss, memory.losses, loss_median, LEAST_LOSS * abs(loss_median), spec.threshold
        ),
        "norm_height": _height(_log(seen.norm), logs, norm_median, math.log(LEAST_NORM), spec.threshold),
    }


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))


def _height(value: float, recent: Sequence[float], middle: float, least: float, threshold: float) -> float:
    deviation = _TO_DEVIATION * median(abs(other - middle) for other in recent)
    return (value - middle) / max(least, threshold * deviation, 1e-12)


def _standing_out(memory: Memory, seen: Seen, extreme: bool) -> tuple[Memory, str]:
    if memory.burst is None:
        burst = Burst(seen.index, seen.index, extreme)
        return replace(memory, burst=burst), "spike" if extreme else "odd"
    burst = replace(memory.burst, last=seen.index, spike=True)
    return replace(memory, burst=burst), "spike"


def _clean(spec: GuardSpec, memory: Memory, seen: Seen) -> Memory:
    losses, norms = (*memory.losses, seen.loss), (*memory.norms, seen.norm)
    return replace(memory, losses=losses[-spec.window :], norms=norms[-spec.window :])


def _burst_over(memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
    """Forget an odd step when nothing followed, rewind when a spike has been seen to its end."""
    burst = memory.burst
    if burst is None:
        return memory, Verdict()
    since = seen.index - burst.last
    if not burst.spike:
        over = since >= PROBATION or seen.final
        return (replace(memory, burst=None) if over else memory), Verdict()
    if since >= CALM or seen.final or seen.index - burst.first + 1 >= LONGEST:
        return memory, Verdict(Action.REWIND, first=burst.first, last=burst.last)
    return memory, Verdict()
