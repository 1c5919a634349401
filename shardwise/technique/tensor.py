"""Tensor parallelism: each layer is split over ranks that read the same samples (Shoeybi et al. 2019).

Heads and the inner width of feed-forward layers are split by columns and then by rows. The vocabulary is split by rows
of the embedding and by classes of the head, whose logits are never gathered for the loss. Per block and micro-batch
that takes four all-reduces of the activations [b, s, h], two in each direction. Nothing hides them, so this is the
innermost axis.

Norms and residuals are not split: every rank computes all of them. With ``tensor_sequence_parallel`` (Megatron's
sequence parallelism) each rank computes a share of the sequence (Korthikanti et al. 2022, arXiv:2205.05198):

    none         norms, residuals and the inputs of split layers are whole on every rank
    gathered     shares; an all-gather and a reduce-scatter replace each all-reduce, with equal bytes. The gathered
                 inputs of split layers are kept for the backward pass
    regathered   shares, and only shares are kept: two more all-gathers per block in the backward pass, overlapped with
                 the products (the paper's own form)

Weights are DTensors, which FSDP2 shards further. runtime/parallel/tensor.py computes with them. It comes after the cut
into stages and before all else: later techniques see layers of this rank's size.

Without shares, all ranks draw the same random numbers, because dropout outside of split layers must be equal on all of
them. With shares, each rank draws its own.

Not supported: padded heads, which waste compute, and copies of key/value heads for more ranks. Rules name the
nearest degree instead. Vocabularies and inner widths need not divide evenly. Norms of shares all-reduce the gradients
of their weights in every backward pass instead of once a step (h values each), so no other technique sees partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.core.strategy import Axis, Layout, Setting, Strategy
from shardwise.recipe.dimensions import Dimensions
from shardwise.technique.base import MOST_RANKS, Dividing, divides_world, divisors
from shardwise.technique.precision import PRECISION
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site

TENSOR_AXIS = Axis("tensor", position=40, piece="slice", redundant=True, blocking=True)

TENSOR_PARALLEL: Setting[int] = Setting(
    "tensor_parallel",
    default=1,
    doc="tensor parallelism (Megatron): number of ranks among which heads, ffn and vocabulary are sharded",
    kind=int,
    minimum=1,
    maximum=MOST_RANKS,
)
TENSOR_SEQUENCE_PARALLEL: Setting[str] = Setting(
    "tensor_sequence_parallel",
    default="none",
    doc="Megatron's sequence parallelism, with tensor_parallel: norms and residuals are sharded over the sequence; the"
    " all-gathered inputs are saved for the backward pass (gathered) or all-gathered again in it (regathered)",
    choices=("none", "gathered", "regathered"),
)
_MOMENTS_BLOCK = 128
"""Neighbours in a row that share a scale in 8-bit moments (engine/optim/moment_storage.py)."""


def _of_degree(fits: Callable[[Dimensions, int], bool]) -> Callable[[Case], bool]:
    """Broken where a degree above 1 does not fit the dimensions."""

    def broken(case: Case) -> bool:
        degree = case.strategy[TENSOR_PARALLEL]
        dimensions = case.dimensions
        return degree > 1 and dimensions is not None and not fits(dimensions, degree)

    return broken


def _whole_heads(d: Dimensions, degree: int) -> bool:
    return math.gcd(d.heads, d.kv_heads) % degree == 0


def _something_each(d: Dimensions, degree: int) -> bool:
    return all(-(-size // degree) * (degree - 1) < size for size in (d.vocab, d.ffn))


def _nearest_degree(case: Case) -> Mapping[str, object]:
    """The largest lower degree that the model and the devices allow."""
    degree = case.strategy[TENSOR_PARALLEL]
    dimensions = case.dimensions
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
    return case.ranks(lambda axis: axis.within_layer)


def _cut_blocks(case: Case) -> bool:
    degree = case.strategy[TENSOR_PARALLEL]
    dimensions = case.dimensions
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
        "completions are generated one token after the other, and a token has no shares",
        lambda case: _shares(case) and case.recipe.samples == "prompts",
    ),
    _without_shares(
        "blocks of transformers read the length of the sequence off what would be a share of it",
        lambda case: _shares(case) and case.recipe.model.hf is not None,
    ),
    _without_shares(
        "latent attention makes the keys and values of all tokens from latent vectors that every rank has whole",
        lambda case: _shares(case) and case.dimensions is not None and case.dimensions.kv_lora_rank > 0,
    ),
    _without_shares(
        "8-bit products keep their own inputs for the backward pass, whole",
        lambda case: (
            case.strategy[TENSOR_SEQUENCE_PARALLEL] == "regathered" and case.strategy[PRECISION] == "fp8"
        ),
        "gathered",
    ),
)


class TensorParallel(Dividing):
    """Splits the layers that the model's own plan names."""

    name = "tensor"
    on_frozen = True
    axes = (TENSOR_AXIS,)
    settings = (TENSOR_PARALLEL, TENSOR_SEQUENCE_PARALLEL)
    rules = RULES

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """Degrees within a node, whose links are the fastest; shares of the sequence save memory at no traffic, so they
        are taken wherever they can be."""
        if setting is TENSOR_PARALLEL and case.dimensions is not None:
            return divisors(math.gcd(case.world_size, case.devices_per_node))
        if setting is TENSOR_SEQUENCE_PARALLEL and case.strategy[TENSOR_PARALLEL] > 1:
            shared = replace(case, strategy=case.strategy.with_values(tensor_sequence_parallel="gathered"))
            return (
                ()
                if any(rule.key == setting.key and rule.broken(shared) for rule in RULES)
                else ("gathered",)
            )
        return ()

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {TENSOR_AXIS.name: strategy[TENSOR_PARALLEL]}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        degree = layout.degree(TENSOR_AXIS)
        if degree == 1:
            return ""
        shares = {"none": "", "gathered": "+sp", "regathered": "+sp regathered"}
        return f"tp{degree}{shares[strategy[TENSOR_SEQUENCE_PARALLEL]]}"

    def apply(self, site: Site) -> None:
        if site.strategy[TENSOR_PARALLEL] == 1:
            return
        from shardwise.runtime.parallel.tensor import shard_layers

        shares = site.strategy[TENSOR_SEQUENCE_PARALLEL]
        if shares != "none":
            site.options.random_per_rank = True  # no two ranks compute the same
            site.options.sequence_shards = site.strategy[TENSOR_PARALLEL]
        mesh = site.context.mesh[TENSOR_AXIS.name]
        view = site.view
        for stage in view.stages:
            shard_layers(
                stage.model, view.tensor_plan(), mesh, shares != "none", shares == "regathered", view.own_axes
            )
