"""A small model as a folder of quantized weights, written with safetensors alone."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.core.scheme import Scheme
from shardwise.model.files.compressed_tensors import quantization_config
from shardwise.model.lora import linear_layers
from shardwise.model.native import NativeModel
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.recipe.dimensions import Dimensions

SMALL = Dimensions(2, 64, 2, 1, 128, vocab=257, context=64)


def write_quantized_folder(
    folder: Path, scheme: Scheme | None, symmetric: bool = True, skip: str = "", size: Dimensions = SMALL
) -> dict[str, Tensor]:
    """Write a small model, rounded to nearest or without a scheme as it is; returns the tensors that it then has."""
    made = NativeModel(size)
    model, method = made.build(), RoundToNearest(clip=False, symmetric=symmetric)
    made.fill(model, 0)
    dense = {name: each.detach() for name, each in model.named_parameters()}
    paths = [path for path in linear_layers(model, made.blocks(model)) if path != skip]
    found = {path: method.quantize(dense[f"{path}.weight"], scheme, None) for path in paths if scheme}
    stored = {f"{path}.{suffix}": each for path, w in found.items() for suffix, each in w.tensors().items()}
    stored |= {name: each for name, each in dense.items() if name.removesuffix(".weight") not in found}
    layout = made.hf_folder()
    names = {name: name if name.startswith("lm_head") else f"model.{name}" for name in stored}
    ignored = ["lm_head", *([f"model.{skip}"] if skip else [])]
    said = quantization_config(scheme, ignored, "rtn", symmetric) if scheme else {}
    folder.mkdir()
    save_file({names[name]: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors")
    config = {**layout.config, "dtype": "float32"} | ({"quantization_config": said} if said else {})
    (folder / "config.json").write_text(json.dumps(config))
    return dense | {f"{path}.weight": weight.dequantize() for path, weight in found.items()}


def native_model(tensors: dict[str, Tensor], size: Dimensions = SMALL) -> nn.Module:
    """The model with these tensors, not quantized."""
    made = NativeModel(size)
    model = made.build()
    made.fill(model, 0)
    model.load_state_dict(tensors)
    return model.eval().requires_grad_(False)
