"""The reference of an objective: log-probabilities of the same answers by the model before training.

``strategy.reference`` says where they are from (technique/reference.py): the trained model as it was, a frozen copy,
or the samples, which have them already.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Batch, Blueprint, ForwardOnly, SampleShapes, TrainingObjective
from shardwise.model.open import base_of
from shardwise.plugins.preferences.documents import DocumentObjective
from shardwise.recipe.sections import AdapterSpec, DataSpec, Recipe

REFERENCE_ROLE = "reference"
"""Role of the frozen copy, and the name of its log-probabilities in a batch, fp32 or fp64 [m, units, answers]."""


OfModel = Callable[[Blueprint, nn.Module, Batch], Tensor]
"""A function of a model and a micro-batch."""


def frozen_copy(recipe: Recipe) -> Blueprint:
    """The model before training: with the adapter that the run continues from, if there is one.

    It is packed as ``objective.reference_quantize`` says, else as the base of the adapters is.
    """
    spec = recipe.adapter
    base = base_of(recipe)
    quantize = "none" if recipe.objective is None else recipe.objective.reference_quantize or "none"
    starts = spec is not None and (
        spec.start_from is not None
        or spec.loftq_iterations
        or base.quantized
        or (spec.quantize != "none" and quantize == "none")
    )
    if not starts and quantize == "none":
        return base
    from shardwise.model.adapted import AdaptedModel

    if starts and spec is not None:
        return AdaptedModel(base, spec)
    # New adapters change nothing: they only pack what they are on.
    return AdaptedModel(base, AdapterSpec(rank=1, quantize=quantize))


class Referenced(TrainingObjective):
    """An objective that compares with a reference.

    Attributes:
        how: ``adapter_off``, ``copy`` or ``precomputed``; "" without a reference.
    """

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.objective is not None
        self.how = "copy" if recipe.objective.reads_reference else ""
        self._reference = functools.cache(lambda: frozen_copy(recipe))  # shared by copies of the objective

    def with_reference(self, how: str | None) -> Self:
        changed = copy.copy(self)
        if how is not None and self.how:
            changed.how = how
        return changed

    def frozen_models(self) -> Mapping[str, Blueprint]:
        return {REFERENCE_ROLE: self._reference()} if self.how == "copy" else {}

    def by_reference(
        self, passes: ForwardOnly, batches: Sequence[Batch], function: OfModel
    ) -> list[Tensor | None]:
        """``function`` of the reference and each micro-batch, for ``adapter_off`` and ``copy``."""
        if self.how == "adapter_off":
            with passes.as_before_training():
                return passes.forward_only(batches, functools.partial(function, passes.blueprint))
        reference = self._reference()
        frozen = passes.frozen[REFERENCE_ROLE]
        return passes.forward_only(batches, lambda _, batch: function(reference, frozen, batch))


class ReferenceObjective(Referenced, DocumentObjective):
    """Base of objectives on answers that compare with a reference."""

    per_sample = DocumentObjective.per_sample | {REFERENCE_ROLE}

    @property
    def whole_step(self) -> bool:  # type: ignore[override]
        return self.how == "adapter_off"

    def sample_shapes(self, shapes: SampleShapes, data: DataSpec) -> SampleShapes:
        shapes = super().sample_shapes(shapes, data)
        if self.how != "precomputed":
            return shapes
        (units,), _ = shapes["present"]
        return {**shapes, REFERENCE_ROLE: ((units, self.answers_per_unit), torch.float64)}

    def precomputed(self) -> Mapping[str, Callable[[Batch], Batch]]:
        return {REFERENCE_ROLE: lambda batch: batch} if self.how == "precomputed" else {}

    def annotated(self, batch: Batch, frozen: Mapping[str, nn.Module]) -> Batch:
        return {**batch, REFERENCE_ROLE: self.of_reference(self._reference(), frozen[REFERENCE_ROLE], batch)}

    def of_reference(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        """Summed log-probabilities by unit, [m, units, answers_per_unit]."""
        return self.answers(blueprint, model, batch).sums

    def before_step(self, passes: ForwardOnly, batches: Sequence[Batch]) -> Sequence[Batch]:
        if self.how != "adapter_off":
            return batches
        sums = self.by_reference(passes, batches, self.of_reference)
        pairs = zip(batches, sums, strict=True)
        return [
            batch if of_batch is None else {**batch, REFERENCE_ROLE: of_batch} for batch, of_batch in pairs
        ]
