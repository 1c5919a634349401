"""The dtypes that a strategy names, for a loop that computes the same step without the techniques (verify)."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.strategy import Strategy
from shardwise.technique.float8 import FP8_LAYERS, FP8_SCALING, can_run, gains
from shardwise.technique.precision import BUFFER_DTYPE, HALF, MASTER_WEIGHTS, PRECISION


@dataclass(frozen=True)
class Digits:
    """The dtypes of a step.

    Attributes:
        compute: fp64, fp32, bf16 or fp16.
        master_weights: whether weights are stored in more digits than they are computed in.
        narrow_buffers: whether buffers are in the dtype of compute too.
        fp8_scaling: the scales of products in 8 bits, "tensor" or "row"; None without such products.
        fp8_everywhere: whether all layers that can run in 8 bits do, and not only those that gain by it.
    """

    compute: str
    master_weights: bool
    narrow_buffers: bool
    fp8_scaling: str | None
    fp8_everywhere: bool

    def in_fp8(self, rows: int, columns: int) -> bool:
        """Whether a linear layer of the blocks with a weight [rows, columns] runs in 8 bits."""
        if self.fp8_scaling is None:
            return False
        return can_run(rows, columns) if self.fp8_everywhere else gains(rows, columns, self.fp8_scaling)


def digits_of(strategy: Strategy) -> Digits:
    """The dtypes that a strategy names."""
    precision = strategy[PRECISION]
    return Digits(
        HALF.get(precision, precision),
        strategy[MASTER_WEIGHTS],
        strategy[BUFFER_DTYPE] == "compute",
        strategy[FP8_SCALING] if precision == "fp8" else None,
        strategy[FP8_LAYERS] == "all",
    )
