"""Model state of a model under ZeRO, counted by dry runs (core/model_state.py has the paper's arithmetic)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.core.model_state import CountedState, state_bytes
from shardwise.core.progress import Progress, silent
from shardwise.recipe.load import recipe_of
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import Recipe

PER_NODE = 8
TOKENS = 128
"""Tokens of a sequence in the dry runs of ``counted``: model state does not depend on them."""


def asked_recipe(model: str, tokens: int = TOKENS, batch: int = 1) -> Recipe:
    """A recipe for one step of a preset, a model folder or a Hub id, in bf16 with Adam."""
    named = {"preset": model} if model in PRESETS else {"hf": model}
    values = {"model": named, "data": {"sequence_length": tokens}, "steps": 1, "batch_size": batch}
    return recipe_of(values)


def parameters_of(model: str) -> int:
    """The number of parameters."""
    from shardwise.model.open import blueprint_of

    return blueprint_of(asked_recipe(model)).parameter_count()


def counted(
    model: str, cells: Sequence[tuple[int, int]], tokens: int = TOKENS, progress: Progress = silent
) -> Iterator[CountedState]:
    """The state of (stage, ranks) on H100s, one sequence per rank.

    Raises:
        RecipeError: there is no such model.
    """
    from shardwise.hardware.cluster import cluster_of
    from shardwise.model.open import blueprint_of
    from shardwise.plan.predict import predict
    from shardwise.recipe.sections import ClusterSpec
    from shardwise.technique import strategy_from

    blueprint = blueprint_of(asked_recipe(model, tokens=tokens))
    for stage, ranks in cells:
        progress(f"ZeRO {stage} on {ranks} ranks")
        nodes, each = (ranks // PER_NODE, PER_NODE) if ranks % PER_NODE == 0 else (1, ranks)
        cluster = cluster_of(ClusterSpec(device="H100-80GB", nodes=nodes, devices_per_node=each))
        strategy = strategy_from({"zero_stage": stage, "precision": "bf16", "micro_batch_size": 1})
        asked = asked_recipe(model, tokens=tokens, batch=ranks)
        found = predict(asked, blueprint, strategy, cluster, quick=True)
        ledgers = {phase: peak.ledger for phase, peak in found.peaks.items()}
        yield CountedState(
            stage,
            ranks,
            ledgers["clip"],
            max(map(state_bytes, ledgers.values())),
            max(ledger.activations for ledger in ledgers.values()),
            found.sum_bytes,
        )
