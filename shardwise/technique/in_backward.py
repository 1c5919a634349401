"""Optimizer in backward: every parameter is updated, and its gradient freed, as soon as the gradient is complete.

Gradients of one layer live at a time instead of all: the single-device twin of ZeRO-2 (Lv et al. 2023, LOMO;
the hook is torch's own). With accumulation that holds for the last micro-batch only. With ZeRO 0 on several ranks, or
with replicas, FSDP2 holds the summed gradients until the backward pass ends, and nothing is saved.

The price is what needs all gradients before the first update: clipping by the global norm, fixed or adaptive, loss
scaling, and skipping a whole update because one gradient is not finite (engine/update.py says what is done instead).
Nor does it go with pipelines (technique/pipeline.py has the rule).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site
from shardwise.technique.precision import PRECISION

OPTIMIZER_IN_BACKWARD: Setting[bool] = Setting(
    "optimizer_in_backward",
    default=False,
    doc="update each parameter during the backward pass, as soon as its gradient is complete, and free that",
    kind=bool,
    choices=(False, True),
    compared=(False, True),
)


def _clips(case: Case) -> bool:
    spec = case.recipe.optimizer
    clips = spec.clip_norm is not None or spec.adaptive_clip is not None
    return case.strategy[OPTIMIZER_IN_BACKWARD] and clips


RULES: tuple[Rule, ...] = (
    Rule(
        key="optimizer_in_backward",
        reason="the norm to clip by is known only when every parameter has been updated",
        broken=_clips,
        fix="set optimizer.clip_norm and optimizer.adaptive_clip to null",
    ),
    Rule(
        key="optimizer_in_backward",
        reason="whether fp16 gradients have overflowed is known only when every parameter has been updated",
        broken=lambda case: case.strategy[OPTIMIZER_IN_BACKWARD] and case.strategy[PRECISION] == "fp16",
        nearest=lambda case: {"precision": "bf16"},
    ),
)


@dataclass(frozen=True)
class InBackward:
    """Has the engine update parameters within the backward pass."""

    name: str = "in_backward"
    settings: Sequence[Setting[Any]] = (OPTIMIZER_IN_BACKWARD,)
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "optimizer in backward" if strategy[OPTIMIZER_IN_BACKWARD] else ""

    def apply(self, site: Site) -> None:
        site.update_in_backward = site.strategy[OPTIMIZER_IN_BACKWARD]
