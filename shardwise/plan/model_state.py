"""Model state by the ZeRO paper's arithmetic, beside what dry runs of the same model count.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1 and table 1: in 16-bit training with Adam a parameter takes 16
bytes, 2 for the weight, 2 for the gradient and 12 for the fp32 weight and two moments. A stage divides some of them by
the number of ranks. The table has 54 cells: three sizes of models, three stages, 1 to 1,024 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.core.ledger import Ledger
from shardwise.core.progress import Progress, silent
from shardwise.recipe.load import recipe_of
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import Recipe

RANKS = (1, 4, 16, 64, 256, 1024)
SIZES = (7.5e9, 128e9, 1e12)
"""Parameters of the models in the paper's table."""

PAPER: dict[int, tuple[int, int]] = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
"""By ZeRO stage: bytes per parameter that every rank holds, and bytes that are divided by the number of ranks."""

PER_NODE = 8
TOKENS = 128
"""Tokens of a sequence in the dry runs of ``counted``: model state does not depend on them."""


def paper_bytes(stage: int, ranks: int) -> float:
    """Bytes of model state per parameter and rank by the paper."""
    whole, divided = PAPER[stage]
    return whole + divided / ranks


@dataclass(frozen=True)
class CountedState:
    """Model state of one rank as a dry run counts it.

    Attributes:
        update: weights, master weights, gradients and optimizer state before the update.
        most: the most of them at any time, with the weights that are all-gathered.
        activations: saved for the backward pass at their peak.
        total: the peak of everything.
    """

    stage: int
    ranks: int
    update: Ledger
    most: int
    activations: int
    total: int


def state_bytes(ledger: Ledger) -> int:
    """Weights, gradients and optimizer state."""
    return ledger.parameters + ledger.master_weights + ledger.gradients + ledger.optimizer_state


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
