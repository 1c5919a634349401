"""Muon with experts: every expert's matrix is orthogonalized on its own, under ZeRO and expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.engine.optim.stepping import SteppedOptimizer
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.corpora import EVEN
from tests.harness.optimizers import MatrixMuon
from tests.harness.parity import Parity, Trial

EXPERTS = 3


MODEL = {
    "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 264, "context": 32, "experts": 4,
    "experts_per_token": 2,
}  # fmt: skip


def recipe_for(factory: str) -> Any:
    values = {
        "model": MODEL,
        "data": {"source": EVEN, "sequence_length": 16},
        "steps": 4,
        "batch_size": 4,
        "optimizer": {"factory": factory, "learning_rate": 0.02},
    }
    return recipe_of(values, SETTINGS)


def newton_schulz(matrix: Tensor) -> Tensor:
    """By the singular values: the polynomial 3.4445 s - 4.775 s^3 + 2.0315 s^5, five times."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_each_expert_is_a_matrix_of_its_own(shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(EXPERTS, *shape, generator=draw, dtype=torch.float64)
    gradients = [torch.randn(EXPERTS, *shape, generator=draw, dtype=torch.float64) for _ in range(3)]
    stack = nn.Parameter(start.clone())
    optimizer = SteppedOptimizer(MatrixMuon([stack], lr=0.1), one_by_one=True)
    expected, buffers = start.clone(), torch.zeros_like(start)
    for gradient in gradients:
        stack.grad = gradient.clone()
        optimizer.step()
        for expert in range(EXPERTS):
            buffers[expert] = 0.95 * buffers[expert] + 0.05 * gradient[expert]
            wanted = newton_schulz(0.05 * gradient[expert] + 0.95 * buffers[expert])
            expected[expert] -= 0.1 * max(1.0, shape[0] / shape[1]) ** 0.5 * wanted
    torch.testing.assert_close(stack.data, expected, rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        [{"zero_stage": 3}, {"zero_stage": 3, "expert_parallel": 2}],
        [{"zero_stage": 1}, {"expert_parallel": 2}],
    ],
    ids=str,
)
def test_trains_as_one_process(settings: list[dict[str, Any]], parity: Parity) -> None:
    """ZeRO cuts stacks between experts, expert parallelism gives whole experts to ranks. Within 1e-10."""
    recipe = recipe_for("tests.harness.optimizers:muon_of_experts")
    trials = [Trial(recipe, 2, {"precision": "fp64", **each}) for each in settings]
    parity.all_pass(*trials)
    assert [parity.verdict(trial).tolerance for trial in trials] == [1e-10] * len(trials)


def test_torchs_muon_refuses_stacks_before_the_first_step() -> None:
    recipe = recipe_for("torch.optim:Muon")
    with pytest.raises(RecipeError, match="2D"):
        strategy = strategy_from({"precision": "fp64"})
        dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
