"""The loss in the head of a page, in the unit that it has, with the first measures of its objective."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwise.core.counted import TOKENS, Units
from shardwise.report.notation import measure_label
from shardwise.report.page_parts import Card
from shardwise.report.record import RunRecord

CARD_MEASURES = 2
"""Measures of the objective in the head of the page; all are among the series."""


def loss_card(run: RunRecord) -> Card:
    """The validation loss; before there is one, the training loss."""
    if run.held_out_loss is not None:
        note = _perplexity_text(run.held_out_loss, run.plan.step.units)
        metrics = next((step.metrics for step in reversed(run.steps) if step.metrics), {})
        return Card("Held-out loss", loss_text(run.held_out_loss), _with_measures(note, metrics))
    if run.steps:
        last = run.steps[-1]
        note = "last step; nothing was held out so far"
        return Card("Training loss", loss_text(last.loss), _with_measures(note, last.measures or {}))
    return Card("Held-out loss", "–", "not yet")


def loss_text(value: float) -> str:
    """Four decimals; a large value in a few digits, or nan or inf."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.5g}"


def _with_measures(note: str, measures: Mapping[str, float]) -> str:
    """A note and the first measures, which an objective names first because they matter most."""
    first = list(measures.items())[:CARD_MEASURES]
    return "\n".join([note, *(f"{measure_label(name)} {value:.3g}" for name, value in first)])


def _perplexity_text(loss: float, units: Units) -> str:
    if not math.isfinite(loss):
        return "not a number"
    if units.read == "samples":
        return "of the module's own loss"
    if units != TOKENS:
        return f"mean over {units.trained}"
    return "nats per token" + (f"\nperplexity {math.exp(loss):.3g}" if loss < 12 else "")
