"""Plain runs in a precision of fewer bits than fp32, and the rounding noise between them.

The engine trains them in one process, without any division: only it computes in 16 or 8 bits, scales losses and keeps
moments in 8 bits. So they show what rounding does, and the comparison in fp64 with the independent reference
(reference.py) shows that the engine is right.

A repeat starts from weights of which each is multiplied by 1 + u·r, with u half the spacing of numbers of the compute
dtype and r uniform in [-1, 1]. Every sum then rounds otherwise. Refused: only another order of the samples. It leaves
the forward pass unchanged, so it misses the noise of ranks that split a product; and another micro-batch size overflows
fp16 in other steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from shardwise.core.atomic_file import write_whole
from shardwise.core.json_file import read_json, text_of
from shardwise.core.strategy import Strategy
from shardwise.data import Data, open_data
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters
from shardwise.technique import MICRO_BATCH_SIZE, undivided
from shardwise.train.loop import seed_step
from shardwise.verify.comparison import parameter_differences
from shardwise.verify.verdict import PlainRuns, TrainedStep

WEIGHTS, _RUNS = "plain.safetensors", "plain.json"
_REPEATS, _REPEATS_OF_FEW_BITS = 2, 5
"""Repeats, and those of optimizers whose codes of few bits flip in some repeats only: their noise varies tenfold."""


def run_plain(recipe: Recipe, strategy: Strategy, folder: Path, device: torch.device) -> None:
    """Train in one process in the digits of ``strategy``, then the repeats; write the results to ``folder``.

    Needs a process group of one rank.
    """
    data = open_data(recipe, blueprint_of(recipe).dataset)
    repeats: list[tuple[TrainedStep, ...]] = []
    noise: dict[str, float] = {}
    few_bits = recipe.optimizer.name == "adamw_8bit" or recipe.optimizer.factory is not None
    for number in range(1 + (_REPEATS_OF_FEW_BITS if few_bits else _REPEATS)):
        run = build(recipe, blueprint_of(recipe), undivided(strategy), device)
        unit = torch.finfo(run.options.dtypes.compute).eps / 2
        if number:
            _move(run, unit, number)
        repeats.append(trained(run, data, recipe.steps))
        if not number:
            weights = {name: local_part(p).cpu().contiguous() for name, p in named_parameters(run.model)}
            save_file(weights, folder / WEIGHTS)
            continue
        for name, difference in parameter_differences(run, folder / WEIGHTS).items():
            noise[name] = max(noise.get(name, 0.0), difference)
    runs = PlainRuns(repeats[0], tuple(repeats[1:]), noise, unit)
    write_whole(folder / _RUNS, text_of(runs).encode())


def read_runs(folder: Path) -> PlainRuns:
    """The results that ``run_plain`` wrote. Raises DataError."""
    return read_json(folder / _RUNS, PlainRuns)


def trained(run: Run, data: Data, steps: int) -> tuple[TrainedStep, ...]:
    """Train a run for some steps on its share of the data."""
    batches = (_batches(run, data, index) for index in range(steps))
    seen = []
    for index in range(steps):
        seed_step(run.recipe.seed, index, run.random_rank)
        result = step(run, batches, learning_rate(run.recipe, index))
        seen.append(TrainedStep(float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return tuple(seen)


def _batches(run: Run, data: Data, index: int) -> list[Batch]:
    """This rank's micro-batches of one step, on its device."""
    size = run.strategy[MICRO_BATCH_SIZE]
    batches = data.micro_batches(index, run.data_rank, run.data_degree, size)
    return [{name: tensor.to(run.device) for name, tensor in batch.items()} for batch in batches]


def _move(run: Run, unit: float, seed: int) -> None:
    """Multiply every weight by 1 + unit·r, r uniform in [-1, 1]."""
    for name, weight in _weights(run):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        r = torch.rand(weight.shape, generator=generator) * 2 - 1
        weight.copy_(weight.double() * (1 + unit * r.to(weight.device).double()))


def _weights(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in named_parameters(run.model):
        if parameter.is_floating_point():
            yield name, local_part(parameter)
