"""Model FLOPs against the papers' formulas, and executed FLOPs against model FLOPs, exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.dryrun.model_flops import model_flops
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.planner.ranks import predict_worst
from shardwise.planner.timing import predicted_step_time
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.flops import FlopCounter, product_shape
from shardwise.technique import SETTINGS, layout_of, strategy_from
from tests.harness.dry_runs import dry_run

MODEL = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 512, "context": 64}
LENGTH, BATCH = 32, 4
SCORES = MODEL["layers"] * MODEL["width"] * LENGTH * LENGTH * BATCH
"""FLOPs of one causal product of attention in all layers: half of 2 h s^2 per sequence and layer."""


def recipe(world_size: int = 1, model: dict[str, Any] = MODEL, **more: Any) -> Recipe:
    cluster = {"preset": "1xH100-80GB", "nodes": world_size}
    values = {"model": model, "data": {"sequence_length": LENGTH}, "steps": 2, "batch_size": BATCH}
    return recipe_of({**values, "cluster": cluster, **more}, SETTINGS)


def counted(asked: Recipe, kind: str = "cuda") -> int:
    return model_flops(blueprint_of(asked), asked.data, asked.batch_size, "bf16", kind)


def executed(asked: Recipe, **settings: Any) -> int:
    """FLOPs of the first rank."""
    strategy = strategy_from({"precision": "bf16", **settings})
    return dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster)).cost.flops


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_six_per_weight_and_token(kind: str) -> None:
    """PaLM's 6 N + 12 L H Q T per token (Chowdhery et al. 2022, appendix B), with half of causal attention.

    N are the weights in matrix products, so without the embedding and the norms.
    """
    asked = recipe()
    embedding, norms = MODEL["vocab"] * MODEL["width"], (2 * MODEL["layers"] + 1) * MODEL["width"]
    weights = blueprint_of(asked).parameter_count() - embedding - norms
    palm = 6 * weights + 12 * MODEL["layers"] * MODEL["width"] * LENGTH // 2
    assert counted(asked, kind) == palm * BATCH * LENGTH


def test_a_gpt_model_has_the_flops_of_korthikanti() -> None:
    """72 B L s h^2 (1 + s / 6h + V / 12hL) (Korthikanti et al. 2022, appendix A), with half of causal attention."""
    width, layers, vocab = 64, 4, 512
    gpt = {"family": "gpt2", "layers": layers, "width": width, "heads": 4, "ffn": 4 * width, "vocab": vocab}
    asked = recipe(model={**gpt, "context": 64})
    products = 72 * BATCH * layers * LENGTH * width**2
    attention = 12 * BATCH * layers * LENGTH**2 * width // 2
    logits = 6 * BATCH * LENGTH * width * vocab
    assert counted(asked) == products + attention + logits


NF4 = pytest.param({"rank": 4, "quantize": "nf4"}, marks=pytest.mark.long)


@pytest.mark.parametrize("adapter", [None, {"rank": 4}, NF4])
def test_a_step_executes_them_and_the_scores_once_more(adapter: dict[str, Any] | None) -> None:
    """Without recomputation, frozen weights or not: the backward kernel of attention repeats one product."""
    asked = recipe(adapter=adapter)
    assert executed(asked) == counted(asked) + SCORES


def test_frozen_weights_have_no_gradient() -> None:
    """4 per frozen weight and token instead of 6, but for the first inputs, which need no gradient either."""
    full, lora = counted(recipe()), counted(recipe(adapter={"rank": 4}))
    assert 0.64 < lora / full < 0.75


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (4, {"zero_stage": 3}),
        (2, {"tensor_parallel": 2}),
        (2, {"sequence_parallel": 2, "sequence_method": "ulysses"}),
        (2, {"sequence_parallel": 2, "sequence_method": "ring"}),
    ],
)
def test_all_ranks_together_execute_the_same(world_size: int, settings: dict[str, Any]) -> None:
    asked = recipe(world_size)
    assert world_size * executed(asked, **settings) == counted(asked) + SCORES


def test_mfu_does_not_count_recomputation_or_depend_on_the_strategy() -> None:
    asked = recipe(2)
    blueprint, cluster = blueprint_of(asked), cluster_of(asked.cluster)
    peak = 2 * cluster.device.peak_flops("bf16")
    for settings in ({}, {"activation_checkpointing": "full"}):
        strategy = strategy_from({"precision": "bf16", **settings})
        found = predict(asked, blueprint, strategy, cluster)
        assert found.step.model_flops == counted(asked)
        assert found.step.mfu == pytest.approx(counted(asked) / peak / found.step.seconds)


@pytest.mark.long
def test_mfu_of_a_pipeline_is_that_of_all_stages() -> None:
    asked = recipe(2)
    cluster, strategy = (
        cluster_of(asked.cluster),
        strategy_from({"pipeline_parallel": 2, "precision": "bf16"}),
    )
    step = predict_worst(asked, blueprint_of(asked), strategy, cluster).step
    assert step.mfu == pytest.approx(counted(asked) / 2 / cluster.device.peak_flops("bf16") / step.seconds)


def test_ring_and_ulysses_take_the_same_time_to_multiply() -> None:
    """Long sequences: attention outweighs the launch of its kernels, which a ring has more of. Of cuDNN's attention
    a ring has no kernel.
    """
    asked = recipe(4, data={"sequence_length": 65536}, model={**MODEL, "layers": 1, "context": 65536})
    hopper, seconds = cluster_of(asked.cluster), {}
    cluster = replace(hopper, device=replace(hopper.device, attention=("flash", "efficient")))
    for method in ("ring", "ulysses"):
        strategy = strategy_from({"precision": "bf16", "sequence_parallel": 4, "sequence_method": method})
        run = dry_run(asked, blueprint_of(asked), strategy, cluster)
        split = predicted_step_time(run.cost, layout_of(strategy, 4), cluster).split
        seconds[method] = split["matrix products"]
    assert seconds["ring"] == pytest.approx(seconds["ulysses"], rel=1e-3)


@pytest.mark.parametrize("backward", [False, True])
def test_a_causal_kernel_skips_half_and_a_masked_one_nothing(backward: bool) -> None:
    """Two products of 2 s^2 d per head forward, and five backward (Dao et al. 2022, algorithm 4)."""
    batch, heads, length, width = 2, 3, 16, 8
    full = 2 * batch * heads * length**2 * width * (7 if backward else 2)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for options, share in (({}, 1.0), ({"is_causal": True}, 0.5), ({"attn_mask": mask}, 1.0)):
        q, k, v = (torch.randn(batch, heads, length, width, requires_grad=backward) for _ in range(3))
        with FlopCounter() as counter:
            out = F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
            if backward:
                out.sum().backward()
        assert counter.flops == share * full
        assert counter.recomputed == (share * full / 7 if backward else 0)


@pytest.mark.parametrize("batch", [(), (3,)], ids=["addmm_", "baddbmm_"])
def test_a_product_that_is_added_in_place_is_counted(batch: tuple[int, ...]) -> None:
    left, right, into = torch.ones(*batch, 4, 5), torch.ones(*batch, 5, 6), torch.ones(*batch, 4, 6)
    with FlopCounter() as counter:
        into.baddbmm_(left, right) if batch else into.addmm_(left, right)
    assert counter.flops == 2 * 4 * 5 * 6 * math.prod(batch)
    operation = torch.ops.aten.baddbmm_.default if batch else torch.ops.aten.addmm_.default
    assert product_shape(operation, (into, left, right)) == (math.prod(batch), 4, 6, 5)


def test_a_chunked_loss_in_fp32_computes_no_more_than_a_whole_one() -> None:
    """Its chunks are added to the gradient of the head in place."""
    asked = recipe(4)
    flops = [executed(asked, precision="fp32", loss=loss) for loss in ("logits", "chunked")]
    assert flops[0] == flops[1]
