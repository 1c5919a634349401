"""Activation checkpointing: keep less of what the forward pass computed, and compute it again in the backward pass.

    none       everything is kept
    selective  results of matrix products and attention are kept, the rest of every block runs again
    every:K    every K-th block runs again, from its input
    full       every block runs again (Chen et al. 2016): one block's activations live at a time, for one more
               forward pass of the blocks less the last product of each: up to a third more FLOPs
    sqrt       about sqrt(n) blocks run again together, from the input of the first: the FLOPs of full for fewer
               inputs and more blocks that live at a time (model/segments.py; Chen et al.'s own schedule)
    budget:F   every block keeps at most the share F of what it would keep with none, beside its input, and of all
               that it could keep what spares most (model/budget.py); 0 keeps what full keeps, 1 is none

What each keeps and costs is counted in docs/concepts/activation-memory.md. All are non-reentrant, so they work
with frozen weights and leave gradients bit-identical; the generators' states are restored before a second run, so
dropout repeats itself.

Wrapping comes before sharding: FSDP2 then gathers a block once for its second run and its backward pass together.
Refused: the reentrant form, which needs inputs that require gradients; wrapping after sharding, which gathers
twice; and leaving out the last blocks, which are needed at once: their activations would live beside the logits,
which are the peak of models with large vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.core.strategy import Form, Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site

if TYPE_CHECKING:
    from torch import nn

EVERY = Form("every", "K", minimum=2, example=2)
BUDGET = Form("budget", "F", minimum=0.0, example=0.4, maximum=1.0, kind=float)
ACTIVATION_CHECKPOINTING: Setting[str] = Setting(
    "activation_checkpointing",
    default="none",
    doc="what the backward pass recomputes: none; all of a block but products and attention (selective); every"
    " K-th block; every block (full); blocks in segments of about the square root of their number (sqrt); or what"
    " costs least to compute again, so that each block keeps at most the share F of its activations (budget:F)",
    choices=("none", "selective", "full", "sqrt"),
    candidates=("none", "selective", "full"),
    forms=(EVERY, BUDGET),
)


@dataclass(frozen=True)
class Checkpointing:
    """Wraps units so that they are recomputed."""

    name: str = "checkpointing"
    settings: Sequence[Setting[Any]] = (ACTIVATION_CHECKPOINTING,)
    rules: Sequence[Rule] = ()

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        kind = strategy[ACTIVATION_CHECKPOINTING]
        return "" if kind == "none" else f"{kind} checkpointing"

    def apply(self, site: Site) -> None:
        kind = site.strategy[ACTIVATION_CHECKPOINTING]
        if kind == "none":
            return
        names = {module: name for name, module in site.model.named_modules()}
        # Segments end where a stage does: what runs next there is another micro-batch.
        stretches = site.stretches if kind == "sqrt" else [site.units]
        everything = [unit for units in stretches for unit in _wrapped(kind, units)]
        for index, wrapped in enumerate(everything):
            if wrapped is not site.units[index]:
                site.model.set_submodule(names[site.units[index]], wrapped)
                site.units[index] = wrapped
        site.period = 0 if kind == "sqrt" else EVERY.number(kind) or 1


def _wrapped(kind: str, units: Sequence[nn.Module]) -> list[nn.Module]:
    """What takes the place of each unit; the unit itself where nothing does."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from shardwise.model.budget import within_budget
    from shardwise.model.segments import in_segments
    from shardwise.model.selective import selective_contexts

    if kind == "sqrt":
        return in_segments(units)
    if (share := BUDGET.number(kind)) is not None:
        return within_budget(units, share)
    if kind == "selective":
        return [checkpoint_wrapper(unit, context_fn=selective_contexts) for unit in units]
    # The first of every K, not the last: the backward pass then frees a block before it needs room to
    # run one again.
    every = EVERY.number(kind) or 1
    return [checkpoint_wrapper(unit) if i % every == 0 else unit for i, unit in enumerate(units)]
