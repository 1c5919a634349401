"""Loss scale and adaptive clipping against what they are defined to be, in plain Python."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from shardwise.engine.loss_scale import loss_scale_of, norm_limit_of
from shardwise.recipe.sections import AdaptiveClipSpec, LossScaleSpec, OptimizerSpec

CPU = torch.device("cpu")
GOOD, BAD = torch.zeros(()), torch.ones(())


def scales(spec: LossScaleSpec, verdicts: str) -> list[float]:
    """The scale after each step; ``x`` is a skipped one."""
    scale = loss_scale_of(spec, CPU)
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
    scale = loss_scale_of(None, CPU)
    scale.update(BAD)
    assert not scale.active and float(scale.value) == 1


# ---- adaptive clipping ------------------------------------------------------------------------------------


def zclip(norms: list[float], z: float, max_norm: float = math.inf) -> list[float]:
    """Norms after ZClip with its defaults (Kumar et al. 2025, equations 1-5, and its reference code's zscore mode).

    25 norms are collected; their mean and variance start the averages, which decay with 0.97 and learn the norm
    that the adaptive limit left.
    """
    collected, clipped = norms[:25], [min(norm, max_norm) for norm in norms[:25]]
    mean, variance = statistics.fmean(collected), statistics.pvariance(collected)
    for norm in norms[25:]:
        height = (norm - mean) / (math.sqrt(variance) + 1e-6)
        left = norm if height <= z else mean + z * math.sqrt(variance) / (height / z)
        clipped.append(min(left, max_norm))
        mean = 0.97 * mean + 0.03 * left
        variance = 0.97 * variance + 0.03 * (left - mean) ** 2
    return clipped


def clipped(norms: list[float], constant: float | None, adaptive: AdaptiveClipSpec | None) -> list[float]:
    """Norms after each was clipped to its limit."""
    limit, found = norm_limit_of(constant, adaptive, CPU), []
    for norm in norms:
        found.append(min(norm, float(limit.value(torch.tensor(norm)))))
        limit.update(torch.tensor(norm), GOOD)
    return found


def noisy_norms(seed: int = 0, count: int = 120, spread: float = 0.3) -> list[float]:
    generator = random.Random(seed)
    return [math.exp(spread * generator.gauss(0, 1)) * (50 if i % 37 == 36 else 1) for i in range(count)]


@pytest.mark.parametrize(("constant", "z"), [(None, 2.5), (1.5, 2.5), (None, 0.5)])
def test_norms_are_clipped_as_by_zclip(constant: float | None, z: float) -> None:
    expected = zclip(noisy_norms(), z, math.inf if constant is None else constant)
    assert clipped(noisy_norms(), constant, AdaptiveClipSpec(z=z)) == pytest.approx(expected, rel=1e-4)
    assert expected != noisy_norms()


def test_a_small_spread_of_large_norms_is_not_lost_to_cancellation() -> None:
    """A spread of 1e-5 of the mean: in fp32 the mean square minus the squared mean has no correct digit."""
    norms = [1000 * (1 + 1e-5 * (-1) ** i) for i in range(25)] + [1001.0]
    excess = clipped(norms, None, AdaptiveClipSpec(z=2.5))[-1] - 1000
    assert excess == pytest.approx(zclip(norms, 2.5)[-1] - 1000, abs=1e-3)


def test_the_higher_the_spike_the_closer_to_the_mean() -> None:
    """Mode cap clips every spike to mean + z deviations: here to 1.05 + 2.5 * 0.05."""
    norms = [1.0, 1.1] * 15
    for spike, mode, expected in ((2.0, "cap", 1.175), (20.0, "cap", 1.175), (1e6, "zclip", 1.05)):
        spec = AdaptiveClipSpec.model_validate({"z": 2.5, "mode": mode})
        assert clipped([*norms, spike], None, spec)[-1] == pytest.approx(expected, abs=2e-3)
    low, high = (clipped([*norms, spike], None, AdaptiveClipSpec(z=2.5))[-1] for spike in (2.0, 20.0))
    assert 1.05 < high < low < 1.175


def test_one_spike_hardly_raises_the_limit_for_the_next() -> None:
    norms = [1.0, 1.1] * 20
    found = clipped([*norms, 1000.0, 1000.0], None, AdaptiveClipSpec(z=3.0))
    assert found[-1] < 1.1


def test_a_number_in_the_recipe_is_the_z_of_zclip() -> None:
    spec = OptimizerSpec.model_validate({"adaptive_clip": 2.5})
    assert spec.adaptive_clip == AdaptiveClipSpec(z=2.5, mode="zclip")


def test_skipped_steps_teach_nothing() -> None:
    limit = norm_limit_of(None, AdaptiveClipSpec(z=2.5), CPU)
    for norm in noisy_norms():
        limit.update(torch.tensor(norm), GOOD)
    before = {name: value.clone() for name, value in limit.state().items()}
    for norm in (math.nan, math.inf, 5.0):
        limit.update(torch.tensor(norm), BAD)
    assert all(torch.equal(before[name], value) for name, value in limit.state().items())


def test_a_constant_limit_learns_nothing() -> None:
    assert clipped(noisy_norms(), 0.1, None) == pytest.approx([0.1] * 120)
    assert clipped(noisy_norms(), None, None) == noisy_norms()
