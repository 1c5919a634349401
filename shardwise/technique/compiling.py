"""Compiled blocks: each transformer block as kernels that inductor generates, compiled once for all equal blocks.

    none     PyTorch's own kernels, one for each operation
    block    both passes of a block from one joint graph: operations between matrix products are fused; the min-cut
             partitioner chooses which tensors the backward pass recomputes (runtime/compiled.py)

The dry run takes the same graph through the same partitioner and scheduler and runs the generated code on fake tensors.
So saved activations and the buffers of fused kernels are counted. A fused kernel moves its inputs and outputs once.

It comes before checkpointing, which recomputes a compiled block as a whole, or tells the partitioner what it may save
(``selective``, ``budget:F``). It comes before sharding, too: FSDP2 gathers weights outside of the compiled code.
Modules that are FSDP groups within a block, such as divided experts, are compiled on their own, and so are the parts
around them.

Refused: the whole model in one graph, which takes longer to compile with each layer and hides the blocks from FSDP2 and
from stages; and CUDA graphs of a step. They replay kernels on fixed addresses, but FSDP2 gathers weights into memory
that it allocates anew, between blocks and on streams of its own; and no plan counts a graph's private pool of memory.
"""

from __future__ import annotations

import os
import shutil

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.recipe.sections import Recipe
from shardwise.technique.base import Wrapping
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site
from shardwise.technique.tensor import TENSOR_SEQUENCE_PARALLEL

COMPILE: Setting[str] = Setting(
    "compile",
    default="none",
    doc="torch.compile's kernels, fused by inductor: of every block (block), or nowhere (none)",
    choices=("none", "block"),
    switch={False: "none", True: "block"},
    once={"block": 30.0},  # assumed: inductor takes 10 to 20 s for a block's CPU kernels on two cores
)

COMPILERS = ("g++", "clang++", "c++")


def has_cpp_compiler() -> bool:
    """Whether there is a compiler for kernels of the CPU. ``CXX`` names one, as inductor reads it."""
    named = os.environ.get("CXX")
    return any(shutil.which(name) is not None for name in ([named] if named else COMPILERS))


def _on_this_machine(recipe: Recipe) -> bool:
    return recipe.cluster.device in (None, "cpu") and recipe.cluster.preset is None


def _compiles(case: Case) -> bool:
    return case.strategy[COMPILE] == "block"


def _not_compiled(case: Case) -> dict[str, object]:
    return {COMPILE.key: "none"}


RULES: tuple[Rule, ...] = (
    Rule(
        key="compile",
        reason="no C++ compiler was found (g++, clang++, or the one that CXX names)",
        broken=lambda case: _compiles(case) and _on_this_machine(case.recipe) and not has_cpp_compiler(),
        nearest=_not_compiled,
    ),
    Rule(
        key="compile",
        reason="the compiler merges the second all-gather of regathered inputs with the first, and saves its result",
        broken=lambda case: _compiles(case) and case.strategy[TENSOR_SEQUENCE_PARALLEL] == "regathered",
        nearest=lambda case: {TENSOR_SEQUENCE_PARALLEL.key: "gathered"},
    ),
)


class Compile(Wrapping):
    """Compiles the forward method of every block."""

    name = "compile"
    settings = (COMPILE,)
    rules = RULES

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return "compiled" if strategy[COMPILE] == "block" else ""

    def apply(self, site: Site) -> None:
        if site.strategy[COMPILE] != "block":
            return
        from shardwise.runtime.compiled import compile_blocks, parts_without

        if reason := site.context.blueprint.compile_obstacle():
            raise RecipeError(
                f"the blocks of {site.context.blueprint.name} cannot be compiled",
                where="strategy.compile: block",
                why=reason,
                fix="the nearest that works is compile: none",
            )
        view = site.view
        compile_blocks(part for block in view.blocks for part in parts_without(block, view.own_axes))
