"""The peak that a dry run of a method counts is the peak of PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.core.scheme import scheme_of
from shardwise.plugins.quantize.methods import kashin
from shardwise.plugins.quantize.methods.awq import AWQ, awq_scale
from shardwise.plugins.quantize.methods.base import InputStatistics, QuantizationMethod
from shardwise.plugins.quantize.methods.gptq import GPTQ
from shardwise.plugins.quantize.methods.hqq import HalfQuadratic
from shardwise.plugins.quantize.methods.kashin import Kashin
from shardwise.plugins.quantize.methods.kashin_weighted import Sweeps
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.plugins.quantize.prediction import counted_peak

ROWS, COLUMNS = 48, 192
KASHIN = Kashin(steps=2, rounds=1, sweeps=Sweeps(1, 1))
CASES: dict[str, tuple[QuantizationMethod, str, bool]] = {
    "rtn": (RoundToNearest(), "w4a16-g64", False),
    "rtn-w8a8": (RoundToNearest(), "w8a8", False),
    "rtn-fp8": (RoundToNearest(), "fp8", False),
    "rtn-nf4": (RoundToNearest(), "nf4", False),
    "hqq": (HalfQuadratic(), "w4a16-g64", False),
    "gptq": (GPTQ(), "w4a16-g64", True),
    "awq": (AWQ(), "w4a16-g64", True),
    "kashin": (KASHIN, "w4a16-channel", False),
    "kashin-calibrated": (KASHIN, "w4a16-channel", True),
}


def quantizing(method: QuantizationMethod, scheme: str, calibrated: bool) -> Callable[[], object]:
    """What a pass does with one weight."""

    def run() -> object:
        weight, inputs = torch.randn(ROWS, COLUMNS), torch.randn(2 * COLUMNS, COLUMNS)
        hessian, magnitude = inputs.T @ inputs / len(inputs), inputs.abs().mean(0)
        statistics = InputStatistics(hessian, magnitude, len(inputs)) if calibrated else None
        del inputs
        if isinstance(method, AWQ) and statistics is not None:
            awq_scale([weight], statistics, scheme_of(scheme), steps=method.steps)
        found = method.quantize(weight, scheme_of(scheme), statistics)
        return found.tensors(), found.dequantize()

    return run


def allocated_peak(run: Callable[[], object]) -> int:
    """Peak bytes of PyTorch's CPU allocator, from its own events: temporary tensors inside kernels are in it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


@torch.no_grad()
@pytest.mark.parametrize(("method", "scheme", "calibrated"), CASES.values(), ids=CASES.keys())
def test_a_rehearsal_on_fake_tensors_has_the_peak_of_the_method(
    method: QuantizationMethod, scheme: str, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 64 bytes, in which the allocator rounds. Without statistics Kashin's rows are searched in two parts."""
    monkeypatch.setattr(kashin, "SEARCHED_WEIGHTS", ROWS * COLUMNS // (1 if calibrated else 2))
    expected = allocated_peak(quantizing(method, scheme, calibrated))
    found = counted_peak(quantizing(method.rehearsal(), scheme, calibrated))
    assert found == pytest.approx(expected, abs=64)
