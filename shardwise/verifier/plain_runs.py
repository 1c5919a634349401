"""Plain runs in a precision of fewer bits than fp32, and the rounding noise between them.

They train in one process, by a loop of their own (mixed_precision.py). The comparison in fp64 with the reference
(reference.py) shows that the layout is right; the comparison with these shows that its 16- or 8-bit arithmetic is.

A repeat multiplies each initial weight by 1 + u·r. u is half the spacing of numbers in the compute dtype, and r is
uniform in [-1, 1]. Every sum then rounds otherwise. Refused: only another order of the samples. It leaves
the forward pass unchanged, so it misses the noise of ranks that split a product; and another micro-batch size overflows
fp16 in other steps.

At the first weights all runs are alike but for rounding, so gradients there are the sharpest comparison. Most repeats
compute only those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.core.atomic_file import write_whole
from shardwise.core.json_file import read_json, text_of
from shardwise.core.strategy import Strategy
from shardwise.data import open_data
from shardwise.engine.seeding import seed_step
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import digits_of
from shardwise.trainer.batches import batches_of
from shardwise.verifier.comparison import inner_products
from shardwise.verifier.dropout import without_dropout
from shardwise.verifier.mixed_precision import COMPUTE_DTYPES, FirstGradients, MixedPrecision
from shardwise.verifier.verdict import FACTOR, PlainRuns, TrainedStep, misalignments

START_FILE, END_FILE, GRADIENTS_FILE = "start.safetensors", "end.safetensors", "gradients.safetensors"
"""Files of the plain run's trained parameters before and after its steps, and of the gradients of the first step."""
_RUNS = "plain.json"
_REPEATS, _REPEATS_OF_FEW_BITS, _GRADIENTS = 2, 5, 8
"""Repeats; those where codes of few bits flip in some repeats only; and those of the first gradients."""


def run_plain(
    recipe: Recipe,
    strategy: Strategy,
    folder: Path,
    device: torch.device,
    skips: Sequence[bool] | None = None,
) -> None:
    """Train in one process in the digits of ``strategy``, then the repeats; write the results to ``folder``.

    Args:
        skips: of every step whether its update is left out; None leaves out what overflows.
    """
    recipe = without_dropout(recipe)
    blueprint = blueprint_of(recipe)
    data = open_data(recipe, blueprint.dataset)

    def trained(number: int, steps: int, scale: float | None = None) -> _PlainRun:
        run = MixedPrecision(recipe, blueprint, strategy, device, number)
        seen = []
        source = batches_of(data, run.rank(strategy), folder)
        start = run.weights()
        for index in range(-1, steps):
            seed_step(recipe.seed, max(0, index), 0)
            batches = source.at(max(0, index))
            if index < 0:
                first = run.gradients(batches, scale or run.loss_scale)
            else:
                seen.append(run.step(index, batches, None if skips is None else skips[index]))
        return _PlainRun(first, tuple(seen), start, run.weights())

    plain = trained(0, recipe.steps)
    firsts, repeats = [], []
    gradients = dict[str, float]()
    # Adam moves all elements equally far at first. Where rounding decides the sign of a gradient, one of n moves the
    # other way, in few runs only. That is a misalignment of 2 / n, which the limit allows.
    parameters = {name: 2 / (FACTOR * tensor.numel()) for name, tensor in plain.end.items()}
    for number in range(1, 1 + _GRADIENTS):
        whole = number <= _repeats(recipe, strategy)
        repeat = trained(number, recipe.steps if whole else 0, plain.first.loss_scale)
        firsts.append(repeat.first.step)
        _raise_noise(gradients, repeat.first.gradients, plain.first.gradients)
        if whole:
            repeats.append(repeat.steps)
            _raise_noise(parameters, repeat.ways, plain.ways)
    save_file(dict(plain.start), folder / START_FILE)
    save_file(dict(plain.end), folder / END_FILE)
    save_file(dict(plain.first.gradients), folder / GRADIENTS_FILE)
    runs = PlainRuns(
        plain.first.step,
        plain.steps,
        tuple(firsts),
        tuple(repeats),
        gradients,
        parameters,
        torch.finfo(COMPUTE_DTYPES[digits_of(strategy).compute]).eps / 2,
        plain.first.targets,
        plain.first.loss_scale,
    )
    write_whole(folder / _RUNS, text_of(runs).encode())


def _repeats(recipe: Recipe, strategy: Strategy) -> int:
    """How many repeats train all steps."""
    optimizer_rounds = recipe.optimizer.name == "adamw_8bit" or recipe.optimizer.factory is not None
    in_fp8 = digits_of(strategy).fp8_scaling is not None
    return _REPEATS_OF_FEW_BITS if optimizer_rounds or in_fp8 else _REPEATS


@dataclass(frozen=True)
class _PlainRun:
    """Gradients of the first step, all steps, and the trained parameters before and after them."""

    first: FirstGradients
    steps: tuple[TrainedStep, ...]
    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]

    @property
    def ways(self) -> dict[str, Tensor]:
        return {name: end - self.start[name] for name, end in self.end.items()}


def _raise_noise(noise: dict[str, float], mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise the noise of every parameter to its misalignment in a repeat."""
    pairs = {name: inner_products(mine[name], tensor) for name, tensor in theirs.items() if name in mine}
    for name, difference in misalignments(pairs).items():
        noise[name] = max(noise.get(name, 0.0), difference)


def read_runs(folder: Path) -> PlainRuns:
    """The results that ``run_plain`` wrote. Raises DataError."""
    return read_json(folder / _RUNS, PlainRuns)
