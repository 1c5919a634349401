"""Update rules: stored state, and that a skipped update touches nothing, that sharding changes nothing."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.dryrun.run import dry_run
from shardwise.engine.optim import build_optimizer
from shardwise.engine.optim.moment_storage import DynamicCode, EightBit, code_values
from shardwise.engine.optim.norm import local
from shardwise.engine.optim.rounding import position_keys, random_bits, to_bf16
from shardwise.engine.seeding import seed_step
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import OptimizerSpec
from shardwise.runtime.parallel.shard_slices import MOMENTS_BLOCK, local_slices
from shardwise.technique import strategy_from
from shardwise.technique.site import StateOffload
from tests.harness.pool import Pool
from tests.harness.tiny_run import batch, equal, full, make_run, train, whole

APPLIED = torch.zeros(())
"""The verdict that skips no update."""

RULES = [
    ("adamw", torch.float32),
    ("adamw", torch.bfloat16),
    ("adamw", torch.float64),
    ("adamw_8bit", torch.float32),
    ("adamw_8bit", torch.bfloat16),
    ("sgd", torch.float32),
    ("sgd", torch.bfloat16),
]


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 30), nn.LayerNorm(30), nn.Linear(30, 5)).to(dtype)


def bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of parameters and of all state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in parameters for v in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*parameters, *states)]


@pytest.mark.parametrize(("name", "dtype"), RULES)
def test_a_skipped_update_touches_nothing(name: str, dtype: torch.dtype) -> None:
    """With NaN and infinite gradients: parameters, moments and step counts keep their bits; the next one applies."""
    net = model(dtype)
    spec = OptimizerSpec(name=name)  # type: ignore[arg-type]
    optimizer = build_optimizer(net, spec)
    optimizer.learning_rate = 1e-2
    for poison, skip in ((None, 0.0), (math.nan, 1.0), (math.inf, 1.0), (None, 0.0)):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
            if poison is not None:
                parameter.grad.view(-1)[0] = poison
        before = bits(optimizer)
        optimizer.step(torch.tensor(skip))
        same = [torch.equal(b, a) for b, a in zip(before, bits(optimizer), strict=True)]
        assert all(same) if skip else not any(same[: len(list(net.parameters()))])
        assert all(t.isfinite().all() for t in bits(optimizer))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_adamw_is_torch_s(dtype: torch.dtype, tolerance: float) -> None:
    """The fused rule against torch.optim's plain loop, over ten steps."""
    spec = OptimizerSpec(weight_decay=0.1)
    ours, theirs = model(dtype), model(dtype)
    mine = build_optimizer(ours, spec)
    mine.learning_rate = 1e-2
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, lr=1e-2, betas=spec.betas, eps=spec.epsilon)
    for _ in range(10):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step(APPLIED)
        other.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("offload", [None, StateOffload()])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_sgd_decays_weights_outside_of_the_momentum(
    dtype: torch.dtype, tolerance: float, offload: StateOffload | None
) -> None:
    """SGDW (Loshchilov & Hutter 2019, algorithm 1), written out; bf16 weights alone go through chunks."""
    rate, decay, momentum = 0.5, 0.1, 0.9
    net = nn.Linear(300, 40, bias=False).to(dtype)
    weight = net.weight.detach().double().clone()
    velocity = torch.zeros_like(weight)
    spec = OptimizerSpec(name="sgd", weight_decay=decay, momentum=momentum)
    optimizer = build_optimizer(net, spec, offload=offload)
    optimizer.learning_rate = rate
    for index in range(6):
        net.weight.grad = torch.randn_like(net.weight) * 0.01
        optimizer.step(torch.tensor(float(index == 2)))
        if index != 2:  # a skipped update decays nothing
            velocity = momentum * velocity + net.weight.grad.double()
            weight = (1 - rate * decay) * weight - rate * velocity
    assert float((net.weight.detach().double() - weight).norm() / weight.norm()) < tolerance


# ---- 8 bits -----------------------------------------------------------------------------------------------


def test_the_code_has_256_values() -> None:
    for signed in (True, False):
        values = code_values(signed)
        assert len(set(values)) == 256 and max(values) == 1.0 and 0.0 in values
        assert min(values) == (pytest.approx(-0.993, abs=1e-3) if signed else 0.0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_finds_what_a_search_among_the_borders_does(signed: bool) -> None:
    """On every border, on the neighbouring floats, and at both ends of every cell of the table."""
    values = torch.tensor(code_values(signed))
    borders = (values[:-1] + values[1:]) / 2
    if not signed:
        borders[0] = 0.0
    neighbours = [torch.nextafter(borders, torch.tensor(end)) for end in (-2.0, 2.0)]
    cells = torch.arange(2**16, dtype=torch.int32) << 16
    ends = torch.cat([cells, cells | 0xFFFF]).view(torch.float32)
    unit = torch.cat([values, borders, *neighbours, ends[ends.abs() <= 1]])
    unit = (unit if signed else unit[unit >= 0]).unsqueeze(0)
    code = DynamicCode(signed, torch.device("cpu"))
    assert torch.equal(code.encoded(unit).long(), torch.bucketize(unit, borders))
    assert torch.equal(code.decoded(code.encoded(values)), values)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_8_bit_moments_are_near_what_was_written(name: str) -> None:
    """Within 1 % of the block's largest value; half a code's span: 7.1 % of a value in its decade, 14.2 % one below.

    The second moment is compared as it enters the update: by its root.
    """
    codes, parameter = EightBit(torch.device("cpu")), nn.Parameter(torch.zeros(6, 3 * MOMENTS_BLOCK + 5))
    state = codes.state(parameter, name)
    magnitude = 10 ** (-5 * torch.rand(6, 3 * MOMENTS_BLOCK + 5))
    signed = name == "exp_avg"
    value = magnitude * torch.randn_like(magnitude).sign() if signed else magnitude
    no = torch.tensor(False)
    assert (codes.read(state, name) == 0).all()
    codes.write(state, name, value.clone() if signed else value.square(), no)
    read = codes.read(state, name)
    error = ((read if signed else read.sqrt()) - value).abs()
    assert (error / magnitude.max()).max() < 0.01
    blocks = [m.amax(-1, keepdim=True).expand_as(m) for m in magnitude.split(MOMENTS_BLOCK, dim=1)]
    unit = magnitude / torch.cat(blocks, dim=1)
    assert (error / magnitude)[unit > 0.1].max() < 0.071
    assert (error / magnitude)[unit > 0.01].max() < 0.142
    # Decoded values are encoded again as the same codes, but where a block's largest value is negative: there is no
    # code for -1. Checkpoints hold codes.
    kept = state[name].clone()
    codes.write(state, name, read, no)
    assert (kept.int() - state[name].int()).abs().max() <= int(signed)


@pytest.mark.parametrize("ratio", [1e-3, 1e-5, 3e-7, 1e-12])
def test_a_small_first_moment_is_not_divided_by_epsilon(ratio: float) -> None:
    """A rare token's row has no gradient in most steps: what it was is forgotten at the pace of the moments' rates.

    One step at rate 1 moves no weight by more than 2, whatever its gradient's share of its block's largest was.
    """
    weight = nn.Parameter(torch.zeros(1, MOMENTS_BLOCK))
    optimizer = build_optimizer(nn.ParameterList([weight]), OptimizerSpec(name="adamw_8bit", epsilon=1e-12))
    optimizer.learning_rate = 1.0
    for small in (ratio, 0.0, 0.0):
        weight.grad = torch.full((1, MOMENTS_BLOCK), small)
        weight.grad[0, 0] = 1.0
        before = weight.detach().clone()
        optimizer.step(APPLIED)
        assert (weight - before).abs().max() < 2


def test_8_bit_state_takes_at_most_2_07_bytes_a_parameter() -> None:
    recipe = recipe_of({"model": {"preset": "python-6m"}, "steps": 1, "batch_size": 1})
    net = blueprint_of(recipe).build()
    optimizer = build_optimizer(net, OptimizerSpec(name="adamw_8bit"))
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert 2.06 <= held / sum(p.numel() for p in net.parameters()) <= 2.07


# ---- stochastic rounding ----------------------------------------------------------------------------------


def test_stochastic_rounding_keeps_the_mean() -> None:
    """Over 10^6 draws the mean is within 1 % of a unit in the last place; every draw is one of two neighbours."""
    for fraction in (0.01, 0.3, 0.5, 0.77):
        low, unit = 1.5, 2.0**-7
        value = torch.full((10**6,), low + fraction * unit)
        rounded = to_bf16(
            value,
            random_bits(*position_keys(torch.arange(1000), torch.arange(1000), torch.tensor(7))).flatten(),
        ).float()
        assert set(rounded.unique().tolist()) <= {low, low + unit}
        assert abs(float(rounded.double().mean()) - float(value[0])) < 0.01 * unit


def test_random_bits_are_alike_in_no_direction() -> None:
    """Every row and column has the mean of fair draws within 5 of its deviations, and neighbours do not correlate."""
    bits = random_bits(*position_keys(torch.arange(1000), torch.arange(1000), torch.tensor(7))).double()
    assert bits.min() >= 0 and bits.max() < 2**16
    fair = (bits - (2**16 - 1) / 2) / (2**16 / math.sqrt(12))
    for dim in (0, 1):
        assert fair.mean(dim).abs().max() < 5 / math.sqrt(1000)
        product = fair.narrow(dim, 0, 999) * fair.narrow(dim, 1, 999)
        assert product.mean().abs() < 5 / math.sqrt(999_000)


def test_rounding_passes_what_is_no_number() -> None:
    value = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    rounded = to_bf16(
        value, random_bits(*position_keys(torch.arange(1), torch.arange(5), torch.tensor(1)))[0]
    )
    assert rounded[:2].tolist() == [math.inf, -math.inf] and rounded[2].isnan() and (rounded[3:] == 0).all()


def updated(name: str) -> dict[str, Tensor]:
    """A bf16 run's whole weights after three updates from given gradients."""
    run = make_run(3, settings={"precision": "bf16", "master_weights": False}, optimizer={"name": name})
    run.optimizer.learning_rate = 1e-3
    for index in range(3):
        for number, parameter in enumerate(run.model.parameters()):
            generator = torch.Generator().manual_seed(100 * index + number)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(gradient[local_slices(parameter)])
        run.optimizer.step(APPLIED)
    return {n: full(p.detach()) for n, p in run.model.named_parameters()}


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "sgd"])
def test_rounding_does_not_depend_on_sharding(name: str, pool: Pool) -> None:
    [alone] = pool.run(1, updated, name)
    for rank in pool.run(3, updated, name):
        assert equal(alone, rank)


def test_master_weights_keep_what_16_bits_lose() -> None:
    """An update of a 2049th of the weight: lost in fp16, kept by the master copy, kept on average by rounding."""
    change = 1 / 2049
    assert torch.tensor(1.0, dtype=torch.float16) + change == 1.0
    spec = OptimizerSpec(name="sgd", momentum=0.0, weight_decay=0.0)
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Linear(1000, 1000, bias=False).to(dtype)
        nn.init.ones_(weight.weight)
        optimizer = build_optimizer(weight, spec)
        optimizer.learning_rate = 1.0
        for _ in range(8):
            weight.weight.grad = torch.full_like(weight.weight, -change)
            optimizer.step(APPLIED)
        expected = 1 + 8 * float(torch.tensor(change, dtype=dtype))
        assert float(weight.weight.detach().double().mean()) == pytest.approx(expected, abs=2e-5)


# ---- within the backward pass -----------------------------------------------------------------------------


def trained(stage: int, name: str, in_backward: bool) -> dict[str, Tensor]:
    """All tensors after four steps of two micro-batches: only the last one updates."""
    settings = {"optimizer_in_backward": in_backward}
    run = make_run(stage, settings=settings, optimizer={"name": name, "clip_norm": None})
    for index in range(4):
        mine = ({k: v[run.data_rank :: run.data_degree] for k, v in batch(n).items()} for n in (index, 7))
        step(run, list(mine), 1e-2)
    return whole(run)


@pytest.mark.parametrize(
    ("world", "stage"),
    [(1, 0), (2, 2), *(pytest.param(*row, marks=pytest.mark.long) for row in ((2, 0), (4, 3)))],
)
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "sgd"])
def test_optimizer_in_backward_gives_the_same_bits(world: int, stage: int, name: str, pool: Pool) -> None:
    plain = pool.run(world, trained, stage, name, False)
    for one, other in zip(plain, pool.run(world, trained, stage, name, True), strict=True):
        assert equal(one, other)


def torn() -> tuple[bool, float, list[Any]]:
    """One element of one gradient is infinite: its piece keeps its bits, and the norm tells."""
    run = make_run(0, settings={"optimizer_in_backward": True}, optimizer={"clip_norm": None})
    train(run, range(1))
    [victim, *_] = [p for p in run.model.parameters() if p.ndim >= 2]
    before = full(victim.detach())
    hooks = victim._post_accumulate_grad_hooks

    def poison(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        local(parameter.grad).view(-1)[0].fill_(math.inf)

    victim._post_accumulate_grad_hooks = type(hooks)([(-1, poison), *hooks.items()])  # type: ignore[call-arg]
    result = step(run, [batch(1)], 1e-2)
    kept = torch.equal(before, full(victim.detach()))
    return kept, float(result.grad_norm), [float(result.skipped)]


def test_a_gradient_that_is_not_finite_keeps_its_piece(pool: Pool) -> None:
    [(kept, norm, skipped)] = pool.run(1, torn)
    assert kept and not math.isfinite(norm) and skipped == [0.0]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_gradients_of_one_unit_live_at_a_time(world: int, stage: int) -> None:
    """The peak of the gradients is the largest group's: a block's, or the output head's."""
    layers = {"layers": 6, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 512, "context": 64}
    recipe = recipe_of(
        {
            "model": layers,
            "data": {"sequence_length": 16},
            "steps": 1,
            "batch_size": world,
            "optimizer": {"clip_norm": None},
            "cluster": {"devices_per_node": world},
        }
    )
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)
    unit = 4 * sum(p.numel() for p in blueprint.blocks(blueprint.build())[0].parameters())
    head = 4 * (512 * 128 + 128)
    strategy = strategy_from({"zero_stage": stage, "optimizer_in_backward": True})
    run = dry_run(recipe, blueprint, strategy, cluster)
    peak = max(sample.ledger.gradients for sample in run.timeline)
    # On one rank nothing is reduced: the gradient of one parameter is gone before the next.
    least = 4 * 512 * 128 if world == 1 else max(unit, head)
    assert least <= peak <= least + 2048, (peak, unit, head)


@pytest.mark.parametrize("seed", [0, 1_234_567_890, 2**63 - 1])
def test_every_seed_of_a_recipe_will_do(seed: int) -> None:
    state = torch.get_rng_state()
    try:
        seed_step(seed, 10**6, 16_383)
    finally:
        torch.set_rng_state(state)
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = build_optimizer(nn.ParameterList([weight]), OptimizerSpec(), seed=seed)
    weight.grad = torch.ones_like(weight)
    optimizer.learning_rate = 0.1
    optimizer.step(APPLIED)
    assert (weight < 1).all()


def test_a_step_draws_the_same_numbers_from_every_generator_after_a_resume() -> None:
    """Optimizers of libraries draw from NumPy (Kron) or Python: a resumed run must draw what an unbroken one does."""

    def draws(index: int) -> tuple[float, float, float]:
        seed_step(0, index, 0)
        return float(torch.rand(())), random.random(), float(np.random.random())

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        unbroken = [draws(index) for index in range(3)]
        resumed = draws(2)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
    assert resumed == unbroken[2]
    assert all(len(set(numbers)) == 3 for numbers in zip(*unbroken, strict=True))
