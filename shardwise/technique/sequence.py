"""Context parallelism (``sequence_parallel``): the tokens of a sequence are divided over ranks.

    ulysses  all-to-alls before and after attention, so each rank attends to all tokens with a share of the heads
             (runtime/parallel/ulysses.py). Traffic per rank falls with the degree, which must divide the heads
    ring     keys and values travel from rank to rank while the ranks compute (runtime/parallel/ring.py). Any degree.
             Traffic per rank does not fall, but is small with grouped heads

Ranks of the axis read the same samples, and each keeps a part of the tokens: a contiguous one, or for the ring two
chunks that balance causal attention. Weights are the same on all of them. ZeRO shards state over this axis, too
(technique/zero.py).

It comes after tensor parallelism and before techniques that wrap blocks. The blocks themselves enter the mode that
replaces attention (runtime/parallel/sequence.py), and enter it again when they are recomputed.

Refused: dividing the sequence for norms and residuals alone (Megatron's sequence parallelism). That belongs to tensor
parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.core.strategy import Axis, Layout, Setting, Strategy
from shardwise.technique.base import MOST_RANKS, Dividing, divides_world, divisors
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING, BUDGET
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site

if TYPE_CHECKING:
    from shardwise.runtime.parallel.sequence import Attend

SEQUENCE_AXIS = Axis("sequence", position=30, piece="tokens", tokens=True)

SEQUENCE_PARALLEL: Setting[int] = Setting(
    "sequence_parallel",
    default=1,
    doc="context parallelism (Ulysses or ring): number of ranks among which the tokens of each sequence are divided",
    kind=int,
    minimum=1,
    maximum=MOST_RANKS,
)

SEQUENCE_METHOD: Setting[str] = Setting(
    "sequence_method",
    default="ulysses",
    doc="context parallelism by ulysses (all-to-all over heads) or ring (ring attention: keys and values rotate)",
    choices=("ulysses", "ring"),
)


def _sequence_pieces(strategy: Strategy) -> int:
    """Into how many equal pieces a sequence is cut; the ring gives each rank two."""
    return strategy[SEQUENCE_PARALLEL] * (2 if strategy[SEQUENCE_METHOD] == "ring" else 1)


def _uneven(case: Case) -> bool:
    divided = case.strategy[SEQUENCE_PARALLEL] > 1
    return divided and case.recipe.data.sequence_length % _sequence_pieces(case.strategy) != 0


def _query_heads(case: Case) -> int:
    """Query heads of each rank that computes whole sequences; 0 where the recipe does not tell."""
    heads = 0 if case.dimensions is None else case.dimensions.heads
    return heads // case.ranks(lambda axis: axis.within_layer and not axis.tokens)


def _splits_heads(case: Case) -> bool:
    return (
        case.strategy[SEQUENCE_METHOD] == "ulysses"
        and _query_heads(case) % case.strategy[SEQUENCE_PARALLEL] != 0
    )


def _nearest(case: Case) -> Mapping[str, object]:
    """The largest smaller degree that breaks none of the rules here; the other method, where only that helps."""
    others = case.model_ranks // case.strategy[SEQUENCE_PARALLEL]
    for degree in range(min(case.strategy[SEQUENCE_PARALLEL] - 1, case.world_size), 1, -1):
        if case.world_size % (degree * others) == 0:
            changed = _with(case, sequence_parallel=degree)
            if not _uneven(changed) and not _splits_heads(changed):
                return {"sequence_parallel": degree}
    ring = _with(case, sequence_method="ring")
    if _splits_heads(case) and not _uneven(ring) and not _packed_in_a_ring(ring):
        return {"sequence_method": "ring"}
    return {"sequence_parallel": 1}


def _ring_within_a_budget(case: Case) -> bool:
    ring = case.strategy[SEQUENCE_PARALLEL] > 1 and case.strategy[SEQUENCE_METHOD] == "ring"
    return ring and BUDGET.number(case.strategy[ACTIVATION_CHECKPOINTING]) is not None


def _packed_in_a_ring(case: Case) -> bool:
    ring = case.strategy[SEQUENCE_PARALLEL] > 1 and case.strategy[SEQUENCE_METHOD] == "ring"
    return ring and case.recipe.data.packing


def _without_a_ring(case: Case) -> Mapping[str, object]:
    """Ulysses, or no context parallelism where the degree does not divide the heads."""
    changed = _with(case, sequence_method="ulysses")
    possible = not _uneven(changed) and not _splits_heads(changed)
    return {"sequence_method": "ulysses"} if possible else {"sequence_parallel": 1}


def _with(case: Case, **changes: object) -> Case:
    return replace(case, strategy=case.strategy.with_values(**changes))


RULES: tuple[Rule, ...] = (
    divides_world(SEQUENCE_PARALLEL),
    Rule(
        key="sequence_method",
        reason="the ring takes no mask, which keeps the documents of data.packing apart; ulysses does",
        broken=_packed_in_a_ring,
        nearest=_without_a_ring,
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


class SequenceParallel(Dividing):
    """Divides batches along the sequence, and has attention see all of it."""

    name = "sequence"
    on_frozen = True
    axes = (SEQUENCE_AXIS,)
    settings = (SEQUENCE_PARALLEL, SEQUENCE_METHOD)
    rules = RULES

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """Every degree, with either method."""
        if setting is SEQUENCE_PARALLEL and case.dimensions is not None:
            return divisors(case.world_size // case.model_ranks)
        if setting is SEQUENCE_METHOD and case.strategy[SEQUENCE_PARALLEL] > 1:
            return setting.choices
        return ()

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {SEQUENCE_AXIS.name: strategy[SEQUENCE_PARALLEL]}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        degree = strategy[SEQUENCE_PARALLEL]
        return f"{strategy[SEQUENCE_METHOD]}×{degree}" if degree > 1 else ""

    def apply(self, site: Site) -> None:
        if site.strategy[SEQUENCE_PARALLEL] == 1:
            return
        from shardwise.runtime.parallel.sequence import ContextParallelAttention, TokenShard, refusal
        from shardwise.runtime.parallel.tp_collectives import TPGroup

        if site.view.context_parallel_obstacle:
            raise refusal(site.view.context_parallel_obstacle)
        balanced = site.strategy[SEQUENCE_METHOD] == "ring"
        context = site.context
        rank = context.mesh.get_local_rank(SEQUENCE_AXIS.name)
        degree = context.layout.degree(SEQUENCE_AXIS)
        objective = context.blueprint.minimises
        shard = TokenShard(rank, degree, balanced, objective.per_token, objective.per_sample)
        site.options.batch_transforms.append(shard.shard_batch)
        group = TPGroup.of(context.mesh.get_group(SEQUENCE_AXIS.name))
        for stage in site.view.stages:
            blocks = tuple(stage.blocks) or (stage.model,)
            packed = context.recipe.data.packing
            parallel = ContextParallelAttention(
                stage.model, blocks, _attend(site, balanced), degree, packed, group
            )
            if site.trained:
                site.options.sampling.append(parallel.whole_sequences)


def _attend(site: Site, ring: bool) -> Attend:
    from shardwise.runtime.parallel.sequence import attend_by_ring, attend_by_ulysses

    return partial(
        attend_by_ring if ring else attend_by_ulysses, group=site.context.mesh.get_group(SEQUENCE_AXIS.name)
    )
