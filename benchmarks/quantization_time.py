"""Seconds per million weights of every quantization method, on one thread, and the output error that they leave.

A square weight of normal values reads correlated inputs whose channels differ by a factor of 20 (``--size`` channels).
AWQ's time includes the search of its scale.

    python benchmarks/quantization_time.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.core.scheme import scheme_of
from shardwise.plugins.quantize.methods import method_of
from shardwise.plugins.quantize.methods.awq import AWQ, awq_scale
from shardwise.plugins.quantize.methods.base import InputStatistics, relative_output_error

CASES = (
    *(("rtn", scheme) for scheme in ("w4a16-g128", "w4a16-channel", "w8a16", "fp8", "nf4")),
    *((method, scheme) for method in ("hqq", "gptq", "awq") for scheme in ("w4a16-g128", "w4a16-channel")),
    ("kashin", "w4a16-channel"),
)


def inputs_of(size: int) -> InputStatistics:
    """The statistics of 4 tokens per channel."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(size, size, generator=generator) * torch.linspace(0, 3, size).exp()
    x = torch.randn(4 * size, size, generator=generator) @ mix / size**0.5
    return InputStatistics(x.T @ x / len(x), x.abs().mean(0), len(x))


def rounded(method: str, scheme: str, weight: Tensor, statistics: InputStatistics) -> Tensor:
    """The weight after quantization, in place of the original one."""
    asked, made = scheme_of(scheme), method_of(method)
    if not isinstance(made, AWQ):
        return made.quantize(weight, asked, statistics).dequantize()
    scale = awq_scale([weight], statistics, asked)
    return made.quantize(weight * scale, asked, statistics.divided(scale)).dequantize() / scale


def timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result, and the seconds of this process's CPU."""
    start = time.process_time()
    return run(), time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024)
    size = parser.parse_args().size
    torch.set_num_threads(1)
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    statistics = inputs_of(size)
    print("| method | scheme | seconds per million weights | relative output error |\n|---|---|---:|---:|")
    for method, scheme in CASES:
        found, seconds = timed(lambda m=method, s=scheme: rounded(m, s, weight, statistics))
        error = relative_output_error(weight, found, statistics)
        print(f"| {method} | {scheme} | {seconds / weight.numel() * 1e6:.2f} | {error:.4f} |", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
