"""Times of single kernels on a device: products by shape, attention, and memory-bound kernels by bytes.

Each figure is the median of a few calls. The operands change from call to call, so small ones come from the cache and
large ones from memory, as in a step. Grids and curves are those of hardware/measured.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.units import MiB
from shardwise.dryrun.counting import dtype_named
from shardwise.hardware.kinds import kind_of
from shardwise.hardware.measured import IN_PLACE, NEW, Curve, Grid
from shardwise.runtime.flops import attention_backward_flops, attention_flops

SIZES = {
    "cpu": ((1, 16, 64, 256, 1024), (32, 128, 512, 2048), (32, 128, 512, 2048)),
    "cuda": ((1, 16, 128, 1024, 8192), (128, 512, 2048, 8192), (128, 512, 2048, 8192)),
}
"""Sizes m, n and k of products."""

HEADS = {"cpu": 8, "cuda": 64}

SLOWEST = 0.1
"""Products that would take longer, by the rate of smaller ones, are not run: seconds grow in proportion to FLOPs."""

_BUDGET = 0.015
"""Seconds to spend on the calls of one figure, after three."""

_MOST_ROUNDS = 10
"""Rounds of an accelerator's calls that wait once for the device."""


def seconds_of(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    budget: float = _BUDGET,
    captured: bool = True,
) -> float:
    """Median seconds of one call. The calls do the same with different operands; each is warmed up.

    On an accelerator they are replayed from a CUDA graph, because the host issues small kernels slower than they run.
    ``captured`` is False for backward passes, which autograd issues in a stream of its own.
    """
    for call in calls:
        call()
    if kind_of(device).is_host:
        return _one_by_one(calls, budget)

    def issue(rounds: int) -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    # As many rounds as fit into the budget, by the time of one.
    rounds = max(1, min(_MOST_ROUNDS, round(budget / _until_idle(lambda: issue(1), device))))
    group: Callable[[], object] = partial(issue, rounds)
    if captured:
        group = _captured(partial(issue, rounds), device).replay
    return statistics.median(_until_idle(group, device) for _ in range(5)) / (rounds * len(calls))


def _captured(calls: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls. ``torch.cuda.graph`` would also empty the allocator's cache, which takes longer."""
    graph = torch.cuda.CUDAGraph()
    # CUDA cannot capture the default stream. The other one must see what the default stream has written.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin()
        calls()
        graph.capture_end()
    return graph


def _one_by_one(calls: Sequence[Callable[[], object]], budget: float) -> float:
    spent: list[float] = []
    while len(spent) < 3 or (sum(spent) < budget and len(spent) < 50):
        for call in calls:
            begin = time.perf_counter()
            call()
            spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def _until_idle(group: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done a group of calls. Waiting for one call takes longer than a small kernel."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    group()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def products(dtype: str, device: torch.device, budget: float) -> Grid:
    """Seconds of x @ W.T over (m, n, k), measured within ``budget`` seconds. Raises RuntimeError without the dtype."""
    axes = SIZES[device.type]
    end = time.monotonic() + budget
    seconds: dict[tuple[int, ...], float] = {}
    rate = 0.0  # the most FLOP/s so far
    # By FLOPs, ascending: the rate of the products so far says how long the next one takes, before it runs.
    for sizes in sorted(product(*axes), key=math.prod):
        flops = 2.0 * math.prod(sizes)
        if rate and (flops / rate > SLOWEST or time.monotonic() > end):
            seconds[sizes] = flops / rate
            continue
        m, n, k = sizes
        pairs = [_operands(((m, k), (n, k)), dtype, device) for _ in range(2)]
        seconds[sizes] = seconds_of([lambda p=p: p[0] @ p[1].t() for p in pairs], device)  # type: ignore[misc]
        rate = max(rate, flops / seconds[sizes])
    return Grid(axes, tuple(seconds[sizes] for sizes in product(*axes)))


def attention(dtype: str, device: torch.device, axes: tuple[tuple[int, ...], ...]) -> dict[str, Grid]:
    """Seconds per FLOP of causal attention over (keys, head dimension), "forward" and "backward"."""
    seconds_per_flop: dict[str, list[float]] = {"forward": [], "backward": []}
    for length, width in product(*axes):
        shape = torch.Size((1, HEADS[device.type], length, width))
        q, k, v = (operand.requires_grad_() for operand in _operands((shape,) * 3, dtype, device))

        # Defaults bind the tensors of this shape.
        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        slope = torch.ones_like(out)

        def backward(
            out: Tensor = out, q: Tensor = q, k: Tensor = k, v: Tensor = v, slope: Tensor = slope
        ) -> object:
            return torch.autograd.grad(out, (q, k, v), slope, retain_graph=True)

        forward_flops = attention_flops(shape, shape, shape, causal=True)
        backward_flops = attention_backward_flops(shape, shape, shape, causal=True)
        forward_seconds = seconds_of([forward], device, captured=False)
        backward_seconds = seconds_of([backward], device, captured=False)
        seconds_per_flop["forward"].append(forward_seconds / forward_flops)
        seconds_per_flop["backward"].append(backward_seconds / backward_flops)
    return {f"{dtype} {name}": Grid(axes, tuple(values)) for name, values in seconds_per_flop.items()}


def plain_curves(device: torch.device, largest: int) -> dict[str, Curve]:
    """Seconds by bytes of a product of elements into new memory, and of one in place.

    Bytes are those that the dry run counts: two operands and the result, or the one tensor that changes.
    """
    new, in_place = [], []
    size = 3 * 1024
    while size <= largest:
        elements = size // 12  # two fp32 operands and the fp32 result
        # Large operands replace each other in the cache, so one set of them is enough.
        operand_sets = 3 if size < 8 * MiB else 1
        pairs = [_operands(((elements,), (elements,)), "fp32", device) for _ in range(operand_sets)]
        new.append((float(size), seconds_of([lambda p=p: p[0] * p[1] for p in pairs], device)))  # type: ignore[misc]
        wide = [torch.ones(size // 4, device=device) for _ in pairs]
        in_place.append((float(size), seconds_of([lambda w=w: w.mul_(1.0) for w in wide], device)))  # type: ignore[misc]
        size *= 4
    return {NEW: tuple(new), IN_PLACE: tuple(in_place)}


def has_native_products(dtype: str, device: torch.device) -> bool:
    """Whether products in this dtype are not emulated: at least a quarter of the speed of fp32."""
    seconds = []
    for name in ("fp32", dtype):
        pairs = [_operands(((256, 256),) * 2, name, device) for _ in range(2)]
        seconds.append(seconds_of([lambda p=p: p[0] @ p[1].t() for p in pairs], device, 0.005))  # type: ignore[misc]
    fp32_seconds, dtype_seconds = seconds
    return dtype_seconds < 4 * fp32_seconds


def _operands(shapes: Sequence[Sequence[int]], dtype: str, device: torch.device) -> list[Tensor]:
    """Random: hardware multiplies zeros faster, and exact halves compress."""
    return [torch.randn(tuple(shape), device=device).to(dtype_named(dtype)) for shape in shapes]
