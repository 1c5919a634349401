"""Storage of the moments of a chunked rule: in fp32, or in 8 bits.

8-bit moments are block-wise dynamic codes (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"). A
block of 128 neighbours in a row shares one fp32 scale, its largest magnitude. Each value is the index of the nearest of
256 code values, which are denser towards zero. That is 1 + 4/128 bytes per value and moment, 2.0625 per parameter for
Adam's two. Vectors stay in fp32: they are few, and outliers hurt most there.

Adam's second moment is stored as its square root, and rounds to zero only if it is zero. The paper encodes the moment
itself. Then it is lost for every gradient below 3e-4 of its block's largest while the first moment remains, so the
update divides by epsilon alone. The rows of rare tokens in an embedding are of that kind.

Blocks are within rows of the first dim, so codes and scales are sharded as the parameter is: on rows anywhere, on
columns between blocks. A checkpoint can be read on another number of ranks, and replicas agree.

A table finds the code of a value. The upper 16 bits of a float leave at most one border between two codes, so a table
look-up and one comparison suffice. A binary search among 255 borders gives the same codes and takes several times as
long on a CPU (benchmarks/updates.py). The table has 320 KiB for each kind of moment.

torchao's optimizers use the same block-wise scheme, but compile the update per shape (so they do not run on fake
tensors) and cannot skip it on the device. Here each chunk is decoded and encoded by about ten eager operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.engine.optim.chunk import distributed_as
from shardwise.engine.optim.norm import local
from shardwise.runtime.parallel.shard_slices import MOMENTS_BLOCK


class Moments(Protocol):
    """Storage of moments, read and written by chunk: some rows of a parameter as [rows, rest]."""

    def state(self, parameter: nn.Parameter, name: str) -> dict[str, Tensor]: ...

    def read(self, state: dict[str, Tensor], name: str) -> Tensor:
        """A chunk's moment, [rows, rest], to be updated in place."""
        ...

    def write(self, state: dict[str, Tensor], name: str, value: Tensor, skip: Tensor) -> None:
        """Store the updated result of ``read``, which is consumed; if ``skip`` (a bool scalar), store nothing."""
        ...


@dataclass(frozen=True)
class Wide:
    """Moments in fp32 (fp64 for fp64 weights), for any dtype of stored weights."""

    def state(self, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        return {name: torch.zeros_like(parameter, dtype=dtype, requires_grad=False)}

    def read(self, state: dict[str, Tensor], name: str) -> Tensor:
        return state[name]

    def write(self, state: dict[str, Tensor], name: str, value: Tensor, skip: Tensor) -> None:
        """Nothing to do: ``read`` returned the stored tensor."""


class EightBit:
    """Block-wise dynamic 8-bit codes for matrices, fp32 for vectors."""

    def __init__(self, device: torch.device) -> None:
        self._wide = Wide()
        self._codes = {signed: DynamicCode(signed, device) for signed in (True, False)}

    def state(self, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
        if parameter.ndim < 2:
            return self._wide.state(parameter, name)
        zero = code_values(_signed(name)).index(0.0)
        codes = torch.full_like(parameter, zero, dtype=torch.uint8, requires_grad=False)
        return {name: codes, f"{name}_scale": _scales_of(parameter)}

    def read(self, state: dict[str, Tensor], name: str) -> Tensor:
        if f"{name}_scale" not in state:
            return self._wide.read(state, name)
        codes = state[name]  # [rows, columns]
        scale = state[f"{name}_scale"]  # [rows, blocks]
        value = self._codes[_signed(name)].decoded(codes)
        for block, block_scale in _blocks(value, scale):
            block.mul_(block_scale)
        return value if _signed(name) else value.square_()  # the second moment is stored as its root

    def write(self, state: dict[str, Tensor], name: str, value: Tensor, skip: Tensor) -> None:
        if f"{name}_scale" not in state:
            return
        codes = state[name]
        scale = state[f"{name}_scale"]
        value = value.to(torch.float32)
        if not _signed(name):
            value = value.sqrt_()
        largest = torch.empty_like(scale)
        for block, magnitude in _blocks(value, largest):
            # The largest magnitude of a block, without a copy of the block as ``abs`` would make it.
            magnitude.copy_(torch.maximum(block.amax(-1, keepdim=True), -block.amin(-1, keepdim=True)))
            # A block of zeros has the scale 0, and 0 / 0 is NaN.
            block.div_(magnitude.clamp(min=torch.finfo(torch.float32).tiny))
        codes.copy_(torch.where(skip, codes, self._codes[_signed(name)].encoded(value)))
        scale.copy_(torch.where(skip, scale, largest))


class DynamicCode:
    """256 code values in (-1, 1] or [0, 1], with encoding to the nearest."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        values = torch.tensor(code_values(signed))
        borders = (values[:-1] + values[1:]) / 2
        if not signed:
            borders[0] = 0.0  # no denominator becomes zero by rounding
        least = _least_of_cells()
        codes = torch.bucketize(least, borders)
        self._values = values.to(device)
        # By cell: the code of its smallest float, and the border to the next code, which may be within the cell.
        self._first = codes.to(torch.uint8).to(device)
        self._border = nn.functional.pad(borders, (0, 1), value=torch.inf)[codes].to(device)

    def decoded(self, codes: Tensor) -> Tensor:
        """fp32 values of uint8 codes, in their shape."""
        return self._values.index_select(0, codes.flatten().int()).view_as(codes)

    def encoded(self, unit: Tensor) -> Tensor:
        """The uint8 codes of fp32 values, in their shape: the number of borders below each."""
        flat = unit.flatten()
        cell = (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF)  # without copies of the sign bit
        codes = self._first.index_select(0, cell)
        # A cell is narrower than the distance of borders, so there is at most one in it.
        return codes.add_(flat > self._border.index_select(0, cell)).view_as(unit)


def _least_of_cells() -> Tensor:
    """The smallest float of each cell, fp32 [2^16]. A cell holds the floats with equal upper 16 bits."""
    bits = torch.arange(2**16, dtype=torch.int32) << 16
    # Negative floats get smaller as their bits count up.
    return torch.minimum(bits.view(torch.float32), (bits | 0xFFFF).view(torch.float32))


def code_values(signed: bool) -> list[float]:
    """The 256 values of the dynamic code, ascending, in (-1, 1] or [0, 1] (Dettmers et al., section 1.3).

    Seven powers of ten, the i-th cut into 2^i means of equal spans for each sign (2^(i+1) without a sign);
    zero and one have their own codes.
    """
    values = [0.0, 1.0]
    for i in range(7):
        spans = 2**i if signed else 2 ** (i + 1)
        means = [(0.1 + 0.9 * (span + 0.5) / spans) * 10.0 ** (i - 6) for span in range(spans)]
        values += means + ([-mean for mean in means] if signed else [])
    return sorted(values)


def _signed(name: str) -> bool:
    return name != "exp_avg_sq"


def _columns(tensor: Tensor) -> int:
    return tensor.shape[1:].numel()


def _scales_of(parameter: nn.Parameter) -> Tensor:
    """fp32 zeros [rows of ``parameter``, blocks of a row], sharded as the parameter is.

    Raises RecipeError if tensor parallelism splits a row within a block.
    """
    piece = local(parameter)
    columns = _columns(piece)
    whole = _columns(parameter)
    # Whole rows may end with a shorter block. Rows that are cut within a block would share its scale across ranks.
    if columns % MOMENTS_BLOCK and columns != whole:
        raise RecipeError(
            "adamw_8bit cannot keep this model's moments",
            where="strategy.tensor_parallel",
            why=f"{MOMENTS_BLOCK} neighbours in a row share a scale, and rows of {whole} are split into {columns}",
            fix="use another degree, or optimizer.name: adamw",
        )
    rows = piece.shape[0] if piece.numel() else 0  # more ranks than rows: some have an empty shard
    zeros = torch.zeros((rows, -(-columns // MOMENTS_BLOCK)), dtype=torch.float32, device=piece.device)
    return distributed_as(parameter, zeros, -(-whole // MOMENTS_BLOCK))


def _blocks(value: Tensor, scale: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(blocks, scales) views of [rows, columns]: whole ones of [rows, blocks, MOMENTS_BLOCK], then a shorter last one.

    The scales are [rows, blocks, 1].
    """
    whole, left = divmod(value.shape[1], MOMENTS_BLOCK)
    if whole:
        yield value[:, : whole * MOMENTS_BLOCK].unflatten(1, (whole, MOMENTS_BLOCK)), scale[:, :whole, None]
    if left:
        yield value[:, None, whole * MOMENTS_BLOCK :], scale[:, whole:, None]
