"""Models as they are published: fp8 blocks, MXFP4 experts, bitsandbytes; read by independent code or transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.model.files.quantized_files import QuantizedFiles, formats_of
from shardwise.model.hf.model import HuggingFaceModel
from shardwise.runtime.quantized import NF4_LEVELS
from tests.harness.pool import Pool

transformers = pytest.importorskip("transformers")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def opened(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> QuantizedFiles:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return QuantizedFiles(folder, formats_of(config, "here"), "BF16")


def unpacked(files: QuantizedFiles, name: str) -> Tensor:
    """The weight, from the one parameter that packs it."""
    packing = files.packing(name)
    return packing.unpack(packing.pack_stored(files.stored(name)), torch.float32)


@pytest.mark.parametrize("shape", [(32, 64), (40, 72)], ids=["whole blocks", "cut blocks"])
@pytest.mark.parametrize(
    "scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8], ids=str
)
def test_fp8_blocks(shape: tuple[int, int], scales: torch.dtype, tmp_path: Path) -> None:
    """A weight is its value times the scale of its block, element by element."""
    rows, columns = shape
    values = random(rows, columns).to(torch.float8_e4m3fn)
    powers = torch.randint(
        -4, 4, (-(-rows // 16), -(-columns // 16)), generator=torch.Generator().manual_seed(1)
    )
    stored = (powers + 127).to(torch.uint8) if scales == torch.uint8 else (2.0**powers).to(scales)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    files = opened(
        tmp_path, {"a.weight": values, "a.weight_scale_inv": stored, "n.weight": random(8)}, config
    )
    expected = torch.tensor(
        [
            [values[r, c].item() * 2.0 ** int(powers[r // 16, c // 16]) for c in range(columns)]
            for r in range(rows)
        ]
    )
    assert files.shapes == {"a.weight": shape, "n.weight": (8,)}
    assert torch.equal(files.read("a.weight"), expected)
    assert torch.equal(unpacked(files, "a.weight"), expected)
    assert files.packing("a.weight").kind == "fp8"


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt"])
def test_fp8_scales_of_tensors_and_rows(method: str, tmp_path: Path) -> None:
    values = random(8, 16).to(torch.float8_e4m3fn)
    scale = random(8, 1) if method == "fbgemm_fp8" else torch.tensor(0.25)
    suffix = "weight_scale_inv" if method == "fp8" else "weight_scale"
    tensors = {"a.weight": values, f"a.{suffix}": scale, "a.input_scale": torch.tensor(1.0)}
    files = opened(tmp_path, tensors, {"quant_method": method, "quant_algo": "FP8"})
    assert files.shapes == {"a.weight": (8, 16)}
    assert torch.equal(files.read("a.weight"), values.float() * scale)


def test_packed_fp4_layers_of_fp8_models(tmp_path: Path) -> None:
    """Two values per byte, a power of two for 32 of them, and a norm whose weight is called scale."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    packed = torch.randint(-128, 128, (6, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    scale = torch.randint(120, 130, (6, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {"a.weight": packed, "a.scale": scale, "norm.scale": random(4)}
    files = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    expected = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
    assert files.shapes == {"a.weight": (6, 64), "norm.scale": (4,)}
    assert torch.equal(files.read("a.weight"), expected)
    assert torch.equal(unpacked(files, "a.weight"), expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(24, 64), (3, 100), (300, 64)])
def test_bitsandbytes_in_4_bits(nested: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    """Codes in row order, the first of two in the high half; scales of 64 values, and of 256 scales."""
    count = shape[0] * shape[1]
    codes = torch.randint(0, 16, (count,), generator=torch.Generator().manual_seed(3))
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).view(-1, 1)
    blocks = -(-count // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {"a.weight": packed, "a.weight.quant_map": torch.tensor(NF4_LEVELS)}
    if nested:
        table, top = random(256, seed=4).sort().values, random(-(-blocks // 256), seed=5)
        absmax = torch.randint(0, 256, (blocks,), generator=torch.Generator().manual_seed(6))
        state |= {"nested_blocksize": 256, "nested_offset": 0.0625, "nested_dtype": "float32"}
        tensors |= {"a.weight.nested_quant_map": table, "a.weight.nested_absmax": top}
        scales = [table[code].item() * top[b // 256].item() + 0.0625 for b, code in enumerate(absmax)]
        tensors["a.weight.absmax"] = absmax.to(torch.uint8)
    else:
        tensors["a.weight.absmax"] = random(blocks, seed=7).abs()
        scales = tensors["a.weight.absmax"].tolist()
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    files = opened(
        tmp_path,
        {**tensors, "a.weight.quant_state.bitsandbytes__nf4": text},
        {"quant_method": "bitsandbytes"},
    )
    expected = torch.tensor([NF4_LEVELS[code] * scales[i // 64] for i, code in enumerate(codes)]).view(shape)
    assert files.shapes == {"a.weight": shape}
    assert (files.read("a.weight") - expected).abs().max() <= 1e-6
    assert torch.equal(unpacked(files, "a.weight"), files.read("a.weight"))


def test_bitsandbytes_in_8_bits(tmp_path: Path) -> None:
    codes = torch.randint(-127, 128, (8, 16), dtype=torch.int8, generator=torch.Generator().manual_seed(8))
    tensors = {
        "a.weight": codes,
        "a.SCB": random(8).abs(),
        "a.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    files = opened(tmp_path, tensors, {"quant_method": "bitsandbytes"})
    assert files.shapes == {"a.weight": (8, 16)}
    assert torch.allclose(files.read("a.weight"), codes.float() * (tensors["a.SCB"].view(-1, 1) / 127))
    assert torch.equal(unpacked(files, "a.weight"), files.read("a.weight"))


def _mxfp4(stack: Tensor) -> dict[str, Tensor]:
    """Random blocks and scales for a stack [e, in, out]."""
    count, columns, rows = stack.shape
    draw = torch.Generator().manual_seed(count + rows)
    blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=draw)
    return {
        "blocks": blocks,
        "scales": torch.randint(118, 123, blocks.shape[:3], dtype=torch.uint8, generator=draw),
    }


def _gpt_oss(folder: Path) -> nn.Module:
    """A folder like those that OpenAI published, and the model that transformers reads from it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=32, num_local_experts=3, num_experts_per_tok=2,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        stored = _mxfp4(tensors.pop(name))
        tensors |= {f"{name}_{part}": tensor for part, tensor in stored.items()}
        model.get_parameter(name).data = convert_moe_packed_tensors(**stored, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    text["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(text))
    return model


def test_gpt_oss_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    expected = _gpt_oss(tmp_path)
    blueprint = HuggingFaceModel(str(tmp_path), 16)
    model = blueprint.build()
    blueprint.fill(model, 0)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert blueprint.packings() == {}  # its linear layers are not quantized
    read = blueprint.weights().read("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(read, expected.get_parameter("model.layers.0.mlp.experts.down_proj"))
    layout = blueprint.hf_folder()
    assert "quantization_config" not in layout.config
    written = {name: shape for group in layout.groups for name, shape in group.shapes.items()}
    assert written["model.layers.0.mlp.experts.down_proj"] == (3, 32, 64)


def test_ranks_read_their_part_of_a_stack(pool: Pool, tmp_path: Path) -> None:
    stored = {f"a.up_{part}": tensor for part, tensor in _mxfp4(torch.empty(4, 64, 8)).items()}
    opened(tmp_path, stored, {"quant_method": "mxfp4"})
    assert pool.run(2, _read_shards, tmp_path) == [[True] * 3] * 2


def _read_shards(folder: Path) -> list[bool]:
    """Whether this rank's half of each dim is read."""
    files = QuantizedFiles(folder, formats_of({"quant_method": "mxfp4"}, "here"), "BF16")
    whole, mesh = files.read("a.up"), init_device_mesh("cpu", (2,))
    shards = [distribute_tensor(torch.zeros(whole.shape), mesh, [Shard(dim)]) for dim in range(3)]
    for shard in shards:
        files.read_into(shard, "a.up")
    own = [whole.chunk(2, dim)[mesh.get_rank()] for dim in range(3)]
    return [torch.equal(shard.to_local(), part) for shard, part in zip(shards, own, strict=True)]
