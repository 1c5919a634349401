"""The recipe of a fine-tuning run, written with a comment for each choice. No torch.

Defaults of learning rates: 2e-5 for all weights, 2e-4 for LoRA of rank 16 on all linear layers, as in the recipes of
TRL and of Hu et al. (arXiv:2106.09685) and Dettmers et al. (arXiv:2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.recipe.yaml_source import written

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
"""From the most memory to the least."""

_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}


@dataclass(frozen=True)
class Shape:
    """The sequences of a fine-tuning run, and why they are so; ``completion_length`` is that of a decoder."""

    sequence_length: int = 2048
    packing: bool = True
    why: str = "tokens per sequence, at most the model's context"
    completion_length: int | None = None


@dataclass(frozen=True)
class Hardware:
    """The devices of a run: ``device`` is cpu or a profile's name, memory is that of one device in GiB."""

    device: str = "cpu"
    count: int = 1
    memory_gib: float | None = None
    precision: str = "fp32"
    note: str = "this machine"


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning run before its method is chosen.

    Attributes:
        unread: the model or the data, where it was not here to be read.
    """

    model: str
    data: str
    epochs: float = 3.0
    batch_size: int = 16
    shape: Shape = field(default_factory=Shape)
    hardware: Hardware = field(default_factory=Hardware)
    objective: str = "causal"
    unread: tuple[str, ...] = ()

    def recipe(self, method: Method, why: str = "") -> str:
        """The recipe as YAML with comments.

        Args:
            method: full trains all weights, lora an adapter, qlora an adapter on a base in 4 bits.
            why: the reason for the method, as its comment.
        """
        shape, hardware = self.shape, self.hardware
        lines = [
            f"# Fine-tune {self.model} on {self.data}. Every value may be changed: see docs/reference/recipe.md.",
            "model:",
            _line("  hf", self.model, "folder or Hub id"),
            *self._objective(),
            "data:",
            _line("  source", self.data, "file, folder, glob or Hub id"),
            _line("  tokenizer", self.model, "with its chat template"),
            _line("  sequence_length", shape.sequence_length, shape.why),
            *self._sequences(),
            _line("epochs", self.epochs, "passes over the data; or steps: N"),
            _line("batch_size", self.batch_size, "sequences per optimizer step, over all devices"),
            *_adapter(method, why),
            "optimizer:",
            _line("  learning_rate", _RATES[method], f"the peak, usual for {_NAMES[method]}"),
            _line("  weight_decay", 0.0, ""),
            "schedule:",
            _line("  name", "cosine", ""),
            _line("  warmup", 0.03, "of all steps"),
            "cluster:",
            _line("  device", hardware.device, hardware.note),
            _line("  devices_per_node", hardware.count, ""),
            *([_line("  memory_gib", hardware.memory_gib, "of one device")] if hardware.memory_gib else []),
            "strategy:",
            _line("  precision", hardware.precision, "the planner chooses the other settings"),
        ]
        return "\n".join(lines) + "\n"

    def _objective(self) -> list[str]:
        said = {"masked": "hides 15 % of the tokens", "seq2seq": "completions, from prompts in the encoder"}
        if self.objective == "causal":
            return []
        return [_line("  objective", self.objective, said[self.objective])]

    def _sequences(self) -> list[str]:
        if self.objective == "causal":
            what = "several records in a sequence, without attention between them"
            return [_line("  packing", self.shape.packing, what)]
        if self.shape.completion_length is None:
            return []
        return [
            _line("  completion_length", self.shape.completion_length, "tokens of the decoder's sequence")
        ]


_NAMES = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}


def _adapter(method: Method, why: str) -> list[str]:
    if method == "full":
        return [f"# no adapter: all weights are trained{'; ' + why if why else ''}"]
    lines = [f"adapter:{' ' * 32}  # {_NAMES[method]}{': ' + why if why else ''}"]
    lines += [_line("  rank", 16, ""), _line("  alpha", 32.0, "scale = alpha / rank")]
    lines += [_line("  targets", "all", "all linear layers")]
    if method == "qlora":
        lines.append(_line("  quantize", "nf4", "the frozen base in 4 bits"))
    return lines


def _line(key: str, value: object, comment: str) -> str:
    said = f"{key}: {written(value)}"
    return said.ljust(40) + f"  # {comment}" if comment else said
