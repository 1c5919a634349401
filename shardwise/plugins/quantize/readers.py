"""Whether transformers loads a folder with packed weights, found out on its class of the model, without weights.

It changes a model before it loads packed weights: some modules get another form, and a packed layer has no ``weight``.
Then it initializes what the files lack, and some classes read the weights of their linear layers there.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import Scheme
from shardwise.model.files.compressed_tensors import METHOD

DEQUANTIZE = "CompressedTensorsConfig(dequantize=True)"
"""What ``from_pretrained`` gets as ``quantization_config``."""


def reading_notes(model: Any, packed: Sequence[str], scheme: Scheme) -> tuple[str, ...]:
    """What a user of transformers has to know about the folder.

    Args:
        model: of transformers, on the meta device; packed layers lose their weights.
        packed: paths of the layers that will be packed.
        scheme: of a format that transformers reads.

    Raises RecipeError for a model whose folder transformers cannot load.
    """
    base: Any = importlib.import_module("transformers.quantizers.base")
    for path, module in model.named_modules():
        patch = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {}).get(type(module).__name__)
        if patch is not None and METHOD in [str(method.value) for method in patch["quantization_methods"]]:
            raise RecipeError(
                "transformers could not load the quantized model",
                where=path,
                why=f"it replaces {type(module).__name__} by linear layers that it expects to be packed one by one",
                fix="take a model whose experts stay one module there, such as Mixtral or Qwen3-MoE",
            )
    if scheme.kind != "int" or scheme.activation_bits == 8 or _initializes(model, packed):
        return ()
    return (
        f"transformers loads the folder with quantization_config={DEQUANTIZE} only: {type(model).__name__} reads the"
        " weights of packed layers while it initializes others",
    )


def _initializes(model: Any, packed: Sequence[str]) -> bool:
    """Whether the model's initialization runs without the weights of packed layers."""
    initialization: Any = importlib.import_module("transformers.initialization")
    # As transformers' loader leaves packed layers: without the attribute, so that reading it raises AttributeError.
    for path in packed:
        layer: nn.Module = model.get_submodule(path)
        del layer._parameters["weight"]
    with initialization.guard_torch_init_functions():
        try:
            for module in model.modules():
                model._init_weights(module)
        except AttributeError:
            return False
    return True
