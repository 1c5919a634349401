"""Folders of quantized models that are written as compressed-tensors are loaded by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.scheme import scheme_of
from tests.harness.quantized import native_model, write_quantized_folder

transformers = pytest.importorskip("transformers")

IDS = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["w2a16-g16", "w3a16-channel", "w4a16-g16", "w8a16"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_transformers_reads_the_dequantized_weights(name: str, asymmetric: bool, tmp_path: Path) -> None:
    """Without zero points by the default way of loading. With them, compressed-tensors 0.18 to 0.20 allocates
    unpacked zero points before it reads packed ones, so they need ``dequantize``.
    """
    pytest.importorskip("compressed_tensors")
    tensors = write_quantized_folder(
        tmp_path / "out", scheme_of(name), not asymmetric, skip="layers.1.mlp.down_proj"
    )
    given = (
        {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **given)
    with torch.no_grad():
        found = model(IDS).logits
    assert (found - native_model(tensors)(IDS)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_transformers_reads_the_weights_of_eight_bit_activations(name: str, tmp_path: Path) -> None:
    """Its layers also round activations per token, so the weights are compared."""
    pytest.importorskip("compressed_tensors")
    tensors = write_quantized_folder(tmp_path / "out", scheme_of(name))
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=config
    )
    found = {name.removeprefix("model."): each for name, each in model.state_dict().items()}
    for path, tensor in tensors.items():
        assert (found[path] - tensor).abs().max() <= 1e-7, path
