"""Expert parallelism: ranks divide the experts of every mixture layer among them (GShard, Lepikhin et al. 2020).

The ranks are data-parallel ranks, and those that share the work of a layer (of a sequence, or of tensor parallelism).
They have different tokens, or take different ones of the same. Each sends a token once to each rank that has experts
of it, and gets the results back, by all-to-alls (runtime/parallel/dispatch.py). All other weights are equal on these
ranks, so ZeRO divides their states over this axis, too. Experts have a mesh of their own, without it.

Shapes are static, so a plan, compiled blocks and CUDA graphs stay exact, and the host waits for nothing. A rank has
room for ``expert_capacity`` times the rows that a balanced router would send from each other rank, and for as many
times the pairs of a token and an expert. What exceeds either is not dropped: the step that needed more room updates
nothing, and is run again with as much (``Capacity``). So memory and time of a plan are those of the busiest rank at
this imbalance.

Refused: sizes that the host reads before every exchange. It waits for the device in every layer, and the peak of a step
is known after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Axis, Layout, Setting, Strategy
from shardwise.technique.base import MOST_RANKS, Dividing
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site
from shardwise.technique.tensor import TENSOR_SEQUENCE_PARALLEL
from shardwise.technique.zero import REPLICATE, ZERO_STAGE

_NO_LIMIT = 1024.0
"""A limit above every imbalance of real meshes; a rank's room never exceeds the rows that can reach it."""
# Within the shards of ZeRO: ranks that exchange tokens in every layer are neighbours, in one node if possible.
EXPERT_AXIS = Axis(
    "expert", position=25, piece="experts", samples=True, tokens=True, blocking=True, layers="experts"
)

EXPERT_PARALLEL: Setting[int] = Setting(
    "expert_parallel",
    default=1,
    doc="expert parallelism: number of ranks among which the experts of a layer are divided, those of sequence_parallel"
    " and tensor_parallel included",
    kind=int,
    minimum=1,
    maximum=MOST_RANKS,
)
EXPERT_CAPACITY: Setting[float] = Setting(
    "expert_capacity",
    default=1.25,  # assumed; each run measures its own (load_imbalance in metrics.jsonl)
    doc="with expert_parallel: a rank's room for tokens and for their choices of its experts, relative to a balanced"
    " router; a step that needs more is run again with more room",
    kind=float,
    minimum=1.0,
    maximum=_NO_LIMIT,
    compared=(1.0, 1.5, 2.0),
    step=0.05,
)


def _degree_divides(case: Case, degree: int) -> bool:
    """Whether experts can be divided over so many ranks of this mesh."""
    inner = case.ranks(lambda axis: axis.within_layer)
    copies = case.strategy[REPLICATE]
    if case.strategy[ZERO_STAGE] == 0:
        copies = 1
    whole = degree % inner == 0 and case.data_ranks % (degree // inner * copies) == 0
    return whole and (case.experts or 0) % degree == 0


def _nearest_expert_degree(case: Case) -> Mapping[str, object]:
    degrees = range(min(case.strategy[EXPERT_PARALLEL], case.world_size), 1, -1)
    return {"expert_parallel": next((degree for degree in degrees if _degree_divides(case, degree)), 1)}


def _on(case: Case) -> bool:
    return case.strategy[EXPERT_PARALLEL] > 1


RULES: tuple[Rule, ...] = (
    Rule(
        key="expert_parallel",
        reason="the model has no experts",
        broken=lambda case: _on(case) and case.experts == 0,
        nearest=lambda case: {"expert_parallel": 1},
    ),
    Rule(
        key="expert_parallel",
        reason="it must be a multiple of sequence_parallel x tensor_parallel and divide the number of experts, and"
        " the ranks of one stage and replica must be a multiple of it",
        broken=lambda case: (
            _on(case) and case.experts != 0 and not _degree_divides(case, case.strategy[EXPERT_PARALLEL])
        ),
        nearest=_nearest_expert_degree,
    ),
    Rule(
        key="expert_capacity",
        reason="only expert_parallel above 1 reads it",
        broken=lambda case: not _on(case) and case.strategy[EXPERT_CAPACITY] != EXPERT_CAPACITY.default,
        nearest=lambda case: {"expert_capacity": EXPERT_CAPACITY.default},
    ),
)


class ExpertParallel(Dividing):
    """Counts the tokens of experts, and divides the experts of every mixture layer."""

    name = "expert"
    on_frozen = True
    axes = (EXPERT_AXIS,)
    settings = (EXPERT_PARALLEL, EXPERT_CAPACITY)
    rules = RULES

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """Degrees within a node, and of whole nodes: there, too, an exchange may take less than gathering weights."""
        if setting is not EXPERT_PARALLEL or not case.experts:
            return ()
        node = case.devices_per_node or case.world_size
        degrees = (*range(2, node), *range(node, case.world_size + 1, node))
        plain = replace(case, strategy=case.strategy.with_values(expert_parallel=1))
        return (1, *(degree for degree in degrees if _degree_divides(plain, degree)))

    def has_effect(self, setting: Setting[Any], case: Case) -> bool:
        return case.experts != 0 if setting is EXPERT_PARALLEL else _on(case)

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {EXPERT_AXIS.name: strategy[EXPERT_PARALLEL]}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        degree, capacity = strategy[EXPERT_PARALLEL], strategy[EXPERT_CAPACITY]
        room = "" if capacity == EXPERT_CAPACITY.default else f" capacity {capacity:g}"
        return f"ep{degree}{room}" if degree > 1 else ""

    def apply(self, site: Site) -> None:
        _count_tokens(site)
        if site.strategy[EXPERT_PARALLEL] == 1:
            return
        _refuse_asynchronous(site)
        _require_experts(site)
        from shardwise.runtime.parallel.dispatch import Room, divide_experts
        from shardwise.runtime.torch_private import flattened

        layout, mesh = site.context.layout, site.context.mesh
        axes = [a for a, degree in layout.axes if degree > 1 and (a == EXPERT_AXIS or a.within_layer)]
        names = tuple(axis.name for axis in axes)
        own = mesh[names] if len(names) == 1 else flattened(mesh[names], "+".join(names))
        if len(names) > 1:
            site.options.groups.append(("+".join(names), own.get_group()))
        # Ranks of a layer have the same tokens, unless tensor ranks share out the sequence between layers.
        sharded = site.strategy[TENSOR_SEQUENCE_PARALLEL] != "none"
        same_tokens = [] if sharded else [axis.name for axis in axes if not axis.tokens]
        shares = mesh[same_tokens[0]].get_group() if same_tokens else None
        # No step of a frozen model runs again: it has room for all that a rank can get.
        room = Room(site.strategy[EXPERT_CAPACITY] if site.trained else _NO_LIMIT)
        divided = divide_experts(site.view.model, own, shares, room)
        site.view.own_axes |= dict.fromkeys(divided, tuple(axes))
        if site.trained:
            site.options.capacity = room
            site.options.sampling.append(room.unlimited)


def _count_tokens(site: Site) -> None:
    """Before anything divides tokens: how many each expert gets, if all layers have as many experts."""
    if site.trained and len(set(site.view.experts.values())) == 1:
        from shardwise.runtime.parallel.expert_load import ExpertLoad

        stages = [(stage.model, stage.blocks) for stage in site.view.stages]
        load = site.options.expert_load = ExpertLoad(site.view.experts, stages)
        if load.balances and site.options.place is not None and not site.options.place.synchronous:
            raise RecipeError(
                "the biases of the routers cannot balance the experts",
                where="model.router_bias",
                why="stages of this schedule are not in the same step, so their tokens are not counted together",
                fix="set strategy.pipeline_schedule: 1f1b, or model.router_bias_rate: 0",
            )


def _require_experts(site: Site) -> None:
    if not site.view.experts and site.context.depth is None:  # the first blocks may be dense
        raise RecipeError(
            "no module has experts that can be divided",
            where="strategy.expert_parallel",
            why="experts are modules of 3-D weights, as transformers 5 has them",
            fix="the nearest that works is expert_parallel: 1",
        )


def _refuse_asynchronous(site: Site) -> None:
    if site.options.place is not None and not site.options.place.synchronous:
        raise RecipeError(
            f"expert_parallel cannot be {site.strategy[EXPERT_PARALLEL]}",
            where="strategy.expert_parallel",
            why="stages of this schedule are not in the same step, so they cannot agree to run a step again",
            fix="the nearest that works is expert_parallel: 1",
        )
