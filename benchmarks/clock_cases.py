"""Runs of clock_here.py: on the CPU of this machine with 1, 2 and 4 processes, and on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 12

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "layers": 12, "width": 768, "heads": 12, "ffn": 3072, "vocab": 50257},
    "150M": {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 32768},
    "0.4B": {"layers": 24, "width": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816, "vocab": 50304},
    "1.3B": {"layers": 24, "width": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 32000},
    "3B": {"layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "8B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "0.3M": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 512},
    "5M": {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 4096},
    "gpt2 4M": {"family": "gpt2", "layers": 4, "width": 256, "heads": 8, "ffn": 1024, "vocab": 2048},
    "19M": {"layers": 4, "width": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192},
    "41M": {"layers": 8, "width": 640, "heads": 10, "kv_heads": 5, "ffn": 1728, "vocab": 2048},
}


@dataclass(frozen=True)
class Case:
    """One run: ``batch`` sequences of ``length`` tokens per optimizer step.

    Attributes:
        settings: of the strategy; those that are missing are the planner's choice.
        counted: whether the case is one of the runs whose error is reported; others only compete with a choice.
    """

    model: str
    world: int
    batch: int
    length: int = 256
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    counted: bool = True
    device: str = "cpu"

    @property
    def work(self) -> str:
        """The recipe without its strategy."""
        words = f"{self.model}, {self.world} × {self.device}, batch {self.batch} × {self.length}"
        words += f", {self.settings['precision']}" if "precision" in self.settings else ""
        if self.adapter:
            words += ", QLoRA" if self.adapter.get("quantize") else ", LoRA"
        return words

    @property
    def name(self) -> str:
        said = [f"{key} {value}" for key, value in self.settings.items() if key != "precision"]
        return f"{self.work}: {', '.join(said) or 'free choice'}"

    def recipe(self) -> dict[str, Any]:
        return {
            "model": MODELS[self.model] | {"context": max(self.length, 256)},
            "data": {"sequence_length": self.length},
            "steps": STEPS,
            "batch_size": self.batch,
            "cluster": {"device": self.device, "devices_per_node": self.world},
            "strategy": {"precision": "fp32", **self.settings},
            "evaluation": {"sequences": 1},
            **({"adapter": dict(self.adapter)} if self.adapter else {}),
        }


def _of(work: tuple[str, int, int, int], *settings: dict[str, Any]) -> list[Case]:
    return [Case(*work, each) for each in settings]


MB1, MB2, MB4, MB8 = ({"micro_batch_size": size} for size in (1, 2, 4, 8))
PIPELINE = {"pipeline_parallel": 2}

CASES: tuple[Case, ...] = (
    *_of(("0.3M", 1, 8, 64), MB2),
    *_of(
        ("5M", 1, 4, 256),
        MB4,
        MB4 | {"activation_checkpointing": "full"},
        MB4 | {"activation_checkpointing": "selective"},
        MB4 | {"precision": "bf16"},
        MB4 | {"offload": "optimizer"},
    ),
    *_of(("5M", 1, 2, 1024), MB2),
    *_of(("gpt2 4M", 1, 4, 256), MB4),
    *_of(("19M", 1, 4, 256), MB4, MB4 | {"precision": "bf16"}),
    Case("19M", 1, 4, 256, MB4, {"name": "lora", "rank": 8}),
    *_of(("41M", 1, 2, 256), MB2),
    *_of(
        ("5M", 2, 8, 256),
        *(MB4 | {"zero_stage": stage} for stage in range(4)),
        MB8 | {"tensor_parallel": 2},
        MB8 | {"sequence_parallel": 2},
        MB8 | {"sequence_parallel": 2, "sequence_method": "ring"},
        MB2 | PIPELINE | {"pipeline_schedule": "1f1b"},
        MB2 | PIPELINE | {"pipeline_schedule": "gpipe"},
        MB4 | {"zero_stage": 0, "precision": "bf16"},
    ),
    *_of(("0.3M", 2, 8, 64), MB4 | {"zero_stage": 3}),
    *_of(("19M", 2, 4, 256), MB2 | {"zero_stage": 3}, MB4 | {"tensor_parallel": 2}),
    *_of(("19M", 2, 8, 256), MB2 | {"zero_stage": 1, "activation_checkpointing": "full"}),
    *_of(("0.3M", 4, 8, 64), MB2 | {"zero_stage": 3}),
    *_of(
        ("5M", 4, 8, 256),
        MB2 | {"zero_stage": 0},
        MB2 | {"zero_stage": 3},
        MB2 | {"zero_stage": 3, "replicate": 2},
        MB4 | {"tensor_parallel": 2, "zero_stage": 3},
        MB2 | PIPELINE | {"zero_stage": 1},
    ),
)

CHOICES: tuple[Case, ...] = tuple(
    Case(*work, counted=False)
    for work in (("0.3M", 2, 8, 64), ("5M", 1, 4), ("5M", 2, 8), ("5M", 4, 8), ("19M", 2, 4))
)
"""Recipes whose strategy is left to the planner."""

RIVALS: tuple[Case, ...] = tuple(
    Case(model, world, batch, length, settings, counted=False)
    for model, world, batch, length, settings in (
        ("0.3M", 2, 8, 64, MB4 | {"zero_stage": 0}),
        ("0.3M", 2, 8, 64, MB8 | {"tensor_parallel": 2}),
        ("5M", 1, 4, 256, MB1),
        ("19M", 2, 4, 256, MB2 | {"zero_stage": 0}),
        ("19M", 2, 4, 256, MB1 | PIPELINE),
    )
)
"""More strategies for these recipes."""

BF16, FULL = {"precision": "bf16"}, {"activation_checkpointing": "full"}
_COMPILED = {"compile": "block"}
_LORA: dict[str, Any] = {"name": "lora", "rank": 16}


@dataclass(frozen=True)
class Suite:
    """Runs for one kind of device. Its results are clock-NAME.jsonl and clock-NAME.json in ``folder``.

    Attributes:
        cases: runs whose error is reported.
        choices: recipes whose strategy is left to the planner.
        rivals: more strategies for these recipes.
    """

    name: str
    cases: tuple[Case, ...]
    choices: tuple[Case, ...]
    rivals: tuple[Case, ...]
    folder: Path = Path(__file__).parent / "results"

    @property
    def every(self) -> tuple[Case, ...]:
        return *self.cases, *self.choices, *self.rivals

    @property
    def runs(self) -> Path:
        return self.folder / f"clock-{self.name}.jsonl"

    @property
    def summary(self) -> Path:
        return self.folder / f"clock-{self.name}.json"


CPU = Suite("cpu", CASES, CHOICES, RIVALS)


def gpu_suite(device: str) -> Suite:
    """For one GPU of at least 80 GB, by the name of its profile."""

    def of(work: tuple[str, int, int], *settings: Mapping[str, Any], **more: Any) -> list[Case]:
        model, batch, length = work
        return [Case(model, 1, batch, length, each, device=device, **more) for each in settings]

    small, middle, large = ("150M", 16, 1024), ("1.3B", 8, 2048), ("3B", 4, 4096)
    cases = (
        *of(
            small,
            MB8 | BF16,
            MB8 | {"precision": "fp32"},
            MB8 | {"precision": "fp16"},
            MB8 | {"precision": "fp8"},
            MB2 | BF16,
            MB8 | BF16 | FULL,
            MB8 | BF16 | {"loss": "logits"},
            MB8 | BF16 | _COMPILED,
            MB8 | BF16 | {"offload": "activations"},
            MB8 | BF16 | {"offload": "optimizer"},
        ),
        *of(("gpt2", 16, 1024), MB8 | BF16, MB8 | BF16 | _COMPILED),
        *of(("0.4B", 4, 8192), MB1 | BF16),
        *of(("0.4B", 1, 32768), MB1 | BF16 | FULL),
        *of(
            middle,
            MB1 | BF16,
            MB4 | BF16,
            MB4 | BF16 | FULL,
            MB4 | BF16 | {"activation_checkpointing": "selective"},
            MB4 | BF16 | _COMPILED,
            MB4 | {"precision": "fp8"} | _COMPILED,
        ),
        *of(large, MB1 | BF16, MB1 | BF16 | FULL, MB1 | BF16 | _COMPILED),
        *of(("8B", 4, 2048), MB2 | BF16, adapter=_LORA),
        *of(("8B", 4, 2048), MB2 | BF16, adapter=_LORA | {"quantize": "nf4"}),
    )
    choices = (
        *of(small, BF16, counted=False),
        *of(middle, BF16, counted=False),
        *of(large, BF16, counted=False),
    )
    rivals = (
        *of(
            small, {"micro_batch_size": 16} | BF16, {"micro_batch_size": 16} | BF16 | _COMPILED, counted=False
        ),
        *of(middle, MB8 | BF16, MB8 | BF16 | _COMPILED, MB2 | BF16 | _COMPILED, counted=False),
        *of(large, MB2 | BF16 | FULL, MB2 | BF16 | _COMPILED, counted=False),
    )
    return Suite(device.lower(), cases, choices, rivals)
