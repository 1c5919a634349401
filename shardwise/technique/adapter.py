"""Rules and a note for adapters (``adapter:`` in the recipe). The adapters themselves belong to the model
(model/adapted.py).

They are part of the model before the first technique sees it, and every technique handles frozen weights: precision
stores them in the compute dtype, ZeRO gathers them and never reduces them, optimizers skip them.
"""

from __future__ import annotations

from shardwise.core.units import format_count, format_percent
from shardwise.technique.base import Wrapping
from shardwise.technique.precision import PRECISION
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site
from shardwise.technique.tensor import TENSOR_PARALLEL, TENSOR_SEQUENCE_PARALLEL


def _adapted(case: Case) -> bool:
    return case.recipe.adapter is not None


RULES: tuple[Rule, ...] = (
    Rule(
        key="precision",
        reason="layers with adapters multiply in bf16, which leaves little or nothing of a block for 8 bits",
        broken=lambda case: _adapted(case) and case.strategy[PRECISION] == "fp8",
        nearest=lambda case: {"precision": "bf16"},
        condition="with an adapter",
    ),
    Rule(
        key="tensor_sequence_parallel",
        reason="adapters keep their own inputs for the backward pass, whole",
        broken=lambda case: _adapted(case) and case.strategy[TENSOR_SEQUENCE_PARALLEL] == "regathered",
        nearest=lambda case: {"tensor_sequence_parallel": "gathered"},
        condition="with an adapter",
    ),
    Rule(
        key="tensor_parallel",
        reason="packed weights are rows of bytes in which a layer's own rows and columns cannot be told apart",
        broken=lambda case: (
            case.recipe.adapter is not None
            and case.recipe.adapter.quantize != "none"
            and case.strategy[TENSOR_PARALLEL] > 1
        ),
        nearest=lambda case: {"tensor_parallel": 1},
        condition="with an adapter",
    ),
    Rule(
        key="tensor_parallel",
        reason="the bias of lora_bias would be added once by every rank that holds a part of a layer's inputs",
        broken=lambda case: (
            case.recipe.adapter is not None
            and case.recipe.adapter.lora_bias
            and case.strategy[TENSOR_PARALLEL] > 1
        ),
        nearest=lambda case: {"tensor_parallel": 1},
        condition="with an adapter",
    ),
    Rule(
        key="tensor_parallel",
        reason="dora takes the norms of whole rows of a weight, which tensor parallelism cuts",
        broken=lambda case: (
            case.recipe.adapter is not None
            and case.recipe.adapter.name == "dora"
            and case.strategy[TENSOR_PARALLEL] > 1
        ),
        nearest=lambda case: {"tensor_parallel": 1},
        condition="with an adapter",
    ),
)


class Adapter(Wrapping):
    """Describes the trained weights, and excludes combinations."""

    name = "adapter"
    rules = RULES

    def apply(self, site: Site) -> None:
        spec = site.context.recipe.adapter
        if spec is None:
            return
        trained, frozen = site.context.blueprint.parameter_counts()
        others = " (and others by rank_pattern)" if spec.rank_pattern else ""
        whole = f", {', '.join(spec.modules_to_save)} in full," if spec.modules_to_save else ""
        site.hints.note(
            f"{spec.name} of rank {spec.rank}{others} trains {format_count(trained)} weights"
            f" ({format_percent(trained / (trained + frozen), 2)}){whole} and {format_count(frozen)} frozen ones",
        )
