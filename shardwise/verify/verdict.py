"""Results of a comparison with plain processes. Needs no torch.

In fp32 and fp64 a fixed tolerance decides. In fewer bits two correct runs differ by much more than rounding once:
training amplifies a rounding error with every step. So the limit is measured. The same plain process trains again, from
weights moved by a rounding error, and its differences from the first plain run are the *rounding noise*. By backward
error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", section 1.5), that is what a computation in
this precision may differ by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from shardwise.core.json_file import plain

FACTOR = 4.0
"""Differences above this multiple of the measured rounding noise fail."""


@dataclass(frozen=True)
class TrainedStep:
    """Loss and gradient norm of one optimizer step, and whether its update was skipped."""

    loss: float
    grad_norm: float
    skipped: bool = False


@dataclass(frozen=True)
class PlainRuns:
    """Results of one plain process in a strategy's precision, trained several times.

    Attributes:
        steps: of the run to compare with.
        repeats: of runs from weights that a rounding error moved.
        parameters: per parameter the largest relative difference of the repeats after the last step.
        unit: half the spacing of numbers in the dtype of compute, relative.
    """

    steps: tuple[TrainedStep, ...]
    repeats: tuple[tuple[TrainedStep, ...], ...]
    parameters: Mapping[str, float]
    unit: float


@dataclass(frozen=True)
class Allowed:
    """The largest difference that rounding noise explains, for each quantity where it came closest."""

    loss: float
    gradient_norm: float
    parameters: float


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison, as ``shardwise verify --json`` prints it.

    Attributes:
        precision: in which both runs computed.
        tolerance: the largest difference that passes whatever the noise is.
        undetermined: parameters that the loss does not determine; they are not compared.
        allowed: limits by rounding noise, where the precision has fewer bits than fp32.
        compared: steps that were compared. Fewer than ``steps`` after an update that one of the runs skipped; then
            the parameters are not compared, and their difference is 0.
        skipped: updates skipped by the strategy, and by the plain process.
        notes: settings that this comparison replaced, and what else limits it, in words.
        proof: the same layout in fp64 against a plain process in fp64.
    """

    max_loss_difference: float
    max_gradient_norm_difference: float
    max_parameter_difference: float
    worst_parameter: str
    tolerance: float
    steps: int
    undetermined: tuple[str, ...] = ()
    precision: str = "fp32"
    allowed: Allowed | None = None
    compared: int | None = None
    skipped: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()
    proof: Verdict | None = None

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """(quantity, difference, limit)."""
        limits = [self.tolerance] * 3
        if self.allowed is not None:
            limits = [self.allowed.loss, self.allowed.gradient_norm, self.allowed.parameters]
        found = (self.max_loss_difference, self.max_gradient_norm_difference, self.max_parameter_difference)
        return list(zip(("loss", "gradient norm", "parameters"), found, limits, strict=True))

    @property
    def agrees(self) -> bool:
        """Whether this comparison passed, without its proof."""
        return all(found <= limit for _, found, limit in self.rows) and not self.skips_on

    @property
    def skips_on(self) -> bool:
        """Whether the strategy skips many more updates than the plain process.

        Once one of the two skipped an update alone, the runs go apart, so a few more may overflow.
        """
        return self.skipped[0] > self.skipped[1] + max(1, self.steps // 5)

    @property
    def passed(self) -> bool:
        return self.agrees and (self.proof is None or self.proof.passed)

    def as_dict(self) -> dict[str, object]:
        proof = None if self.proof is None else self.proof.as_dict()
        return {**plain(self), "proof": proof, "passed": self.passed}


def relative(value: float, reference: float) -> float:
    """Relative difference. NaN counts as infinite, so it never passes."""
    difference = abs(value - reference) / max(abs(reference), 1e-12)
    return math.inf if math.isnan(difference) else difference


def _apart(left: float, right: float) -> float:
    """Difference relative to the larger value, at most 1: two runs hit a jump of the gradient norm unlike."""
    difference = abs(left - right) / max(abs(left), abs(right), 1e-12)
    return math.inf if math.isnan(difference) else difference


def judged(
    steps: Sequence[TrainedStep],
    parameters: Mapping[str, float],
    runs: PlainRuns,
    precision: str,
    tolerance: float,
) -> Verdict:
    """Compare a strategy's steps and its parameters' relative differences with plain runs in its precision.

    A loss is compared until the runs differ in a skipped update, a gradient norm where neither run skipped.
    """
    floor = max(tolerance, runs.unit)
    same = _alike(steps, runs.steps)
    losses = _differences(steps, runs.steps, "loss")
    norms = _differences(steps, runs.steps, "grad_norm")
    loss = _worst(losses, _limits(runs, "loss", floor))
    norm = _worst(norms, _limits(runs, "grad_norm", floor))
    worst, limit, name = 0.0, floor, ""
    if same == len(steps):
        for each, difference in parameters.items():
            allowed = max(floor, FACTOR * runs.parameters.get(each, 0.0))
            if not name or difference / allowed > worst / limit:
                worst, limit, name = difference, allowed, each
    return Verdict(
        loss[0],
        norm[0],
        worst,
        name,
        floor,
        len(steps),
        precision=precision,
        allowed=Allowed(loss[1], norm[1], limit),
        compared=same,
        skipped=(sum(s.skipped for s in steps), sum(s.skipped for s in runs.steps)),
    )


def _alike(left: Sequence[TrainedStep], right: Sequence[TrainedStep]) -> int:
    """Steps until one of two runs skipped an update that the other made."""
    return len(
        list(takewhile(lambda pair: pair[0].skipped == pair[1].skipped, zip(left, right, strict=True)))
    )


def _differences(left: Sequence[TrainedStep], right: Sequence[TrainedStep], name: str) -> list[float | None]:
    """Relative differences by step; None for the norm of a skipped step. The first unlike step still has a loss."""
    same = _alike(left, right)
    pairs = list(zip(left, right, strict=True))[: same + (name == "loss")]
    return [
        None if name == "grad_norm" and a.skipped else _apart(getattr(a, name), getattr(b, name))
        for a, b in pairs
    ]


def _limits(runs: PlainRuns, name: str, floor: float) -> list[float]:
    """What each step allows: the noise so far and in the step after, because noise grows."""
    apart = [_differences(repeat, runs.steps, name) for repeat in runs.repeats]
    return [
        max([floor, *(FACTOR * found for each in apart for found in _known(each[: index + 2]))])
        for index in range(len(runs.steps))
    ]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _worst(differences: Sequence[float | None], limits: Sequence[float]) -> tuple[float, float]:
    """The difference that is largest in terms of its limit, and that limit."""
    found = [(d, limit) for d, limit in zip(differences, limits, strict=False) if d is not None]
    return max(found, key=lambda pair: pair[0] / pair[1], default=(0.0, max(limits)))
