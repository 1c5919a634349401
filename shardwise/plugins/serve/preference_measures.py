"""What a model prefers: the measures of an objective on pairs of a chosen and a rejected answer.

Pairs are read and scored by the code that training uses. So the held-out pairs of a run have the figures of its last
evaluation. What scores them:

    a run on pairs          its own objective
    a run with a reference  DPO with its beta, as for kto and rollouts
    another adapter         DPO against the model without the adapter
    a reward model          its scores
    any other model         log-probabilities: the reward of an answer y is log π(y)

With a reference the reward is β (log π(y) - log π_ref(y)). The reference is the model before training: the same model
without its adapter, or a second model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint.chosen import recipe_in
from shardwise.checkpoint.run_folder import RECIPE
from shardwise.core.cache_folder import default_root
from shardwise.core.errors import RecipeError
from shardwise.core.plugins import OBJECTIVES, require_plugin
from shardwise.data.batches import batch_of
from shardwise.data.opening import open_splits
from shardwise.data.preferences import Preferences
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.model.blueprint import Batch, Blueprint, TrainingObjective
from shardwise.plugins.serve.evaluating import (
    EvaluationOptions,
    chosen_adapter,
    evaluated_length,
    model_dtype,
    opened_model,
)
from shardwise.plugins.serve.multi_lora import BASE
from shardwise.plugins.serve.serving import serving_device
from shardwise.recipe.objective import ObjectiveSpec
from shardwise.recipe.sections import AdapterSpec, DataSpec, Recipe
from shardwise.runtime.measures import Measures, collecting
from shardwise.verifier.reference import reference_model

_WHERE = "--preferences"
_LOG_PROBABILITY = ObjectiveSpec(name="dpo", reference_free=True, beta=1.0)
"""Its reward of an answer is log π(y)."""


@dataclass(frozen=True)
class PreferenceMeasures:
    """The preferences of a model on some pairs.

    Attributes:
        measures: means over the pairs by name, such as ``accuracy``: the share of pairs whose chosen answer has the
            larger reward.
        objective: what scores the pairs, its name or "log-probability".
        reference: what rewards compare with; "" for nothing.
        pairs: how many were scored. cut: of those, pairs with an answer that is longer than ``sequence_length``.
        left_out: pairs whose answers are equal, or have nothing to score before the cut.
        sequence_length: most tokens of an answer with its prompt.
    """

    measures: Mapping[str, float]
    objective: str
    reference: str
    pairs: int
    cut: int
    left_out: int
    sequence_length: int


@dataclass(frozen=True)
class _Scoring:
    """A model with the objective that scores pairs.

    Attributes:
        reference: the values that the objective reads of the model before training; {} without one.
    """

    blueprint: Blueprint
    model: nn.Module
    tokenizer: Tokenizer
    length: int
    objective: TrainingObjective
    spec: ObjectiveSpec
    reference: Callable[[Batch], Batch] = lambda batch: {}
    reference_name: str = ""


@torch.no_grad()
def preference_measures(
    model: Path, source: str, options: EvaluationOptions, progress: Callable[[int, int], None]
) -> PreferenceMeasures:
    """The measures of a run's newest checkpoint, or of a Hugging Face folder, on a source of pairs.

    Args:
        source: as ``data.source`` of a recipe; all of it counts, and nothing is held out.
        progress: called with the pairs done and all.

    Raises:
        CheckpointError, DataError, RecipeError: the model, the data or an option cannot be used.
    """
    recipe = recipe_in(model) if (model / RECIPE).is_file() else None
    scoring = _scoring_of(model, recipe, options)
    data = _opened_pairs(recipe, source, scoring)
    device = next(scoring.model.parameters()).device
    collected = Measures(scoring.objective.measures, device)
    count = min(len(data), options.sequences or len(data))
    done = 0
    with collecting(collected):
        for rows, batch in _batches(data, count, options.batch):
            batch = scoring.objective.rows({name: tensor.to(device) for name, tensor in batch.items()})
            batch = {**batch, **scoring.reference(batch)}
            scoring.objective.loss(scoring.blueprint, scoring.model, batch)
            progress(done := done + rows, count)
    sums = zip(scoring.objective.measures, collected.sums.tolist(), strict=True)
    return PreferenceMeasures(
        {name: total / items for name, (total, items) in sums if items},
        "log-probability" if scoring.spec == _LOG_PROBABILITY else scoring.spec.name or "",
        scoring.reference_name,
        count,
        int(data.cut[:count].sum()),
        data.cache.header.documents // 2 - data.records,
        scoring.length,
    )


def _batches(data: Preferences, count: int, size: int) -> Iterator[tuple[int, Batch]]:
    """The number of pairs and the tensors of batches; those of similar lengths together, without common padding."""
    lengths = [int(data.inputs_in(pair).max()) for pair in range(count)]
    order = sorted(range(count), key=lambda pair: -lengths[pair])
    for first in range(0, count, size):
        rows: list[int | None] = [*order[first : first + size]]
        longest = lengths[order[first]]
        batch = batch_of(data, rows)
        yield len(rows), {n: t[..., :longest] if t.dim() == 3 else t for n, t in batch.items()}


def _opened_pairs(recipe: Recipe | None, source: str, scoring: _Scoring) -> Preferences:
    """The pairs of a source; a run's own settings say how they are read."""
    read = {"source": source, "sequence_length": scoring.length, "held_out": 0.0, "packing": False}
    read |= {"mixture": None, "stream_window": None, "format": "preference", "too_long": "cut"}
    spec = (recipe.data if recipe else DataSpec()).model_copy(update=read)
    kind = "scored" if scoring.spec.head == "score" else "pairs"
    data = open_splits(spec, scoring.tokenizer, default_root(), kind=kind).train
    assert isinstance(data, Preferences)
    return data


# ---- the model and its objective --------------------------------------------------------------------------


def _scoring_of(folder: Path, recipe: Recipe | None, options: EvaluationOptions) -> _Scoring:
    if _is_reward_model(folder, recipe):
        return _reward_model(folder, recipe, options)
    opened, served, length = opened_model(folder, options)
    length = options.sequence_length or (recipe.data.sequence_length if recipe else length)
    chosen = chosen_adapter(opened, options)
    served.bank.select([chosen])
    spec = _scoring_spec(recipe, chosen, options)
    scored = (recipe or _recipe_of_folder(folder)).model_copy(update={"objective": spec})
    objective = _scoring_objective(scored)
    if not spec.reads_reference:
        return _Scoring(opened.blueprint, opened.model, opened.tokenizer, length, objective, spec)
    objective = objective.with_reference("precomputed")

    def without_adapter(batch: Batch) -> Batch:
        served.bank.select([BASE])
        values = _precomputed_values(objective, opened.blueprint, opened.model, batch)
        served.bank.select([chosen])
        return values

    if options.adapter is not None or (recipe is not None and _changes_nothing_at_first(recipe.adapter)):
        reference: Callable[[Batch], Batch] = without_adapter
        name = "the model without its adapter"
    else:
        reference = _first_model(scored, objective, opened.dtype, options.device)
        name = "the model before training"
    return _Scoring(
        opened.blueprint, opened.model, opened.tokenizer, length, objective, spec, reference, name
    )


def _scoring_spec(recipe: Recipe | None, chosen: str, options: EvaluationOptions) -> ObjectiveSpec:
    """What scores pairs."""
    own = recipe.objective if recipe is not None else None
    if options.adapter is None and own is not None:
        if recipe is not None and recipe.samples == "pairs":
            return own
        if own.reads_reference:
            return ObjectiveSpec(name="dpo", beta=own.beta)
    return ObjectiveSpec(name="dpo") if chosen != BASE else _LOG_PROBABILITY


def _scoring_objective(recipe: Recipe) -> TrainingObjective:
    spec = recipe.objective
    assert spec is not None and spec.name is not None
    objective = require_plugin(OBJECTIVES[spec.name], _WHERE).objective(recipe)
    assert isinstance(objective, TrainingObjective)
    return objective


def _recipe_of_folder(folder: Path) -> Recipe:
    from shardwise.recipe.load import recipe_of
    from shardwise.technique import SETTINGS

    return recipe_of({"model": {"hf": str(folder)}, "steps": 1, "batch_size": 1}, SETTINGS)


def _changes_nothing_at_first(adapter: AdapterSpec | None) -> bool:
    """Whether the base without the adapter is the model before training."""
    return adapter is not None and not (
        adapter.start_from or adapter.loftq_iterations or adapter.modules_to_save
    )


def _first_model(
    recipe: Recipe, objective: TrainingObjective, dtype: torch.dtype, device: str
) -> Callable[[Batch], Batch]:
    """What the objective reads of the model before training, which is built here."""
    (blueprint,) = objective.with_reference("copy").frozen_models().values()
    model = reference_model(blueprint, recipe.seed, dtype).to(serving_device(device))
    model.eval().requires_grad_(False)
    return lambda batch: _precomputed_values(objective, blueprint, model, batch)


def _precomputed_values(
    objective: TrainingObjective, blueprint: Blueprint, model: nn.Module, batch: Batch
) -> Batch:
    return {
        name: objective.of_reference(blueprint, model, part(batch))
        for name, part in objective.precomputed().items()
    }


def _is_reward_model(folder: Path, recipe: Recipe | None) -> bool:
    if recipe is not None:
        return recipe.objective is not None and recipe.objective.head == "score"
    if not (folder / "config.json").is_file():
        return False
    from shardwise.model.hf import HuggingFaceModel, ScoringModel

    return ScoringModel.of(HuggingFaceModel(str(folder), sequence_length=1, objective=None)).has_score


def _reward_model(folder: Path, recipe: Recipe | None, options: EvaluationOptions) -> _Scoring:
    if options.adapter is not None:
        why = "a reward model is scored as it was trained"
        fix = "leave out --adapter and --base"
        raise RecipeError("there is no other adapter", where=_WHERE, why=why, fix=fix)
    scoring = require_plugin("preferences.scoring", _WHERE)
    opened = scoring.load_reward_model(folder, serving_device(options.device), model_dtype(options))
    length = evaluated_length(options, opened.blueprint.context)
    if recipe is not None and options.sequence_length is None:
        length = recipe.data.sequence_length
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else opened.tokenizer
    if tokenizer is None:
        fix = "name one: --tokenizer bytes, or a folder"
        raise RecipeError("the model's folder has no tokenizer", where=str(folder), fix=fix)
    spec = (recipe.objective if recipe else None) or ObjectiveSpec(name="reward")
    scored = (recipe or _recipe_of_folder(folder)).model_copy(update={"objective": spec})
    return _Scoring(opened.blueprint, opened.model, tokenizer, length, _scoring_objective(scored), spec)
