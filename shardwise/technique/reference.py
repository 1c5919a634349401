"""Where the reference of an objective is: the model before training, with whose log-probabilities the loss compares.

    adapter_off   the trained model itself. From new adapters: with its adapters switched off, at no bytes. From an
                  adapter that exists, or with modules trained in full: with the first values of the trained weights,
                  which are kept and exchanged with the present ones for the pass.
    copy          a frozen copy of the model, divided over the ranks by the same techniques, in the dtype of compute.
    precomputed   nowhere: its log-probabilities are computed once before the first step and read with the samples.

All three give the same loss. ``adapter_off`` and ``copy`` cost a forward pass in every step, ``precomputed`` one for
every sample. So it is faster for several epochs; of one epoch the planner tries it only where the others are not
possible, or do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.technique.base import Wrapping
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site
from shardwise.technique.tensor import TENSOR_PARALLEL

REFERENCE: Setting[str] = Setting(
    "reference",
    default="auto",
    doc="reference of an objective: the trained model with its adapters off, a frozen copy, or log-probabilities that"
    " are precomputed; auto is adapter_off for adapters, else copy, or precomputed in pipelines",
    choices=("auto", "adapter_off", "copy", "precomputed"),
    last_resort=("precomputed",),
    ordered=False,
)


def reads_reference(case: Case) -> bool:
    """Whether the recipe's objective compares with a reference."""
    return case.recipe.objective is not None and case.recipe.objective.reads_reference


def _generates(case: Case) -> bool:
    return case.recipe.samples == "prompts"


def _in_stages(case: Case) -> bool:
    return case.ranks(lambda axis: axis.stages) > 1


def _is(value: str, case: Case) -> bool:
    return reads_reference(case) and _resolved(case) == value


def _resolved(case: Case) -> str:
    """The setting without ``auto``."""
    asked = case.strategy[REFERENCE]
    if asked != "auto":
        return asked
    if case.recipe.adapter is not None:
        return "adapter_off"
    return "precomputed" if _in_stages(case) and not _generates(case) else "copy"


RULES: tuple[Rule, ...] = (
    Rule(
        key="pipeline_parallel",
        reason="completions are generated and scored by ranks that have all blocks",
        broken=lambda case: _generates(case) and _in_stages(case),
        nearest=lambda case: {"pipeline_parallel": 1},
    ),
    Rule(
        key="reference",
        reason="the objective compares with no reference",
        broken=lambda case: case.strategy[REFERENCE] != "auto" and not reads_reference(case),
        nearest=lambda case: {"reference": "auto"},
    ),
    Rule(
        key="reference",
        reason="all weights are trained, so no adapter can be switched off",
        broken=lambda case: _is("adapter_off", case) and case.recipe.adapter is None,
        nearest=lambda case: {"reference": "copy"},
    ),
    Rule(
        key="reference",
        reason="a pipeline cuts only the trained model, not a frozen copy",
        broken=lambda case: _is("copy", case) and _in_stages(case),
        nearest=lambda case: {"reference": "adapter_off" if case.recipe.adapter else "precomputed"},
    ),
    Rule(
        key="reference",
        reason="the completions that it would be computed for are generated in every step",
        broken=lambda case: _is("precomputed", case) and _generates(case),
        nearest=lambda case: {"reference": "adapter_off" if case.recipe.adapter else "copy"},
    ),
    Rule(
        key="tensor_parallel",
        reason="packed weights of the reference are rows of bytes, which tensor parallelism cannot cut",
        broken=lambda case: (
            _is("copy", case)
            and case.recipe.objective is not None
            and (case.recipe.objective.reference_quantize or "none") != "none"
            and case.strategy[TENSOR_PARALLEL] > 1
        ),
        nearest=lambda case: {"tensor_parallel": 1},
    ),
)


class Reference(Wrapping):
    """Tells the objective where its reference is."""

    name = "reference"
    settings = (REFERENCE,)
    rules = RULES

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "" if strategy[REFERENCE] == "auto" else f"reference {strategy[REFERENCE]}"

    def has_effect(self, setting: Setting[Any], case: Case) -> bool:
        return reads_reference(case)

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        if not reads_reference(case):
            return ()
        with_weights = ["adapter_off"] if case.recipe.adapter is not None else []
        if not _in_stages(case) and not with_weights:
            with_weights.append("copy")
        if _generates(case):
            return with_weights
        repeats = (case.recipe.epochs or 1) > 1
        return ["precomputed"] if repeats or not with_weights else with_weights

    def apply(self, site: Site) -> None:
        layout = site.context.layout
        case = Case(site.strategy, layout.world_size, site.context.recipe, dict(layout.axes))
        if not reads_reference(case):
            return
        site.options.reference = _resolved(case)
        adapter = case.recipe.adapter
        if site.options.reference == "adapter_off" and adapter is not None:
            new = adapter.start_from is None and not adapter.loftq_iterations and not adapter.modules_to_save
            site.options.keeps_first_values = not new
