"""Kashin quantization against the published figures: residuals, entries, errors of each stage, weights that refuse."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.core.scheme import scheme_of
from shardwise.plugins.quantize.methods.base import (
    InputStatistics,
    NotConverged,
    QuantizationMethod,
    relative_output_error,
)
from shardwise.plugins.quantize.methods.expansion import check_convergence, expand
from shardwise.plugins.quantize.methods.gptq import GPTQ
from shardwise.plugins.quantize.methods.kashin import Kashin, split_bits
from shardwise.plugins.quantize.methods.kashin_codes import fitted, nearest_codes
from shardwise.plugins.quantize.methods.kashin_weighted import _descend, metric_of
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.plugins.quantize.prediction import _Constants
from shardwise.runtime.quantization.kashin import kashin_weight_of, table_of
from shardwise.runtime.quantization.orthogonal import Basis, Factor

FOUR = scheme_of("w4a16-channel")
FAST = {"steps": 30, "rounds": 6}


def sample(kind: str, rows: int = 16, columns: int = 256) -> Tensor:
    """The weights of the synthetic table (benchmarks/quantization_synthetic.py), smaller."""
    made = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=made)
    if kind.startswith("t"):
        degrees = float(kind[1:])
        chi = torch._standard_gamma(torch.full_like(normal, degrees / 2), generator=made) * 2
        return normal / (chi / degrees).sqrt()
    if kind == "column":
        normal[:, 3] *= 40
    return normal


def error(weight: Tensor, method: Kashin | RoundToNearest, scheme: str = "w4a16-channel") -> float:
    return relative_output_error(weight, method.quantize(weight, scheme_of(scheme), None).dequantize(), None)


@pytest.mark.parametrize("kind", ["normal", "t4", "t2.5", "column"])
@pytest.mark.parametrize("transform", ["dct", "hadamard"])
def test_the_residual_falls_geometrically_and_both_factors_have_small_entries(
    kind: str, transform: str
) -> None:
    """Normal rows: a step leaves 1 - 2/π of the squared norm, a block of four its square. √n ‖u‖∞ ≤ 1.5 ‖w‖."""
    weight = sample(kind, columns=1024).double()
    found = expand(weight, Basis(Factor(transform, 0, 1024)))
    assert found.residuals[-1] <= (1e-6 if transform == "dct" else 2e-6)
    if kind == "normal":
        assert found.residuals[0] == pytest.approx((1 - 2 / math.pi) ** 2, rel=0.02)
        assert (found.residuals[9] / found.residuals[4]) ** 0.2 == pytest.approx(
            (1 - 2 / math.pi) ** 2, rel=0.12
        )
    for factor in (found.u, found.v):
        assert (math.sqrt(1024) * factor.abs().amax(1) / weight.norm(dim=1)).max() < 1.5


@pytest.mark.parametrize(
    ("kind", "plain", "refitted"),
    [("normal", 0.128, 0.113), ("t4", 0.174, 0.131), ("t2.5", 0.199, 0.141), ("column", 0.394, 0.225)],
)
def test_each_stage_lowers_the_error_and_meets_the_published_figure(
    kind: str, plain: float, refitted: float
) -> None:
    """Bounds: the measured figures of a prototype at these distributions, for rounding once and for ten rounds."""
    weight = sample(kind)
    papers = error(weight, Kashin(steps=0, rounds=0, rotate=False))
    alternated = error(weight, Kashin(steps=0, rounds=10, rotate=False))
    searched = error(weight, Kashin(**FAST))
    assert papers <= plain and alternated <= refitted
    assert searched < 0.9 * alternated < 0.9 * 0.95 * papers
    assert searched < error(weight, RoundToNearest())


def test_it_is_closer_than_the_best_sixteen_levels_to_normal_weights() -> None:
    """0.0975 is the relative error of the optimal 4-bit scalar quantizer for a normal variable (Max 1960, table I)."""
    assert error(sample("normal"), Kashin()) < 0.95 * math.sqrt(0.009497)


def test_more_bits_lower_the_error() -> None:
    weight = sample("t4")
    errors = [error(weight, Kashin(**FAST), f"w{bits}a16-channel") for bits in (2, 3, 4, 6)]
    errors.append(error(weight, Kashin(**FAST), "w8a16"))
    assert all(after < 0.65 * before for before, after in pairwise(errors))
    assert [split_bits(bits) for bits in (8, 6, 4, 3)] == [(4, 4), (3, 3), (2, 2), (2, 1)]


def test_a_two_sided_factor_is_searched_too() -> None:
    assert error(sample("normal", 64, 64), Kashin(**FAST, two_sided=True, rotate=False)) < 0.134


def test_the_result_does_not_depend_on_how_rows_are_shared_out() -> None:
    """Ranks quantize their own rows."""
    weight = sample("t4")
    method = Kashin(steps=5, rounds=2)
    whole = method.quantize(weight, FOUR, None)
    half = method.quantize(weight[8:], FOUR, None)
    assert whole.u.codes[8:].equal(half.u.codes) and whole.v.peaks[8:].equal(half.v.peaks)


def test_a_stored_result_is_the_result() -> None:
    weight = Kashin(steps=5, rounds=2).quantize(sample("normal", 24, 100), scheme_of("w3a16-channel"), None)
    assert kashin_weight_of(weight.tensors(), weight.shape).dequantize().equal(weight.dequantize())


def test_nearest_codes_and_peaks_equal_a_search_over_all_codes() -> None:
    values, peaks = sample("normal", 4, 50), torch.tensor([[0.9, 0.4, 0.1]]).expand(4, -1)
    every = (values.unsqueeze(2) - table_of(peaks).unsqueeze(1)).abs()
    assert every.argmin(2).equal(nearest_codes(values, peaks))
    before, after = (
        (values - table_of(each).gather(1, nearest_codes(values, each))).norm()
        for each in (peaks, fitted(values, peaks))
    )
    assert after < before


def test_rows_of_zeros_stay_zero() -> None:
    weight = sample("normal")
    weight[3] = 0
    assert Kashin(**FAST).quantize(weight, FOUR, None).dequantize()[3].abs().max() == 0


def test_an_expansion_that_stalls_is_reported() -> None:
    """One basis alone stalls, as Householder and Givens factors do in the paper; so does n = 1, and no other n."""
    with pytest.raises(NotConverged, match="falling share"):
        check_convergence(sample("t2.5"), Basis())
    for columns in (2, 3, 5, 8):
        check_convergence(sample("t2.5", 16, columns), Basis(Factor("dct", 0, columns)))


def correlated(columns: int) -> InputStatistics:
    """Inputs with eigenvalues 1/k in a random basis, and three channels of five times the size."""
    made = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(columns, columns, generator=made))[0]
    spectrum = torch.arange(1, columns + 1).float().rsqrt()
    inputs = torch.randn(1024, columns, generator=made) * spectrum @ basis.T
    inputs[:, :3] *= 5
    return InputStatistics(inputs.T @ inputs / 1024, inputs.abs().mean(0), 1024)


@pytest.mark.parametrize("scheme", ["w4a16-channel", "w3a16-channel"])
def test_statistics_lower_the_output_error_below_that_of_gptq(scheme: str) -> None:
    weight, statistics = sample("normal", 32, 128), correlated(128)

    def output_error(method: QuantizationMethod, given: InputStatistics | None) -> float:
        found = method.quantize(weight, scheme_of(scheme), given).dequantize()
        return relative_output_error(weight, found, statistics)

    calibrated = output_error(Kashin(**FAST), statistics)
    assert calibrated < 0.75 * output_error(Kashin(**FAST), None)
    assert calibrated < 0.95 * output_error(GPTQ(), statistics)


def test_a_hard_sweep_takes_the_best_value_of_each_column_in_order() -> None:
    """Against the error computed anew for every candidate of every column."""
    weight, inner = sample("normal", 3, 70), Basis(Factor("dct", 0, 70))
    metric = metric_of(correlated(70).hessian, inner)
    assert metric is not None
    peaks = [torch.tensor([[0.7, 0.2]]).repeat(3, 1) for _ in range(2)]
    means = [torch.zeros_like(weight), torch.zeros_like(weight)]
    expected = means[1].clone()
    for column in range(70):
        errors = []
        for value in table_of(peaks[1])[0].tolist():
            expected[:, column] = value
            rest = inner(weight - inner(expected))
            errors.append((rest @ metric.sides[1] * rest).sum(1))
        best = torch.stack(errors).argmin(0)
        expected[:, column] = table_of(peaks[1])[0][best]
    torch.testing.assert_close(_descend(weight, inner, means, metric, 1, table_of(peaks[1]), None), expected)


def test_a_dry_run_before_changes_nothing() -> None:
    """The pass predicts its memory on fake tensors first (quantize/prediction.py)."""
    weight, method = sample("normal", 8, 96), Kashin(steps=2, rounds=1)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _Constants():
        statistics = InputStatistics(torch.empty(96, 96), torch.empty(96), 4)
        rehearsed = method.rehearsal().quantize(fake.from_tensor(weight), FOUR, statistics)
        assert rehearsed.dequantize().shape == weight.shape
    found = method.quantize(weight, FOUR, None).dequantize()
    assert not isinstance(found, FakeTensor) and bool(found.isfinite().all())


def test_inputs_of_zeros_leave_the_codes() -> None:
    nothing = InputStatistics(torch.zeros(256, 256), torch.zeros(256), 4)
    method, weight = Kashin(steps=5, rounds=2), sample("normal")
    assert (
        method.quantize(weight, FOUR, nothing)
        .dequantize()
        .equal(method.quantize(weight, FOUR, None).dequantize())
    )


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(broken: float) -> None:
    weight = sample("normal")
    weight[2, 5] = broken
    with pytest.raises(NotConverged, match="infinite or undefined"):
        Kashin().quantize(weight, FOUR, None)
