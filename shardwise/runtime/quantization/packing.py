"""Codes of 2 to 8 bits in as many bits, without gaps.

Code i of a row takes the bits [i · width, (i + 1) · width) of the row, counted from the lowest bit of the first byte. A
code may cross bytes: 8 codes fill ``width`` bytes. Read as little-endian int32, this is the layout of
compressed-tensors (``pack_to_int32``) and of GPTQ's ``qweight``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """Pack codes [rows, count], uint8 below 2^width, into uint8 [rows, ⌈count · width / 8⌉]."""
    rows, count = codes.shape
    if width == 8:
        return codes.contiguous()
    # Eight codes of ``width`` bits fill ``width`` bytes exactly, so each of the eight has one place in them.
    eights = F.pad(codes, (0, -count % 8)).view(rows, -1, 8)
    packed = codes.new_zeros(rows, eights.shape[1], width)
    for index in range(8):
        byte, shift = divmod(index * width, 8)
        packed[..., byte] |= eights[..., index] << shift
        if shift + width > 8:
            # The code crosses into the next byte; uint8 has dropped these bits in the shift above.
            packed[..., byte + 1] |= eights[..., index] >> (8 - shift)
    return packed.view(rows, -1)[:, : packed_bytes(count, width)].contiguous()


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """The codes [rows, count], uint8, of uint8 [rows, ⌈count · width / 8⌉ or more]."""
    rows = packed.shape[0]
    if width == 8:
        return packed[:, :count]
    # Two codes per byte need no loop: the most frequent width, read in every forward pass.
    if width == 4:
        return torch.stack((packed & 15, packed >> 4), 2).view(rows, -1)[:, :count]
    eights = F.pad(packed, (0, -packed.shape[1] % width)).view(rows, -1, width)
    codes = packed.new_empty(rows, eights.shape[1], 8)
    for index in range(8):
        byte, shift = divmod(index * width, 8)
        code = eights[..., byte] >> shift
        if shift + width > 8:
            code = code | eights[..., byte + 1] << (8 - shift)
        codes[..., index] = code & (1 << width) - 1
    return codes.view(rows, -1)[:, :count]


def levels_by_byte(levels: Tensor, high_first: bool = False) -> Tensor:
    """The two levels [16] that each byte stands for, [256, 2]: that of its low half first, or that of its high half."""
    low, high = levels.repeat(16), levels.repeat_interleave(16)
    return torch.stack((high, low) if high_first else (low, high), 1)


def packed_bytes(count: int, width: int) -> int:
    """Bytes of a row of ``count`` codes."""
    return -(-count * width // 8)


def to_words(codes: Tensor, width: int) -> Tensor:
    """Pack signed codes [rows, count], int8 in [-2^(width-1), 2^(width-1) - 1], into int32, padded per row."""
    packed = pack_bits(unsigned(codes, width), width)
    words = F.pad(packed, (0, -packed.shape[1] % 4))
    return words.reshape(-1).view(torch.int32).view(words.shape[0], -1)


def from_words(words: Tensor, width: int, count: int) -> Tensor:
    """The signed codes [rows, count], int8, of int32 words."""
    return signed(unpack_bits(bytes_in(words), width, count), width)


def bytes_in(words: Tensor) -> Tensor:
    """int32 words [rows, count] as uint8 [rows, 4 · count]."""
    return words.reshape(-1).contiguous().view(torch.uint8).view(words.shape[0], -1)


def unsigned(codes: Tensor, width: int) -> Tensor:
    """Signed codes, int8, as uint8 from 0 on."""
    return (codes.to(torch.int16) + (1 << width - 1)).to(torch.uint8)


def signed(codes: Tensor, width: int) -> Tensor:
    """The inverse of ``unsigned``."""
    return (codes.to(torch.int16) - (1 << width - 1)).to(torch.int8)
