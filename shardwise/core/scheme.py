"""Quantization schemes: the number format of weights and activations, as ``w4a16-g128`` names it. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shardwise.core.errors import RecipeError, one_of

NumberKind = Literal["int", "float8", "nf4"]
GROUPS = (16, 32, 64, 128, 256)
"""Group sizes: input channels that share a scale."""

QUANTIZATION_METHODS = ("rtn", "hqq", "gptq", "awq", "kashin")
"""The methods by name; each has a file in plugins/quantize/methods."""

_INTEGER_SCHEME = re.compile(r"w([2-8])a(8|16)(?:-(?:g(\d+)|(channel)))?")


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme.

    Attributes:
        kind: int (uniform levels), float8 (e4m3, one scale per output channel) or nf4 (QLoRA's 16 levels).
        bits: bits per stored code, without scales.
        group: input channels per scale; None is one scale per output channel.
        activation_bits: 16 keeps activations as they are; 8 quantizes them per token while the model serves.
    """

    kind: NumberKind
    bits: int
    group: int | None
    activation_bits: int

    @property
    def name(self) -> str:
        """The scheme as the command line spells it."""
        if self.kind != "int":
            return {"float8": "fp8", "nf4": "nf4"}[self.kind]
        suffix = f"-g{self.group}" if self.group else "" if self.bits == 8 else "-channel"
        return f"w{self.bits}a{self.activation_bits}{suffix}"


def scheme_of(name: str) -> Scheme:
    """The scheme of a name: ``w8a16``, ``w4a16-g128``, ``w3a16-channel``, ``w8a8``, ``fp8``, ``nf4``.

    Raises RecipeError for another name.
    """
    if name == "fp8":
        return Scheme("float8", 8, None, 8)
    if name == "nf4":
        return Scheme("nf4", 4, 64, 16)
    match = _INTEGER_SCHEME.fullmatch(name)
    if match is None:
        raise RecipeError(
            f"no scheme is called {name}",
            where="--scheme",
            fix="give w8a16, w8a8, w4a16-g128, w4a16-channel (2 to 8 bits; groups of "
            f"{', '.join(map(str, GROUPS))}), fp8 or nf4",
        )
    bits = int(match[1])
    activation_bits = int(match[2])
    group = int(match[3]) if match[3] else None
    if group is not None and group not in GROUPS:
        raise RecipeError(
            f"no kernel has groups of {group}",
            where="--scheme",
            fix=f"give one of {', '.join(map(str, GROUPS))}",
        )
    if group is None and match[4] is None and bits != 8:
        raise RecipeError(
            f"{name} does not say which weights share a scale",
            where="--scheme",
            fix=f"give {name}-g128 or {name}-channel",
        )
    if activation_bits == 8 and (bits != 8 or group is not None):
        raise RecipeError(
            f"{name} has no integer kernel",
            where="--scheme",
            why="8-bit activations take 8-bit weights",
            fix="give w8a8",
        )
    return Scheme("int", bits, group, activation_bits)


def check_method(method: str, scheme: Scheme) -> None:
    """Refuse a method that does not exist or that cannot produce a scheme. Raises RecipeError."""
    if method not in QUANTIZATION_METHODS:
        raise RecipeError(
            f"no method is called {method}",
            where="--method",
            fix=one_of(method, QUANTIZATION_METHODS),
        )
    why = _method_obstacle(method, scheme)
    if why:
        raise RecipeError(
            f"{method} cannot make {scheme.name}", where="--method", why=why, fix="give --method rtn"
        )


def _method_obstacle(method: str, scheme: Scheme) -> str:
    """Why a method cannot produce a scheme; empty if it can."""
    if method == "rtn":
        return ""
    if scheme.kind != "int":
        return f"{scheme.name} has no uniform integer levels; its levels take the nearest value"
    if scheme.activation_bits == 8 and method == "hqq":
        return "8-bit products take weights without zero points, and hqq optimizes zero points"
    if method == "kashin" and (scheme.group is not None or scheme.activation_bits == 8):
        return "its two factors have one scale per output channel and are multiplied in 16 bits"
    return ""
