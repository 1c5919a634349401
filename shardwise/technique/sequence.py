"""Sequence parallelism: the tokens of one sequence over several ranks, for contexts that do not fit on one.

    ulysses  all-to-alls before and after attention, so that each rank attends with a share of the heads to all
             tokens (model/ulysses.py). Traffic per rank falls with the degree; the degree must divide the heads
    ring     queries stay, keys and values travel from rank to rank beside the computation (model/ring.py). Any
             degree; traffic per rank does not fall, but takes keys and values alone, which are few where heads are
             grouped

Ranks of the axis read the same samples and keep a part of each: contiguous, or for the ring two chunks that balance
causal attention. All of a rank's activations are those of its part. Weights are the same on all of them, and
technique/zero.py divides state over this axis as over its own.

After tensor parallelism, and before whatever wraps blocks: the mode that meets attention (model/sequence.py) is entered
by the blocks themselves, below that, and so again when they are recomputed.

Refused: dividing the sequence for norms and residuals alone (Megatron's sequence parallelism), which belongs to
tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import RecipeError
from shardwise.core.presets import dimensions_of
from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.technique.base import Site, divides_world
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING, BUDGET

if TYPE_CHECKING:
    from shardwise.model.sequence import Attend

SEQUENCE_PARALLEL: Setting[int] = Setting(
    "sequence_parallel",
    default=1,
    doc="ranks over which the tokens of each sequence are divided",
    kind=int,
    minimum=1,
)

SEQUENCE_METHOD: Setting[str] = Setting(
    "sequence_method",
    default="ulysses",
    doc="how ranks see each other's tokens: ulysses (all-to-all, heads over ranks) or ring (keys and values travel)",
    choices=("ulysses", "ring"),
)


def _pieces(strategy: Strategy) -> int:
    """Into how many equal pieces a sequence is cut; the ring gives each rank two."""
    return strategy[SEQUENCE_PARALLEL] * (2 if strategy[SEQUENCE_METHOD] == "ring" else 1)


def _uneven(case: Case) -> bool:
    divided = case.strategy[SEQUENCE_PARALLEL] > 1
    return divided and case.recipe.data.sequence_length % _pieces(case.strategy) != 0


def _heads(case: Case) -> int:
    """Query heads of each tensor-parallel rank; 0 where the recipe does not tell."""
    spec = case.recipe.model
    if spec.hf is not None or spec.factory is not None:
        return 0
    try:
        heads = dimensions_of(spec).heads
    except RecipeError:  # told apart from this rule, in words of its own
        return 0
    return heads // int(str(case.strategy.values.get("tensor_parallel", 1)))


def _splits_heads(case: Case) -> bool:
    return (
        case.strategy[SEQUENCE_METHOD] == "ulysses" and _heads(case) % case.strategy[SEQUENCE_PARALLEL] != 0
    )


def _nearest(case: Case) -> Mapping[str, object]:
    """The largest smaller degree that breaks none of the rules here; the other method, where only that helps."""
    others = case.model_ranks // case.strategy[SEQUENCE_PARALLEL]
    for degree in range(case.strategy[SEQUENCE_PARALLEL] - 1, 1, -1):
        changed = _with(case, sequence_parallel=degree)
        if case.world_size % (degree * others) == 0 and not _uneven(changed) and not _splits_heads(changed):
            return {"sequence_parallel": degree}
    if _splits_heads(case) and not _uneven(_with(case, sequence_method="ring")):
        return {"sequence_method": "ring"}
    return {"sequence_parallel": 1}


def _ring_within_a_budget(case: Case) -> bool:
    ring = case.strategy[SEQUENCE_PARALLEL] > 1 and case.strategy[SEQUENCE_METHOD] == "ring"
    return ring and BUDGET.number(case.strategy[ACTIVATION_CHECKPOINTING]) is not None


def _with(case: Case, **changes: object) -> Case:
    return Case(case.strategy.with_values(**changes), case.world_size, case.recipe, case.model_ranks)


RULES: tuple[Rule, ...] = (
    divides_world(SEQUENCE_PARALLEL),
    Rule(
        key="sequence_parallel",
        reason="attention over divided sequences takes no mask, which keeps the documents of data.packing apart",
        broken=lambda case: case.strategy[SEQUENCE_PARALLEL] > 1 and case.recipe.data.packing,
        nearest=lambda case: {"sequence_parallel": 1},
    ),
    Rule(
        key="activation_checkpointing",
        reason="what a budget keeps of a ring is more than its plan says in this version",
        broken=_ring_within_a_budget,
        nearest=lambda case: {"activation_checkpointing": "selective"},
    ),
    Rule(
        key="sequence_parallel",
        reason="sequences are cut into equal pieces, one per rank (ulysses) or two (ring): their number must divide"
        " data.sequence_length",
        broken=_uneven,
        nearest=_nearest,
    ),
    Rule(
        key="sequence_parallel",
        reason="with sequence_method ulysses the ranks share out whole query heads",
        broken=_splits_heads,
        nearest=_nearest,
    ),
)


@dataclass(frozen=True)
class SequenceParallel:
    """Divides batches along the sequence, and has attention see all of it."""

    name: str = "sequence"
    settings: Sequence[Setting[Any]] = (SEQUENCE_PARALLEL, SEQUENCE_METHOD)
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {"sequence": strategy[SEQUENCE_PARALLEL]}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        degree = strategy[SEQUENCE_PARALLEL]
        return f"{strategy[SEQUENCE_METHOD]}×{degree}" if degree > 1 else ""

    def apply(self, site: Site) -> None:
        if site.strategy[SEQUENCE_PARALLEL] == 1:
            return
        from shardwise.model.sequence import DividedAttention, Share, refusal

        if site.indivisible:
            raise refusal(site.indivisible)
        balanced = site.strategy[SEQUENCE_METHOD] == "ring"
        share = Share(site.mesh.get_local_rank("sequence"), site.layout.degree("sequence"), balanced)
        site.batch_transforms.append(share.of)
        for model, units in zip(site.parts or [site.model], site.stretches, strict=True):
            DividedAttention(model, tuple(units) or (model,), _attend(site, balanced))


def _attend(site: Site, ring: bool) -> Attend:
    from torch import Tensor

    from shardwise.model.ring import ring_attention
    from shardwise.model.sequence import refusal
    from shardwise.model.ulysses import ulysses_attention

    group = site.mesh.get_group("sequence")

    def by_ulysses(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> Tensor:
        return ulysses_attention(q, k, v, dropout, scale, group)

    def by_ring(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> Tensor:
        if dropout:
            raise refusal("the ring has no dropout of attention's probabilities; sequence_method ulysses has")
        return ring_attention(q, k, v, scale, group)

    return by_ring if ring else by_ulysses
