"""Workspaces of convolutions and LSTMs on a CPU: what the dry run counts, against what the operating system counts."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.dryrun.onednn import with_workspaces
from shardwise.runtime.torch_private import TorchDispatchMode, tree_iter
from shardwise.runtime.torch_private_onednn import onednn_compiles
from shardwise.trainer.meter import MemoryMeter, return_large_frees
from shardwise.trainer.warm_up import _convolve
from tests.harness.pool import Pool

MIB = 2**20
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, bool, int]] = {
    "3x3": ((8, 64, 64, 64), (64, 64, 3, 3), 1, False, 1),
    "strided": ((8, 64, 64, 64), (128, 64, 3, 3), 2, False, 1),
    "of images": ((8, 3, 128, 128), (64, 3, 3, 3), 1, False, 1),
    "padded channels": ((8, 50, 64, 64), (50, 50, 3, 3), 1, False, 1),
    "large weights": ((4, 512, 8, 8), (512, 512, 3, 3), 1, False, 1),
    "depthwise": ((8, 64, 64, 64), (64, 1, 3, 3), 1, False, 64),
    "transposed": ((8, 64, 32, 32), (64, 32, 2, 2), 2, True, 1),
    "1-D": ((8, 256, 4000), (256, 256, 3), 2, False, 1),
    "3-D": ((4, 32, 16, 32, 32), (32, 32, 3, 3, 3), 1, False, 1),
}


class Buffers(TorchDispatchMode):
    """Sums the buffers that operations with a workspace allocate."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name() == "aten::new_empty":
            self.total += out.numel() * out.element_size()
        return out


def call(name: str, dtype: torch.dtype) -> tuple[list[Tensor], tuple[Any, ...]]:
    shape, weight, stride, transposed, groups = CALLS[name]
    n = len(shape) - 2
    tensors = [torch.randn(shape).to(dtype), torch.randn(weight).to(dtype)]
    padding = 0 if transposed else weight[-1] // 2
    return tensors, ([stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups)


def workspaces(name: str, dtype: torch.dtype) -> list[tuple[float, float]]:
    """(counted, measured) MiB beyond the results of both passes."""
    return_large_frees(True)
    _convolve(dtype, torch.device("cpu"))
    (x, weight), form = call(name, dtype)
    dy = torch.ops.aten.convolution(x, weight, None, *form)
    passes: list[tuple[str, tuple[Any, ...]]] = [
        ("convolution", (x, weight, None, *form)),
        ("convolution_backward", (dy, x, weight, None, *form, [True, True, False])),
    ]
    found = []
    for operation, arguments in passes:
        with Buffers() as buffers:
            with_workspaces(torch.get_num_threads())[f"aten::{operation}"](*arguments)
        found.append(
            (buffers.total / MIB, measured(lambda: getattr(torch.ops.aten, operation)(*arguments)) / MIB)  # noqa: B023
        )
    return found


def measured(function: Callable[[], Any]) -> int:
    """Bytes at the peak of a second call beyond its results."""
    function()
    gc.collect()
    meter = MemoryMeter(torch.device("cpu"))
    out = function()
    results = (each for each in tree_iter(out) if isinstance(each, Tensor))
    return meter.reached().allocated - sum(each.numel() * each.element_size() for each in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_convolution_takes_the_workspace_it_was_planned(name: str, dtype: torch.dtype, pool: Pool) -> None:
    """Within 5 % of its tensors."""
    if dtype not in {torch.float32, *onednn_compiles()}:
        pytest.skip("this processor has no instructions for it")
    shape, weight, *_ = CALLS[name]
    room = 0.05 * (3 * math.prod(shape) + math.prod(weight)) * dtype.itemsize / MIB + 0.5
    for counted, real in pool.run(1, workspaces, name, dtype)[0]:
        assert abs(counted - real) <= room, (counted, real)


def lstm(dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that the forward pass of an LSTM keeps: counted, and measured."""
    return_large_frees(True)
    _convolve(dtype, torch.device("cpu"))
    model, x = nn.LSTM(256, 256).to(dtype), torch.randn(400, 8, 256).to(dtype)
    with torch.no_grad():
        model(x)
    gc.collect()
    x.requires_grad_()
    meter = MemoryMeter(torch.device("cpu"))
    out = model(x)[0]
    meter.forget()
    kept = meter.reached().allocated - out.numel() * out.element_size()
    return 5 * out.numel() * out.element_size(), kept


def test_an_lstm_keeps_its_gates(pool: Pool) -> None:
    counted, kept = pool.run(1, lstm, torch.float32)[0]
    assert kept == pytest.approx(counted, rel=0.05)
