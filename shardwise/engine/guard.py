"""The guard: decides from losses and gradient norms whether to go on, rewind, or give up. A pure function.

Its inputs are all-reduced, so all ranks reach the same verdict without communication. Its memory is a value
(``GuardState``) in the training state, so a resumed or rewound run gets the same verdicts as an uninterrupted one.

*Spikes.* A step is an outlier when its loss, or the logarithm of its gradient norm, exceeds the median of the last
``window`` clean steps by more than ``threshold`` robust deviations (1.4826 times the median absolute deviation). It
must also exceed a fixed minimum, because recent steps may be so close together that their deviation means nothing.
Medians are used because a spike would raise a mean. Outliers, skipped steps and non-finite steps never enter the
window. A single outlier may be an unusual batch, whose clipped update does no harm; it is logged as ``odd``. Clean runs
of a small decoder had single norms of 25 times the median, and two consecutive norms of 4 times the median. A spike is
an outlier that another one follows within PROBATION steps, or a loss that exceeds the threshold EXTREME times. A rewind
waits until no outlier came for CALM steps, or until the spike is LONGEST_SPIKE steps old, so that one rewind skips all
of it. With these values benchmarks/guard.py sees no rewind in 20 clean runs of 500 steps.

*Skips.* A skipped update loses only its batch. More than ``skips`` consecutive ones end the run, because the fault does
not go away. In fp16 the dynamic loss scale causes overflows of the scaled gradients. These count only when the scale is
at its floor, or when the loss itself is not finite.

*Torn.* With the optimizer in the backward pass, a non-finite gradient may appear after other parameters were updated.
The run then rewinds at once.

Limits: there is no spike before the window is full, and none for a loss that rises slowly over a window. The medians
sort the window in each step: microseconds for the usual 64 steps, tens of milliseconds for 100,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Self

from pydantic import model_validator

from shardwise.core.json_file import Finite, Size
from shardwise.recipe.sections import GuardSpec

LEAST_LOSS = 0.1
"""Smallest excess of an outlier's loss, relative to the median."""

LEAST_NORM = 8.0
"""Smallest ratio of an outlier's norm to the median norm."""

EXTREME = 2.0
PROBATION = 2
CALM = 2
LONGEST_SPIKE = 16

_TO_DEVIATION = 1.4826  # of a normal distribution, from its median absolute deviation: 1 / Φ⁻¹(3/4)


class GuardAction(Enum):
    """What to do after a step."""

    GO_ON = "go on"
    REWIND = "rewind"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Burst:
    """Outliers close together: indices of the first and last step, and whether they are a spike."""

    first: Size
    last: Size
    spike: bool

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.first > self.last:
            raise ValueError("a burst is from a step to a later one")
        return self


@dataclass(frozen=True)
class GuardState:
    """The guard's state between steps: clean losses and norms, consecutive skips, an open burst."""

    losses: tuple[Finite, ...] = ()
    norms: tuple[Finite, ...] = ()
    skips: Size = 0
    burst: Burst | None = None

    def forgetting(self) -> GuardState:
        """Without the window: after a spike that could not be undone, the guard learns the new level."""
        return replace(self, losses=(), norms=(), burst=None)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if len(self.losses) != len(self.norms):
            raise ValueError("there are as many losses as norms")
        return self


@dataclass(frozen=True)
class Seen:
    """The guard's input for one step.

    Attributes:
        index: of the step, from 0.
        loss, norm: as the step returned them.
        skipped: whether its update was skipped.
        overflow: whether fp16's dynamic loss scale explains the skip.
        final: whether it is the last step.
    """

    index: int
    loss: float
    norm: float
    skipped: bool = False
    overflow: bool = False
    final: bool = False


@dataclass(frozen=True)
class GuardVerdict:
    """The guard's decision after a step.

    Attributes:
        action: go on, rewind or give up.
        event: to log: overflow, skipped, torn, odd (a single outlier so far), spike, or "" for nothing.
        first, last: indices of the steps whose batches a rewind skips.
        against: the medians, and the heights of loss and norm; a height above 1 is an outlier.
    """

    action: GuardAction = GuardAction.GO_ON
    event: str = ""
    first: int = 0
    last: int = 0
    against: dict[str, float] = field(default_factory=dict)


def judge(spec: GuardSpec, memory: GuardState, seen: Seen) -> tuple[GuardState, GuardVerdict]:
    """The guard's memory after a step, and its verdict."""
    if seen.overflow:
        memory, verdict = _burst_over(memory, seen)
        return memory, replace(verdict, event="overflow")
    if seen.skipped or not (math.isfinite(seen.loss) and math.isfinite(seen.norm)):
        return _not_finite(spec, memory, seen)
    memory = replace(memory, skips=0)
    heights = _heights(spec, memory, seen)
    highest = max(heights["loss_height"], heights["norm_height"]) if heights else 0.0
    if highest > 1:
        # A norm alone is never extreme: clean runs have single norms of many times the median.
        memory, event = _outlier(memory, seen, heights.get("loss_height", 0.0) >= EXTREME)
    else:
        memory = _clean(spec, memory, seen)
        event = ""
    memory, verdict = _burst_over(memory, seen)
    return memory, replace(verdict, event=event, against=heights if event else {})


def _not_finite(spec: GuardSpec, memory: GuardState, seen: Seen) -> tuple[GuardState, GuardVerdict]:
    """A skipped or torn update. It extends an open burst."""
    burst = memory.burst
    # A step that is not finite and was not skipped has updated some of the parameters.
    event = "skipped" if seen.skipped else "torn"
    if burst is not None:
        memory = replace(memory, burst=replace(burst, last=seen.index))
    memory = replace(memory, skips=memory.skips + 1)
    if memory.skips > spec.skips:
        return memory, GuardVerdict(GuardAction.GIVE_UP, event, seen.index, seen.index)
    first = seen.index if burst is None else burst.first
    if event == "torn":
        return memory, GuardVerdict(GuardAction.REWIND, event, first, seen.index)
    memory, verdict = _burst_over(memory, seen)
    return memory, replace(verdict, event=event)


def _heights(spec: GuardSpec, memory: GuardState, seen: Seen) -> dict[str, float]:
    """Excess of loss and norm over the medians, in units of the threshold; {} before the window is full."""
    if len(memory.losses) < spec.window:
        return {}
    # Norms vary by factors, so they are compared by their logarithms.
    logs = [_log(norm) for norm in memory.norms]
    loss_median = median(memory.losses)
    norm_median = median(logs)
    return {
        "loss_median": loss_median,
        "norm_median": math.exp(norm_median),
        "loss_height": _height(
            seen.loss, memory.losses, loss_median, LEAST_LOSS * abs(loss_median), spec.threshold
        ),
        "norm_height": _height(_log(seen.norm), logs, norm_median, math.log(LEAST_NORM), spec.threshold),
    }


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))  # 0 has no logarithm


def _height(value: float, recent: Sequence[float], middle: float, least: float, threshold: float) -> float:
    deviation = _TO_DEVIATION * median(abs(other - middle) for other in recent)
    # Of a window of losses of 0 the other two limits are 0.
    return (value - middle) / max(least, threshold * deviation, 1e-12)


def _outlier(memory: GuardState, seen: Seen, extreme: bool) -> tuple[GuardState, str]:
    if memory.burst is None:
        burst = Burst(seen.index, seen.index, extreme)
        return replace(memory, burst=burst), "spike" if extreme else "odd"
    burst = replace(memory.burst, last=seen.index, spike=True)
    return replace(memory, burst=burst), "spike"


def _clean(spec: GuardSpec, memory: GuardState, seen: Seen) -> GuardState:
    losses = (*memory.losses, seen.loss)
    norms = (*memory.norms, seen.norm)
    return replace(memory, losses=losses[-spec.window :], norms=norms[-spec.window :])


def _burst_over(memory: GuardState, seen: Seen) -> tuple[GuardState, GuardVerdict]:
    """Close a burst: drop a single outlier that none followed, rewind after a spike has ended."""
    burst = memory.burst
    if burst is None:
        return memory, GuardVerdict()
    since = seen.index - burst.last
    if not burst.spike:
        if since >= PROBATION or seen.final:
            memory = replace(memory, burst=None)
        return memory, GuardVerdict()
    # At the last step there is nothing to wait for: the run must not end within a spike.
    if since >= CALM or seen.final or seen.index - burst.first + 1 >= LONGEST_SPIKE:
        return memory, GuardVerdict(GuardAction.REWIND, first=burst.first, last=burst.last)
    return memory, GuardVerdict()
