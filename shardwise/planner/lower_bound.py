"""A lower bound of a strategy's memory, so that the search can exclude it without a dry run of the model.

Weights, gradients and optimizer state take so many bytes per parameter at their highest moment. Small models of two
and of three blocks are dry-run with the strategy's precision, optimizer, adapter and division of the states; what the
third block adds is taken for every parameter. State in separate host memory or on disk does not count. Some optimizers
need more for vectors than for matrices, and the small block has relatively more vectors: hence a margin of 3 %.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.core.strategy import Layout, Strategy
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import Cluster
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import AdapterSpec, OptimizerSpec, Quantize, Recipe
from shardwise.technique import ORDER, STATES, strategy_from, within
from shardwise.technique.base import Dividing

_BOUND_MARGIN = 0.97
_MAX_RANKS = 8
"""Ranks of the larger probe: every dimension of its blocks is a multiple of it, so shards are even."""
# Only bytes per parameter are read from its dry run, so its size does not matter.
_PROBE: dict[str, Any] = {
    "model": {"layers": 2, "width": 512, "heads": 4, "ffn": 1024, "vocab": 256},
    "data": {"sequence_length": 8},
    "steps": 1,
    "batch_size": 1,
}


def least_state_bytes(
    parameters: tuple[int, int], strategy: Strategy, layout: Layout, recipe: Recipe, cluster: Cluster
) -> int:
    """A lower bound of one rank's memory at its highest moment, in bytes.

    Args:
        parameters: numbers of trained and of frozen parameters.
    """
    sharing = layout.ranks(lambda axis: axis.tokens)  # ranks with the same part of the model
    states = _of_states(strategy)
    optimizer = _stateless(recipe.optimizer)
    node = replace(cluster, nodes=1)
    quantize = recipe.adapter.quantize if recipe.adapter is not None else None
    state_bytes = 0.0
    for number, frozen in zip(parameters, (None, quantize), strict=True):
        counted = functools.partial(_bytes_per_parameter, states, optimizer, node, frozen)
        state_bytes += number * _on_ranks(counted, sharing, layout.state_copies) if number else 0
    return int(_BOUND_MARGIN * state_bytes * sharing / layout.world_size)


def _on_ranks(counted: Callable[[int], float], ranks: int, copies: int) -> float:
    """Bytes of a rank per parameter, from probes on 1 and _MAX_RANKS ranks: a part is replicated, a part is sharded.

    Args:
        counted: the bytes of a rank where so many ranks share one copy of the states.
        copies: of the states, on the ``ranks``.
    """
    shards = ranks // copies
    if shards in (1, _MAX_RANKS):
        return counted(shards)
    one, few = counted(1), counted(_MAX_RANKS)
    # Bytes of a rank are replicated + sharded / ranks: solved for both from two probes.
    sharded = (one - few) / (1 - 1 / _MAX_RANKS)
    return one - sharded + sharded / shards


def share_of_states(layout: Layout) -> float:
    """What a rank holds of all states, at least."""
    return layout.state_copies / layout.world_size


def _stateless(optimizer: OptimizerSpec) -> OptimizerSpec:
    """The optimizer; for one of a library, whose state is known only to the dry run, one without state."""
    if optimizer.factory is None:
        return optimizer
    return OptimizerSpec(name="sgd", momentum=0.0)


def _of_states(strategy: Strategy) -> Strategy:
    """The strategy's settings that change weights and states on the ranks that share them; defaults of all others.

    What costs seconds once, such as compiling, changes neither.
    """
    kept: dict[str, object] = {}
    for technique in ORDER:
        if technique.part == STATES or not isinstance(technique, Dividing):
            kept |= {s.key: strategy[s] for s in technique.settings if not s.once}
        if isinstance(technique, Dividing):
            kept |= technique.without_copies()
    return within(strategy_from(kept), STATES)


def divides_states_alike(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies divide the states alike. The bound excludes few that do."""
    dividing = (t for t in ORDER if t.part == STATES and isinstance(t, Dividing))
    return all(one[setting] == other[setting] for technique in dividing for setting in technique.settings)


@functools.cache
def _bytes_per_parameter(
    strategy: Strategy, optimizer: OptimizerSpec, node: Cluster, frozen: Quantize | None, ranks: int
) -> float:
    """Bytes of weights, gradients and optimizer state of a rank that one more parameter adds.

    Args:
        frozen: how a frozen parameter is stored; None for a trained one.
    """
    recipe = recipe_of(_PROBE).model_copy(update={"optimizer": optimizer, "batch_size": ranks})
    if frozen is not None:
        recipe = recipe.model_copy(update={"adapter": AdapterSpec(rank=1, quantize=frozen)})
    # The difference of two depths is that of one block: embeddings and the head cancel out.
    (fewer, *few), (more, *many) = (_state_bytes(recipe, strategy, node, ranks, depth) for depth in (2, 3))
    trained, fixed = (many[i] - few[i] for i in (0, 1))
    if frozen is None:
        return (more - fewer) / trained
    own = trained * _bytes_per_parameter(strategy, optimizer, node, None, ranks)
    return max(0.0, (more - fewer - own) / fixed)


def _state_bytes(
    recipe: Recipe, strategy: Strategy, node: Cluster, ranks: int, depth: int
) -> tuple[int, int, int]:
    """The most bytes of weights, gradients and states of rank 0; both numbers of parameters of ``depth`` blocks."""
    model = recipe.model.model_copy(update={"layers": depth})
    recipe = recipe.model_copy(update={"model": model})
    blueprint = blueprint_of(recipe)
    run = dry_run(recipe, blueprint, strategy, replace(node, devices_per_node=ranks))
    rows = ("parameters", "master_weights", "gradients", "optimizer_state")
    most = max(sum(getattr(point.ledger, row) for row in rows) for point in run.timeline)
    return most, *blueprint.parameter_counts()
