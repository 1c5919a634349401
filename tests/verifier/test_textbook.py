"""What plain processes are made of, against PyTorch and against the engine, whose code is another one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from shardwise.engine.loss_scale import loss_scale_of, norm_limit_of
from shardwise.engine.optim.moment_storage import EightBit
from shardwise.recipe.sections import AdaptiveClipSpec, LossScaleSpec
from shardwise.verifier.mixed_precision import stochastically_rounded
from shardwise.verifier.textbook import PlainLossScale, PlainNormLimit, in_8_bits

CPU = torch.device("cpu")
OVERFLOWS = [random.Random(step).random() < 0.3 for step in range(200)]


def test_the_loss_scale_is_that_of_grad_scaler() -> None:
    """torch's has no hysteresis."""
    spec = LossScaleSpec(initial=2.0**12, growth_interval=3, growth=4.0, hysteresis=1, floor=2.0**-40)
    ours = PlainLossScale(spec)
    theirs = torch.amp.GradScaler("cpu", init_scale=spec.initial, growth_factor=4.0, growth_interval=3)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflows in OVERFLOWS:
        assert ours.value == theirs.get_scale()
        theirs.scale(torch.zeros(1))
        weight.grad = torch.full((1,), torch.inf if overflows else 1.0)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflows)
    assert ours.value != spec.initial


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_loss_scale_is_that_of_the_engine(hysteresis: int, dynamic: bool) -> None:
    spec = LossScaleSpec(
        initial=2.0**12, growth_interval=3, hysteresis=hysteresis, dynamic=dynamic, floor=4.0
    )
    ours, theirs = PlainLossScale(spec), loss_scale_of(spec, CPU)
    for overflows in OVERFLOWS:
        assert ours.value == theirs.value.item()
        ours.update(overflows)
        theirs.update(torch.tensor(float(overflows)))


@pytest.mark.parametrize("mode", ["zclip", "cap"])
@pytest.mark.parametrize("constant", [None, 1.3])
def test_the_limit_of_the_norm_is_that_of_the_engine(mode: str, constant: float | None) -> None:
    spec = AdaptiveClipSpec.model_validate({"z": 2.5, "mode": mode})
    ours, theirs = PlainNormLimit(constant, spec), norm_limit_of(constant, spec, CPU)
    chance = random.Random(0)
    for step in range(120):
        norm = chance.uniform(0.8, 1.2) * (5 if step % 17 == 16 else 1)
        expected = float(theirs.value(torch.tensor(norm)))
        assert ours.next(norm) == pytest.approx(expected, rel=1e-5)
        theirs.update(torch.tensor(norm), torch.zeros(()))


def test_a_constant_limit_is_torch_s() -> None:
    assert PlainNormLimit(0.3, None).next(5.0) == torch.tensor(0.3).item()
    assert PlainNormLimit(None, None).next(5.0) == float("inf")


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("columns", [5, 128, 300])
def test_moments_of_8_bits_are_those_of_the_engine(name: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(7, columns, generator=generator) * torch.logspace(-7, 0, columns)
    value[0, :3] = 0
    storage = EightBit(CPU)
    state = storage.state(nn.Parameter(value), name)
    if name == "exp_avg_sq":
        value = value.square()
        ours = in_8_bits(value.sqrt(), signed=False).square()
    else:
        ours = in_8_bits(value, signed=True)
    storage.write(state, name, value.clone(), torch.zeros((), dtype=torch.bool))
    assert torch.equal(ours, storage.read(state, name))
    assert not torch.equal(ours, value)


def test_stochastic_rounding_keeps_the_mean_and_takes_a_neighbour() -> None:
    value = torch.full((200_000,), 1.0 + 2.0**-7 * 0.3)
    rounded = stochastically_rounded(value, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert rounded.mean().item() - 1 == pytest.approx(2.0**-7 * 0.3, rel=0.02)
    exact = torch.tensor([-3.5, 0.0, 2.0**-20])
    assert torch.equal(stochastically_rounded(exact, torch.Generator()), exact)
