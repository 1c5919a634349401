"""GPTQ against optimal brain quantization with whole inverses, and against rounding to nearest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.scheme import scheme_of
from shardwise.dryrun.reading import peaks
from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.dryrun.tracker import Tracker
from shardwise.plugins.quantize.methods.base import InputStatistics, NotConverged, relative_output_error
from shardwise.plugins.quantize.methods.gptq import GPTQ, inverse_factor
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.runtime.quantization.weights import IntWeight
from shardwise.runtime.torch_private import FakeTensorMode


def statistics_of(inputs: Tensor) -> InputStatistics:
    return InputStatistics(inputs.T @ inputs / len(inputs), inputs.abs().mean(0), len(inputs))


def correlated(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Inputs whose channels share directions, with standard deviations over a factor of 20."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(channels, channels, generator=generator) * torch.linspace(0, 3, channels).exp()
    return torch.randn(tokens, channels, generator=generator) @ mix / channels**0.5


def brute_force(weight: Tensor, hessian: Tensor, made: IntWeight, order: list[int]) -> Tensor:
    """Codes of optimal brain quantization, one channel at a time in a given order (2208.11580, eq. 2), in fp64.

    After each channel, the remaining ones move by -error / [H⁻¹]_ii · H⁻¹[:, i], with H⁻¹ of the remaining channels
    computed anew.
    """
    weight, codes = weight.double().clone(), torch.zeros(weight.shape)
    size = weight.shape[1] // made.scale.shape[1]
    remaining = list(order)
    while remaining:
        inverse = hessian[remaining][:, remaining].inverse()
        own = remaining[0]
        scale = made.scale[:, own // size].double()
        zero = torch.zeros_like(scale) if made.zero is None else made.zero[:, own // size].double()
        half = 2 ** (made.width - 1)
        codes[:, own] = code = torch.clamp(torch.round(weight[:, own] / scale) + zero, -half, half - 1)
        error = weight[:, own] - (code - zero) * scale
        weight[:, remaining] -= torch.outer(error / inverse[0, 0], inverse[:, 0])
        remaining = remaining[1:]
    return codes.to(torch.int8)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "scheme"), [(8, 8, "w3a16-channel"), (8, 8, "w4a16-channel"), (8, 48, "w4a16-g16")]
)
def test_codes_are_those_of_brute_force(
    act_order: bool, symmetric: bool, rows: int, columns: int, scheme: str
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    statistics = statistics_of(correlated(500, columns))
    made = GPTQ(symmetric, act_order).quantize(weight, scheme_of(scheme), statistics)
    assert isinstance(made, IntWeight)
    exact = statistics.hessian.double()
    damped = exact + 0.01 * exact.diagonal().mean() * torch.eye(columns)
    order = exact.diagonal().argsort(descending=True).tolist() if act_order else list(range(columns))
    assert torch.equal(made.codes, brute_force(weight, damped, made, order))
    levels = made.scale.shape[1]
    nearest = (weight.view(rows, levels, -1) / made.scale.unsqueeze(2)).round().flatten(1)
    assert not torch.equal(made.codes.float(), nearest)  # errors moved


@pytest.mark.parametrize("scheme", ["w4a16-channel", "w3a16-channel", "w4a16-g64", "w3a16-g64", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_nearer_than_those_of_rounding_to_nearest(scheme: str, dtype: torch.dtype) -> None:
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(2)).to(dtype)
    statistics = statistics_of(correlated(2000, 192))
    lost = [
        relative_output_error(
            weight, method.quantize(weight, scheme_of(scheme), statistics).dequantize(), statistics
        )
        for method in (GPTQ(), RoundToNearest())
    ]
    assert lost[0] < 0.75 * lost[1]


def test_blocks_do_not_change_the_result() -> None:
    weight = torch.randn(16, 100, generator=torch.Generator().manual_seed(3))
    statistics, scheme = statistics_of(correlated(500, 100)), scheme_of("w4a16-channel")
    whole, parts = (GPTQ(block=block).quantize(weight, scheme, statistics) for block in (100, 7))
    assert (whole.dequantize() != parts.dequantize()).float().mean() < 0.005  # ties, summed in another order


def test_channels_without_input_are_rounded_to_nearest() -> None:
    """They neither give errors nor receive them; with no input at all, GPTQ rounds to nearest."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    inputs = correlated(500, 64)
    inputs[:, [3, 40]] = 0
    made = GPTQ().quantize(weight, scheme_of("w4a16-channel"), statistics_of(inputs))
    assert isinstance(made, IntWeight)
    nearest = (weight / made.scale).round().clamp(-8, 7)
    assert torch.equal(made.codes[:, [3, 40]].float(), nearest[:, [3, 40]])
    silent = GPTQ().quantize(weight, scheme_of("w4a16-channel"), statistics_of(torch.zeros(9, 64)))
    plain = RoundToNearest().quantize(weight, scheme_of("w4a16-channel"), None)
    assert torch.equal(silent.dequantize(), plain.dequantize())


@pytest.mark.parametrize(("lowest", "damping"), [(0.0, 0.01), (-0.05, 0.1), (-0.5, 1.0)])
def test_damping_grows_until_the_hessian_is_positive(lowest: float, damping: float) -> None:
    """Sums of 16-bit inputs may have negative eigenvalues."""
    values = torch.full((16,), 1.0)
    values[0] = lowest
    hessian = _rotated(torch.diag(values))
    factor = inverse_factor(hessian)
    expected = hessian + damping * float(values.mean()) * torch.eye(16)
    assert torch.allclose((factor.T @ factor).inverse(), expected, atol=1e-4)


def test_a_hessian_that_is_not_positive_is_reported() -> None:
    values = torch.ones(16)
    values[0] = -8.0
    with pytest.raises(NotConverged, match="Cholesky"):
        inverse_factor(_rotated(torch.diag(values)))


class _Values(TorchDispatchMode):
    """Answers questions for values of fake tensors: True, 1.0, 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.long
def test_a_rehearsal_has_the_peak_of_the_method() -> None:
    """On fake tensors, whose allocations the tracker counts; columns after the first of a block cost no operation."""
    peak, work = [], []
    for one in (GPTQ(block=8), GPTQ(block=8).rehearsal()):
        target = TARGET_KERNELS["cpu"]
        tracker = Tracker({}, target.workspace, target.kept, lambda: "")
        with FakeTensorMode(allow_non_fake_inputs=True), tracker.watching(), _Values():
            statistics = InputStatistics(torch.empty(32, 32), torch.empty(32), 9)
            made = one.quantize(torch.empty(16, 32), scheme_of("w4a16-g16"), statistics)
            assert made.shape == (16, 32)
        peak.append(max(found.bytes for found in peaks(tracker).values()))
        work.append(tracker.now)
    assert peak[0] == peak[1]
    assert work[1] < work[0] - 24 * 5


def _rotated(matrix: Tensor) -> Tensor:
    """The matrix in a random basis, where no diagonal element shows a negative eigenvalue."""
    basis = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))[0]
    return basis @ matrix @ basis.T
