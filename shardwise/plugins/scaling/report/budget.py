"""A budget's choice as text, as JSON and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shardwise.core.plan import Plan
from shardwise.core.units import format_count, format_difference, format_seconds
from shardwise.plugins.scaling.budget import BudgetChoice, SizeInBudget, six_nd
from shardwise.plugins.scaling.law import Law, SizeAndTokens
from shardwise.plugins.scaling.standing import doubts
from shardwise.report.notation import of_capacity
from shardwise.report.pictures import ACCENT, INK, MUTED, STYLE, WIDE_INCHES, svg
from shardwise.report.template import without_control

_BINDING = 2
"""A size that does not fit, and is less than this much larger than the chosen one, has limited the choice."""


def budget_values(
    budget: BudgetChoice, law: Law, steps: int, batch_size: int, unique: float | None
) -> dict[str, Any]:
    """The object that ``budget --json`` prints."""
    best, plan = budget.best, budget.plan
    tokens = steps * plan.step.tokens
    return {
        "parameters": best.parameters,
        "tokens": tokens,
        "flops": steps * plan.step.model_flops,
        "flops_6nd": six_nd(best) * tokens / best.tokens,
        "loss": law.loss(best.parameters, tokens),
        "seconds": steps * plan.step.seconds,
        "strategy": plan.line,
        "law": law.name,
        "model": _dimensions_json(best),
        "steps": steps,
        "batch_size": batch_size,
        "tokens_per_parameter": tokens / best.parameters,
        "epochs": tokens / unique if unique else None,
        "step_seconds": plan.step.seconds,
        "fits": plan.fits,
        "neighbours": [_size_json(each, best.loss) for each in budget.neighbours],
        "budget": budget.limit,
        "planned": [_size_json(each, best.loss) for each in budget.tried],
        "refused": None if budget.refused is None else budget.refused[1],
        "training_only": None if budget.fresh is None else _size_json(budget.fresh, best.loss),
        "warnings": list(warnings(budget, law)),
    }


def _dimensions_json(size: SizeInBudget) -> dict[str, Any]:
    made = size.dimensions
    return {
        key: getattr(made, key) for key in ("family", "layers", "width", "heads", "kv_heads", "ffn", "vocab")
    }


def _size_json(size: SizeInBudget, loss: float) -> dict[str, Any]:
    return {
        "parameters": size.parameters,
        "layers": size.dimensions.layers,
        "width": size.dimensions.width,
        "tokens": size.tokens,
        "flops": size.flops,
        "seconds": size.seconds,
        "loss": size.loss,
        "loss_difference": size.loss - loss,
        "planned": size.planned,
    }


def warnings(budget: BudgetChoice, law: Law) -> Iterator[str]:
    """Sentences about the trust that the figures deserve."""
    best = budget.best
    yield from doubts(law, SizeAndTokens(best.parameters, best.tokens), best.dimensions.vocab)
    if budget.refused is not None and budget.refused[0].parameters < _BINDING * best.parameters:
        made, why = budget.refused
        yield f"larger models were not considered: {format_count(made.parameters)} parameters, {why}"


def budget_text(values: dict[str, Any], plan: Plan, law: Law, explain: bool) -> str:
    """The choice, its neighbours and, with ``explain``, how it was found."""
    made = values["model"]
    lines = [
        f"{format_count(values['parameters'])} parameters on {format_count(values['tokens'])} tokens"
        f"   {values['tokens_per_parameter']:.3g} tokens per parameter   loss {values['loss']:.4f}",
        f"model: {made['layers']} layers, width {made['width']}, {made['heads']} heads, {made['kv_heads']} key/value"
        f" heads, ffn {made['ffn']}",
        f"{values['steps']:,} steps of {format_count(plan.step.tokens)} tokens (batch size {values['batch_size']})",
        f"{values['flops']:.3g} FLOPs by the dry run, {values['flops_6nd']:.3g} by 6ND",
        f"{format_seconds(values['seconds'])} on {plan.cluster}: {plan.line},"
        f" {format_seconds(plan.step.seconds)} a step, {of_capacity(plan.peak.bytes, plan.capacity_bytes)}",
    ]
    if values["epochs"]:
        lines.append(f"{values['epochs']:.3g} epochs of the unique tokens")
    if before := values["training_only"]:
        lines.append(
            f"for training alone: {format_count(before['parameters'])} parameters on"
            f" {format_count(before['tokens'])} tokens in {format_seconds(before['seconds'])}, the same loss"
        )
    lines += ["", "With the same loss" if before else f"In the same {values['budget']}"]
    lines += [_neighbour(each) for each in values["neighbours"]]
    if values["batch_size_advice"]:
        lines += ["", "Batch size", *(f"  {sentence}" for sentence in values["batch_size_advice"])]
    lines += ["", f"law: {law.name} ({law.source})", *values["warnings"]]
    if explain:
        lines += ["", "Planned", *(_neighbour(each) for each in values["planned"])]
        lines += ["~: time and FLOPs are interpolated between planned sizes, as multiples of 6N"]
    return "\n".join(lines)


def _neighbour(each: dict[str, Any]) -> str:
    mark = " " if each["planned"] else "~"
    return (
        f"  {mark} {format_count(each['parameters']):>8} parameters   {each['layers']:>3} layers"
        f"   width {each['width']:<6} {format_count(each['tokens']):>8} tokens"
        f"   loss {each['loss']:.4f}  {format_difference(each['loss_difference'])}   {format_seconds(each['seconds'])}"
    )


@matplotlib.rc_context(STYLE)
def budget_picture(budget: BudgetChoice, width: float = WIDE_INCHES) -> Figure:
    """Predicted loss by size in the budget; the chosen size is marked."""
    figure = Figure(figsize=(width, 0.38 * width), layout="constrained")
    axes: Any = figure.subplots()
    sizes = sorted({*budget.neighbours, *budget.tried, budget.best}, key=lambda each: each.parameters)
    axes.plot(
        [each.parameters for each in sizes], [each.loss for each in sizes], "o-", color=MUTED, markersize=4
    )
    axes.plot(budget.best.parameters, budget.best.loss, "*", color=ACCENT, markersize=12)
    if max(each.parameters for each in sizes) > min(each.parameters for each in sizes):
        axes.set_xscale("log")
    axes.set_xlabel("parameters", color=INK)
    axes.set_ylabel("predicted loss, nats per token", color=INK)
    return figure


_BUDGET_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>Budget · Shardwise</title><style>
:root { --ink: #1b1f25; --muted: #68707d; --line: #dde1e6; --shade: #f1f3f6; --paper: #ffffff; --accent: #0b6b88; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --muted: #98a2b0; --line: #2f363f; --shade: #1d2228;
  --paper: #14181c; --accent: #62c3de; } }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; padding: 1rem; background: var(--shade); }
svg { max-width: 100%; height: auto; }
</style></head><body><h1>Compute-optimal training</h1><pre>TEXT</pre>PICTURE<h2>Recipe</h2>
<pre>RECIPE</pre></body></html>
"""


def budget_page(budget: BudgetChoice, text: str, recipe: str) -> str:
    """The text, the picture and the recipe to train, in one file without scripts."""
    page = _BUDGET_PAGE.replace(
        "PICTURE", svg(budget_picture(budget), "Predicted loss by model size in the budget")
    )
    return without_control(page.replace("TEXT", escape(text)).replace("RECIPE", escape(recipe)))
