"""Results of a comparison with plain processes. Needs no torch.

In fp32 and fp64 a fixed tolerance decides. In fewer bits two correct runs differ by much more than rounding once:
training amplifies a rounding error with every step. So the limit is measured. The same plain process trains again, from
weights moved by a rounding error, and its differences from the first plain run are the *rounding noise*. By backward
error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", section 1.5), that is what a computation in
this precision may differ by.

A limit that would pass an error of 10 % judges nothing: what noise makes so uncertain is not compared, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.json_file import plain

FACTOR = 4.0
"""Differences above this multiple of the measured rounding noise fail."""
LOOSEST = 0.09
"""The largest limit by which anything is judged in fewer bits: 10 % off is 9.1 % of the larger value."""
JUMPS = 10
"""One of 10 steps may be beyond its limit."""
SMALLEST_LIMIT = 1e-3
"""The smallest limit for a parameter: of many, some agree in all repeats by chance."""
ALL_PARAMETERS = "all parameters"
"""The name of all parameters together."""

Products = tuple[float, float, float]
"""Of a tensor of this run, m, and that of another run, r: <m, r>, <m, m>, <r, r>."""

_CompareSteps = Callable[["TrainedStep", "TrainedStep"], float | None]


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
        first: the first step of the run to compare with, at ``loss_scale``.
        steps: its steps.
        firsts: first steps from weights that a rounding error moved.
        repeats: all steps from such weights.
        gradients: per parameter the largest misalignment of these first steps' gradients.
        parameters: per parameter the largest misalignment of its updates by all steps of the repeats.
        unit: half the spacing of numbers in the dtype of compute, relative.
        targets: over which the first loss is a mean.
        loss_scale: the largest at which the first gradients do not overflow.
    """

    first: TrainedStep
    steps: tuple[TrainedStep, ...]
    firsts: tuple[TrainedStep, ...]
    repeats: tuple[tuple[TrainedStep, ...], ...]
    gradients: Mapping[str, float]
    parameters: Mapping[str, float]
    unit: float
    targets: int
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Allowed:
    """The largest difference that rounding noise explains, for each quantity where it came closest."""

    loss: float
    gradient_norm: float
    gradients: float
    parameters: float


ComparedCount = tuple[int, int]
"""How many were compared, and of how many: noise would hide an error of 10 % in the others, or made them jump."""


@dataclass(frozen=True)
class ComparedCounts:
    """How much of each quantity was compared: steps with a loss, with a gradient norm, and parameters."""

    loss: ComparedCount
    gradient_norm: ComparedCount
    gradients: ComparedCount
    parameters: ComparedCount


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison, as ``shardwise verify --json`` prints it.

    Attributes:
        max_parameter_difference: relative, in L2 norm; in fewer bits than fp32 the misalignment of the updates.
        precision: in which both runs computed.
        tolerance: the largest difference that passes whatever the noise is.
        undetermined: parameters that the loss does not determine; they are not compared.
        allowed: limits by rounding noise, where the precision has fewer bits than fp32.
        compared: steps whose losses noise leaves comparable.
        counted: how much of each quantity it leaves comparable.
        max_gradient_difference: misalignment of the first gradient of a parameter, in fewer bits than fp32.
        worst_gradient: the parameter.
        skipped: updates skipped by the strategy, and by the plain process.
        unskipped: updates by gradients that were not finite.
        notes: settings that this comparison replaced, and what else limits it, in words.
        untrained: first steps in which all advantages were zero. Gradients were zero, or rounding error of the distance
            from the reference, which the optimizer amplifies; so nothing is compared.
        depends_on_layout: whether the model draws random numbers of its own, or reads buffers that it changes.
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
    counted: ComparedCounts | None = None
    max_gradient_difference: float | None = None
    worst_gradient: str = ""
    skipped: tuple[int, int] = (0, 0)
    unskipped: int = 0
    notes: tuple[str, ...] = ()
    untrained: int = 0
    depends_on_layout: bool = False
    proof: Verdict | None = None

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """(quantity, difference, limit)."""
        loss, norm, parameters = "loss", "gradient norm", "parameters"
        if self.allowed is None:
            differences = {
                loss: self.max_loss_difference,
                norm: self.max_gradient_norm_difference,
                parameters: self.max_parameter_difference,
            }
            return [(name, difference, self.tolerance) for name, difference in differences.items()]
        return [
            (loss, self.max_loss_difference, self.allowed.loss),
            (norm, self.max_gradient_norm_difference, self.allowed.gradient_norm),
            ("gradients", self.max_gradient_difference or 0.0, self.allowed.gradients),
            (parameters, self.max_parameter_difference, self.allowed.parameters),
        ]

    @property
    def agrees(self) -> bool:
        """Whether this comparison passed, without its proof."""
        return (
            all(difference <= limit for _, difference, limit in self.rows)
            and not self.skips_on
            and not self.unskipped
        )

    @property
    def skips_on(self) -> bool:
        """Whether the strategy skips many more updates than the plain process, or many fewer.

        Where it divides products, their parts overflow at other scales than their sum, so a few may differ.
        """
        return abs(self.skipped[0] - self.skipped[1]) > max(1, self.steps // 5)

    @property
    def compares_nothing(self) -> bool:
        return bool(self.untrained or (self.proof and self.proof.untrained))

    @property
    def passed(self) -> bool:
        return self.agrees and not self.compares_nothing and (self.proof is None or self.proof.passed)

    def as_dict(self) -> dict[str, object]:
        proof = None if self.proof is None else self.proof.as_dict()
        return {**plain(self), "proof": proof, "passed": self.passed}


def relative(value: float, reference: float, least: float = 0.0) -> float:
    """Difference relative to the reference, or to ``least`` if that is larger. NaN counts as infinite."""
    difference = abs(value - reference) / max(abs(reference), least, 1e-12)
    return math.inf if math.isnan(difference) else difference


def misalignments(products: Mapping[str, Products]) -> dict[str, float]:
    """How far tensors m are from others r along those: |1 - <m, r> / <r, r>|, of each and of all together.

    0.1 for gradients, or sums of updates, that are 10 % too long.
    """
    whole = [math.fsum(column) for column in zip(*products.values(), strict=True)] or [0.0] * 3
    return {name: _misaligned(*of) for name, of in {**products, ALL_PARAMETERS: tuple(whole)}.items()}


def _misaligned(both: float, mine: float, theirs: float) -> float:
    if theirs == 0:
        return 0.0 if mine == 0 else math.inf
    difference = abs(1 - both / theirs)
    return math.inf if math.isnan(difference) else difference


def judge_run(
    steps: Sequence[TrainedStep],
    gradients: Mapping[str, float],
    parameters: Mapping[str, float],
    runs: PlainRuns,
    precision: str,
    tolerance: float,
) -> Verdict:
    """Compare a strategy with plain runs in its precision that skipped the same updates.

    Args:
        gradients, parameters: misalignments of the first gradients, and of the updates of all steps together.
    """
    loss = _worst_step(steps, runs, _loss_apart, runs.unit / math.sqrt(max(1, runs.targets)), tolerance)
    norm = _worst_step(steps, runs, _norm_apart, runs.unit, tolerance)
    gradient = _worst_of(gradients, runs.gradients, SMALLEST_LIMIT)
    parameter = _worst_of(parameters, runs.parameters, max(SMALLEST_LIMIT, FACTOR * runs.unit))
    return Verdict(
        loss.difference,
        norm.difference,
        parameter.difference,
        parameter.name,
        tolerance,
        len(steps),
        precision=precision,
        allowed=Allowed(loss.limit, norm.limit, gradient.limit, parameter.limit),
        compared=loss.count[0],
        counted=ComparedCounts(loss.count, norm.count, gradient.count, parameter.count),
        max_gradient_difference=gradient.difference,
        worst_gradient=gradient.name,
        skipped=(sum(step.skipped for step in steps), sum(step.skipped for step in runs.steps)),
        unskipped=sum(not (s.skipped or math.isfinite(s.loss + s.grad_norm)) for s in steps),
    )


@dataclass(frozen=True)
class _Worst:
    """The difference that is largest in terms of its limit, that limit, and how many were compared."""

    name: str
    difference: float
    limit: float
    count: ComparedCount


class _Limited(NamedTuple):
    """A difference, and the largest one that passes."""

    difference: float
    limit: float

    @property
    def of_limit(self) -> float:
        return self.difference / self.limit


def _worst_step(
    steps: Sequence[TrainedStep], runs: PlainRuns, apart: _CompareSteps, floor: float, tolerance: float
) -> _Worst:
    """The worst step by its loss or norm, as ``apart`` compares them. It is None for steps that are not compared.

    The first step, before which nothing has grown, allows the noise of first steps. A later one allows the noise so far
    and in the step after it, because noise grows; at least ``floor``.
    """
    first_noise = _known(apart(step, runs.first) for step in runs.firsts)
    repeats = [
        [apart(mine, theirs) for mine, theirs in zip(repeat, runs.steps, strict=True)]
        for repeat in runs.repeats
    ]
    differences: dict[str, _Limited] = {}
    for index, (mine, theirs) in enumerate(zip(steps, runs.steps, strict=True)):
        difference = apart(mine, theirs)
        if difference is None:
            continue
        noise = first_noise
        least = 0.0
        if index > 0:
            noise = noise + _known(part for repeat in repeats for part in repeat[: index + 2])
            least = floor
        limit = max(tolerance, FACTOR * max(noise, default=0.0), least)
        differences[str(index)] = _Limited(difference, limit)
    return _worst(_without_jumps(differences))


def _without_jumps(differences: Mapping[str, _Limited]) -> Mapping[str, _Limited]:
    """The differences without the largest jumps: at most one step in ``JUMPS``, and never the first.

    Where training is unstable, one run may jump although its repeats do not. An error is in all steps.
    """
    beyond = [n for n, step in differences.items() if n != "0" and step.limit < step.difference < math.inf]
    beyond.sort(key=lambda n: differences[n].of_limit, reverse=True)
    jumps = beyond[: len(differences) // JUMPS]
    # An infinite limit counts the step among those that noise hides.
    return {**differences, **dict.fromkeys(jumps, _Limited(0.0, math.inf))}


def _worst_of(differences: Mapping[str, float], noise: Mapping[str, float], least: float) -> _Worst:
    """The worst of some parameters."""
    return _worst({n: _Limited(d, max(least, FACTOR * noise.get(n, 0.0))) for n, d in differences.items()})


def _worst(differences: Mapping[str, _Limited]) -> _Worst:
    """The difference that is largest in terms of its limit, of those that noise leaves comparable."""
    compared = {name: pair for name, pair in differences.items() if pair.limit <= LOOSEST}
    name = max(compared, key=lambda key: compared[key].of_limit, default="")
    worst = compared.get(name, _Limited(0.0, LOOSEST))
    # "All parameters" is not one more of them.
    count = len(compared.keys() - {ALL_PARAMETERS}), len(differences.keys() - {ALL_PARAMETERS})
    return _Worst(name, worst.difference, worst.limit, count)


def _loss_apart(mine: TrainedStep, theirs: TrainedStep) -> float:
    return _apart(mine.loss, theirs.loss)


def _norm_apart(mine: TrainedStep, theirs: TrainedStep) -> float | None:
    """None for skipped updates, whose norms may be of gradients that overflowed."""
    return None if mine.skipped or theirs.skipped else _apart(mine.grad_norm, theirs.grad_norm)


def _apart(mine: float, theirs: float) -> float:
    """Relative to the larger value, at most 1 for equal signs: two runs hit a jump of the gradient norm unlike."""
    difference = abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-12)  # no division by 0
    return math.inf if math.isnan(difference) else difference


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
