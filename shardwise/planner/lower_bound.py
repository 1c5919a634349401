"""A lower bound of a strategy's memory, so that the search can exclude it without a dry run of the model.

Weights and optimizer state are allocated throughout a step. Their bytes per parameter depend on precision, optimizer
and adapter: a dry run of one block counts them. Only the division by the sharding degree is a formula. Frozen weights
have no optimizer state and are counted separately. State in separate host memory or on disk does not count. Some
optimizers need more for vectors than for matrices, and the small block has relatively more vectors: hence a margin of
3 %.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from shardwise.core.strategy import Layout, Strategy
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.hardware.cluster import Cluster
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import AdapterSpec, OptimizerSpec, Quantize, Recipe
from shardwise.technique import ORDER, STATES, strategy_from, within

_BOUND_MARGIN = 0.97
# Only bytes per parameter are read from its dry run, so its size does not matter.
_PROBE = {
    "model": {"layers": 1, "width": 512, "heads": 4, "ffn": 1024, "vocab": 256},
    "data": {"sequence_length": 8},
    "steps": 1,
    "batch_size": 1,
}


def least_state_bytes(
    parameters: tuple[int, int], strategy: Strategy, layout: Layout, recipe: Recipe, cluster: Cluster
) -> int:
    """A lower bound of one rank's memory at any instant, in bytes.

    Args:
        parameters: numbers of trained and of frozen parameters.
    """
    device = replace(cluster, nodes=1, devices_per_node=1)
    undivided = _undivided(strategy)
    optimizer = _stateless(recipe.optimizer)
    held = parameters[0] * _bytes_per_parameter(undivided, optimizer, device)
    if parameters[1] and recipe.adapter is not None:
        held += parameters[1] * _bytes_per_frozen(undivided, optimizer, recipe.adapter.quantize, device)
    return int(_BOUND_MARGIN * held * share_of_states(layout))


def share_of_states(layout: Layout) -> float:
    """What a rank holds of all states, at least. Of the copies of a layout, only the dry run knows those in shards."""
    return layout.state_copies / layout.world_size


def _stateless(optimizer: OptimizerSpec) -> OptimizerSpec:
    """The optimizer; for one of a library, whose state is known only to the dry run, one without state."""
    if optimizer.factory is None:
        return optimizer
    return OptimizerSpec(name="sgd", momentum=0.0)


def _undivided(strategy: Strategy) -> Strategy:
    """The strategy's settings that change weights and optimizer state, and no mesh axis; defaults of all others.

    What costs seconds once, such as compiling, changes neither.
    """
    kept = {
        setting.key: strategy[setting]
        for technique in ORDER
        if not technique.degrees(strategy, 1)
        for setting in technique.settings
        if not setting.once
    }
    return within(strategy_from(kept), STATES)


@functools.cache
def _bytes_per_parameter(strategy: Strategy, optimizer: OptimizerSpec, cluster: Cluster) -> float:
    """Bytes of weights and optimizer state per parameter, of one block on one device."""
    recipe = recipe_of(_PROBE).model_copy(update={"optimizer": optimizer})
    run = dry_run(recipe, blueprint_of(recipe), strategy, cluster)
    return _state_bytes(run) / run.parameters


@functools.cache
def _bytes_per_frozen(
    strategy: Strategy, optimizer: OptimizerSpec, quantize: Quantize, cluster: Cluster
) -> float:
    """Bytes per frozen parameter of the same block."""
    adapter = AdapterSpec(rank=1, quantize=quantize)
    recipe = recipe_of(_PROBE).model_copy(update={"optimizer": optimizer, "adapter": adapter})
    blueprint = blueprint_of(recipe)
    trained, frozen = blueprint.parameter_counts()
    own = trained * _bytes_per_parameter(strategy, optimizer, cluster)
    return max(0.0, (_state_bytes(dry_run(recipe, blueprint, strategy, cluster)) - own) / frozen)


def _state_bytes(run: DryRun) -> int:
    return min(s.ledger.parameters + s.ledger.master_weights + s.ledger.optimizer_state for s in run.timeline)
