"""Folders of quantized models from other tools: packed here by independent code, read as the weights they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.core.scheme import scheme_of
from shardwise.model.files.compressed_tensors import quantization_config
from shardwise.model.files.quantized_files import QuantizedFiles, formats_of
from shardwise.runtime.quantization.weights import IntWeight
from tests.harness.kashin import kashin_weight

ROWS, COLUMNS, GROUP = 16, 64, 16


def numbers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def word(values: list[int], bits: int) -> int:
    """The signed int32 whose bits are these codes, the first one lowest."""
    number = sum(value << bits * place for place, value in enumerate(values))
    return number - 2**32 if number >= 2**31 else number


def opened(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> QuantizedFiles:
    save_file(
        {f"a.b.{name}": each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return QuantizedFiles(folder, formats_of(config, "here"), "F16")


def gptq(bits: int, offset: int, order: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AutoGPTQ's ``QuantLinear.pack``, value by value, and the weight [out, in] that its kernel computes."""
    groups, most = COLUMNS // GROUP, 2**bits - 1
    codes, zeros = numbers(0, most + 1, COLUMNS, ROWS), numbers(1, most + 1, groups, ROWS, seed=1)
    scales = torch.rand(groups, ROWS, generator=torch.Generator().manual_seed(2)).half()

    def packed(values: list[int]) -> list[int]:
        """A list of codes as words: a number of any length, cut into 32 bits."""
        number = sum(value << bits * place for place, value in enumerate(values))
        found = [number >> 32 * place & 2**32 - 1 for place in range(len(values) * bits // 32)]
        return [each - 2**32 if each >= 2**31 else each for each in found]

    qweight = torch.tensor([packed(codes[:, row].tolist()) for row in range(ROWS)], dtype=torch.int32).t()
    qzeros = torch.tensor([packed((zeros[g] - offset).tolist()) for g in range(groups)], dtype=torch.int32)
    weight = (codes - zeros[order]) * scales[order].float()
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": order.int()}, weight.t()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(bits: int, version: str, act_order: bool, tmp_path: Path) -> None:
    order = torch.arange(COLUMNS) // GROUP
    order = order[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(3))] if act_order else order
    tensors, weight = gptq(bits, 1 if version == "gptq" else 0, order)
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    files = opened(tmp_path, {**tensors, "bias": torch.zeros(ROWS)}, config)
    assert files.shapes == {"a.b.weight": (ROWS, COLUMNS), "a.b.bias": (ROWS,)}
    assert torch.equal(files.read("a.b.weight"), weight)
    assert files.is_padding("a.b.bias")
    packing = files.packing("a.b.weight")
    packed = packing.pack_stored(files.stored("a.b.weight"))
    assert packed.shape == packing.shape
    assert packed.dtype == torch.uint8
    assert torch.equal(packing.unpack(packed, torch.float32), weight)


def test_awq(tmp_path: Path) -> None:
    """AutoAWQ's ``WQLinear_GEMM.from_linear``: nibble i of a word is column order[i] of its eight."""
    order, groups = (0, 2, 4, 6, 1, 3, 5, 7), COLUMNS // GROUP
    codes, zeros = numbers(0, 16, COLUMNS, ROWS), numbers(0, 16, groups, ROWS, seed=1)
    scales = torch.rand(groups, ROWS, generator=torch.Generator().manual_seed(2)).half()

    def packed(values: Tensor) -> Tensor:
        eights = values.view(values.shape[0], -1, 8).tolist()
        words = [[word([each[place] for place in order], 4) for each in row] for row in eights]
        return torch.tensor(words, dtype=torch.int32)

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    files = opened(tmp_path, {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, config)
    order_of = torch.arange(COLUMNS) // GROUP
    weight = ((codes - zeros[order_of]) * scales[order_of].float()).t()
    assert torch.equal(files.read("a.b.weight"), weight)
    packing = files.packing("a.b.weight")
    assert torch.equal(packing.unpack(packing.pack_stored(files.stored("a.b.weight")), torch.float32), weight)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    said = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **weights}
    group = {"targets": ["Linear"], "weights": said, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_float_quantized_scales(strategy: str, tmp_path: Path) -> None:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4)).to(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "channel": (ROWS, 1), "block": (2, 4)}[strategy]
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(5))
    block = {"block_structure": [8, 16]} if strategy == "block" else {}
    config = _compressed("float-quantized", type="float", strategy=strategy, **block)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}
    whole = scale.repeat_interleave(8, 0).repeat_interleave(16, 1) if block else scale
    files = opened(tmp_path, tensors, config)
    assert torch.equal(files.read("a.b.weight"), values.float() * whole)
    assert files.shapes.keys() == {"a.b.weight"}
    packing = files.packing("a.b.weight")
    found = packing.unpack(packing.pack_stored(files.stored("a.b.weight")), torch.float32)
    assert torch.equal(found, values.float() * whole)


def test_older_files_leave_gaps_between_codes(tmp_path: Path) -> None:
    """compressed-tensors before 0.18 puts 10 codes of 3 bits into a word."""
    codes = numbers(-4, 4, ROWS, COLUMNS).to(torch.int8)
    scale = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(6))
    tens = [
        torch.cat([codes.int() + 4, torch.zeros(ROWS, 6, dtype=torch.int32)], 1)[:, i : i + 10]
        for i in range(0, 70, 10)
    ]
    words = [[word(row, 3) for row in ten.tolist()] for ten in tens]
    tensors = {
        "weight_packed": torch.tensor(words, dtype=torch.int32).t(),
        "weight_scale": scale,
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    files = opened(tmp_path, tensors, _compressed("pack-quantized", num_bits=3))
    assert torch.equal(files.read("a.b.weight"), codes.float() * scale)


def test_layers_have_the_bits_of_their_group(tmp_path: Path) -> None:
    config = _compressed("int-quantized")
    groups = config["config_groups"]
    groups["group_1"] = {**groups["group_0"], "targets": ["re:.*b$"], "format": "pack-quantized"}
    groups["group_1"]["weights"] = {**groups["group_0"]["weights"], "num_bits": 4}
    weight = IntWeight(numbers(-8, 8, ROWS, COLUMNS).to(torch.int8), torch.ones(ROWS, 1), None, 4)
    files = opened(tmp_path, dict(weight.tensors()), config)
    assert torch.equal(files.read("a.b.weight"), weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("target", ["re:.*c$", "a.c"])
def test_a_pattern_or_a_path_goes_before_a_class(bits: int, target: str, tmp_path: Path) -> None:
    """Layers of other bits than the rest, listed before the class of the rest, as llm-compressor writes them."""
    config = _compressed("pack-quantized", num_bits=bits)
    rest = config["config_groups"]["group_0"]
    own = {"targets": [target], "weights": {**rest["weights"], "num_bits": 12 - bits}}
    config["config_groups"] = {"group_0": {**rest, **own}, "group_1": rest}
    weight = IntWeight(numbers(-8, 8, ROWS, COLUMNS).to(torch.int8), torch.ones(ROWS, 1), None, bits)
    files = opened(tmp_path, dict(weight.tensors()), config)
    assert torch.equal(files.read("a.b.weight"), weight.dequantize())


def test_codes_of_other_bits_than_the_config_says_are_refused(tmp_path: Path) -> None:
    weight = IntWeight(numbers(-8, 8, ROWS, COLUMNS).to(torch.int8), torch.ones(ROWS, 1), None, 8)
    files = opened(tmp_path, dict(weight.tensors()), _compressed("pack-quantized", num_bits=4))
    with pytest.raises(CheckpointError, match="64 codes has 16 words, not 8 as in 4 bits"):
        files.read("a.b.weight")


def test_kashin_weights_are_read_from_their_folder(tmp_path: Path) -> None:
    weight = kashin_weight(ROWS, COLUMNS, (2, 2))
    config = quantization_config(scheme_of("w4a16-channel"), [], "kashin")
    files = opened(tmp_path, dict(weight.tensors()), config)
    assert torch.equal(files.read("a.b.weight"), weight.dequantize())
    packing = files.packing("a.b.weight")
    assert packing.kind == "kashin4"
    assert torch.equal(packing.unpack(packing.pack_stored(weight), torch.float32), weight.dequantize())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "IndexError"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"a": {}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4}, "group_size"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        (_compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "nvfp4"),
        (["list"], "AttributeError"),
    ],
    ids=["other", "modelopt", "block", "dynamic", "damaged", "gemv", "nvfp4", "list"],
)
def test_other_formats_are_refused_in_words(config: Any, why: str) -> None:
    with pytest.raises(RecipeError, match=why) as caught:
        formats_of(config, "model.hf: x")
    assert "\n" not in str(caught.value)


def test_a_layer_without_its_scales_is_damaged(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 1, torch.arange(COLUMNS) // GROUP)
    files = opened(
        tmp_path, {"qweight": tensors["qweight"]}, {"quant_method": "gptq", "bits": 4, "group_size": 16}
    )
    with pytest.raises(CheckpointError, match=r"a\.b\.weight"):
        files.read("a.b.weight")


def test_config_json_is_parsed_as_written(tmp_path: Path) -> None:
    """Numbers and nulls as other tools write them."""
    text = '{"quant_method": "gptq", "bits": 4, "group_size": -1, "dynamic": null, "checkpoint_format": null}'
    order = torch.zeros(COLUMNS, dtype=torch.int64)
    tensors, weight = gptq(4, 1, order)
    one = {**tensors, "qzeros": tensors["qzeros"][:1], "scales": tensors["scales"][:1]}
    assert torch.equal(opened(tmp_path, one, json.loads(text)).read("a.b.weight"), weight)
