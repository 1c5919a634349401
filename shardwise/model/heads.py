"""The recipe's model with the head that an objective trains: ``score`` in the place of logits, or a value head."""

from __future__ import annotations

from dataclasses import replace

from shardwise.model.blueprint import Blueprint
from shardwise.model.native import NativeModel
from shardwise.model.scalar_head import NativeScores, no_head
from shardwise.model.value_head import NativeValues


def scalar_head(base: Blueprint) -> Blueprint:
    """The model of ``base`` with ``score`` as its output layer (scalar_head.py).

    Raises RecipeError if it is not causal, or has no known output layer.
    """
    if isinstance(base, NativeModel):
        return NativeScores(replace(base.dimensions, tied=False), base.name)
    from shardwise.model.hf import HuggingFaceModel, ScoringModel

    if isinstance(base, HuggingFaceModel):
        return ScoringModel.of(base)
    raise no_head(base, f"{base.name} does not name its output layer")


def value_head(base: Blueprint) -> Blueprint:
    """The model of ``base`` with a value head (value_head.py). Raises as ``scalar_head``."""
    if isinstance(base, NativeModel):
        return NativeValues(base.dimensions, base.name)
    from shardwise.model.hf import HuggingFaceModel, ValuingModel

    if isinstance(base, HuggingFaceModel):
        return ValuingModel.of(base)
    raise no_head(base, f"{base.name} does not name its output layer")
