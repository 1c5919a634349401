"""Stored forms of quantized weights: bit-exact with compressed-tensors, and back again without loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.runtime.quantization.as_parameter import stored_packing
from shardwise.runtime.quantization.packing import from_words, pack_bits, to_words, unpack_bits
from shardwise.runtime.quantization.stored import weight_of
from shardwise.runtime.quantization.weights import (
    Float8Weight,
    IntWeight,
    NF4Weight,
    QuantizedWeight,
)
from shardwise.runtime.quantized import Packing
from tests.harness.kashin import kashin_weight

shapes = st.tuples(st.integers(1, 7), st.integers(1, 70), st.integers(2, 8), st.integers(0, 2**31))

NF4 = Packing("nf4", 6, 34)


def codes_of(rows: int, columns: int, width: int, seed: int) -> torch.Tensor:
    low, high = -(2 ** (width - 1)), 2 ** (width - 1)
    made = torch.randint(low, high, (rows, columns), generator=torch.Generator().manual_seed(seed))
    return made.to(torch.int8)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_words_are_those_of_compressed_tensors(shape: tuple[int, int, int, int]) -> None:
    reference = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    rows, columns, width, seed = shape
    codes = codes_of(rows, columns, width, seed)
    words = to_words(codes, width)
    assert torch.equal(words, reference.pack_to_int32(codes, width))
    assert torch.equal(from_words(words, width, columns), codes)
    zero = to_words(codes.t(), width).t()
    assert torch.equal(zero, reference.pack_to_int32(codes, width, packed_dim=0))


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_bits_come_back(shape: tuple[int, int, int, int]) -> None:
    """Against Python's own integers: a row is one number, the first code in its lowest bits."""
    rows, columns, width, seed = shape
    codes = torch.randint(2**width, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )
    packed = pack_bits(codes, width)
    for row, stored in zip(codes.tolist(), packed, strict=True):
        number = sum(code << width * place for place, code in enumerate(row))
        assert bytes(stored.tolist()) == number.to_bytes(-(-columns * width // 8), "little")
    assert torch.equal(unpack_bits(packed, width, columns), codes)


def _weights() -> dict[str, QuantizedWeight]:
    scale = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense = torch.randn(6, 34, generator=torch.Generator().manual_seed(2))
    found: dict[str, QuantizedWeight] = {
        "fp8": Float8Weight(dense.to(torch.float8_e4m3fn), scale[:, :1]),
        "nf4": NF4Weight(NF4.pack(dense, slice(0, NF4.shape[0])), NF4),
        "kashin": kashin_weight(6, 34, (2, 1)),
        "w8a8": IntWeight(codes_of(6, 34, 8, 5), scale[:, :1], None, 8, activation_bits=8),
        "w8a8 asymmetric": IntWeight(
            codes_of(6, 34, 8, 5), scale, codes_of(6, 2, 8, 6), 8, activation_bits=8
        ),
    }
    for width in range(2, 9):
        found[f"w{width}"] = IntWeight(codes_of(6, 34, width, 3), scale, None, width)
        zero = codes_of(6, 2, width, 4)
        found[f"w{width} asymmetric"] = IntWeight(codes_of(6, 34, width, 3), scale, zero, width)
    return found


@pytest.mark.parametrize("name", _weights())
def test_a_stored_weight_is_read_back(name: str) -> None:
    weight = _weights()[name]
    width = weight.width if isinstance(weight, IntWeight) else 8
    found = weight_of(weight.tensors(), width, weight.shape)
    assert type(found) is type(weight)
    assert found.tensors().keys() == weight.tensors().keys()
    for suffix, each in weight.tensors().items():
        assert torch.equal(found.tensors()[suffix].view(torch.uint8), each.view(torch.uint8)), suffix
    assert torch.equal(found.dequantize(), weight.dequantize())


def test_stored_bits_are_counted() -> None:
    scale = torch.ones(128, 4, dtype=torch.bfloat16)
    weight = IntWeight(codes_of(128, 512, 4, 0), scale, None, 4)
    assert weight.bits == 4 + 16 / 128


@pytest.mark.parametrize("name", _weights())
def test_a_weight_is_one_parameter(name: str) -> None:
    """For FSDP2: uint8 rows, with less than a byte per row and 15 per tensor of padding."""
    weight = _weights()[name]
    width = weight.width if isinstance(weight, IntWeight) else 8
    forms = {suffix: (tuple(each.shape), each.dtype) for suffix, each in weight.tensors().items()}
    packing = stored_packing(name, width, weight.shape, forms)
    packed = packing.pack_stored(weight)
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, packing.shape)
    assert torch.equal(packing.unpack(packed, torch.float32), weight.dequantize())
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert packing.unpack(fake.from_tensor(packed), torch.float32).shape == weight.shape
    stored = round(weight.bits * 6 * 34 / 8)
    assert stored <= packed.numel() < stored + 15 * (len(forms) - 1) + weight.shape[0]
