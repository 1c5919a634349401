"""``metrics.jsonl`` and ``report.json``: what a run writes while it trains, and once at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from shardwise.core.json_file import Seconds, Size
from shardwise.core.ledger import Ledger
from shardwise.core.pipeline.schedule import Action, PassKind, Played

EVENTS = "events.jsonl"
"""A line for each event of the guard, such as a spike or a rewind."""

Which: TypeAlias = Literal["latest", "best"]
"""The newest complete checkpoint of a run, or the one with the best value of ``checkpoint.best``."""


@dataclass(frozen=True)
class GradientNoise:
    """Squared gradient norms at two batch sizes, from which recipe/noise_scale.py estimates the gradient noise scale.

    Attributes:
        micro_batch_tokens: harmonic mean of the targets of a micro-batch of all data-parallel ranks, of those that
            have any.
        batch_tokens: of the whole batch.
        micro_batch_square: mean over these micro-batches.
        batch_square: of the whole batch.
    """

    micro_batch_tokens: float
    batch_tokens: Size
    micro_batch_square: float
    batch_square: float


@dataclass(frozen=True)
class StepRecord:
    """One line of ``metrics.jsonl``. Keys that are None are left out.

    Attributes:
        step: number of the optimizer step, from 1.
        loss: in nats per token; NaN once the run has failed.
        tokens: targets that were trained on.
        seconds: wall time since the step before, without that of compiling.
        processed_per_second: positions that the model computed, padding and prompts included, as the plan counts them.
        rewinds: how often the run had gone back before this step.
        loss_scale: the factor of fp16's loss; None without one.
        peak_bytes: highest memory of rank 0 so far, as far as it was measured.
        held_out_losses: of the named validation sets.
        metrics: of ``evaluation.metrics``, on the held-out samples.
        compile_seconds: of compiling kernels in this step.
        load_imbalance: load of the busiest rank relative to a balanced one, where a technique divides work by the data.
        busiest_expert: tokens of the busiest expert relative to the mean of its layer, the largest of all layers.
        dead_experts: experts of all layers that got no token in this step.
        measures: of the objective, such as ``accuracy`` of preferences: means over the global batch.
    """

    step: Size
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: Size
    seconds: float
    tokens_per_second: float
    skipped: bool = False
    held_out_loss: float | None = None
    rewinds: Size | None = None
    gradient_noise: GradientNoise | None = None
    compile_seconds: Seconds | None = None
    processed_per_second: float | None = None
    loss_scale: float | None = None
    peak_bytes: Size | None = None
    held_out_losses: Mapping[str, float] | None = None
    metrics: Mapping[str, float] | None = None
    load_imbalance: float | None = None
    busiest_expert: float | None = None
    dead_experts: Size | None = None
    measures: Mapping[str, float] | None = None


@dataclass(frozen=True)
class RankMemory:
    """Predicted and measured peak bytes of one rank.

    Attributes:
        measured_peak_bytes: 0 if the process that made the steps was killed before it wrote its report.
        measured_reserved_bytes: 0 on the CPU.
    """

    rank: Size
    predicted_peak_bytes: Size
    measured_peak_bytes: Size
    measured_reserved_bytes: Size = 0


@dataclass(frozen=True)
class RankPasses:
    """The passes of one rank in one step: kind, stage, micro-batch, begin and end in seconds from the first pass."""

    rank: Size
    spans: tuple[tuple[PassKind, Size, Size, Seconds, Seconds], ...]


@dataclass(frozen=True)
class PassesRecord:
    """The measured passes of the ranks of one pipeline in one step, in the order of the ranks."""

    step: Size
    ranks: Annotated[tuple[RankPasses, ...], Field(min_length=1)]

    def played(self) -> Played:
        return Played(
            tuple(
                tuple(
                    (Action(kind, stage, number), begin, end)
                    for kind, stage, number, begin, end in rank.spans
                )
                for rank in self.ranks
            )
        )


@dataclass(frozen=True)
class PhasesRecord:
    """Median seconds of a step: forward, backward, optimizer, and communication where that was timed apart.

    Attributes:
        step: the first one that was timed.
        seconds: of rank 0.
        ranks: of every rank, in order; () in reports of earlier versions.
        steps: how many were timed.
    """

    step: Size
    seconds: Mapping[str, Seconds]
    ranks: tuple[Mapping[str, Seconds], ...] = ()
    steps: Size = 1


@dataclass(frozen=True)
class GradientHistogram:
    """Rank 0's gradients of one step in fp16 by size, scaled as they were computed.

    Attributes:
        lowest: exponent of the first count: |g| in [2^lowest, 2^(lowest + 1)), and everything smaller.
        counts: of values by exponent.
        non_finite: overflowed values.
    """

    step: Size
    loss_scale: Annotated[float, Field(gt=0)]
    lowest: int
    counts: tuple[Size, ...]
    zeros: Size
    non_finite: Size


@dataclass(frozen=True)
class ExpertsRecord:
    """Tokens of every expert relative to the mean of its layer.

    Attributes:
        steps: number of steps that the mean is over. The process that wrote the report made them.
        layers: names of the experts modules.
        load: a row for each of them.
    """

    steps: Size
    layers: tuple[str, ...]
    load: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class AnswerRecord:
    """Greedy answers to a held-out prompt.

    Attributes:
        before: of the model before training; None where it is not known.
        after: of the trained model.
        expected: the data's, the chosen one of a pair; "" for a prompt alone.
    """

    prompt: str
    before: str | None
    after: str
    expected: str = ""


@dataclass(frozen=True)
class Outcome:
    """``report.json``: measured results of a run that reached its end, with the plan's predictions.

    Attributes:
        measured_step_seconds: None when no step was made.
        ledger: the plan's, at the peak.
        trained_parameters: those that are not frozen; None in reports of earlier versions.
        tokens: targets trained on, earlier runs of a resumed run included.
        seconds: of this run's training, evaluation and saving.
        sample: text of a model of plain text. answers: those of a model of records. unsampled: why there are neither.
        passes: the measured passes of a pipeline.
        phases: the measured seconds of a step by phase; None if the run was too short.
        held_out_losses: the last ones of the named validation sets.
        gradients: their sizes in a step; None without loss scaling.
        metrics: the last ones of ``evaluation.metrics``.
        best_step: the step of the best checkpoint; None without ``checkpoint.best``.
        experts: their load; None for a model without experts.
        other_cores: cores of the first rank's host that other processes used, on average; 0 if so few that it counts
            as idle.
    """

    ranks: Annotated[tuple[RankMemory, ...], Field(min_length=1)]
    predicted_step_seconds: Seconds
    measured_step_seconds: Seconds | None
    ledger: Ledger
    held_out_loss: float | None = None
    parameters: Size = 0
    trained_parameters: Size | None = None
    tokens: Size = 0
    seconds: Seconds = 0.0
    sample: str | None = None
    answers: tuple[AnswerRecord, ...] = ()
    unsampled: str = ""
    device: str = ""
    world_size: Size = 0
    passes: PassesRecord | None = None
    phases: PhasesRecord | None = None
    held_out_losses: Mapping[str, float] = field(default_factory=dict)
    gradients: GradientHistogram | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best_step: Size | None = None
    experts: ExpertsRecord | None = None
    other_cores: Seconds = 0.0

    @property
    def worst(self) -> RankMemory:
        """The rank with the highest measured peak."""
        return max(self.ranks, key=lambda rank: rank.measured_peak_bytes)
