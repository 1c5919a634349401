"""One's own training loop on a plan: build it, iterate over its batches, and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.checkpoint.checkpoint import restore_or_start
from shardwise.checkpoint.run_folder import CHECKPOINTS, with_date
from shardwise.checkpoint.saver import Saver
from shardwise.core.errors import RecipeError
from shardwise.core.paths import path_of
from shardwise.core.plan import Plan
from shardwise.data import open_data
from shardwise.data.epochs import with_steps
from shardwise.engine.build import build
from shardwise.engine.schedule import learning_rate
from shardwise.engine.seeding import seed_step
from shardwise.engine.step import StepResult, end_step
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan, refuse_unfit
from shardwise.jobs.request import measured_cluster, refuse_plan_only
from shardwise.launch.placement import launched_by, require_processes
from shardwise.launch.process import join
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import gather, named_parameters
from shardwise.trainer.batches import batches_of, require_vocabulary
from shardwise.trainer.evaluation import evaluate
from shardwise.trainer.issued_step import noted_capacity, restore_capacity
from shardwise.trainer.precomputed import with_precomputed
from shardwise.trainer.predictions import Predictions
from shardwise.trainer.run_log import say, warn


class Session:
    """A live run on this rank, for a loop of one's own. All ranks call its methods together.

    Attributes:
        recipe, plan: of the run; the plan's forecast holds for this loop.
        rank, world_size: of this process.
        step_number: optimizer steps done.
        metrics: of the last ``evaluate``.
    """

    def __init__(self, recipe: Recipe, plan: Plan, device: torch.device) -> None:
        self.recipe, self.plan, self.device = recipe, plan, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        blueprint = blueprint_of(recipe)
        self._data = open_data(recipe, blueprint.dataset)
        require_vocabulary(blueprint, self._data)
        self._run = build(recipe, blueprint, plan.strategy, device)
        if self._run.options.place is not None:
            raise RecipeError(
                "a session cannot train a model in stages",
                where=f"strategy: {plan.line}",
                why="the stages pass the micro-batches of several steps at once",
                fix="use shardwise.train with callbacks",
            )
        with_precomputed(self._run, self._data, say)
        self._batches = batches_of(self._data, self._run)
        self._predictions = Predictions(self._run) if recipe.evaluation.metrics is not None else None
        self.metrics: dict[str, float] = {}
        self._state = TrainState()
        self._batch: list[Batch] = []
        self._loss: Tensor | None = None
        self._tokens = torch.zeros(())

    @property
    def module(self) -> nn.Module:
        """This rank's model; its parameters are sharded as the plan says."""
        return self._run.model

    @property
    def step_number(self) -> int:
        return self._state.step

    def batches(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each remaining step, until the recipe's number of steps is done."""
        while self._state.step < self.recipe.steps:
            yield self._batches.at(self._state.position(self._state.step))

    def forward_backward(self, batch: list[Batch]) -> Tensor:
        """Forward and backward pass over one step's micro-batches.

        It seeds the generators of torch, Python and NumPy from the recipe's seed, the step and the rank.

        Returns:
            The mean loss over the valid targets of the global batch, a scalar on the device, equal on all ranks.
        """
        self._batch = batch
        seed_step(self.recipe.seed, self._state.step, self._run.random_rank)
        self._run.optimizer.learning_rate = learning_rate(self.recipe, self._state.step)
        self._tokens, self._loss = self._run.passes.forward_backward(batch)
        return self._loss

    def step(self) -> StepResult:
        """Clip, update the parameters and clear the gradients; the scalars of the step, equal on all ranks.

        A step that exceeded ``expert_capacity`` runs its passes again, with more room.

        Raises RuntimeError without a ``forward_backward`` before it.
        """
        if self._loss is None:
            raise RuntimeError("step() without forward_backward() before it")
        result = end_step(self._run, self._tokens, self._loss)
        while done := self._run.enlarged(result.capacity_used, result.capacity):
            say(done)
            self._state = noted_capacity(self._run, self._state)
            loss = self.forward_backward(self._batch)
            result = end_step(self._run, self._tokens, loss)
        step = self._state.step + 1
        tokens = self._state.tokens + int(result.tokens)
        self._state = replace(self._state, step=step, tokens=tokens)
        self._loss = None
        return result

    def evaluate(self, name: str = "") -> float:
        """The validation loss in nats per target, or of a module's own loss; NaN without samples.

        Sets ``metrics`` to those of ``evaluation.metrics``.

        Args:
            name: a set of ``evaluation.sets``; "" is the run's own held-out data.
        """
        predictions = self._predictions if not name else None
        with self._run.apart_from_step():
            loss = evaluate(self._run, self._batches.validation(name), predictions)
        self.metrics = {} if predictions is None else predictions.values()
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter in full, as a copy on each rank, by name."""
        return {name: gather(parameter.detach()).clone() for name, parameter in named_parameters(self.module)}

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint below ``folder``, as ``train`` does."""
        saver = Saver(self._run, path_of(folder), self._data.fingerprint)
        saver.save(self._state)
        saver.wait()

    def resume(self, folder: str | Path) -> int:
        """Load the newest checkpoint below ``folder``, saved under any strategy; returns its step, 0 without one."""
        train_state = restore_or_start(
            self._run, path_of(folder) / CHECKPOINTS, self._data.fingerprint, say, warn
        )
        self._state = train_state or TrainState()
        restore_capacity(self._run, self._state)
        return self._state.step


@contextmanager
def open_session(recipe: Recipe, plan: Plan | None = None) -> Iterator[Session]:
    """A session in this process: alone, as a rank of torchrun's or srun's, or in the process group that exists.

    Args:
        plan: None plans the recipe, on rank 0.

    Raises:
        RecipeError: the recipe, the plan, or the number of processes does not fit.
        ResourceError: the plan does not fit the memory.
    """
    refuse_plan_only(cluster_of(recipe.cluster))
    recipe = with_steps(with_date(recipe))
    if dist.is_initialized():
        if plan is None:
            why = "a dry run has a process group of its own"
            raise RecipeError(
                "a plan is needed", where="session", why=why, fix="make it before: shardwise.plan"
            )
        yield Session(recipe, _checked_plan(plan), _session_device(recipe))
        return
    placement = launched_by()
    require_processes(
        cluster_of(recipe.cluster).world_size if plan is None else plan.world_size,
        1 if placement is None else placement.world_size,
    )
    cluster = measured_cluster(recipe)
    if plan is None and (placement is None or placement.rank == 0):
        plan = make_plan(recipe, cluster)
    with join(cluster.device.traits.torch_type) as world:
        planned = [plan]
        dist.broadcast_object_list(planned)
        assert planned[0] is not None
        yield Session(recipe, _checked_plan(planned[0]), world.device)


def _session_device(recipe: Recipe) -> torch.device:
    kind = cluster_of(recipe.cluster).device.traits
    if kind.is_host:
        return torch.device(kind.torch_type)
    return torch.device(kind.torch_type, torch.get_device_module(kind.torch_type).current_device())


def _checked_plan(plan: Plan) -> Plan:
    """The plan, if it fits and is for as many processes as there are."""
    refuse_unfit(plan)
    require_processes(plan.world_size, dist.get_world_size())
    return plan
