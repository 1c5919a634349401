"""What the time model reads of a counted step: shapes of products, and phases and passes of collectives."""

from __future__ import annotations

from shardwise.core.cost import StepCost
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.dry_runs import dry_run

MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 512, "context": 64}


def cost_of(**settings: object) -> StepCost:
    """Of three micro-batches of two sequences of 32 tokens on each of two devices."""
    values = {
        "model": MODEL,
        "data": {"sequence_length": 32},
        "steps": 2,
        "batch_size": 2 * 2 * 3,
        "cluster": {"preset": "2xH100-80GB"},
    }
    asked = recipe_of(values, SETTINGS)
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, **settings})
    return dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster), history=False).cost


def test_products_and_attention_carry_their_shape() -> None:
    kernels = [kernel for kernel in cost_of().kernels if kernel.flops]
    products = {k.shape for k in kernels if k.operation == "aten::mm" and k.phase == "forward"}
    assert (1, 2 * 32, 192, 64) in products and (1, 2 * 32, 64, 192) in products
    attention = [k for k in kernels if "attention" in k.operation]
    assert {k.shape for k in attention} == {(2 * 4, 32, 32, 16)}
    for kernel in kernels:
        if "mm" in kernel.operation:
            count, rows, columns, inner = kernel.shape
            assert kernel.flops == 2 * count * rows * columns * inner


def test_collectives_say_when_they_are_called() -> None:
    def passes(stage: int, kind: str) -> set[tuple[str, int]]:
        cost = cost_of(zero_stage=stage)
        assert cost.micro_batches == 3
        return {(c.phase, c.passes) for c in cost.collectives if c.kind == kind and c.axis == "shard"}

    assert passes(1, "reduce_scatter") == {("backward", 1)}
    assert passes(2, "reduce_scatter") == {("backward", 3)}
    assert passes(1, "all_gather") == {("forward", 1)}
    assert passes(3, "all_gather") >= {("forward", 3), ("backward", 3)}
