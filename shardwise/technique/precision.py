"""Precision: which dtype weights are stored in, computed in and reduced in.

bf16 keeps fp32 master weights: they are what is sharded and updated; the bf16 copy exists only while a layer
is gathered (Micikevicius et al. 2018, with FSDP2's mixed-precision policy as the mechanism). Gradients are
summed over ranks and micro-batches in fp32. The loss is always computed in fp32 by the model's blueprint.

Refused: autocast, which keeps a bf16 copy of every weight alive from forward to backward and decides per
operation; and a bf16 reduction by default, which halves the gradient traffic and loses small gradients when
thousands of ranks are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.strategy import Layout, Rule, Setting, Strategy
from shardwise.technique.base import Dtypes, Site

PRECISION: Setting[str] = Setting(
    "precision",
    default="fp32",
    doc="dtype of compute: fp32, bf16 (with fp32 master weights), fp8 (bf16, but large products), or fp64 for proofs",
    choices=("fp32", "bf16", "fp8", "fp64"),
    note="fp16 is not in this version yet",
    units={"fp8": "fp8"},
)


@dataclass(frozen=True)
class Precision:
    """Sets the dtypes that the techniques after it use."""

    name: str = "precision"
    settings: Sequence[Setting[Any]] = (PRECISION,)
    rules: Sequence[Rule] = ()

    def degrees(self, strategy: Strategy, world_size: int) -> dict[str, int]:
        return {}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        return strategy[PRECISION]

    def apply(self, site: Site) -> None:
        import torch

        storage, compute = {
            "fp32": (torch.float32, torch.float32),
            "bf16": (torch.float32, torch.bfloat16),
            "fp8": (torch.float32, torch.bfloat16),  # its layers are Float8's
            "fp64": (torch.float64, torch.float64),
        }[site.strategy[PRECISION]]
        site.dtypes = Dtypes(storage=storage, compute=compute, reduce=storage)
        site.model.to(storage)
