"""Initial values that do not depend on who makes them.

A parameter is covered by a fixed grid of tiles. Each tile has its own seed, from the run's seed, the
parameter's name and the tile's place, and is always drawn whole, in fp32, on the CPU. A rank draws the tiles
that its slice touches and copies what it holds of them, so any sharding, in any precision, on any device
starts from the same numbers, and no rank makes or receives a tensor it does not keep.

Tiles are low and wide, as slices are: on 16,384 ranks a rank holds one row of a matrix, and draws 32. The
price of the grid is that waste (on one process it is nothing) and drawing on one CPU thread, at about 400
million values a second. The CPU generator takes 32 bits of seed: in a model of 8 billion parameters about two
of its 123,000 tiles are alike, at unrelated places. Refused: a counter-based generator, which has no such
repeats but runs 3.5 times slower in NumPy; drawing on the GPU, which gives other numbers than the CPU;
filling whole tensors on one rank and scattering them, which is what cannot be done when a model does not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.model.slices import local_part, local_slices

TILE = (32, 2048)
"""Rows and columns drawn from one seed. Changing it changes every model's initial values."""


def fill_normal(tensor: Tensor, std: float, seed: int, name: str) -> None:
    """Write this rank's part of a matrix of normal values with mean 0, in place.

    Args:
        tensor: [rows, columns], plain or DTensor, any float dtype and device.
        std: standard deviation.
        seed: the run's.
        name: the parameter's canonical name.
    """
    _fill(tensor, lambda tile, chance: tile.normal_(0.0, std, generator=chance), seed, name)


def fill_uniform(tensor: Tensor, bound: float, seed: int, name: str) -> None:
    """As ``fill_normal``, of values that are uniform between ``-bound`` and ``bound``."""
    _fill(tensor, lambda tile, chance: tile.uniform_(-bound, bound, generator=chance), seed, name)


@torch.no_grad()
def _fill(tensor: Tensor, draw: Callable[[Tensor, torch.Generator], object], seed: int, name: str) -> None:
    rows, columns = local_slices(tensor)
    part = local_part(tensor)
    if part.numel() == 0:
        return
    shape = (TILE[0], min(TILE[1], tensor.shape[1]))
    tile = torch.empty(shape, dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu")
    for i in _touched(rows, shape[0]):
        for j in _touched(columns, shape[1]):
            draw(tile, generator.manual_seed(seed_of(seed, name, i, j)))
            into_rows, from_rows = _overlap(rows, i, shape[0])
            into_columns, from_columns = _overlap(columns, j, shape[1])
            part[into_rows, into_columns] = tile[from_rows, from_columns].to(part)


def seed_of(*parts: object) -> int:
    """32 bits that depend on every part, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _touched(held: slice, size: int) -> range:
    """Indices of the tiles of ``size`` that [start, stop) touches."""
    return range(held.start // size, -(-held.stop // size))


def _overlap(held: slice, index: int, size: int) -> tuple[slice, slice]:
    """Where tile ``index`` and the held range meet: counted from the held range, and from the tile."""
    start, stop = max(held.start, index * size), min(held.stop, (index + 1) * size)
    return slice(start - held.start, stop - held.start), slice(start - index * size, stop - index * size)
