"""How few rows can calibrate an expert: ``python benchmarks/expert_rows.py``.

A random weight [256, 1024] is rounded to ``w4a16-g128`` with the Hessian of 0 to 4096 rows, as it is and shrunk as for
experts (plugins/quantize/statistics.py). Rows are Gaussian. Their covariance has eigenvalues that fall as a power of
their number; in half of the cases the channels also have log-normal sizes. The figure is the error on new rows over
that of rounding to nearest. Takes about a minute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.scheme import scheme_of
from shardwise.plugins.quantize.methods.awq import AWQ
from shardwise.plugins.quantize.methods.base import (
    InputStatistics,
    QuantizationMethod,
    relative_output_error,
)
from shardwise.plugins.quantize.methods.gptq import GPTQ
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.plugins.quantize.statistics import shrunk

OUT, IN = 256, 1024
ROWS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096)
DECAYS = (0.0, 0.25, 0.5, 1.0)
"""Exponents of the singular values of the rows."""
SCHEME = scheme_of("w4a16-g128")
METHODS: tuple[QuantizationMethod, ...] = (GPTQ(), AWQ(symmetric=True))


def statistics_of(rows: Tensor) -> InputStatistics:
    return InputStatistics(rows.T @ rows / len(rows), rows.abs().mean(0), len(rows))


def mixing(decay: float, uneven: bool, draw: torch.Generator) -> Tensor:
    """[IN, IN]: normal rows times this have the covariance of a case."""
    rotation = torch.linalg.qr(torch.randn(IN, IN, generator=draw))[0]
    scaled = torch.arange(1, IN + 1).float().pow(-decay).unsqueeze(1) * rotation
    return scaled * torch.randn(IN, generator=draw).exp() if uneven else scaled


@torch.no_grad()
def main() -> None:
    print(f"| method, Hessian | singular values | channels | {' | '.join(map(str, ROWS))} |")
    print(f"|---|---|---|{'---:|' * len(ROWS)}")
    for decay in DECAYS:
        for uneven in (False, True):
            draw = torch.Generator().manual_seed(0)
            mixed = mixing(decay, uneven, draw)
            rows = torch.randn(max(ROWS), IN, generator=draw) @ mixed
            new = statistics_of(torch.randn(4 * IN, IN, generator=draw) @ mixed)
            weight = torch.randn(OUT, IN, generator=draw)
            nearest = RoundToNearest().quantize(weight, SCHEME, None).dequantize()
            base = relative_output_error(weight, nearest, new)
            for method in METHODS:
                for name, change in (("as it is", lambda given: given), ("shrunk", shrunk)):
                    found = []
                    for count in ROWS:
                        given = change(statistics_of(rows[:count]))
                        made = method.quantize(weight, SCHEME, given).dequantize()
                        found.append(f"{relative_output_error(weight, made, new) / base:.3f}")
                    sizes = "uneven" if uneven else "alike"
                    print(f"| {method.name}, {name} | k^-{decay:g} | {sizes} | {' | '.join(found)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
