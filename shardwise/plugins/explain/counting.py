"""Model state under ZeRO (model_state.py has the paper's arithmetic), and recomputed blocks, by dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.core.block_times import BlockTimes
from shardwise.core.progress import Progress, silent
from shardwise.plugins.explain.model_state import CountedState, state_bytes
from shardwise.recipe.load import recipe_of
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import Recipe

PER_NODE = 8
SEQUENCE_TOKENS = 128
"""Tokens of a sequence in the dry runs of ``counted_states``: model state does not depend on them."""


SHOWN_KINDS = ("none", "selective", "full", "every:2", "sqrt", "recursive:1", "recursive:3")
"""The values of activation_checkpointing that are shown; recursive:1 is the memory-poor extreme."""


SMALL_DEPTH = 16


def checkpointed(
    model: str | None = None,
    depth: int | None = None,
    tokens: int = SEQUENCE_TOKENS,
    progress: Progress = silent,
) -> Iterator[tuple[str, BlockTimes]]:
    """One sequence of a model under each of SHOWN_KINDS, by dry runs in bf16 on an H100.

    Args:
        model: as of ``asked_recipe``; None for a small decoder in fp32 on the CPU.
        depth: its number of blocks instead of its own.

    Raises:
        RecipeError: there is no such model.
    """
    from shardwise.dryrun.run import dry_run
    from shardwise.hardware.cluster import cluster_of
    from shardwise.model.open import blueprint_of
    from shardwise.recipe.sections import ClusterSpec
    from shardwise.technique import strategy_from

    device, precision = ("cpu", "fp32") if model is None else ("H100-80GB", "bf16")
    recipe = _small_decoder(depth or SMALL_DEPTH) if model is None else asked_recipe(model, tokens)
    cluster = cluster_of(ClusterSpec(device=device, devices_per_node=1))
    blueprint = blueprint_of(recipe)
    for name in SHOWN_KINDS:
        progress(f"activation_checkpointing: {name}")
        strategy = strategy_from(
            {"activation_checkpointing": name, "micro_batch_size": 1, "precision": precision}
        )
        run = dry_run(recipe, blueprint, strategy, cluster, depth=None if model is None else depth)
        assert run.blocks is not None
        yield name, run.blocks


def _small_decoder(depth: int) -> Recipe:
    model = {"layers": depth, "width": 64, "heads": 2, "ffn": 176, "vocab": 256}
    return recipe_of({"model": model, "data": {"sequence_length": 64}, "steps": 1, "batch_size": 1})


def asked_recipe(model: str, tokens: int = SEQUENCE_TOKENS, batch: int = 1) -> Recipe:
    """A recipe for one step of a preset, a model folder or a Hub id, in bf16 with Adam."""
    named = {"preset": model} if model in PRESETS else {"hf": model}
    values = {"model": named, "data": {"sequence_length": tokens}, "steps": 1, "batch_size": batch}
    return recipe_of(values)


def tokens_within(model: str, tokens: int) -> int:
    """So many tokens, or the model's limit. Raises RecipeError: there is no such model."""
    from shardwise.model.open import blueprint_of

    return min(tokens, blueprint_of(asked_recipe(model)).context or tokens)


def parameter_count(model: str) -> int:
    """The number of parameters."""
    from shardwise.model.open import blueprint_of

    return blueprint_of(asked_recipe(model)).parameter_count()


def counted_states(
    model: str, cells: Sequence[tuple[int, int]], tokens: int = SEQUENCE_TOKENS, progress: Progress = silent
) -> Iterator[CountedState]:
    """The state of (stage, ranks) on H100s, one sequence per rank.

    Raises:
        RecipeError: there is no such model.
    """
    from shardwise.hardware.cluster import cluster_of
    from shardwise.model.open import blueprint_of
    from shardwise.planner.predict import predict
    from shardwise.recipe.sections import ClusterSpec
    from shardwise.technique import strategy_from

    blueprint = blueprint_of(asked_recipe(model, tokens=tokens))
    for stage, ranks in cells:
        progress(f"ZeRO {stage} on {ranks} ranks")
        nodes, per_node = (ranks // PER_NODE, PER_NODE) if ranks % PER_NODE == 0 else (1, ranks)
        cluster = cluster_of(ClusterSpec(device="H100-80GB", nodes=nodes, devices_per_node=per_node))
        strategy = strategy_from({"zero_stage": stage, "precision": "bf16", "micro_batch_size": 1})
        asked = asked_recipe(model, tokens=tokens, batch=ranks)
        prediction = predict(asked, blueprint, strategy, cluster)
        ledgers = {phase: peak.ledger for phase, peak in prediction.peaks.items()}
        yield CountedState(
            stage,
            ranks,
            ledgers["clip"],
            max(map(state_bytes, ledgers.values())),
            max(ledger.activations for ledger in ledgers.values()),
            prediction.sum_bytes,
        )
