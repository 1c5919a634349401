"""The answer of ``shardwise plan``: a run's hours and cost, how sure they are, the nearest alternatives, what binds.

Everything here follows from a plan, its recipe and the committed accuracy of predictions; nothing is predicted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.core.counted import Unit
from shardwise.core.json_file import plain
from shardwise.core.plan import Candidate, PeakIs
from shardwise.core.units import format_bytes, format_percent

SURE = 3.0
"""What costs seconds once is chosen where its predicted saving is so many times the cost: both are uncertain, and a run
may be stopped early."""

TELLS = 0.03
"""Relative differences of time that the model does not tell apart: within them, the plainer strategy is chosen."""

SAMPLE_STEPS = 1000
"""Steps whose hours and cost are shown where a recipe gives epochs."""


@dataclass(frozen=True)
class Spread:
    """How far runs were from their predictions.

    Attributes:
        p50, p95: quantiles of measured over predicted.
        runs: that were compared.
        source: which runs, and the file of their results.
    """

    p50: float
    p95: float
    runs: int
    source: str

    def of(self, predicted: float) -> Interval:
        """The interval of a new prediction."""
        return Interval(self.p50 * predicted, self.p95 * predicted, self.runs, self.source)


@dataclass(frozen=True)
class Interval:
    """Half of the runs are expected below ``p50``, 95 % below ``p95``; the others as in ``Spread``."""

    p50: float
    p95: float
    runs: int
    source: str


@dataclass(frozen=True)
class RunCost:
    """The recipe's steps, without evaluations, checkpoints and failures.

    Attributes:
        steps: of the recipe; SAMPLE_STEPS where it gives epochs, whose steps are counted from the data by train.
        epochs: that the recipe gives instead of steps.
        hours: of all steps.
        price: of a device for an hour; None where the recipe does not give it.
        likely_hours: None where the accuracy of this device's seconds is not known.
        unit: what ``tokens`` counts.
    """

    steps: int
    tokens: int
    devices: int
    hours: float
    price: float | None
    likely_hours: Interval | None
    epochs: float | None = None
    unit: Unit = "tokens"

    @property
    def device_hours(self) -> float:
        return self.devices * self.hours

    @property
    def cost(self) -> float | None:
        """In the currency of the price."""
        return None if self.price is None else self.device_hours * self.price


@dataclass(frozen=True)
class Alternative:
    """The best strategy with another value of one setting, or why none was predicted.

    Attributes:
        setting: the key, with the chosen value and the other one.
        candidate: None where none was predicted.
        also: further settings that differ, with both values.
    """

    setting: str
    chosen: str
    other: str
    candidate: Candidate | None
    reason: str
    also: tuple[str, ...] = ()


PINNED = "the recipe pins"

ABOUT: Mapping[PeakIs, str] = {"counted": "", "estimated": "about ", "at least": "at least "}
"""What kind of figure a peak is, before it."""


def pinned_in_words(keys: Iterable[str]) -> str:
    """That a strategy is not chosen because of pins."""
    return f"{PINNED} {', '.join(keys)}"


@dataclass(frozen=True)
class MemoryPrice:
    """A faster strategy, and the memory that it lacks.

    Attributes:
        bytes: more memory of a device, at least.
        change: settings that would change, in words.
        time: of a step, relative: -0.09 is 9 % less.
    """

    bytes: int
    change: str
    time: float
    candidate: Candidate

    def sentence(self) -> str:
        more = f"{ABOUT[self.candidate.peak_is]}{format_bytes(self.bytes)} more than the device has"
        faster = format_percent(-self.time, decimals=0 if self.time < -0.0995 else 1)
        return f"{self.change} would be {faster} faster; it needs {more}"


@dataclass(frozen=True)
class DeviceTry:
    """A number of devices that was planned for ``plan --for devices``.

    Attributes:
        hours: of all steps; 0 where there is no plan.
        verdict: enough | takes longer | does not fit | not possible, with the reason.
    """

    devices: int
    hours: float
    cost: float | None
    verdict: str


@dataclass(frozen=True)
class QuantityLimit:
    """How far one quantity goes at the plan's strategy, all else equal.

    Attributes:
        quantity: micro_batch_size | sequence_length | layers | devices, or a setting of the strategy.
        now: what the plan has.
        fits: the largest value that fits, or the fewest devices; None where none does.
        peak_bytes: with it, by a full dry run; 0 where none fits.
        stops: the next value, which does not fit; None where the range ends.
        stop_bytes: with it; 0 where it is not possible.
        reason: why it stops.
        note: what goes with the value that fits.
    """

    quantity: str
    now: float
    fits: float | None
    peak_bytes: int
    stops: float | None
    stop_bytes: int
    reason: str
    note: str = ""

    def sentence(self) -> str:
        fits = f"{self.fits:,} fits" if self.fits is not None else "no value fits"
        fits += f" ({self.note})" if self.note else ""
        return f"{self.quantity}: {fits}; {self.end()}"

    def end(self) -> str:
        """Where it stops, in words."""
        return self.reason if self.stops is None else f"{self.stops:,} {self.reason}"


@dataclass(frozen=True)
class FigureOrigin:
    """Where figures come from.

    Attributes:
        figures: their keys in ``plan --json``, without the numbers of lists; a key stands for all below it.
        source: which they are, and from where.
    """

    figures: tuple[str, ...]
    kind: Literal["counted", "measured", "assumed"]
    source: str


@dataclass(frozen=True)
class Answer:
    """What a plan answers.

    Attributes:
        peak: of the worst rank's memory; None where no run of such a device was compared.
        binding: what keeps the step from being faster.
        prices: what more memory would allow, the least first; each gives more than those before it.
        front: predicted strategies, fitting or not, that no other is better than in both memory and time; by memory.
        devices: numbers of devices that were tried, where the fewest are asked for.
        limits: of ``plan --limits``.
        origins: of every number in ``plan --json``.
        nearest: one for each setting, in the order of techniques.
        unpin: pins of the recipe without which the run fits and is faster, and defaults that take twice the time; a
            sentence each.
    """

    run: RunCost
    peak: Interval | None
    nearest: tuple[Alternative, ...]
    binding: str
    prices: tuple[MemoryPrice, ...]
    front: tuple[Candidate, ...]
    devices: tuple[DeviceTry, ...] = ()
    origins: tuple[FigureOrigin, ...] = ()
    unpin: tuple[str, ...] = ()
    limits: tuple[QuantityLimit, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The objects that ``plan --json`` adds to the plan."""
        written = plain(self)
        written["run"] |= {"device_hours": self.run.device_hours, "cost": self.run.cost}
        interval = {"peak_bytes": written.pop("peak"), "hours": written["run"].pop("likely_hours")}
        return written | {"interval": interval}

    def sentences(self) -> Iterator[str]:
        """The binding constraint, and its price."""
        yield self.binding
        yield from (price.sentence() for price in self.prices)

    def sources(self) -> Iterator[str]:
        """Which figures are counted, measured and assumed, a sentence each."""
        for kind in ("counted", "measured", "assumed"):
            if sources := [origin.source for origin in self.origins if origin.kind == kind]:
                yield f"{kind}: {'; '.join(sources)}"
