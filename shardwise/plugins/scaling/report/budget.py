"""A budget's choice as text, as JSON and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shardwise.core.units import format_count, format_difference, format_seconds
from shardwise.plugins.scaling.budget import BudgetChoice, SizeInBudget, six_nd
from shardwise.plugins.scaling.law import Law, SizeAndTokens
from shardwise.plugins.scaling.standing import doubts
from shardwise.report.notation import of_capacity
from shardwise.report.pictures import ACCENT, INK, MUTED, STYLE, WIDE_INCHES, svg
from shardwise.report.template import without_control

_BINDING = 2
"""A size that does not fit, and is less than this much larger than the chosen one, has limited the choice."""


@dataclass(frozen=True)
class BudgetReport:
    """A budget's choice, and the figures of the run that trains it: whole steps, so not exactly the budget's tokens.

    Attributes:
        unique_tokens: of the data, which further tokens repeat; None where the user has not said.
        batch_size_advice: sentences of a measured gradient noise scale.
    """

    choice: BudgetChoice
    law: Law
    steps: int
    batch_size: int
    unique_tokens: float | None
    batch_size_advice: Sequence[str]

    @property
    def tokens(self) -> int:
        return self.steps * self.choice.plan.step.tokens

    @property
    def loss(self) -> float:
        return self.law.loss(self.choice.best.parameters, self.tokens)

    @property
    def flops(self) -> float:
        """As the dry run counts them."""
        return self.steps * self.choice.plan.step.model_flops

    @property
    def flops_6nd(self) -> float:
        """As scaling laws count them."""
        best = self.choice.best
        return six_nd(best) * self.tokens / best.tokens

    @property
    def seconds(self) -> float:
        return self.steps * self.choice.plan.step.seconds

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.choice.best.parameters

    @property
    def epochs(self) -> float | None:
        return self.tokens / self.unique_tokens if self.unique_tokens else None

    def as_dict(self) -> dict[str, Any]:
        """The object that ``budget --json`` prints."""
        choice = self.choice
        best = choice.best
        plan = choice.plan
        return {
            "parameters": best.parameters,
            "tokens": self.tokens,
            "flops": self.flops,
            "flops_6nd": self.flops_6nd,
            "loss": self.loss,
            "seconds": self.seconds,
            "strategy": plan.line,
            "law": self.law.name,
            "model": {key: getattr(best.dimensions, key) for key in _SIZE_DIMENSIONS},
            "steps": self.steps,
            "batch_size": self.batch_size,
            "tokens_per_parameter": self.tokens_per_parameter,
            "epochs": self.epochs,
            "step_seconds": plan.step.seconds,
            "fits": plan.fits,
            "neighbours": [_size_json(size, best) for size in choice.neighbours],
            "budget": choice.limit,
            "planned": [_size_json(size, best) for size in choice.tried],
            "refused": None if choice.refused is None else choice.refused[1],
            "training_only": None if choice.fresh is None else _size_json(choice.fresh, best),
            "warnings": list(warnings(choice, self.law)),
            "batch_size_advice": list(self.batch_size_advice),
        }

    def text(self, explain: bool) -> str:
        """The choice, its neighbours and, with ``explain``, how it was found."""
        choice = self.choice
        lines = list(self._choice_lines())
        if (training := choice.fresh) is not None:
            lines.append(
                f"for training alone: {format_count(training.parameters)} parameters on"
                f" {format_count(training.tokens)} tokens in {format_seconds(training.seconds)}, the same loss"
            )
        lines += ["", f"In the same {choice.limit}" if training is None else "With the same loss"]
        lines += [_size_line(size, choice.best) for size in choice.neighbours]
        if self.batch_size_advice:
            lines += ["", "Batch size", *(f"  {sentence}" for sentence in self.batch_size_advice)]
        lines += ["", f"law: {self.law.name} ({self.law.source})", *warnings(choice, self.law)]
        if explain:
            lines += ["", "Planned", *(_size_line(size, choice.best) for size in choice.tried)]
            lines += ["~: time and FLOPs are interpolated between planned sizes, as multiples of 6N"]
        return "\n".join(lines)

    def _choice_lines(self) -> Iterator[str]:
        plan = self.choice.plan
        model = self.choice.best.dimensions
        yield (
            f"{format_count(self.choice.best.parameters)} parameters on {format_count(self.tokens)} tokens"
            f"   {self.tokens_per_parameter:.3g} tokens per parameter   loss {self.loss:.4f}"
        )
        yield (
            f"model: {model.layers} layers, width {model.width}, {model.heads} heads, {model.kv_heads} key/value"
            f" heads, ffn {model.ffn}"
        )
        yield f"{self.steps:,} steps of {format_count(plan.step.tokens)} tokens (batch size {self.batch_size})"
        yield f"{self.flops:.3g} FLOPs by the dry run, {self.flops_6nd:.3g} by 6ND"
        yield (
            f"{format_seconds(self.seconds)} on {plan.cluster}: {plan.line},"
            f" {format_seconds(plan.step.seconds)} a step, {of_capacity(plan.peak.bytes, plan.capacity_bytes)}"
        )
        if self.epochs:
            yield f"{self.epochs:.3g} epochs of the unique tokens"


_SIZE_DIMENSIONS = ("family", "layers", "width", "heads", "kv_heads", "ffn", "vocab")


def _size_json(size: SizeInBudget, best: SizeInBudget) -> dict[str, Any]:
    return {
        "parameters": size.parameters,
        "layers": size.dimensions.layers,
        "width": size.dimensions.width,
        "tokens": size.tokens,
        "flops": size.flops,
        "seconds": size.seconds,
        "loss": size.loss,
        "loss_difference": size.loss - best.loss,
        "planned": size.planned,
    }


def _size_line(size: SizeInBudget, best: SizeInBudget) -> str:
    mark = " " if size.planned else "~"
    return (
        f"  {mark} {format_count(size.parameters):>8} parameters   {size.dimensions.layers:>3} layers"
        f"   width {size.dimensions.width:<6} {format_count(size.tokens):>8} tokens"
        f"   loss {size.loss:.4f}  {format_difference(size.loss - best.loss)}   {format_seconds(size.seconds)}"
    )


def warnings(budget: BudgetChoice, law: Law) -> Iterator[str]:
    """Sentences about the trust that the figures deserve."""
    best = budget.best
    yield from doubts(law, SizeAndTokens(best.parameters, best.tokens), best.dimensions.vocab)
    if budget.refused is not None and budget.refused[0].parameters < _BINDING * best.parameters:
        dimensions, why = budget.refused
        yield f"larger models were not considered: {format_count(dimensions.parameters)} parameters, {why}"


@matplotlib.rc_context(STYLE)
def budget_picture(budget: BudgetChoice, width: float = WIDE_INCHES) -> Figure:
    """Predicted loss by size in the budget; the chosen size is marked."""
    figure = Figure(figsize=(width, 0.38 * width), layout="constrained")
    axes: Any = figure.subplots()
    sizes = sorted({*budget.neighbours, *budget.tried, budget.best}, key=lambda size: size.parameters)
    axes.plot(
        [size.parameters for size in sizes], [size.loss for size in sizes], "o-", color=MUTED, markersize=4
    )
    axes.plot(budget.best.parameters, budget.best.loss, "*", color=ACCENT, markersize=12)
    # A single size makes a logarithmic axis without width.
    if max(size.parameters for size in sizes) > min(size.parameters for size in sizes):
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
    # The picture first: the text and the recipe are the user's, and may have its marker in them.
    page = _BUDGET_PAGE.replace(
        "PICTURE", svg(budget_picture(budget), "Predicted loss by model size in the budget")
    )
    return without_control(page.replace("TEXT", escape(text)).replace("RECIPE", escape(recipe)))
