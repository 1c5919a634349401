"""The speed ladder: a model with one more optimization on each rung, next to plain PyTorch and transformers' Trainer.

1.5B (4 × 2,048) and 7B (1 × 4,096) in bf16, every strategy pinned, and LoRA and QLoRA of Llama 3 8B's dimensions, on a
row of 4,096 tokens and on 8 packed documents of 512. Where 7B with fp32 master weights does not fit, all its rows train
bf16 weights alone and recompute the blocks; the row says so. Rungs of small risk come first: 8-bit products last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_bench import Bench, Task
from gpu_contenders import Contender, shardwise, task
from gpu_peers import peers

MODELS: dict[str, dict[str, Any]] = {
    "0.5B": {"layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151936, "tied": True},
    "1.5B": {"layers": 28, "width": 1536, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "tied": True},
    "7B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000},
}  # fmt: skip
"""Dimensions of Qwen2.5-0.5B and 1.5B, and of Llama-2-7B."""

PLAIN: Mapping[str, Any] = {
    "precision": "bf16", "zero_stage": 0, "offload": "none", "activation_checkpointing": "none", "compile": "none",
    "loss": "logits",
}  # fmt: skip
BF16_ALONE: Mapping[str, Any] = {"master_weights": False, "activation_checkpointing": "full"}

RUNGS: tuple[tuple[str, Mapping[str, Any], str | None], ...] = (
    ("eager", {}, None),
    ("compile: block", {"compile": "block"}, None),
    ("+ flash attention", {"compile": "block"}, "flash"),
    ("+ cuDNN attention", {"compile": "block"}, "cudnn"),
    ("+ chunked loss", {"compile": "block", "loss": "chunked"}, "cudnn"),
    ("+ fp8, scales per tensor", {"compile": "block", "loss": "chunked", "precision": "fp8"}, "cudnn"),
    (
        "+ fp8, scales per row",
        {"compile": "block", "loss": "chunked", "precision": "fp8", "fp8_scaling": "row"},
        "cudnn",
    ),
)
"""Name, settings, kernel of attention. A rung with + has all that stands above it, but for flash attention."""


@dataclass(frozen=True)
class Work:
    """A model and a batch, all of one micro-batch.

    Attributes:
        least_bytes: device memory below which ``tight`` settings are added.
    """

    name: str
    model: Mapping[str, Any]
    batch: int
    length: int
    seconds: float
    least_bytes: int = 0
    tight: Mapping[str, Any] = field(default_factory=dict)

    def label(self) -> str:
        return f"{self.name}, {self.batch} × {self.length:,}"

    def strategy(self, bench: Bench, settings: Mapping[str, Any]) -> dict[str, Any]:
        size = {"micro_batch_size": min(self.batch, 4) if bench.tiny else self.batch}
        return {**PLAIN, **size, **(self.tight if self.is_tight(bench) else {}), **settings}

    def is_tight(self, bench: Bench) -> bool:
        return 0 < bench.capacity < self.least_bytes

    def values(self, bench: Bench, settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        model = self.model if "preset" in self.model else {**self.model, "context": self.length}
        return bench.values(model, self.length, self.batch, self.strategy(bench, settings), **more)


SMALL = Work("1.5B", MODELS["1.5B"], 4, 2048, 25.0)
LARGE = Work("7B", MODELS["7B"], 1, 4096, 35.0, 120 * 2**30, BF16_ALONE)
ADAPTED = Work("8B", {"preset": "llama-3-8b"}, 1, 4096, 35.0)
ADAPTER = {"rank": 16, "alpha": 32.0, "targets": "all"}


def rungs(bench: Bench, work: Work) -> list[Contender]:
    note = {"memory": "bf16 weights alone, blocks recomputed"} if work.is_tight(bench) else {}
    return [
        shardwise(bench, f"{work.label()}: {name}", work.values(bench, settings), backend, **note)
        for name, settings, backend in RUNGS
    ]


def adapters(bench: Bench) -> list[Contender]:
    """LoRA and QLoRA, compiled, with the chunked loss; packed rows have documents of 512 tokens."""
    settings = {"compile": "block", "loss": "chunked"}
    return [
        shardwise(
            bench,
            f"{name} of {ADAPTED.name}, {batch}",
            ADAPTED.values(
                bench, settings, adapter=ADAPTER | {"quantize": quantize}, data={"packing": packing}
            ),
        )
        for name, quantize in (("LoRA", "none"), ("QLoRA", "nf4"))
        for batch, packing in (("1 × 4,096", False), ("8 × 512 packed", True))
    ]


def contenders(bench: Bench, work: Work) -> list[Contender]:
    """Rungs and peers of a model, in the order in which they are measured."""
    *safe, per_tensor, per_row = rungs(bench, work)
    return [*safe, *peers(bench, work.label(), work.values(bench, {})), per_tensor, per_row]


def ladder(bench: Bench) -> Iterator[Task]:
    """1.5B first: it is small."""
    yield task(bench, contenders(bench, SMALL), SMALL.seconds)
    yield task(bench, adapters(bench), ADAPTED.seconds)
    yield task(bench, contenders(bench, LARGE), LARGE.seconds)
    adapted = ADAPTED.values(bench, {}, adapter=ADAPTER | {"quantize": "none"})
    yield task(bench, peers(bench, f"LoRA of {ADAPTED.label()}", adapted), ADAPTED.seconds)


def best(bench: Bench, work: Work) -> Contender:
    """The rung with the most tokens/s of those that were measured; the first one if none was."""

    def speed(contender: Contender) -> float:
        row = bench.last("ladder", contender.name) or {}
        return float(row.get("tokens_per_second", 0.0))

    return max(rungs(bench, work), key=speed)
