"""Worker processes of tests/families: plan a config.json; compare logits with those of transformers."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.reference import reference_model

LENGTH = 256
STRATEGY = {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 1, "activation_checkpointing": "full"}


def plan(folder: str) -> dict[str, Any]:
    """The plan of a ``config.json`` on 8 H100: parameters, bytes at the peak of a rank, seconds of a step."""
    values = {
        "model": {"hf": folder},
        "data": {"sequence_length": LENGTH},
        "steps": 1,
        "batch_size": 8,
        "cluster": {"preset": "8xH100-80GB"},
    }
    recipe = recipe_of(values, SETTINGS)
    blueprint = blueprint_of(recipe)
    found = predict(recipe, blueprint, strategy_from(STRATEGY), cluster_of(recipe.cluster))
    return {
        "parameters": found.parameters,
        "peak_bytes": found.peak.bytes,
        "seconds": found.step.seconds,
    }


def dry(recipe: Recipe, settings: dict[str, Any]) -> int:
    """The bytes at the peak of a dry run of the recipe's cluster."""
    return dry_run(
        recipe, blueprint_of(recipe), strategy_from(settings), cluster_of(recipe.cluster)
    ).peak.bytes


def logit_difference(folder: str, vocabulary: int, length: int) -> float:
    """The largest difference from the logits of ``from_pretrained``, relative to the largest logit, in fp32."""
    import transformers

    values = {"model": {"hf": folder}, "data": {"sequence_length": length}, "steps": 1, "batch_size": 1}
    blueprint = blueprint_of(recipe_of(values, SETTINGS))
    model = reference_model(blueprint, 0, torch.float32).eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits
        return float((blueprint.logits(model, ids) - expected).abs().max() / expected.abs().max())
