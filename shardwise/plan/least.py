"""The least that a strategy can hold, for discarding it without a dry run of the model itself.

Weights and optimizer state are there at every instant. What they take per parameter depends on precision,
optimizer and adapter, and is counted by dry-running one block, not written down; only the division by the sharding
degree is a formula. Frozen weights, which have no optimizer state, are counted by themselves. What lies in host memory
or on a disk is none of it where the device has a memory of its own. Vectors take more in some optimizers than matrices
do, and a small model has relatively more of them, hence the margin.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from shardwise.core.cluster import Cluster
from shardwise.core.recipe import Recipe, recipe_of
from shardwise.core.sections import AdapterSpec, OptimizerSpec, Quantize
from shardwise.core.strategy import Layout, Strategy
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.model.blueprint import blueprint_of
from shardwise.technique import ORDER, strategy_from

_MARGIN = 0.97
_PROBE = {
    "model": {"layers": 1, "width": 512, "heads": 4, "ffn": 1024, "vocab": 256},
    "data": {"sequence_length": 8},
    "steps": 1,
    "batch_size": 1,
}


def least_state_bytes(
    parameters: tuple[int, int], strategy: Strategy, layout: Layout, recipe: Recipe, cluster: Cluster
) -> int:
    """A lower bound of the bytes that one rank holds at any time, given how many are trained and how many frozen."""
    device = replace(cluster, nodes=1, devices_per_node=1)
    undivided = _undivided(strategy)
    held = parameters[0] * _bytes_per_parameter(undivided, recipe.optimizer, device)
    if parameters[1] and recipe.adapter is not None:
        held += parameters[1] * _bytes_per_frozen(
            undivided, recipe.optimizer, recipe.adapter.quantize, device
        )
    # Copies are the least that any layout makes; what else is copied, only the dry run knows.
    return int(_MARGIN * held * layout.degree("replicate") / layout.world_size)


def _undivided(strategy: Strategy) -> Strategy:
    """The strategy with every setting that lays out a mesh back at its default."""
    kept = {
        setting.key: strategy[setting]
        for technique in ORDER
        if not technique.degrees(strategy, 1)
        for setting in technique.settings
    }
    return strategy_from(kept)


@functools.cache
def _bytes_per_parameter(strategy: Strategy, optimizer: OptimizerSpec, cluster: Cluster) -> float:
    """Weights and optimizer state of one block on one device, per parameter."""
    recipe = recipe_of(_PROBE).model_copy(update={"optimizer": optimizer})
    run = dry_run(recipe, blueprint_of(recipe), strategy, cluster)
    return _state_bytes(run) / run.parameters


@functools.cache
def _bytes_per_frozen(
    strategy: Strategy, optimizer: OptimizerSpec, quantize: Quantize, cluster: Cluster
) -> float:
    """Bytes of the same block's frozen weights, of each."""
    adapter = AdapterSpec(rank=1, quantize=quantize)
    recipe = recipe_of(_PROBE).model_copy(update={"optimizer": optimizer, "adapter": adapter})
    blueprint = blueprint_of(recipe)
    trained, frozen = blueprint.parameter_counts()
    own = trained * _bytes_per_parameter(strategy, optimizer, cluster)
    return max(0.0, (_state_bytes(dry_run(recipe, blueprint, strategy, cluster)) - own) / frozen)


def _state_bytes(run: DryRun) -> int:
    return min(s.ledger.parameters + s.ledger.master_weights + s.ledger.optimizer_state for s in run.timeline)
