"""Measured speeds as the time model reads them: grids, curves, and the share of a process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardwise.core.cost import Collective, Kernel
from shardwise.hardware.measured import IN_PLACE, NEW, Grid, MeasuredSpeeds, in_place, on_curve

GRID = Grid(((16, 256), (32, 512), (64, 1024)), tuple(1e-6 * 4**i for i in range(8)))
SPEEDS = MeasuredSpeeds(
    processes=2,
    threads=1,
    products={"fp32": GRID},
    attention={
        "fp32 forward": Grid(((64,), (32,)), (1e-10,)),
        "fp32 backward": Grid(((64,), (32,)), (3e-10,)),
    },
    plain={NEW: ((1e3, 1e-6), (1e6, 1e-4)), IN_PLACE: ((1e3, 5e-7), (1e6, 5e-5))},
    ratios={"aten::exp fp32": ((1e3, 2.0), (1e6, 8.0))},
    host={"forward": 1e-5},
    collectives={"all_gather": ((4.0, 1e-4), (1e6, 1e-3))},
    around={"shard": 2e-4},
)


def kernel(operation: str, size: int = 1000, flops: int = 0, shape: tuple[int, ...] = ()) -> Kernel:
    return Kernel("forward", operation, "fp32", 1, flops, size, shape=shape)


def test_a_grid_gives_back_what_was_measured() -> None:
    corners = [(m, n, k) for m in GRID.axes[0] for n in GRID.axes[1] for k in GRID.axes[2]]
    assert [GRID.at(sizes) for sizes in corners] == pytest.approx(list(GRID.seconds))


def test_a_grid_between_its_sizes_is_their_geometric_mean() -> None:
    between = math.sqrt(64 * 1024)
    assert GRID.at((16, 32, between)) == pytest.approx(math.sqrt(GRID.seconds[0] * GRID.seconds[1]))


def test_a_grid_grows_in_proportion_above_and_stays_below() -> None:
    assert GRID.at((512, 512, 1024)) == pytest.approx(2 * GRID.seconds[-1])
    assert GRID.at((1, 32, 64)) == pytest.approx(GRID.seconds[0])


def test_a_curve_has_a_floor_and_the_rate_of_its_end() -> None:
    curve = SPEEDS.plain[NEW]
    assert on_curve(curve, 10) == 1e-6 and on_curve(curve, 1e6) == 1e-4
    assert on_curve(curve, 5e6) == pytest.approx(5e-4)
    assert on_curve(curve, math.sqrt(1e3 * 1e6)) == pytest.approx(1e-5)


def test_kernels_take_the_seconds_of_their_kind() -> None:
    product = kernel("aten::mm", flops=1, shape=(3, 16, 32, 64))
    assert SPEEDS.kernel_seconds(product) == pytest.approx(3 * GRID.seconds[0])
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert SPEEDS.kernel_seconds(kernel(forward, flops=1000, shape=(8, 64, 64, 32))) == pytest.approx(1e-7)
    assert SPEEDS.kernel_seconds(
        kernel(f"{forward}_backward", flops=1000, shape=(8, 64, 64, 32))
    ) == pytest.approx(3e-7)
    assert SPEEDS.kernel_seconds(kernel("aten::exp", 10**6)) == pytest.approx(8e-4)
    assert SPEEDS.kernel_seconds(kernel("aten::mul_.Tensor", 10**6)) == pytest.approx(5e-5)
    assert SPEEDS.host_seconds(kernel("aten::mul")) == 1e-5


def test_a_flop_of_attention_takes_no_longer_beyond_the_grid() -> None:
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert SPEEDS.kernel_seconds(kernel(forward, flops=1000, shape=(8, 9999, 9999, 64))) == pytest.approx(
        1e-7
    )


def test_a_dtype_that_was_not_measured_has_no_seconds() -> None:
    product = replace(kernel("aten::mm", flops=1, shape=(3, 16, 32, 64)), dtype="fp8")
    assert SPEEDS.kernel_seconds(product) is None
    assert SPEEDS.kernel_seconds(kernel("aten::convolution", flops=1)) is None


def test_which_operations_write_in_place() -> None:
    assert in_place("aten::mul_.Tensor") and in_place("aten::_fused_adamw_") and in_place("fsdp::chunk_cat")
    assert not in_place("aten::mul.Tensor") and not in_place("aten::native_layer_norm_backward")


def test_collectives_take_their_curve_and_the_host_around_them() -> None:
    gather = Collective("all_gather", "shard", 2, 5, 10, 1)
    assert SPEEDS.collective_seconds(gather) == pytest.approx(3e-4)
    assert SPEEDS.collective_seconds(replace(gather, axis="tensor")) == pytest.approx(1e-4)
    assert SPEEDS.collective_seconds(replace(gather, kind="broadcast")) is None
    assert replace(SPEEDS, waiting={"shard": 0.5}).collective_seconds(gather) == pytest.approx(2.5e-4)


@pytest.mark.parametrize(
    ("processes", "threads", "kernels", "host"), [(4, 1, 2, 2), (2, 1, 1, 1), (1, 2, 0.5, 1), (1, 1, 1, 1)]
)
def test_processes_divide_the_machine(processes: int, threads: int, kernels: float, host: float) -> None:
    """Measured on two cores in two processes. Four take turns; one has both cores, if it may have two threads."""
    shared, exp = SPEEDS.shared_by(processes, threads, cores=2), kernel("aten::exp", 10**6)
    assert shared.kernel_seconds(exp) == pytest.approx(kernels * SPEEDS.kernel_seconds(exp))
    assert shared.host["forward"] == pytest.approx(host * SPEEDS.host["forward"])
