"""``sqrt`` and ``recursive:S``: how often blocks run, which inputs they keep, and which models they refuse.

That their gradients are those without recomputation is in tests/technique/test_checkpointing.py, for every value.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.planner.counts import NotComposable
from shardwise.plugins.checkpointing.recursive import kept_inputs, passes
from shardwise.technique import strategy_from
from shardwise.technique.checkpointing import Checkpointing
from tests.harness.dropping import Dropped
from tests.harness.pool import Pool
from tests.planner.test_compose import composed, predictor, recipe
from tests.technique import test_checkpointing_costs as costs
from tests.technique.test_checkpointing import differing, unsharded

LONG = pytest.mark.long


def test_frozen_weights(pool: Pool) -> None:
    """With one kept input. Other values are in tests/technique/test_checkpointing.py."""
    assert pool.run(2, differing, {"zero_stage": 3}, ["recursive:1"], True) == [[], []]


@pytest.mark.parametrize("kind", ["sqrt", "recursive:2"])
def test_segments_refuse_a_model_that_computes_between_its_blocks(kind: str) -> None:
    model = Dropped(between=True)
    Checkpointing().apply(unsharded(model, model.units(), kind))
    with pytest.raises(RecipeError, match="Residual is not called with the result of the block before"):
        model(torch.ones(1, 4, 16))


@pytest.mark.parametrize("kind", ["sqrt", "recursive:1", "recursive:2"])
def test_segments_may_be_run_and_thrown_away(kind: str) -> None:
    """Without gradients, and with a graph without a backward pass."""
    model = Dropped()
    Checkpointing().apply(unsharded(model, model.units(), kind))
    x = torch.ones(1, 4, 16)
    with torch.no_grad():
        model(x)
    model(x)
    first, second = model(x).sum(), model(x).sum()
    (first + second).backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    (first + second).backward()
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


@functools.cache
def fewest(blocks: int, inputs: int) -> int:
    """Blocks to pass through, by trying every place for the next kept input (the recursion behind the formula)."""
    if blocks == 1:
        return 0
    if inputs == 1:
        return blocks * (blocks - 1) // 2
    return min(k + fewest(blocks - k, inputs - 1) + fewest(k, inputs) for k in range(1, blocks))


class Counted(nn.Module):
    """A block that counts its runs, and how many runs of a chain hold their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (x * self.scale).sin()


@pytest.mark.parametrize(
    ("blocks", "inputs", "formula"),
    [(1, 1, 0), (7, 1, 21), (10, 3, 15), (11, 3, 18), (16, 4, 27), (9, 2, 17), (5, 8, 4)],
)
def test_recursive_runs_blocks_as_often_as_the_binomial_formula_says(
    blocks: int, inputs: int, formula: int
) -> None:
    """t(l, s) = r l - C(s + r, s + 1) runs that pass through; one run more per block, and one of the last.

    10 steps are what 3 inputs reverse in 2 repeats, C(5, 3) = 10, with 2 * 10 - C(5, 4) = 15 (Griewank & Walther 2000).
    The memory-poor case is l (l - 1) / 2. The last block's first run gives the loss, and keeps nothing.
    """
    model = nn.Sequential(*(Counted() for _ in range(blocks)))
    Checkpointing().apply(unsharded(model, list(model), f"recursive:{inputs}"))
    model(torch.linspace(0, 1, 8)).sum().backward()
    counts = [link._checkpoint_wrapped_module.runs for link in model]
    assert sum(counts) == formula + blocks + 1
    assert formula == fewest(blocks, inputs)
    assert all(link._checkpoint_wrapped_module.scale.grad is not None for link in model)


def test_the_schedule_is_optimal_for_every_length_and_number_of_inputs() -> None:
    for blocks in range(1, 40):
        for inputs in range(1, 7):
            assert passes(blocks, inputs) == fewest(blocks, inputs)
            kept = kept_inputs(blocks, inputs)
            assert kept[0] == 0 and len(kept) <= inputs and kept == sorted(set(kept)) and kept[-1] < blocks


def test_recursive_never_keeps_more_inputs_than_it_may() -> None:
    model = nn.Sequential(*(Counted() for _ in range(20)))
    Checkpointing().apply(unsharded(model, list(model), "recursive:3"))
    passes_of: list[Any] = []
    kept: list[int] = []
    model[0].register_forward_hook(lambda link, *_: passes_of.append(link.chain.current))
    for link in model:
        link.register_forward_pre_hook(lambda *_: kept.append(len(passes_of[0].kept) if passes_of else 0))
    model(torch.linspace(0, 1, 8)).sum().backward()
    assert max(kept) == 3 and len(kept) == passes(20, 3) + 21


@pytest.mark.long
def test_sqrt_of_64_blocks() -> None:
    """Counted: activations peak at 11.5 % of those of none, for 31.7 % more FLOPs. Required: 25 % and 33.4 %."""
    none, sqrt = costs.counted("none", 64), costs.counted("sqrt", 64)
    assert costs.activations(sqrt) <= 0.25 * costs.activations(none)
    assert 0.25 < costs.extra_flops(sqrt, none) <= 0.334


@pytest.mark.long
def test_recursive_costs_what_its_runs_cost() -> None:
    """Of 6 blocks with 1 input, t = 15: 5 passes are the first forward pass, 10 are more than the runs of `full`."""
    full, poor = costs.counted("full"), costs.counted("recursive:1")
    one_block = costs.forward_flops(costs.counted("none")) - costs.forward_flops(costs.counted("none", 5))
    assert poor.cost.flops - full.cost.flops == 10 * one_block
    one_input = 4 * 32 * 64 * 4
    assert costs.at_the_loss(full) - costs.at_the_loss(poor) == 4 * one_input, "all inputs but two"


@pytest.mark.parametrize("layers", [1, 5, *(pytest.param(n, marks=LONG) for n in (2, 3, 8, 12))])
def test_sqrt_keeps_at_most_twice_the_square_root_of_inputs(layers: int) -> None:
    """Between the passes: inputs of segments, and what a model of no blocks to speak of keeps."""
    one_input = 4 * 32 * 64 * 4
    full, sqrt = costs.counted("full", layers), costs.counted("sqrt", layers)
    segments = (
        layers
        - (full.peaks["forward"].ledger.activations - sqrt.peaks["forward"].ledger.activations) / one_input
    )
    assert segments <= 2 * layers**0.5


@pytest.mark.parametrize("shape", ["llama", *(pytest.param(shape, marks=LONG) for shape in ("wide", "gpt2"))])
def test_no_sqrt_does_better_than_a_budget_with_as_much_memory(shape: str) -> None:
    costs.test_no_other_value_does_better_with_as_much_memory(shape, "sqrt")


def test_what_depends_on_the_depth_is_not_composed() -> None:
    asked = predictor(recipe(batch_size=4))
    with pytest.raises(NotComposable, match="depends on the depth"):
        composed(asked, strategy_from({"activation_checkpointing": "sqrt"}))
