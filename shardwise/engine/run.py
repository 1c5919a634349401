"""A run: the model and optimizer of one rank, and the two policies that train them.

``ForwardBackward`` says in which order the micro-batches of a step pass through the model; ``OptimizerStep`` says when
gradients become updates. Both work on a ``LiveModel``, which ``build`` makes first. ``Run`` is that model with its
policies.

The loss of a step is the sum over all valid targets of the global batch divided by their number. The counts are summed
over micro-batches and all-reduced over data-parallel ranks *before* the first backward pass. Each micro-batch's loss
sum is divided by that one number, so any split over micro-batches and ranks gives the same gradient. Refused: a mean
of means, which weighs short micro-batches too much, and dividing gradients afterwards, whose sums overflow in 16 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.strategy import Layout, Strategy
from shardwise.engine.first_values import FirstValues
from shardwise.engine.loss_scale import LossScale, NormLimit
from shardwise.engine.optim.norm import shards_of
from shardwise.engine.optim.optimizer import Optimizer
from shardwise.model.blueprint import Batch, Blueprint, LossSum, TrainingObjective, loss_of
from shardwise.model.lora import adapters_off
from shardwise.recipe.sections import Recipe
from shardwise.runtime.measures import Measures, collecting
from shardwise.runtime.parallel.expert_load import FILLED_ROWS
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.runtime.parallel.vocabulary import IGNORED
from shardwise.technique.site import Context, EngineOptions


class BatchSource(Protocol):
    """Where the steps of a run take their micro-batches from: data in an order, or samples that the model generates."""

    def micro_batches(self, step: int) -> Sequence[Batch]:
        """This rank's micro-batches of optimizer step ``step``, on its device; () after the last step."""


@dataclass(frozen=True)
class ListedBatches:
    """A source of steps whose micro-batches are there already."""

    steps: Sequence[Sequence[Batch]]

    def micro_batches(self, step: int) -> Sequence[Batch]:
        return self.steps[step] if step < len(self.steps) else ()


SeesLoss = Callable[[Tensor], None]
"""Called with the loss sum of every micro-batch between its two passes."""


@dataclass(frozen=True)
class LiveModel:
    """One rank's part of a model, with its optimizer. State that survives a restart is in TrainState.

    Attributes:
        frozen: the models that the objective reads and that are not trained, by role.
        objective: what the run makes small.
        first_values: of the trained parameters; None where nothing needs them.
    """

    context: Context
    options: EngineOptions
    device: torch.device
    model: nn.Module
    optimizer: Optimizer
    loss_scale: LossScale
    norm_limit: NormLimit
    frozen: Mapping[str, nn.Module]
    objective: TrainingObjective
    first_values: FirstValues | None

    @property
    def recipe(self) -> Recipe:
        return self.context.recipe

    @property
    def blueprint(self) -> Blueprint:
        return self.context.blueprint

    @property
    def strategy(self) -> Strategy:
        return self.context.strategy

    @property
    def layout(self) -> Layout:
        return self.context.layout

    @property
    def data_rank(self) -> int:
        """The share of the batch that this rank reads."""
        return self.layout.number(dist.get_rank(), lambda axis: axis.samples)

    @property
    def data_degree(self) -> int:
        """The number of shares of the batch."""
        return self.layout.data_degree

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks that read the same share of the batch."""
        return self.layout.number(dist.get_rank(), lambda axis: not axis.samples) == 0

    def local_batch(self, batch: Batch) -> Batch:
        """The part of a micro-batch of this rank's share that its model runs on."""
        whole = batch = self.objective.rows(batch)
        for transform in self.options.batch_transforms:
            batch = transform(batch)
        if self.options.expert_load is None or self.blueprint.objective is None:
            return batch
        # A rank's part of a row may have no target where the row has one.
        return {**batch, FILLED_ROWS: (whole["labels"] != IGNORED).any(-1)}

    def local_batches(self, passes: ForwardBackward, batches: Iterable[Batch]) -> Iterable[Batch]:
        """``local_batch`` of all micro-batches, with what the objective needs of the whole step."""
        local = map(self.local_batch, batches)
        return self.objective.before_step(passes, list(local)) if self.objective.whole_step else local

    def loss(self, batch: Batch) -> LossSum:
        """The summed loss of a micro-batch of ``local_batch``, and its valid targets."""
        self.begin_pass(batch)
        return loss_of(self.objective, self.blueprint, self.model, self.frozen, batch)

    def begin_pass(self, batch: Batch) -> None:
        """Before each forward pass of a micro-batch of ``local_batch``."""
        if self.options.expert_load is not None:
            self.options.expert_load.begin(batch)

    def count(self, batch: Batch) -> Tensor:
        """The valid targets of a micro-batch of ``local_batch``."""
        return self.objective.count(self.blueprint, batch)

    def ranks_of(self, parameter: Tensor) -> int:
        """The number of ranks that hold the same shard of a parameter, this one included.

        The mesh of a DTensor may be another for each parameter. Ranks outside of it hold copies.
        """
        stages = 1 if self.options.place is None else self.options.place.ranks
        return self.layout.world_size // (stages * shards_of(parameter))

    @property
    def verdict_group(self) -> dist.ProcessGroup | None:
        """The ranks that judge a step's gradients together; None for all."""
        return None if self.options.place is None else self.options.place.verdict_group

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank counts as its own: a tied one belongs to one of the stages that share it."""
        place = self.options.place
        return [p for name, p in named_parameters(self.model) if place is None or place.owns(name)]

    @property
    def synchronous(self) -> bool:
        """Whether all ranks are within the same step; else they meet only where the run pauses."""
        return self.options.place is None or self.options.place.synchronous

    @property
    def random_rank(self) -> int:
        """Equal on ranks that must draw the same random numbers: those that compute parts of the same activations."""
        if self.options.random_per_rank:
            return dist.get_rank()
        return self.layout.number(dist.get_rank(), lambda axis: not axis.redundant)

    def count_targets(self, batches: Sequence[Batch]) -> Tensor:
        """The valid targets of the global batch."""
        # Summed on the device: adding numbers of Python would wait for it at every micro-batch.
        tokens = torch.stack([self.count(batch) for batch in batches]).sum()
        dist.all_reduce(tokens, group=self.context.token_group)
        return tokens


class OptimizerStep(ABC):
    """When gradients become updates: after the backward pass, or within it.

    Attributes:
        skip: 1 leaves the next update out whatever its gradients are, 0 or None does not.
        correction: factor of the gradients, known before the last backward pass; None for 1.
        void: 1 if a step exceeded ``EngineOptions.capacity``: this one, or one that is not run again yet. No update is
            made until the host has run that step again. None where there is no capacity.
        capacity_used: the largest share of it that a rank used in the last step; above 1 the step is void.
    """

    skip: Tensor | None = None
    correction: Tensor | None = None
    void: Tensor | None = None
    capacity_used: Tensor | None = None

    def __init__(self, live: LiveModel) -> None:
        self._live = live

    def see_capacity(self, faulty: Tensor) -> None:
        """Set ``capacity_used`` and ``void`` from the use by all ranks since the last ``forget_capacity``.

        Args:
            faulty: 1 or true if the loss is not finite, on all ranks: routers of NaN send all tokens to the same
                experts, and more room for them would help no step.
        """
        used = self.capacity_since()
        if used is None:
            return
        used = used.where(faulty == 0, used.clamp(max=1))
        exceeded = (used > 1).to(torch.float32)
        self.capacity_used = used
        # Steps that the host has issued since a void one are void too, until it has read that and set None.
        self.void = exceeded if self.void is None else self.void.maximum(exceeded)

    def capacity_since(self) -> Tensor | None:
        """The largest share of the capacity that a rank used since it was last forgotten; now it is. Collective."""
        if (capacity := self._live.options.capacity) is None:
            return None
        # A rank whose passes met no experts takes part in the all-reduce all the same.
        nothing = torch.zeros((), dtype=torch.float32, device=self._live.device)
        used = nothing if capacity.used is None else capacity.used.clone()
        dist.all_reduce(used, dist.ReduceOp.MAX)
        self.forget_capacity()
        return used

    def forget_capacity(self) -> None:
        """Count the use of the capacity from now on."""
        if (capacity := self._live.options.capacity) is not None and capacity.used is not None:
            capacity.used.zero_()

    def or_left_out(self, verdict: Tensor) -> Tensor:
        """1 if the verdict is 1, or if the update is left out for another reason."""
        for other in (self.skip, self.void):
            verdict = verdict if other is None else verdict.maximum(other)
        return verdict

    @abstractmethod
    def before_backward(self, total: Tensor, last: bool) -> None:
        """Called before every backward pass with this rank's loss sum of the micro-batches so far."""

    @abstractmethod
    def after_backward(self) -> None:
        """Called after the last backward pass of a step, when gradients are summed over the ranks."""

    @abstractmethod
    def suspended(self) -> AbstractContextManager[None]:
        """Within it backward passes accumulate gradients and update nothing."""

    @abstractmethod
    def finish(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """End the step; (gradient norm, 1 if the update was skipped, else 0), equal on all ranks."""


class ForwardBackward(ABC):
    """How the micro-batches of a step run through the model. All ranks call its methods together.

    Attributes:
        measures: of the last ``forward_backward`` or ``evaluate``: sum and count of every measure of the objective over
            the global batch, fp64 [measures, 2]; None without measures.
    """

    measures: Tensor | None = None

    def __init__(self, live: LiveModel, update: OptimizerStep) -> None:
        self._live = live
        self._update = update

    @property
    def blueprint(self) -> Blueprint:
        return self._live.blueprint

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        return self._live.frozen

    @abstractmethod
    def forward_only(
        self, batches: Sequence[Batch], function: Callable[[nn.Module, Batch], Tensor]
    ) -> list[Tensor | None]:
        """As ``ForwardOnly`` says."""

    @contextmanager
    def as_before_training(self) -> Iterator[None]:
        """As ``ForwardOnly`` says."""
        first = self._live.first_values
        # Without its adapters a model is as before training: their frozen base has not changed.
        with adapters_off(self._live.model) if first is None else first.exchanged():
            yield

    def global_sum(self, values: Tensor) -> Tensor:
        """As ``ForwardOnly`` says."""
        total = values.clone()
        dist.all_reduce(total, group=self._live.context.token_group)
        return total

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Collect what the loss notes within the block into ``measures``."""
        names = self._live.objective.measures
        if not names:
            yield
            return
        collected = Measures(names, self._live.device)
        with collecting(collected):
            yield
        self.measures = self.global_sum(collected.sums)

    @property
    def weight_copies(self) -> list[Tensor]:
        """Further copies of weights that are held between steps."""
        return []

    def begin(self, source: BatchSource, step: int) -> None:  # noqa: B027 (most schedules read no step ahead)
        """Steps from ``step`` on, one after the other, have the micro-batches of ``source``.

        Only a schedule that reads ahead asks it; without this call, each step is a run of its own.
        """

    @abstractmethod
    def forward_backward(
        self, batches: Sequence[Batch], sees_loss: SeesLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        """Accumulate the scaled gradient of the mean loss; (valid targets, mean loss) of the global batch.

        Args:
            batches: this rank's micro-batches of the step.
        """

    @abstractmethod
    def representative_count(self, count: int, limit: int | None = None) -> int:
        """Smallest number of micro-batches whose peak memory equals that of ``count``, or ``limit`` if that is given.

        The second one stands in for those that are not run.
        """

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """[summed loss, valid targets] of all ranks' batches, fp64, without gradients."""


@dataclass(frozen=True)
class Run(LiveModel):
    """A live model with the policies that train it."""

    passes: ForwardBackward
    update: OptimizerStep

    def enlarged(self, used: Tensor | None, factor: float | None) -> str:
        """Enlarge the capacity if a step exceeded it and must be run again; the change in words, "" if it did not.

        Waits for the device.

        Args:
            used, factor: of the step's result.
        """
        capacity = self.options.capacity
        if capacity is None or used is None or factor is None or float(used) <= 1:
            return ""
        self.update.void = None  # the host knows now, and runs the step again
        return capacity.enlarge(float(used), factor)

    def exceeded(self) -> bool:
        """Whether passes without an update exceeded the capacity, which is then enlarged. Waits for the device.

        Steps that the host does not know to be void yet stay void.
        """
        capacity = self.options.capacity
        used = self.update.capacity_since()
        if capacity is None or used is None or float(used) <= 1:
            return False
        capacity.enlarge(float(used), capacity.factor)
        return True

    @contextmanager
    def apart_from_step(self) -> Iterator[None]:
        """Within it the use of the capacity is not that of the step that has begun."""
        if (capacity := self.options.capacity) is None:
            yield
            return
        before = capacity.used
        capacity.used = None
        try:
            yield
        finally:
            capacity.used = before

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within it the model continues texts token by token, whole ones on every rank."""
        with ExitStack() as stack:
            for context in self.options.sampling:
                stack.enter_context(context())
            yield
