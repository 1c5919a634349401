"""Folders of quantized models: written as compressed-tensors, loaded by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.core.scheme import Scheme, scheme_of
from shardwise.model.files.compressed_tensors import quantization_config
from shardwise.model.lora import linear_layers
from shardwise.model.native import NativeModel
from shardwise.quantize.methods.rtn import RoundToNearest
from shardwise.recipe.presets import Dimensions

transformers = pytest.importorskip("transformers")

SMALL = Dimensions(2, 32, 2, 1, 48, vocab=53, context=32)
IDS = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(0))


def write(folder: Path, scheme: Scheme, symmetric: bool = True, skip: str = "") -> dict[str, Tensor]:
    """Write a small model, rounded to nearest; returns the tensors that it then has."""
    made = NativeModel(SMALL)
    model, method = made.build(), RoundToNearest(clip=False, symmetric=symmetric)
    made.fill(model, 0)
    dense = {name: each.detach() for name, each in model.named_parameters()}
    paths = [path for path in linear_layers(model, made.blocks(model)) if path != skip]
    found = {path: method.quantize(dense[f"{path}.weight"], scheme, None) for path in paths}
    stored = {f"{path}.{suffix}": each for path, w in found.items() for suffix, each in w.tensors().items()}
    stored |= {name: each for name, each in dense.items() if name.removesuffix(".weight") not in found}
    layout = made.hf_folder()
    names = {name: name if name.startswith("lm_head") else f"model.{name}" for name in stored}
    said = quantization_config(scheme, ["lm_head", *([f"model.{skip}"] if skip else [])], "rtn", symmetric)
    folder.mkdir()
    save_file({names[name]: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors")
    config = {**layout.config, "dtype": "float32", "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    return dense | {f"{path}.weight": weight.dequantize() for path, weight in found.items()}


def logits_of(tensors: Mapping[str, Tensor]) -> Tensor:
    made = NativeModel(SMALL)
    model = made.build()
    made.fill(model, 0)
    model.load_state_dict(dict(tensors), strict=False)
    with torch.no_grad():
        return made.logits(model, IDS)


@pytest.mark.parametrize("name", ["w2a16-g16", "w3a16-channel", "w4a16-g16", "w8a16"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_transformers_reads_the_dequantized_weights(name: str, asymmetric: bool, tmp_path: Path) -> None:
    """Without zero points by the default way of loading. With them, compressed-tensors 0.18 to 0.20 allocates
    unpacked zero points before it reads packed ones, so they need ``dequantize``.
    """
    pytest.importorskip("compressed_tensors")
    tensors = write(tmp_path / "out", scheme_of(name), not asymmetric, skip="layers.1.mlp.down_proj")
    given = (
        {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **given)
    with torch.no_grad():
        found = model(IDS).logits
    assert (found - logits_of(tensors)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_transformers_reads_the_weights_of_eight_bit_activations(name: str, tmp_path: Path) -> None:
    """Its layers also round activations per token, so the weights are compared."""
    pytest.importorskip("compressed_tensors")
    tensors = write(tmp_path / "out", scheme_of(name))
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=config
    )
    found = {name.removeprefix("model."): each for name, each in model.state_dict().items()}
    for path, tensor in tensors.items():
        assert (found[path] - tensor).abs().max() <= 1e-7, path
