"""Quantization methods: one file each, all with the same call (base.py). ``method_of`` finds one by name.

core/scheme.py says which methods make which schemes.
"""

from __future__ import annotations

from importlib import import_module

from shardwise.core.errors import RecipeError, one_of
from shardwise.core.scheme import QUANTIZATION_METHODS
from shardwise.plugins.quantize.methods.base import QuantizationMethod

_CLASSES = {
    "rtn": "RoundToNearest",
    "hqq": "HalfQuadratic",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "kashin": "Kashin",
}
"""The class of each method. Its module has the method's name and is imported when the method is asked for."""


def method_of(name: str) -> QuantizationMethod:
    """The method of a name, with its default settings. Raises RecipeError for another name."""
    if name not in _CLASSES:
        raise RecipeError(
            f"no method is called {name}",
            where="--method",
            fix=one_of(name, QUANTIZATION_METHODS),
        )
    method: QuantizationMethod = getattr(
        import_module(f"shardwise.plugins.quantize.methods.{name}"), _CLASSES[name]
    )()
    return method
