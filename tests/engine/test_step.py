"""The step: one division by the global token count, a global norm that is right for any sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.engine.build import build
from shardwise.engine.optim import build_optimizer
from shardwise.engine.optim.norm import local
from shardwise.engine.optimizer_step import AfterBackward
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.cross_entropy import IGNORED, cross_entropy_sum
from shardwise.runtime.parallel.shard_slices import local_slices
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.pool import Pool

MODEL = {"layers": 2, "width": 36, "heads": 2, "kv_heads": 1, "ffn": 37, "vocab": 257, "context": 16}
ROWS, LENGTH = 8, 12


def recipe() -> Recipe:
    values = {"model": MODEL, "data": {"sequence_length": LENGTH}, "steps": 1, "batch_size": ROWS}
    return recipe_of(values, SETTINGS)


def uneven_batch() -> Batch:
    """Eight rows with 1 to 12 valid targets, one of them with none."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 257, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row, valid in enumerate((12, 1, 7, 0, 3, 12, 2, 9)):
        labels[row, valid:] = IGNORED
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


Gradients = tuple[float, float, dict[str, tuple[Any, torch.Tensor]]]


def gradients(settings: dict[str, Any]) -> Gradients:
    """Loss, norm and this rank's gradients of one step over all rows, split over ranks and micro-batches."""
    blueprint = blueprint_of(recipe())
    run = build(recipe(), blueprint, strategy_from(settings), torch.device("cpu"))
    whole, size = uneven_batch(), settings["micro_batch_size"]
    rows = torch.arange(ROWS).view(-1, run.data_degree, size)[:, run.data_rank]
    batches = [{name: tensor[part] for name, tensor in whole.items()} for part in rows]
    _, loss = run.passes.forward_backward(batches)
    pieces = {
        n: (local_slices(p), local(p.grad).clone())
        for n, p in run.model.named_parameters()
        if p.grad is not None
    }
    norm, _ = AfterBackward(run).clip(loss)
    return float(loss), float(norm), pieces


SPLITS = [
    (world, {"precision": "fp64", "zero_stage": stage, "micro_batch_size": size})
    for world, stage, size in (
        (1, 0, 1),
        (1, 3, 2),
        (2, 0, 1),
        (2, 1, 2),
        (2, 2, 4),
        (4, 3, 1),
        (4, 2, 2),
        (4, 0, 2),
    )
]


@pytest.fixture(scope="module")
def undivided(pool: Pool) -> Gradients:
    """Of one process and one micro-batch."""
    [found] = pool.run(1, gradients, {"precision": "fp64", "zero_stage": 0, "micro_batch_size": ROWS})
    return found


@pytest.mark.parametrize(("world", "settings"), SPLITS, ids=lambda value: str(value))
def test_any_split_of_a_batch_gives_the_same_gradient(
    world: int, settings: dict[str, Any], pool: Pool, undivided: Gradients
) -> None:
    loss, norm, expected = undivided
    for other_loss, other_norm, pieces in pool.run(world, gradients, settings):
        assert other_loss == pytest.approx(loss, rel=1e-13)
        assert other_norm == pytest.approx(norm, rel=1e-12)
        for name, (slices, piece) in pieces.items():
            torch.testing.assert_close(piece, expected[name][1][slices], rtol=1e-10, atol=1e-14)


def clipped() -> tuple[float, float]:
    blueprint = blueprint_of(recipe())
    run = build(recipe(), blueprint, strategy_from({"zero_stage": 3}), torch.device("cpu"))
    for parameter in run.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before, after = (AfterBackward(run).clip(torch.zeros(()))[0] for _ in range(2))
    return float(before), float(after)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_clipping_by_the_global_norm(world: int, pool: Pool) -> None:
    elements = blueprint_of(recipe()).parameter_count()
    for before, after in pool.run(world, clipped):
        assert before == pytest.approx(0.5 * elements**0.5, rel=1e-5)
        assert after == pytest.approx(1.0, rel=1e-4)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    decaying, others = build_optimizer(model, recipe().optimizer).param_groups
    assert [p.ndim for p in decaying["params"]] == [2]
    assert decaying["weight_decay"] == 0.1
    assert [p.ndim for p in others["params"]] == [1, 1, 1]
    assert others["weight_decay"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_is_torch_s_cross_entropy(dtype: torch.dtype) -> None:
    """Value and gradient of F.cross_entropy on logits widened to fp32, with uncounted rows."""
    torch.manual_seed(0)
    values = (4 * torch.randn(3, 17, 211, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, 211, (3, 17))
    labels[1, 5:] = IGNORED
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    loss = cross_entropy_sum(ours, labels)
    wide = theirs if dtype == torch.float64 else theirs.float()
    expected = torch.nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss / 7).backward()
    (expected / 7).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert ours.grad is not None and ours.grad.dtype == dtype
    torch.testing.assert_close(
        ours.grad, theirs.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-8
    )
