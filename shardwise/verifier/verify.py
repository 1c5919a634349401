"""Compare a strategy with one plain process: loss and gradient norm at every step, weights at the end.

In fp32 and fp64 the plain process is the independent reference (reference.py), and a fixed tolerance decides. It trains
first and writes its losses and final weights to a folder. Then the strategy's ranks train on the same data. Differences
are relative. Parameters that the loss does not determine are listed and not compared (reference.GradientScale).

In fewer bits the plain process computes in these bits too, also without the engine (mixed_precision.py), and its own
rounding noise decides (plain_runs.py). Noise may hide an error of the layout. So the same layout also trains in fp64
and is compared with the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shardwise.core.atomic_file import write_whole
from shardwise.core.json_file import read_json, text_of
from shardwise.core.strategy import Strategy
from shardwise.data import Data, open_data
from shardwise.engine.build import build
from shardwise.engine.optim.trial import rounds
from shardwise.engine.run import Run
from shardwise.engine.sampling import PositionedBatches, SamplingObjective
from shardwise.engine.schedule import learning_rate
from shardwise.engine.seeding import seed_step
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.section import Arguments
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique import in_fp64, precision_of
from shardwise.trainer.batches import StepBatches, batches_of
from shardwise.trainer.precomputed import with_precomputed
from shardwise.verifier.comparison import gradient_products, parameter_differences, way_products
from shardwise.verifier.dropout import (
    draws_random_numbers,
    drop_nothing,
    kept_buffers,
    reads_changed_buffers,
    without_dropout,
)
from shardwise.verifier.plain_runs import END_FILE, GRADIENTS_FILE, START_FILE, read_runs, run_plain
from shardwise.verifier.reference import (
    GradientScale,
    PlainRank,
    ReferenceLoss,
    ReferenceStep,
    detached_parameters,
    reference_model,
    rounds_to_fp32,
    train_reference,
)
from shardwise.verifier.verdict import TrainedStep, Verdict, judge_run, misalignments, relative

TOLERANCES: dict[str, float] = {"fp64": 1e-10, "fp32": 1e-5}
"""Largest relative difference from the reference that passes, by the strategy's precision."""

_EXACT = {"adamw_8bit": "adamw"}
"""Optimizers that round their state, and those of the same rule that do not."""

_ROUNDING_NOTE = "the model's code rounds to fp32, so fp32's tolerance applies"
_DRAWS = "the model's code draws random numbers, which differ between layouts, and so may the results"
_READS_BUFFERS = (
    "forward passes read buffers that they change: those of a rank follow from its samples, as in"
    " DistributedDataParallel, and so results differ between layouts"
)
_NO_GRADIENTS = "not proved: gradients, which are zero in all steps"
_WEIGHTS_FILE, _STEPS_FILE, _VERDICT_FILE = "reference.safetensors", "reference.json", "verify.json"


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """The recipe shortened to ``steps`` steps, from new weights. Warmup and decay keep their share of the run.

    Rounding never makes warmup and decay together longer than the run if they were not before.
    """
    schedule = recipe.schedule
    warmup = -(-schedule.warmup_steps(recipe.steps) * steps // recipe.steps)
    parts = {"warmup": min(warmup, max(1, steps - 1))}
    if schedule.name == "wsd":
        parts["decay"] = schedule.decay_steps(recipe.steps) * steps // recipe.steps
    changed = {
        "steps": steps,
        "schedule": schedule.model_copy(update=parts),
        "checkpoint": recipe.checkpoint.model_copy(update={"start_from": None}),
    }
    return recipe.model_copy(update=changed)


def rounds_more(recipe: Recipe, strategy: Strategy) -> bool:
    """Whether a run keeps fewer digits than fp32, so that only its own noise can judge it."""
    return (
        precision_of(strategy) not in TOLERANCES
        or recipe.optimizer.name in _EXACT
        or _optimizer_rounds(recipe)
    )


def _optimizer_rounds(recipe: Recipe) -> bool:
    """Whether an optimizer of a library computes in 16 bits, such as Muon."""
    if recipe.optimizer.factory is None:
        return False
    with torch.device("meta"):
        model = blueprint_of(recipe).build()
    return rounds({name: p for name, p in named_parameters(model) if p.requires_grad}, recipe.optimizer)


def exactly(recipe: Recipe, strategy: Strategy) -> tuple[Recipe, Strategy, tuple[str, ...]]:
    """The same layout in fp64, and the settings that it replaces, in words.

    An optimizer of a library that rounds has no exact form: AdamW is in its place.
    """
    wide = in_fp64(strategy)
    name = recipe.optimizer.name
    factory = recipe.optimizer.factory
    replaced: dict[str, Any] = {"name": _EXACT.get(name, name)}
    if _optimizer_rounds(recipe):
        replaced = {"name": "adamw", "factory": None, "arguments": Arguments()}
    words = [f"{key}: {there} for {here}" for key, (here, there) in strategy.differences(wide).items()]
    if replaced["name"] != name or "factory" in replaced:
        words.append(f"optimizer: {replaced['name']} for {factory or name}")
    optimizer = recipe.optimizer.model_copy(update=replaced)
    return recipe.model_copy(update={"optimizer": optimizer}), wide, tuple(words)


def run_reference(recipe: Recipe, strategy: Strategy, folder: Path) -> None:
    """Train the reference for ``recipe.steps`` and write its results to ``folder``.

    In fp64 where the strategy computes in fp64, else in fp32.
    """
    recipe = without_dropout(recipe)
    blueprint = blueprint_of(recipe)
    data = open_data(recipe, blueprint.dataset)
    dtype = torch.float64 if precision_of(strategy) == "fp64" else torch.float32
    model, loss = (
        reference_model(blueprint, recipe.seed, dtype),
        ReferenceLoss(blueprint, recipe.seed, dtype),
    )

    source = batches_of(data, PlainRank(loss.passes(model), strategy, torch.device("cpu")), folder)

    signals = list[bool]()
    objective = blueprint.minimises

    def batches() -> Iterator[list[Batch]]:
        for index in range(recipe.steps):
            seed_step(recipe.seed, index, 0)
            made = source.at(index)
            if isinstance(objective, SamplingObjective):
                signals.append(any(map(objective.has_signal, made)))
            yield made

    (first,) = loss.prepared(model, source.at(0)[:1])
    with kept_buffers(model):
        narrow = dtype == torch.float64 and rounds_to_fp32(loss, model, first)
    random, reads = (tells(loss, model, first) for tells in (draws_random_numbers, reads_changed_buffers))
    scale = GradientScale()
    seen = list(train_reference(recipe, blueprint, model, loss, batches(), scale))
    digits = torch.float32 if narrow else dtype
    save_file(scale.compared(detached_parameters(model), digits), folder / _WEIGHTS_FILE)
    undetermined = scale.undetermined(digits)
    still = all(result.grad_norm == 0 for result in seen)
    notes = [_ROUNDING_NOTE] * narrow + [_DRAWS] * random + [_READS_BUFFERS] * reads + [_NO_GRADIENTS] * still
    steps = [vars(s) for s in seen]
    untrained = [*signals, True].index(True)  # steps before the first with a signal
    if untrained < len(steps) and not (recipe.objective and recipe.objective.reads_reference):
        untrained = 0  # without a reference such steps leave the weights as they are
    left = {
        "steps": steps,
        "untrained": untrained,
        "undetermined": undetermined,
        "rounds_to_fp32": narrow,
        "depends_on_layout": random or reads,
        "notes": notes,
    }
    (folder / _STEPS_FILE).write_text(json.dumps(left), encoding="utf-8")


def trained(run: Run, batches: PositionedBatches, steps: int) -> tuple[TrainedStep, ...]:
    """Train a run for some steps on its share of the data."""
    source = StepBatches(batches, lambda index: index, steps)
    run.passes.begin(source, 0)
    seen = []
    for index in range(steps):
        result = None
        while result is None or run.enlarged(result.capacity_used, result.capacity):
            seed_step(run.recipe.seed, index, run.random_rank)
            result = step(run, source.micro_batches(index), learning_rate(run.recipe, index))
        seen.append(TrainedStep(float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return tuple(seen)


def run_strategy(
    recipe: Recipe, strategy: Strategy, folder: Path, device: torch.device, tolerance: float | None = None
) -> Verdict:
    """Train with the strategy on all ranks and compare with what ``run_reference`` left in ``folder``.

    Args:
        tolerance: largest difference that passes; None takes that of the precision.
    """
    run, data, words = _built(recipe, strategy, device)
    batches = batches_of(data, run, folder)
    left = json.loads((folder / _STEPS_FILE).read_text(encoding="utf-8"))
    expected = [ReferenceStep(**s) for s in left["steps"]]
    seen = trained(run, batches, len(expected))
    pairs = list(zip(seen, expected, strict=True))
    ignored = tuple(left["undetermined"])
    apart = {n: d for n, d in parameter_differences(run, folder / _WEIGHTS_FILE).items() if n not in ignored}
    worst = max(apart, key=lambda name: apart[name], default="")
    precision = precision_of(strategy)
    inside = bool(left["rounds_to_fp32"])
    cancels = run.objective.cancels  # then the gradient has the size of the terms, and the loss has not
    return Verdict(
        max(relative(ours.loss, theirs.loss, theirs.grad_norm * cancels) for ours, theirs in pairs),
        max(relative(ours.grad_norm, theirs.grad_norm) for ours, theirs in pairs),
        apart.get(worst, 0.0),
        worst,
        tolerance or TOLERANCES["fp32" if inside else precision],
        len(expected),
        ignored,
        precision,
        notes=(*words, *left["notes"]),
        untrained=left["untrained"],
        depends_on_layout=left["depends_on_layout"],
    )


def run_near_plain(recipe: Recipe, strategy: Strategy, folder: Path, device: torch.device) -> Verdict:
    """Train with the strategy on all ranks and compare with what ``run_plain`` left in ``folder``."""
    run, data, words = _built(recipe, strategy, device)
    batches = batches_of(data, run, folder)
    runs = read_runs(folder)
    gradients = _first_gradients(run, batches, runs.loss_scale, folder) if run.synchronous else {}
    seen = trained(run, batches, recipe.steps)
    skips = [step.skipped for step in seen]
    own = sum(step.skipped for step in runs.steps)
    if skips != [step.skipped for step in runs.steps]:
        # From another number of updates on nothing is alike, so the plain process follows the strategy's.
        if dist.get_rank() == 0:
            run_plain(recipe, strategy, folder, device, skips)
        dist.barrier()
        runs = read_runs(folder)
    parameters = misalignments(way_products(run, folder / START_FILE, folder / END_FILE))
    verdict = judge_run(seen, gradients, parameters, runs, precision_of(strategy), TOLERANCES["fp32"])
    return replace(verdict, notes=words, skipped=(verdict.skipped[0], own))


def _first_gradients(
    run: Run, batches: PositionedBatches, loss_scale: float, folder: Path
) -> dict[str, float]:
    """Misalignments of the gradients of the first step, without an update."""
    seed_step(run.recipe.seed, 0, run.random_rank)
    scale = run.loss_scale.value
    before = run.loss_scale.value.clone()
    scale.fill_(loss_scale)
    with run.update.suspended():
        run.passes.forward_backward(batches.at(0))
    gradients = misalignments(gradient_products(run, folder / GRADIENTS_FILE))
    run.optimizer.zero_grad(set_to_none=True)
    scale.copy_(before)
    return gradients


def _built(recipe: Recipe, strategy: Strategy, device: torch.device) -> tuple[Run, Data, tuple[str, ...]]:
    """A run that drops nothing, its data, and what a comparison with one process leaves open, in words."""
    quiet = without_dropout(recipe)
    blueprint = blueprint_of(quiet)
    run = build(quiet, blueprint, strategy, device)
    words = []
    if drop_nothing(run.model) or quiet != recipe:
        words.append("dropout is off in all runs")
    if not run.synchronous:
        words.append(
            "stages update at different times, with gradients of older weights; one process does not"
        )
    if recipe.optimizer.factory is not None:
        words.append(
            f"not proved: the update itself, which is that of {recipe.optimizer.factory} in all runs"
        )
    if isinstance(run.objective, SamplingObjective):
        words.append("not proved: sampling; all runs train on the completions of the plain process")
    if blueprint.quantized or (recipe.adapter is not None and recipe.adapter.quantize != "none"):
        words.append("not proved: the values of the quantized weights, which all runs read alike")
    data = open_data(quiet, blueprint.dataset)
    with_precomputed(run, data, say=lambda sentence: None)
    return run, data, tuple(words)


def run_verification(recipe: Recipe, strategy: Strategy, folder: Path, device: torch.device) -> Verdict:
    """All comparisons of a strategy, on all its ranks; rank 0 writes the verdict."""
    if not rounds_more(recipe, strategy):
        verdict = run_strategy(recipe, strategy, folder, device)
    else:
        near = run_near_plain(recipe, strategy, folder, device)
        exact, wide, words = exactly(recipe, strategy)
        proof = run_strategy(exact, wide, folder, device)
        further = [note for note in proof.notes if note not in near.notes]
        verdict = replace(near, proof=replace(proof, notes=(*words, *further)))
    if dist.get_rank() == 0:
        write_whole(folder / _VERDICT_FILE, text_of(verdict).encode())
    return verdict


def read_verdict(folder: Path) -> Verdict:
    """The verdict that ``run_verification`` wrote to ``folder``. Raises DataError."""
    return read_json(folder / _VERDICT_FILE, Verdict)
