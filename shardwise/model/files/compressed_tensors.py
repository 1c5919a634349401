"""The entry ``quantization_config`` of config.json, in the format of compressed-tensors where it has one.

    int, 16-bit activations    pack-quantized     codes without gaps in int32
    int, 8-bit activations     int-quantized      codes as int8; activations are quantized per token by the reader
    float8                     float-quantized    e4m3 and a scale per output channel
    nf4, Kashin                -                  own ``quant_method: shardwise``, which only Shardwise reads

transformers and vLLM read the first three. The fourth must be written dense for them (``shardwise export``, ``merge``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.core.scheme import Scheme

# Values of ``quant_method``.
METHOD = "compressed-tensors"
OWN_METHOD = "shardwise"
EXPERTS = r"re:.*\.experts\.\d+\..*"
"""The matrices of experts, under their names in the files; transformers looks for a pattern with this word."""


def quantization_config(
    scheme: Scheme, ignored: Sequence[str], method: str, symmetric: bool = True, experts: Scheme | None = None
) -> dict[str, Any]:
    """The entry for a model whose linear layers are quantized.

    Args:
        ignored: paths of linear layers that are not quantized, under their names in the files.
        method: the quantization method; "kashin" has its own format.
        symmetric: whether the codes have no zero points.
        experts: the scheme of a mixture's experts, whose codes have no zero points; None without any.
    """
    origin = {"method": method, "scheme": scheme.name}
    if scheme.kind == "nf4" or method == "kashin":
        form = "nf4" if scheme.kind == "nf4" else method
        return {
            "quant_method": OWN_METHOD,
            "format": form,
            "bits": scheme.bits,
            "ignore": [*ignored],
            **origin,
        }
    groups = {"group_0": _config_group(scheme, ["Linear"], symmetric)}
    if experts is not None and (experts != scheme or not symmetric):
        groups["group_1"] = _config_group(experts, [EXPERTS], symmetric=True)
    return {
        "quant_method": METHOD,
        "format": _format(scheme),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*ignored],
        OWN_METHOD: origin,
    }


def _config_group(scheme: Scheme, targets: Sequence[str], symmetric: bool) -> dict[str, Any]:
    """The layers of one scheme."""
    weights = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.kind == "int" else "float",
        "symmetric": symmetric,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group,
        "dynamic": False,
    }
    activations = None
    if scheme.activation_bits == 8:
        activations = {
            "num_bits": 8,
            "type": weights["type"],
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    form = _format(scheme)
    return {"targets": [*targets], "weights": weights, "input_activations": activations, "format": form}


def _format(scheme: Scheme) -> str:
    if scheme.kind == "float8":
        return "float-quantized"
    return "int-quantized" if scheme.activation_bits == 8 else "pack-quantized"
