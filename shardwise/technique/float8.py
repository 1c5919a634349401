"""fp8: matrix products of large linear layers in 8 bits, everything else as with ``precision: bf16``.

Master weights, gradients, their reduction, norms, attention, the embedding and the head do not change. The three
products of a block's linear layer (output, gradients of input and weight) run in e4m3 and e5m2 by torchao's recipes
(runtime/float8.py; Micikevicius et al. 2022, arXiv:2209.05433).

    fp8_scaling  operand                      gradient   scales
    tensor       e4m3                         e5m2       one per tensor
    row          e4m3                         e4m3       one per row of each product, powers of two; slower, closer

A layer runs in 8 bits if that is faster: on small layers the casts cost more than the products save. The thresholds are
torchao's (measured on an H100), as one pure function of the layer's shape, so the plan and the run choose the same
layers. ``fp8_layers: all`` takes every layer that an 8-bit product can take, for other hardware and for tests.

Refused: 8-bit all-gathers of weights, which need a tensor subclass as parameter and an all-reduce for scales. The price
is that ZeRO 3 sends bf16, as without fp8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.technique.base import Wrapping
from shardwise.technique.precision import PRECISION
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site

if TYPE_CHECKING:
    from torch import nn

FP8_SCALING: Setting[str] = Setting(
    "fp8_scaling",
    default="tensor",
    doc="scaling granularity with precision fp8: one scale per tensor, or per row",
    choices=("tensor", "row"),
)
FP8_LAYERS: Setting[str] = Setting(
    "fp8_layers",
    default="large",
    doc="linear layers in fp8: those large enough to be faster (large), or all with dims that are multiples of 16",
    choices=("large", "all"),
)


def _without_fp8(setting: Setting[str]) -> Rule:
    def broken(case: Case) -> bool:
        return case.strategy[PRECISION] != "fp8" and case.strategy[setting] != setting.default

    return Rule(
        setting.key, "only precision fp8 reads it", broken, lambda case: {setting.key: setting.default}
    )


RULES: tuple[Rule, ...] = (_without_fp8(FP8_SCALING), _without_fp8(FP8_LAYERS))

DIM_MULTIPLE = 16
"""What both dims of a weight must be a multiple of (cuBLAS; ``torch._scaled_mm`` refuses others)."""


def can_run(rows: int, columns: int) -> bool:
    """Whether an 8-bit product takes a weight [rows, columns] = [width out, width in]."""
    return rows % DIM_MULTIPLE == 0 and columns % DIM_MULTIPLE == 0


def gains(rows: int, columns: int, scaling: str) -> bool:
    """Whether the products of a layer with a weight [rows, columns] are faster with their casts than in bf16.

    The thresholds of torchao's ``_auto_filter_for_tensorwise`` and ``_auto_filter_for_rowwise``
    (https://github.com/pytorch/ao/tree/main/torchao/float8#performance, H100).
    """
    if not can_run(rows, columns):
        return False
    if scaling == "tensor":
        return rows > 1024 or columns > 4096
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


class Float8(Wrapping):
    """Puts 8-bit layers in the place of linear layers of the blocks."""

    name = "fp8"
    rounds = True
    settings = (FP8_SCALING, FP8_LAYERS)
    rules = RULES

    def label(self, strategy: Strategy, layout: Layout) -> str:
        words = {"row": "row scales"}.get(strategy[FP8_SCALING], "")
        return " ".join([words, *(["all layers"] if strategy[FP8_LAYERS] == "all" else [])]).strip()

    def apply(self, site: Site) -> None:
        if site.strategy[PRECISION] != "fp8":
            return
        from shardwise.runtime.float8 import Float8Linear, scaling_named
        from shardwise.runtime.parallel.shard_slices import local_part

        scaling = site.strategy[FP8_SCALING]
        every = site.strategy[FP8_LAYERS] == "all"
        how = scaling_named({"tensor": "tensorwise", "row": "rowwise"}[scaling])
        total = taken = 0
        for parent, name, linear in list(_linear_layers(site.view.blocks)):
            total += 1
            rows, columns = local_part(linear.weight).shape  # of a split layer, what this rank multiplies
            if can_run(rows, columns) if every else gains(rows, columns, scaling):
                taken += 1
                setattr(parent, name, Float8Linear(linear, how))
        site.hints.note(_note(taken, total, every))


def _linear_layers(blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Every plain linear layer of the blocks, with its parent and its name there."""
    from torch import nn

    for block in blocks:
        for parent in block.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear:  # a subclass may not call its own forward
                    yield parent, name, child


def _note(taken: int, total: int, every: bool) -> str:
    why = "have dims that are multiples of 16" if every else "are large enough to gain by it"
    if taken == 0:
        return (
            f"fp8 changes nothing: none of the {total} linear layers of the blocks {why}, so all run in bf16"
        )
    return f"fp8 in {taken} of the {total} linear layers of the blocks, those that {why}; the rest in bf16"
