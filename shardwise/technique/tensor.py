"""Tensor parallelism: every layer in parts over ranks that read the same samples (Shoeybi et al. 2019).

Heads and the inner width of feed-forward layers are divided by columns and then rows, the vocabulary by rows of the
embedding and by classes of the head, whose logits are never joined for the loss. Per block and micro-batch that is
four all-reduces of the activations [b, s, h], two in each direction, which nothing hides: hence the innermost axis.

What is not divided, norms and residuals, every rank would compute for itself. With ``tensor_sequence_parallel`` each
does it for a share of the sequence (Korthikanti et al. 2022, arXiv:2205.05198):

    none         norms, residuals and the inputs of split layers are whole on every rank
    gathered     shares; an all-gather and a reduce-scatter in place of each all-reduce, so as many bytes; the
                 gathered inputs of split layers are kept for the backward pass
    regathered   shares, and only shares are kept: two more all-gathers per block in the backward pass, beside the
                 products (the paper's own form, whose bytes per layer are all divided)

Weights are DTensors, which FSDP2 divides further over ``shard``; how layers are split while they run is
model/split.py. Applied after the pipeline's cut and before all else: what comes later sees layers of this rank's size.

Without shares all ranks draw the same random numbers, for what they drop must be the same outside of split layers;
within them, every rank's heads then drop alike. With shares each draws its own.

Refused: padding heads, which computes what is thrown away, and copying key/value heads where there are more ranks;
both are answered with the nearest degree. Vocabularies and inner widths need not divide: parts may be uneven.
Norms of shares sum the gradients of their weights in every backward pass instead of once a step: h values each, so
that no other technique need know of sums that are still partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.presets import Dimensions, dimensions_of
from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site, divides_world
from shardwise.technique.precision import PRECISION

TENSOR_PARALLEL: Setting[int] = Setting(
    "tensor_parallel",
    default=1,
    doc="tensor-parallel degree: ranks that share out heads, inner widths and the vocabulary of one copy of the model",
    kind=int,
    minimum=1,
)
TENSOR_SEQUENCE_PARALLEL: Setting[str] = Setting(
    "tensor_sequence_parallel",
    default="none",
    doc="with tensor_parallel: norms and residuals on shares of the sequence; inputs of split layers are kept gathered"
    " for the backward pass (gathered), or gathered again in it (regathered)",
    choices=("none", "gathered", "regathered"),
)
_MOMENTS_BLOCK = 128
"""Neighbours in a row that share a scale in 8-bit moments (engine/optim/moments.py)."""


def _dimensions(case: Case) -> Dimensions | None:
    """Of the native decoder; None where the model comes from elsewhere, or is refused elsewhere."""
    spec = case.recipe.model
    if spec.hf is not None or spec.factory is not None:
        return None
    try:
        return dimensions_of(spec)
    except RecipeError:
        return None


def _of_degree(fits: Callable[[Dimensions, int], bool]) -> Callable[[Case], bool]:
    """Broken where a degree above 1 does not fit the dimensions."""

    def broken(case: Case) -> bool:
        degree, dimensions = case.strategy[TENSOR_PARALLEL], _dimensions(case)
        return degree > 1 and dimensions is not None and not fits(dimensions, degree)

    return broken


def _whole_heads(d: Dimensions, degree: int) -> bool:
    return math.gcd(d.heads, d.kv_heads) % degree == 0


def _something_each(d: Dimensions, degree: int) -> bool:
    return all(-(-size // degree) * (degree - 1) < size for size in (d.vocab, d.ffn))


def _nearest_degree(case: Case) -> Mapping[str, object]:
    """The largest lower degree that the model and the devices allow."""
    degree, dimensions = case.strategy[TENSOR_PARALLEL], _dimensions(case)
    assert dimensions is not None
    others = case.model_ranks // degree
    return {
        "tensor_parallel": next(
            lower
            for lower in range(min(degree - 1, math.gcd(dimensions.heads, dimensions.kv_heads)), 0, -1)
            if lower == 1
            or (
                _whole_heads(dimensions, lower)
                and _something_each(dimensions, lower)
                and case.world_size % (lower * others) == 0
            )
        )
    }


def _shares(case: Case) -> bool:
    return case.strategy[TENSOR_PARALLEL] > 1 and case.strategy[TENSOR_SEQUENCE_PARALLEL] != "none"


def _sequence_ranks(case: Case) -> int:
    """Among how many ranks a sequence is shared out between blocks."""
    return case.strategy[TENSOR_PARALLEL] * int(str(case.strategy.values.get("sequence_parallel", 1)))


def _cut_blocks(case: Case) -> bool:
    degree, dimensions = case.strategy[TENSOR_PARALLEL], _dimensions(case)
    if degree == 1 or dimensions is None or case.recipe.optimizer.name != "adamw_8bit":
        return False
    return any(size % (degree * _MOMENTS_BLOCK) for size in (dimensions.width, dimensions.ffn))


def _without_shares(reason: str, broken: Callable[[Case], bool], instead: str = "none") -> Rule:
    key = TENSOR_SEQUENCE_PARALLEL.key
    return Rule(key, reason, broken, lambda case: {key: instead})


RULES: tuple[Rule, ...] = (
    divides_world(TENSOR_PARALLEL),
    Rule(
        key="tensor_parallel",
        reason="heads and key/value heads are not divided, so the degree must divide the number of both",
        broken=_of_degree(_whole_heads),
        nearest=_nearest_degree,
    ),
    Rule(
        key="tensor_parallel",
        reason="some ranks would have nothing of the vocabulary or of the feed-forward layers",
        broken=_of_degree(_something_each),
        nearest=_nearest_degree,
    ),
    Rule(
        key="tensor_parallel",
        reason="8-bit moments share a scale among 128 neighbours in a row, and rows of width or ffn would be cut"
        " within them",
        broken=_cut_blocks,
        nearest=lambda case: {"tensor_parallel": 1},
    ),
    _without_shares(
        "only tensor_parallel above 1 reads it",
        lambda case: (
            case.strategy[TENSOR_PARALLEL] == 1 and case.strategy[TENSOR_SEQUENCE_PARALLEL] != "none"
        ),
    ),
    _without_shares(
        "the sequence cannot be shared out evenly: tensor_parallel, with sequence_parallel, does not divide"
        " data.sequence_length",
        lambda case: _shares(case) and case.recipe.data.sequence_length % _sequence_ranks(case) != 0,
    ),
    _without_shares(
        "blocks of transformers read the length of the sequence off what would be a share of it",
        lambda case: _shares(case) and case.recipe.model.hf is not None,
    ),
    _without_shares(
        "8-bit products keep their own inputs for the backward pass, whole",
        lambda case: (
            case.strategy[TENSOR_SEQUENCE_PARALLEL] == "regathered" and case.strategy[PRECISION] == "fp8"
        ),
        "gathered",
    ),
)


@dataclass(frozen=True)
class Tensor:
    """Splits the layers that the model's own plan names."""

    name: str = "tensor"
    settings: Sequence[Setting[Any]] = (TENSOR_PARALLEL, TENSOR_SEQUENCE_PARALLEL)
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {"tensor": strategy[TENSOR_PARALLEL]}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        degree = layout.degree("tensor")
        if degree == 1:
            return ""
        shares = {"none": "", "gathered": "+sp", "regathered": "+sp regathered"}
        return f"tp{degree}{shares[strategy[TENSOR_SEQUENCE_PARALLEL]]}"

    def apply(self, site: Site) -> None:
        if site.strategy[TENSOR_PARALLEL] == 1:
            return
        from shardwise.model.split import split

        shares = site.strategy[TENSOR_SEQUENCE_PARALLEL]
        if shares != "none":
            site.draws_apart = True  # no rank computes what another does
            site.stream_shares = site.strategy[TENSOR_PARALLEL]
        for model in site.parts or [site.model]:
            split(model, site.tensor_plan(), site.mesh["tensor"], shares != "none", shares == "regathered")
