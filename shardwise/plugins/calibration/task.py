"""What the processes of a calibration are told, and how much they measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.core.units import MiB
from shardwise.hardware.measured import MeasuredSpeeds

TASK, FOUND = "task.json", "found.json"
"""Files in the folder of the processes: what they are told, and what the first one found."""

Model = tuple[Mapping[str, Any], int, int]
"""Dimensions, sequence length and micro-batch of a model whose step is timed."""

TINY = {"layers": 4, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 176, "vocab": 512}
"""Its kernels take microseconds, so the seconds of its step are those of the host."""

WIDE = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 704, "vocab": 1024}
"""With few tokens, its collectives take longer than its kernels."""


@dataclass(frozen=True)
class Effort:
    """How much a calibration measures.

    Attributes:
        largest_bytes: of plain kernels.
        product_seconds: for the products of one dtype. Those that are left then, the largest, are not run.
        attention: by the type of device, keys and head dimensions.
        models: whose steps give the speed of each operation.
        again: the one of them that is also trained in bf16 and sharded; None for none.
        axes: mesh axes whose collectives are timed within steps; the others are taken to be like the first.
        payloads: bytes of collectives, as core/cost.py counts: the gathered tensor, or the tensor before the scatter.
        plain_steps: steps that give the seconds of phases.
    """

    largest_bytes: int
    product_seconds: float
    attention: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    models: tuple[Model, ...]
    again: Model | None
    axes: tuple[str, ...]
    payloads: tuple[int, ...]
    plain_steps: int


_MIDDLE: Model = (
    {"layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 4096},
    256,
    4,
)

FULL = Effort(
    largest_bytes=192 * MiB,
    product_seconds=1.5,
    attention=MappingProxyType(
        {"cpu": ((64, 256, 1024), (16, 64, 128)), "cuda": ((256, 1024, 4096), (64, 128))}
    ),
    models=(
        (TINY, 64, 2),
        _MIDDLE,
        ({"family": "gpt2", "layers": 2, "width": 192, "heads": 4, "ffn": 768, "vocab": 2048}, 256, 4),
        ({"layers": 1, "width": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192}, 256, 4),
    ),
    again=_MIDDLE,
    axes=("replicate", "shard", "tensor", "sequence"),
    payloads=(4, 4096, 64 * 1024, MiB, 16 * MiB),
    plain_steps=5,
)
"""Of ``shardwise doctor --calibrate``: about a minute."""

QUICK = Effort(
    largest_bytes=16 * MiB,
    product_seconds=0.4,
    attention=MappingProxyType({"cpu": ((64, 512), (32, 128)), "cuda": ((256, 2048), (64, 128))}),
    models=(({"layers": 1, "width": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 2048}, 256, 2),),
    again=None,
    axes=("shard",),
    payloads=(4, 64 * 1024, 4 * MiB),
    plain_steps=3,
)
"""Before the first plan: some seconds."""


@dataclass(frozen=True)
class Task:
    """What the processes measure.

    Attributes:
        device: as torch names it: cpu, or cuda:0.
        dtypes: of products, as far as they are native; () leaves the kernels to ``known``.
        known: what fewer processes found, in the share of these processes.
        quick: measure QUICK instead of FULL, and the host in each process alone.
    """

    device: str
    dtypes: tuple[str, ...]
    known: MeasuredSpeeds | None = None
    quick: bool = False

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else FULL
