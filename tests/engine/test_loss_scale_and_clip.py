"""Loss scale and adaptive clipping against what they are defined to be, in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from shardwise.engine.loss_scale import NORM_DECAY, NORM_WARMUP, LossScale, NormLimit
from shardwise.recipe.sections import LossScaleSpec

CPU = torch.device("cpu")
GOOD, BAD = torch.zeros(()), torch.ones(())


def scales(spec: LossScaleSpec, verdicts: str) -> list[float]:
    """The scale after each step; ``x`` is a skipped one."""
    scale = LossScale(spec, CPU)
    found = []
    for verdict in verdicts:
        scale.update(BAD if verdict == "x" else GOOD)
        found.append(float(scale.value))
    return found


def test_the_scale_grows_after_an_interval_without_overflow() -> None:
    spec = LossScaleSpec(initial=8.0, growth_interval=3, growth=4.0)
    assert scales(spec, "......") == [8, 8, 32, 32, 32, 128]


def test_an_overflow_starts_the_interval_again() -> None:
    spec = LossScaleSpec(initial=8.0, growth_interval=3, hysteresis=9)
    assert scales(spec, "..x..x...") == [8, 8, 8, 8, 8, 8, 8, 8, 16]


def test_the_scale_backs_off_down_to_its_floor() -> None:
    spec = LossScaleSpec(initial=8.0, backoff=0.5, floor=3.0, hysteresis=1)
    assert scales(spec, "xxxx") == [4, 3, 3, 3]


def test_hysteresis_as_megatron_s() -> None:
    """Backs off at the n-th overflow since it last grew, and then at each further one, until it grows again."""
    spec = LossScaleSpec(initial=64.0, hysteresis=2, growth_interval=2)
    assert scales(spec, "x.xx..x") == [64, 64, 32, 16, 16, 32, 32]


class Megatron:
    """DynamicGradScaler of megatron/core/optimizer/grad_scaler.py, in its own words."""

    def __init__(self, spec: LossScaleSpec) -> None:
        self.spec, self.scale = spec, spec.initial
        self.growth_tracker, self.hysteresis_tracker = 0, spec.hysteresis

    def update(self, found_inf: bool) -> None:
        spec = self.spec
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * spec.backoff, spec.floor)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == spec.growth_interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = spec.hysteresis
                self.scale *= spec.growth


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_as_megatron_s(seed: int) -> None:
    generator = random.Random(seed)
    spec = LossScaleSpec(initial=2.0**16, growth_interval=4, hysteresis=1 + seed % 3, floor=2.0)
    verdicts = "".join(generator.choice("...x") for _ in range(300))
    expected, scaler = [], Megatron(spec)
    for verdict in verdicts:
        scaler.update(verdict == "x")
        expected.append(scaler.scale)
    assert scales(spec, verdicts) == expected


def test_a_static_scale_never_moves_and_neither_does_one() -> None:
    assert scales(LossScaleSpec(initial=128.0, dynamic=False, growth_interval=1), "x..x") == [128] * 4
    scale = LossScale(None, CPU)
    scale.update(BAD)
    assert not scale.active and float(scale.value) == 1


# ---- adaptive clipping ------------------------------------------------------------------------------------


def clipped_by_hand(norms: list[float], constant: float, z: float) -> list[float]:
    """The limits that ZClip sets: plain statistics in the beginning, then exponential, of clipped norms."""
    mean = square = 0.0
    limits = []
    for seen, norm in enumerate(norms):
        limit = constant
        if seen >= NORM_WARMUP:
            limit = min(constant, mean + z * math.sqrt(max(0.0, square - mean * mean)))
        limits.append(limit)
        value = min(norm, limit)
        weight = max(1 / (seen + 1), 1 - NORM_DECAY)
        mean += weight * (value - mean)
        square += weight * (value * value - square)
    return limits


def limits(norms: list[float], constant: float | None, z: float | None) -> list[float]:
    limit, found = NormLimit(constant, z, CPU), []
    for norm in norms:
        found.append(float(limit.value()))
        limit.update(torch.tensor(norm), limit.value(), GOOD)
    return found


def noisy_norms(seed: int = 0, count: int = 120) -> list[float]:
    generator = random.Random(seed)
    return [math.exp(0.3 * generator.gauss(0, 1)) * (50 if i % 37 == 36 else 1) for i in range(count)]


@pytest.mark.parametrize(("constant", "z"), [(None, 2.5), (1.5, 2.5), (math.inf, 0.5)])
def test_limits_are_those_of_the_definition(constant: float | None, z: float) -> None:
    expected = clipped_by_hand(noisy_norms(), math.inf if constant is None else constant, z)
    assert limits(noisy_norms(), constant, z) == pytest.approx(expected, rel=1e-4)


def test_one_spike_hardly_raises_the_limit_for_the_next() -> None:
    norms = [1.0, 1.1] * 20
    limit = limits([*norms, 1000.0, 1.0], None, 3.0)
    assert limit[-1] < 1.3


def test_skipped_steps_teach_nothing() -> None:
    limit = NormLimit(None, 2.5, CPU)
    for norm in noisy_norms():
        limit.update(torch.tensor(norm), limit.value(), GOOD)
    before = {name: value.clone() for name, value in limit.state().items()}
    for norm in (math.nan, math.inf, 5.0):
        limit.update(torch.tensor(norm), limit.value(), BAD)
    assert all(torch.equal(before[name], value) for name, value in limit.state().items())


def test_a_constant_limit_learns_nothing() -> None:
    assert limits(noisy_norms(), 0.7, None) == pytest.approx([0.7] * 120)
    assert limits(noisy_norms(), None, None) == [math.inf] * 120
