"""What a strategy has to know of adapters (``adapter:`` in the recipe), which are the model's own: model/adapted.py.

Nothing is applied here but a sentence for the plan: adapters are there when the first technique sees the model, and
every technique treats frozen weights for what they are. Precision stores them in the dtype of compute, ZeRO gathers
them and never reduces them, optimizers do not know them.

Excluded is what would do other than it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.core.units import format_count
from shardwise.technique.base import Site
from shardwise.technique.precision import PRECISION
from shardwise.technique.tensor import TENSOR_PARALLEL, TENSOR_SEQUENCE_PARALLEL


def _adapted(case: Case) -> bool:
    return case.recipe.adapter is not None


RULES: tuple[Rule, ...] = (
    Rule(
        key="precision",
        reason="layers with adapters multiply in bf16, which leaves little or nothing of a block for 8 bits",
        broken=lambda case: _adapted(case) and case.strategy[PRECISION] == "fp8",
        nearest=lambda case: {"precision": "bf16"},
    ),
    Rule(
        key="tensor_sequence_parallel",
        reason="adapters keep their own inputs for the backward pass, whole",
        broken=lambda case: _adapted(case) and case.strategy[TENSOR_SEQUENCE_PARALLEL] == "regathered",
        nearest=lambda case: {"tensor_sequence_parallel": "gathered"},
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
    ),
)


@dataclass(frozen=True)
class Adapter:
    """Says what is trained, and what cannot be combined with it."""

    name: str = "adapter"
    settings: Sequence[Setting[Any]] = ()
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return ""

    def apply(self, site: Site) -> None:
        spec = site.recipe.adapter
        if spec is None:
            return
        trained, frozen = site.blueprint.parameter_counts()
        site.notes.append(
            f"{spec.name} of rank {spec.rank} trains {format_count(trained)} weights"
            f" ({trained / (trained + frozen):.2%}) beside {format_count(frozen)} frozen ones"
        )
