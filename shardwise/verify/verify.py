"""Compare a strategy with one plain process: loss and gradient norm at every step, weights at the end.

The reference trains first and writes its losses and final weights to a folder. Then the strategy's ranks train on the
same data. Each rank compares its own shards with the reference's file, without an all-gather. Differences are relative.
A scalar is compared with the reference's value. A parameter is compared in L2 norm with the larger of two norms: the
reference's, and the norm of a parameter of its size at the model's root mean square (a bias that just left zero
consists only of updates). Parameters that the loss does not determine are listed and not compared
(reference.GradientScale).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from shardwise.core.strategy import Strategy
from shardwise.data import Data, open_data
from shardwise.engine.build import build
from shardwise.engine.optim.norm import holders
from shardwise.engine.run import Run
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import local_part, local_slices, named_parameters
from shardwise.technique import MICRO_BATCH_SIZE, precision_of
from shardwise.train.loop import seed_step
from shardwise.verify.reference import (
    GradientScale,
    ReferenceStep,
    parameters_of,
    reference_model,
    train_reference,
)

TOLERANCE: dict[str, float] = {
    "fp64": 1e-10,
    "fp32": 1e-5,
    "fp16": 1e-2,
    "bf16": 5e-2,
    "fp8": 1e-1,
    "adamw_8bit": 5e-2,
}
"""Largest relative difference that passes, by the strategy's precision or the optimizer's name."""

_WEIGHTS, _STEPS, _VERDICT = "reference.safetensors", "reference.json", "verify.json"


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison, as ``shardwise verify --json`` prints it."""

    max_loss_difference: float
    max_gradient_norm_difference: float
    max_parameter_difference: float
    worst_parameter: str
    tolerance: float
    steps: int
    undetermined: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        worst = max(
            self.max_loss_difference, self.max_gradient_norm_difference, self.max_parameter_difference
        )
        return worst <= self.tolerance

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "passed": self.passed}


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """The recipe shortened to ``steps`` steps, from new weights. Warmup and decay keep their share of the run.

    Rounding never makes warmup and decay together longer than the run if they were not before.
    """
    schedule = recipe.schedule
    parts = {"warmup": -(-schedule.warmup_steps(recipe.steps) * steps // recipe.steps)}
    if schedule.name == "wsd":
        parts["decay"] = schedule.decay_steps(recipe.steps) * steps // recipe.steps
    changed = {
        "steps": steps,
        "schedule": schedule.model_copy(update=parts),
        "checkpoint": recipe.checkpoint.model_copy(update={"start_from": None}),
    }
    return recipe.model_copy(update=changed)


def run_reference(recipe: Recipe, strategy: Strategy, folder: Path) -> None:
    """Train the reference for ``recipe.steps`` and write its results to ``folder``."""
    blueprint = blueprint_of(recipe)
    data = open_data(recipe, blueprint.dataset)
    dtype = torch.float64 if precision_of(strategy) == "fp64" else torch.float32
    model = reference_model(blueprint, recipe.seed, dtype)

    def batches() -> Iterator[list[Batch]]:
        for index in range(recipe.steps):
            seed_step(recipe.seed, index, 0)
            yield data.micro_batches(index, 0, 1, strategy[MICRO_BATCH_SIZE])

    scale = GradientScale()
    seen = list(train_reference(recipe, blueprint, model, batches(), scale))
    save_file(parameters_of(model), folder / _WEIGHTS)
    left = {"steps": [vars(s) for s in seen], "undetermined": scale.undetermined(dtype)}
    (folder / _STEPS).write_text(json.dumps(left), encoding="utf-8")


def run_strategy(recipe: Recipe, strategy: Strategy, folder: Path, device: torch.device) -> Verdict:
    """Train with the strategy on all ranks and compare; rank 0 writes the result. Call ``run_reference`` first."""
    blueprint = blueprint_of(recipe)
    data = open_data(recipe, blueprint.dataset)
    run = build(recipe, blueprint, strategy, device)
    left = json.loads((folder / _STEPS).read_text(encoding="utf-8"))
    expected = [ReferenceStep(**s) for s in left["steps"]]
    loss = norm = 0.0
    batches = (_batches(run, data, index) for index in range(len(expected)))
    for index, reference in enumerate(expected):
        seed_step(recipe.seed, index, run.random_rank)
        result = step(run, batches, learning_rate(recipe, index))
        loss = max(loss, _relative(float(result.loss), reference.loss))
        norm = max(norm, _relative(float(result.grad_norm), reference.grad_norm))
    ignored = tuple(left["undetermined"])
    worst, name = parameter_difference(run, folder / _WEIGHTS, ignored)
    verdict = Verdict(loss, norm, worst, name, _tolerance(recipe, strategy), len(expected), ignored)
    if dist.get_rank() == 0:
        (folder / _VERDICT).write_text(json.dumps(vars(verdict)), encoding="utf-8")
    return verdict


def _batches(run: Run, data: Data, index: int) -> list[Batch]:
    """This rank's micro-batches of one step, on its device."""
    size = run.strategy[MICRO_BATCH_SIZE]
    batches = data.micro_batches(index, run.data_rank, run.data_degree, size)
    return [{name: tensor.to(run.device) for name, tensor in batch.items()} for batch in batches]


def _tolerance(recipe: Recipe, strategy: Strategy) -> float:
    return max(TOLERANCE[precision_of(strategy)], TOLERANCE.get(recipe.optimizer.name, 0.0))


def read_verdict(folder: Path) -> Verdict:
    """The result that ``run_strategy`` wrote to ``folder``."""
    values = json.loads((folder / _VERDICT).read_text(encoding="utf-8"))
    return Verdict(**{**values, "undetermined": tuple(values["undetermined"])})


def _relative(value: float, reference: float) -> float:
    """Relative difference. NaN counts as infinite, so it never passes."""
    difference = abs(value - reference) / max(abs(reference), 1e-12)
    return difference if difference == difference else float("inf")


def parameter_difference(run: Run, weights: Path, ignored: tuple[str, ...] = ()) -> tuple[float, str]:
    """The largest relative L2 difference of a parameter from the file, and its name; equal on all ranks."""
    counted = set(run.own_parameters())
    with safe_open(weights, framework="pt") as file:
        names: list[str] = sorted(file.keys())
        slices = {name: file.get_slice(name) for name in names}
        sizes = [math.prod(held.get_shape()) for held in slices.values()]
        # Quantized weights are bytes; their magnitude is unrelated to the model's.
        counts = [size * (slices[name].get_dtype() != "U8") for name, size in zip(names, sizes, strict=True)]
        # A rank may hold some of the parameters; each row is summed over the ranks that hold it.
        sums = torch.zeros((len(names), 2), dtype=torch.float64, device=run.device)
        for name, parameter in named_parameters(run.model):
            if parameter not in counted:
                continue
            mine = local_part(parameter).double()
            place = local_slices(parameter)
            reference = torch.as_tensor(file.get_slice(name)[place] if place else file.get_tensor(name))
            theirs = reference.to(mine.device).double()
            row = torch.stack([(mine - theirs).square().sum(), theirs.square().sum()])
            sums[names.index(name)] = row / holders(parameter, run.stage_ranks)
    dist.all_reduce(sums)
    real = torch.tensor([count > 0 for count in counts], device=run.device)
    mean_square = float(sums[real, 1].sum()) / sum(counts)
    worst, worst_name = 0.0, ""
    for name, size, (difference, norm) in zip(names, sizes, sums.tolist(), strict=True):
        if name in ignored:
            continue
        relative = (difference / max(norm, mean_square * size)) ** 0.5
        if not relative <= worst:
            worst, worst_name = (relative if relative == relative else float("inf")), name
    return worst, worst_name
