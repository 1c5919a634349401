"""Seconds of one kernel on a device, from its shape, FLOPs and bytes.

- **Matrix products** are cut into tiles of the result, one for each multiprocessor at a time, so time goes up in whole
  waves of tiles. A tile of k steps also takes the time of ``inner`` steps to begin and to end. Small results take
  smaller tiles, which reuse less, or divide the summed dimension. The fastest of these is taken, as cuBLAS does.
- **Attention** computes 128 queries of one head on a multiprocessor. Small heads and the backward pass, which computes
  five products of tiles where the forward pass computes two, reach less of the peak.
- **All kernels** move their bytes at the achieved bandwidth, if that takes longer, and take at least the floor.

CPU kernels on host memory update weights and moments: they are memory-bound, at the device's share of the host's
bandwidth. A device without ``tiles`` computes every shape at the efficiency of a large one.
"""

from __future__ import annotations

import math
from functools import lru_cache

from shardwise.core.cost import Kernel
from shardwise.hardware.device import RATED_DTYPES, DeviceProfile

_TILES: tuple[tuple[int, int, float], ...] = (
    (128, 256, 1.0),
    (128, 128, 0.9),
    (64, 128, 0.7),
    (64, 64, 0.5),
)
"""Rows and columns of tiles, and the fraction that each reaches of the largest's speed: operands loaded per product."""

_SPLIT_K = (1, 2, 4, 8)
"""Parts into which the summed dimension may be divided (split-K)."""

_QUERY_TILE = 128
"""Queries of one head that a multiprocessor computes at a time."""

_HEAD = 24.0
"""A head dimension d reaches d / (d + _HEAD) of the speed of an endless one: softmax does not shrink with it."""

_BACKWARD_SPEED = 0.75
"""Speed of attention's backward kernel relative to its forward kernel (Dao 2023, arXiv:2307.08691, section 4.1)."""

_CUDNN_SPEED = 600 / 370
"""Speed of cuDNN's attention over that of FlashAttention-2. The ``efficiency.attention`` of a profile is that of
FlashAttention-2. Measured on an H100 with 8,192 tokens and heads of 128 (Shah et al. 2024, arXiv:2407.08608, figure 5).
"""

_MANY = ("aten::_foreach", "aten::_fused")
"""Operations on lists, which are counted once per tensor and launched once."""


def kernel_seconds(kernel: Kernel, device: DeviceProfile) -> float:
    """Seconds of one call: measured ones where the device was calibrated, else those of the model."""
    measured = device.measured
    if measured is None or (kernel.on_host and not device.traits.is_host):
        return _modelled(kernel, device)
    seconds = measured.kernel_seconds(kernel)
    if seconds is None:
        seconds = _modelled(kernel, device)
    return seconds + measured.host_seconds(kernel) if device.traits.is_host else seconds


def host_launch_seconds(kernel: Kernel, device: DeviceProfile) -> float:
    """Seconds in which the host of an accelerator launches one call, ahead of the device: measured, or assumed.

    Measured ones are per counted kernel, so each tensor of an operation on lists has its share.
    """
    measured = device.measured
    if not device.traits.is_host and measured is not None and kernel.phase in measured.host:
        return measured.host_seconds(kernel)
    return 0.0 if launched_together(kernel) else device.launch.kernel


def _modelled(kernel: Kernel, device: DeviceProfile) -> float:
    if kernel.on_host:
        return kernel.bytes / (device.host_memory_bandwidth * device.efficiency.memory)
    seconds = kernel.bytes / (device.memory_bandwidth * device.efficiency.memory)
    if kernel.flops:
        seconds = max(seconds, arithmetic_seconds(kernel, device))
    return seconds if launched_together(kernel) else max(seconds, device.launch.floor)


def launched_together(kernel: Kernel) -> bool:
    """Whether one launch serves many of these kernels."""
    return kernel.operation.startswith(_MANY)


def arithmetic_seconds(kernel: Kernel, device: DeviceProfile) -> float:
    """Seconds of the arithmetic alone, at least that of the peak."""
    peak = device.peak_flops(kernel.dtype if kernel.dtype in RATED_DTYPES else "fp32")
    if "attention" in kernel.operation:
        return kernel.flops / (peak * _attention_fraction(kernel, device))
    rate = peak * device.efficiency.matmul
    tiles = device.tiles
    if tiles.units == 0 or not kernel.shape:
        return kernel.flops / rate
    return max(kernel.flops, _tiled(kernel.shape, tiles.units, tiles.inner)) / rate


def _attention_fraction(kernel: Kernel, device: DeviceProfile) -> float:
    fraction = device.efficiency.attention
    if device.tiles.units == 0 or not kernel.shape:
        return fraction
    heads, queries, _, width = kernel.shape
    tiles = heads * math.ceil(queries / _QUERY_TILE)
    # The last wave of tiles leaves multiprocessors idle.
    filled = tiles / (math.ceil(tiles / device.tiles.units) * device.tiles.units)
    # Relative to a width of 128.
    by_width = (width / (width + _HEAD)) * (128 + _HEAD) / 128
    backward = _BACKWARD_SPEED if "backward" in kernel.operation else 1.0
    backend = _CUDNN_SPEED if "cudnn" in kernel.operation else 1.0
    return min(1.0, fraction * filled * by_width * backward * backend)


@lru_cache(maxsize=65536)
def _tiled(shape: tuple[int, ...], units: int, inner: float) -> float:
    """FLOPs that all multiprocessors could have done while they compute equal products in waves of tiles."""
    products, m, n, k = shape
    best = math.inf
    for rows, columns, speed in _TILES:
        tiles = products * math.ceil(m / rows) * math.ceil(n / columns)
        work = 2 * rows * columns * units / speed
        for parts in _SPLIT_K if tiles < units else (1,):
            best = min(best, math.ceil(tiles * parts / units) * work * (k / parts + inner))
    return best
