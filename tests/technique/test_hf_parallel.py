"""Tensor and pipeline parallelism of transformers' families, each of which needs something of its own.

tests/families trains all families in all ways; a long test repeats its table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from tests.families import __main__ as families
from tests.harness.corpora import EVEN
from tests.harness.families import save_tiny
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool

pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent.parent
TABLE = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text(encoding="utf-8"))[
    "families"
]


def recipe_for(folder: Path, **sections: Any) -> Recipe:
    values = {
        "model": {"hf": str(folder)},
        "data": {"source": EVEN, "sequence_length": 16},
        "steps": 4,
        "batch_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    return recipe_of(values | sections, SETTINGS)


def trials_of(
    families: tuple[str, ...], folder: Path, settings: dict[str, Any], **sections: Any
) -> list[Trial]:
    trials = []
    for family in families:
        save_tiny(family, folder / family, vocab_size=264)
        recipe = recipe_for(folder / family, **sections)
        trials.append(Trial(recipe, 2, {"precision": "fp32", "micro_batch_size": 2, **settings}))
    return trials


def test_tensor_parallelism_of_experts_gathered_norms_and_latent_attention(
    parity: Parity, tmp_path: Path
) -> None:
    families = ("mixtral", "olmo2", "deepseek_v2")
    parity.all_pass(*trials_of(families, tmp_path, {"tensor_parallel": 2}))


@pytest.mark.long
def test_adapters_of_experts_and_of_gathered_layers(parity: Parity, tmp_path: Path) -> None:
    adapter = {"rank": 2, "targets": "all"}
    settings = {"tensor_parallel": 2}
    parity.all_pass(*trials_of(("qwen2_moe", "phi3"), tmp_path, settings, adapter=adapter))


def test_pipelines_of_unlike_blocks_scaled_logits_and_scaled_branches(parity: Parity, tmp_path: Path) -> None:
    """Cohere scales its logits, MiniCPM each residual branch by the number of blocks."""
    families = ("gpt_oss", "cohere", "minicpm3")
    parity.all_pass(*trials_of(families, tmp_path, {"pipeline_parallel": 2}))


TENSOR_IN_STAGES = {"tensor_parallel": 2, "pipeline_parallel": 2}


@pytest.mark.parametrize("rank", [0, 2])
def test_stages_are_sharded_without_what_another_stage_has(rank: int, tmp_path: Path) -> None:
    """transformers' plan is of the whole model; the first stage has no head, the last no embedding."""
    save_tiny("llama", tmp_path, vocab_size=264)
    recipe = recipe_for(tmp_path, cluster={"device": "cpu", "devices_per_node": 4})
    strategy = strategy_from({"micro_batch_size": 2, **TENSOR_IN_STAGES})
    cluster = cluster_of(recipe.cluster)
    assert dry_run(recipe, blueprint_of(recipe), strategy, cluster, rank=rank).peak.bytes > 0


@pytest.mark.long
def test_tensor_parallelism_within_stages(parity: Parity, tmp_path: Path) -> None:
    for family in ("llama", "gemma2", "mixtral"):
        save_tiny(family, tmp_path / family, vocab_size=264)
        settings = {"precision": "fp32", "micro_batch_size": 2, **TENSOR_IN_STAGES}
        parity.all_pass(Trial(recipe_for(tmp_path / family), 4, settings))


def test_experts_are_held_once_and_their_results_are_summed(tmp_path: Path) -> None:
    """Rank r has half of the experts, whole; a forward pass sums one more [tokens, width] than attention does."""
    save_tiny("mixtral", tmp_path, vocab_size=264)
    recipe = recipe_for(tmp_path, cluster={"device": "cpu", "devices_per_node": 2})
    strategy = strategy_from({"tensor_parallel": 2, "micro_batch_size": 2})
    found = dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
    whole = blueprint_of(recipe).parameter_count()
    replicated = 5 * 32 + 2 * 4 * 32  # norms and routers; experts, attention, embedding and head are halved
    rotary = 2 * 4
    counts = 2 * 4 * 8  # of the tokens of each expert, int64
    held = found.peaks["setup"].ledger.parameters
    assert held == 4 * ((whole - replicated) // 2 + replicated + rotary) + counts
    sums = [c for c in found.cost.collectives if (c.phase, c.axis) == ("forward", "tensor")]
    hidden = [c.calls for c in sums if c.bytes == 4 * 2 * 16 * 32]
    assert hidden == [2 * 5], "two micro-batches: embedding, and attention and experts of two blocks"


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("granite", {"pipeline_parallel": 2}, "its embeddings are changed before they enter the first block"),
        (
            "gemma4_text",
            {"pipeline_parallel": 2},
            "its embed_tokens_per_layer is neither embedding, block nor norm",
        ),
        ("glm_moe_dsa", {"pipeline_parallel": 2}, "its blocks pass more than hidden states to later ones"),
        ("gpt2", {"pipeline_parallel": 2}, "transformers has no plan of embedding, blocks and norm for gpt2"),
        ("gpt_oss", {"tensor_parallel": 2}, "transformers' plan for gpt_oss shards no layer of its blocks"),
        ("inkling2_text", {"tensor_parallel": 2}, "Inkling2NormedEmbedding.* does more than look up rows"),
        ("zamba", {"zero_stage": 3}, "block 1 shares .*shared_transf.self_attn.q_proj.weight with block 2"),
        ("dbrx", {}, "aten::nonzero gives a result whose shape depends on values"),
    ],
)
def test_what_cannot_be_divided_or_planned_is_refused_in_one_line(
    family: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path, vocab_size=264)
    recipe = recipe_for(tmp_path, cluster={"device": "cpu", "devices_per_node": 2})
    strategy = strategy_from({"micro_batch_size": 1, **settings})
    with pytest.raises(RecipeError, match=why):
        dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))


@pytest.mark.long
@pytest.mark.parametrize("family", list(TABLE)[::7])
def test_the_table_of_families_is_true(family: str, pool: Pool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(family, model, vocab_size=families.VOCABULARY)
    found = {"logits": families.compared(model, pool), **families.ways_of(family, tuple(families.WAYS), pool)}
    assert found == {name: TABLE[family][name] for name in found}
