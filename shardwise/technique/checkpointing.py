"""Activation checkpointing: recompute activations in the backward pass instead of keeping them.

    none       keeps everything
    selective  keeps results of matrix products and attention; recomputes the rest of every block
    every:K    recomputes every K-th block from its input
    full       recomputes every block (Chen et al. 2016). One block's activations live at a time, for one more forward
               pass of the blocks, less the last product of each: up to a third more FLOPs
    sqrt       recomputes segments of about sqrt(n) blocks, each from its first input (Chen et al.'s own schedule). The
               FLOPs of full, fewer kept inputs, more live blocks. A plugin
    recursive:S  keeps at most S inputs at a time, and runs blocks as often as that takes: the binomial schedule of
               Griewank & Walther 2000. recursive:1 keeps the input of the model's blocks alone, for n^2 / 2 runs
               ("memory-poor"). A plugin
    budget:F   keeps at most the share F of a block's activations, and its input: those that save the most recomputation
               (runtime/recompute/budget.py). 0 is full, 1 is none

Compiled blocks do ``selective`` and ``budget:F`` within their compiled code (runtime/compiled.py).

docs/concepts/activation-memory.md counts what each keeps and costs. All are non-reentrant, so they work with frozen
weights and leave gradients bit-identical. Generator states are restored before recomputation, so dropout is the same.

Wrapping comes before sharding, so FSDP2 gathers a block once for its recomputation and its backward pass. Refused: the
reentrant form, which needs inputs that require gradients; wrapping after sharding, which gathers twice; and no
checkpointing of the last blocks, whose activations would be live together with the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.core.plugins import CHECKPOINTING, installed, require_plugin
from shardwise.core.strategy import Form, Layout, Setting, Strategy
from shardwise.technique.base import KEPT, Wrapping
from shardwise.technique.site import Site

if TYPE_CHECKING:
    from torch import nn

EVERY = Form("every", "K", minimum=2, example=2)
BUDGET = Form("budget", "F", minimum=0.0, example=0.4, maximum=1.0, kind=float)
RECURSIVE = Form("recursive", "S", minimum=1, example=2)
ACTIVATION_CHECKPOINTING: Setting[str] = Setting(
    "activation_checkpointing",
    default="none",
    doc="activation checkpointing (gradient checkpointing), what the backward pass recomputes: nothing (none); all of a"
    " block except matmuls and attention (selective); every K-th block (every:K); every block (full); segments of about"
    " √layers blocks (sqrt); blocks as often as S kept inputs make necessary (recursive:S); or the cheapest"
    " operations, so that each block keeps at most the fraction F of its activations (budget:F)",
    choices=("none", "selective", "full", *(("sqrt",) if installed(CHECKPOINTING["sqrt"]) else ())),
    candidates=("none", "selective", "full"),
    forms=(EVERY, BUDGET, *((RECURSIVE,) if installed(CHECKPOINTING["recursive"]) else ())),
)


class Checkpointing(Wrapping):
    """Wraps blocks so that the backward pass recomputes them."""

    name = "checkpointing"
    part = KEPT
    settings = (ACTIVATION_CHECKPOINTING,)

    def label(self, strategy: Strategy, layout: Layout) -> str:
        kind = strategy[ACTIVATION_CHECKPOINTING]
        return "" if kind == "none" else f"{kind} checkpointing"

    def apply(self, site: Site) -> None:
        kind = site.strategy[ACTIVATION_CHECKPOINTING]
        if kind == "none":
            return
        joint = kind.partition(":")[0] in CHECKPOINTING
        # Segments end where a stage does: the next pass there is of another micro-batch.
        segments = [stage.blocks for stage in site.view.stages] if joint else [site.view.blocks]
        wrapped = [block for blocks in segments for block in _wrapped(kind, blocks)]
        pairs = zip(site.view.blocks, wrapped, strict=True)
        site.view.replace({block: new for block, new in pairs if new is not block})
        site.hints.repeats(0 if joint else EVERY.number(kind) or 1)


def _wrapped(kind: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The module in the place of each block: its wrapper, or the block itself."""
    from shardwise.runtime.compiled import limit_saved
    from shardwise.runtime.recompute.budget import within_budget
    from shardwise.runtime.recompute.selective import selective_contexts
    from shardwise.runtime.torch_private import checkpoint_wrapper

    name, _, number = kind.partition(":")
    if name in CHECKPOINTING:
        module = require_plugin(CHECKPOINTING[name], f"strategy.activation_checkpointing: {kind}")
        return list(module.wrapped(blocks, int(number) if number else None))
    if (share := BUDGET.number(kind)) is not None:
        return within_budget(blocks, share)
    if kind == "selective":
        return [
            block if limit_saved(block, None) else checkpoint_wrapper(block, context_fn=selective_contexts)
            for block in blocks
        ]
    # The first of every K, not the last: the backward pass then frees a block before it needs room to
    # run one again.
    every = EVERY.number(kind) or 1
    return [checkpoint_wrapper(block) if i % every == 0 else block for i, block in enumerate(blocks)]
