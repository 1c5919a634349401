"""Optimizer in backward: every parameter is updated, and its gradient freed, as soon as the gradient is complete.

Gradients of one layer live at a time instead of all: the single-device twin of ZeRO-2 (Lv et al. 2023, LOMO;
the hook is torch's own). With accumulation that holds for the last micro-batch only. With ZeRO 0 on several ranks, or
with replicas, FSDP2 holds the summed gradients until the backward pass ends, and nothing is saved.

The price: operations that need all gradients before the first update are not possible. These are clipping by the global
norm, loss scaling, and skipping a whole update because one gradient is not finite (engine/optimizer_step.py says what
is done instead).
"""

from __future__ import annotations

from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.technique.base import STATES, Wrapping
from shardwise.technique.precision import PRECISION
from shardwise.technique.rules import Rule
from shardwise.technique.site import Site

OPTIMIZER_IN_BACKWARD: Setting[bool] = Setting(
    "optimizer_in_backward",
    default=False,
    doc="optimizer in backward: update each parameter as soon as its gradient is complete, then free the gradient",
    kind=bool,
    choices=(False, True),
    compared=(False, True),
)


RULES: tuple[Rule, ...] = (
    Rule(
        key="optimizer_in_backward",
        reason="an optimizer of a library updates all of its parameters at once",
        broken=lambda case: (
            case.strategy[OPTIMIZER_IN_BACKWARD] and case.recipe.optimizer.factory is not None
        ),
        nearest=lambda case: {"optimizer_in_backward": False},
    ),
    Rule(
        key="optimizer_in_backward",
        reason="the norm to clip by is known only when every parameter has been updated",
        broken=lambda case: case.strategy[OPTIMIZER_IN_BACKWARD] and case.clips,
        fix="set optimizer.clip_norm and optimizer.adaptive_clip to null",
    ),
    Rule(
        key="optimizer_in_backward",
        reason="whether fp16 gradients have overflowed is known only when every parameter has been updated",
        broken=lambda case: case.strategy[OPTIMIZER_IN_BACKWARD] and case.strategy[PRECISION] == "fp16",
        nearest=lambda case: {"precision": "bf16"},
    ),
)


class InBackward(Wrapping):
    """Has the engine update parameters within the backward pass."""

    name = "in_backward"
    part = STATES
    settings = (OPTIMIZER_IN_BACKWARD,)
    rules = RULES

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "optimizer in backward" if strategy[OPTIMIZER_IN_BACKWARD] else ""

    def apply(self, site: Site) -> None:
        site.options.update_in_backward = site.strategy[OPTIMIZER_IN_BACKWARD]
