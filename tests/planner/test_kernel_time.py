"""Seconds of a kernel by its shape: bounded by the peaks, monotone, and slow where tiles do not fill the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.core.cost import Kernel
from shardwise.hardware.device import DeviceProfile
from shardwise.hardware.profiles import PROFILES
from shardwise.planner.kernel_time import kernel_seconds

DEVICES = [PROFILES[name] for name in ("H100-80GB", "A100-80GB", "MI300X-192GB", "V100-16GB")]
H100 = DEVICES[0]


def product(m: int, n: int, k: int, count: int = 1, dtype: str = "bf16") -> Kernel:
    moved = 2 * count * (m * k + k * n + m * n)
    return Kernel("forward", "aten::mm", dtype, 1, 2 * count * m * n * k, moved, shape=(count, m, n, k))


def attention(heads: int, length: int, width: int, backward: bool = False) -> Kernel:
    name = "aten::_scaled_dot_product_flash_attention" + ("_backward" if backward else "")
    flops = heads * length * length * width * (5 if backward else 2)
    shape = (heads, length, length, width)
    return Kernel("forward", name, "bf16", 1, flops, 8 * heads * length * width, shape=shape)


def reached(kernel: Kernel, device: DeviceProfile = H100) -> float:
    """The fraction of the arithmetic peak."""
    return kernel.flops / kernel_seconds(kernel, device) / device.peak_flops(kernel.dtype)


SIZES = (1, 16, 100, 128, 700, 1024, 4096, 14336)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_no_kernel_beats_a_peak(device: DeviceProfile) -> None:
    kernels = [product(m, n, k) for m in SIZES for n in SIZES for k in SIZES]
    kernels += [
        attention(h, s, d, b) for h in (1, 32) for s in (128, 8192) for d in (64, 256) for b in (0, 1)
    ]
    for kernel in kernels:
        seconds = kernel_seconds(kernel, device)
        assert seconds >= kernel.flops / device.peak_flops(kernel.dtype)
        assert seconds >= kernel.bytes / device.memory_bandwidth
        assert seconds >= device.launch.floor


def test_more_work_never_takes_less_time() -> None:
    for m in SIZES:
        for k in SIZES:
            times = [kernel_seconds(product(m, n, k), H100) for n in SIZES]
            assert times == sorted(times)
    bytes_only = [
        kernel_seconds(Kernel("forward", "aten::add", "bf16", 1, 0, b), H100) for b in (1, 10**6, 10**9)
    ]
    assert bytes_only == sorted(bytes_only)


def test_large_products_reach_the_stated_efficiency_and_thin_ones_do_not() -> None:
    large, thin = product(16384, 14336, 8192), product(16, 4096, 4096)
    assert 0.9 * H100.efficiency.matmul < reached(large) <= H100.efficiency.matmul
    assert reached(thin) < 0.1
    assert reached(product(8192, 4096, 64)) < 0.5 * reached(large)


def test_one_tile_too_many_costs_a_wave() -> None:
    """132 tiles of 128 x 256 fill the device once; one row of tiles more needs a second wave."""
    full, over = product(128 * 12, 256 * 11, 4096), product(128 * 13, 256 * 11, 4096)
    assert kernel_seconds(over, H100) > 1.3 * kernel_seconds(full, H100)
    assert H100.tiles.units == 12 * 11


def test_small_heads_and_the_backward_pass_of_attention_reach_less() -> None:
    wide, narrow, back = attention(64, 8192, 128), attention(64, 8192, 64), attention(64, 8192, 128, True)
    assert reached(wide) > reached(narrow) and reached(wide) > reached(back)


def test_a_device_without_tiles_is_as_fast_for_every_shape() -> None:
    plain = replace(H100, tiles=type(H100.tiles)())
    assert reached(product(4096, 4096, 4096), plain) == pytest.approx(H100.efficiency.matmul)


def test_updates_of_many_tensors_have_no_floor_each() -> None:
    each = Kernel("optimizer", "aten::_fused_adamw_", "fp32", 1000, 0, 4096)
    assert kernel_seconds(each, H100) < H100.launch.floor
