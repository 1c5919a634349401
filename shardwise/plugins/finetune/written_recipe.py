"""The recipe of a fine-tuning run, written with a comment for each choice. No torch.

Defaults of learning rates: 2e-5 for all weights, 2e-4 for LoRA of rank 16 on all linear layers, as in the recipes of
TRL and of Hu et al. (arXiv:2106.09685) and Dettmers et al. (arXiv:2305.14314). `PREFERENCES` has those of objectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from shardwise.recipe.objective import READ
from shardwise.recipe.yaml_source import written

FineTuningMethod = Literal["full", "lora", "qlora"]
FINE_TUNING_METHODS: tuple[FineTuningMethod, ...] = ("full", "lora", "qlora")
"""From the most memory to the least."""

_LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}


class PreferenceChoices(NamedTuple):
    """Choices of a run with an objective.

    Attributes:
        full, adapter: learning rates of all weights, and of an adapter.
        warmup: a fraction of the steps.
        keys: of `objective:`, written with their values and comments.
    """

    full: float
    adapter: float
    warmup: float
    keys: Mapping[str, str]


_BETA = {"beta": "how far the model stays from the reference: less is further"}
_PAIRS = PreferenceChoices(5e-7, 5e-6, 0.1, _BETA)
PREFERENCES: Mapping[str, PreferenceChoices] = {
    "dpo": _PAIRS,  # Zephyr 7B in the alignment-handbook: full 5e-7, QLoRA 5e-6, warmup 0.1, one epoch
    "ipo": _PAIRS,
    "kto": _PAIRS,
    # The handbook has 5e-6 for all weights of Zephyr 141B; adapters: ten times that, as of dpo.
    "orpo": PreferenceChoices(5e-6, 5e-5, 0.1, {"beta": "weight of the odds ratio"}),
    "simpo": PreferenceChoices(  # princeton-nlp/SimPO: 3e-7 to 1e-6, of Llama 3 8B 6e-7; adapters: ten times that
        6e-7, 6e-6, 0.1, {"beta": "scale of the rewards", "margin": "by which the chosen answer shall win"}
    ),
    "cpo": PreferenceChoices(  # TRL's CPOConfig has 1e-6; adapters: ten times that
        1e-6, 1e-5, 0.1, {"beta": "scale of the rewards", "nll_weight": "of the chosen answer"}
    ),
    # TRL's RewardConfig has 1e-4; all weights: a tenth of it.
    "reward": PreferenceChoices(1e-5, 1e-4, 0.03, {"center_weight": "0.01 centers the rewards"}),
}
"""The objectives that the command writes: they are trained on given answers."""
PREFERENCE_EPOCHS = 1.0
"""Passes over preferences: as many as Zephyr's in the alignment-handbook."""


@dataclass(frozen=True)
class SequenceShape:
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
        objective: of the model's class: causal, masked or seq2seq.
        preference: a name of `PREFERENCES`; None trains on the next token.
        unread: the model or the data, where it was not here to be read.
    """

    model: str
    data: str
    epochs: float = 3.0
    batch_size: int = 16
    shape: SequenceShape = field(default_factory=SequenceShape)
    hardware: Hardware = field(default_factory=Hardware)
    objective: str = "causal"
    preference: str | None = None
    unread: tuple[str, ...] = ()

    def on(self, hardware: Hardware) -> FineTuning:
        """This run on these devices. The batch size is rounded up to a multiple of their number."""
        batch = -(-self.batch_size // hardware.count) * hardware.count
        return replace(self, hardware=hardware, batch_size=batch)

    def recipe(self, method: FineTuningMethod, why: str = "") -> str:
        """The recipe as YAML with comments.

        Args:
            method: full trains all weights, lora an adapter, qlora an adapter on a base in 4 bits.
            why: the reason for the method, as its comment.
        """
        shape, hardware = self.shape, self.hardware
        choices = PREFERENCES.get(self.preference or "")
        rate, usual = _LEARNING_RATES[method], _METHOD_NAMES[method]
        if choices is not None:
            rate = choices.full if method == "full" else choices.adapter
            usual = f"{self.preference} of {usual}"
        lines = [
            f"# Fine-tune {self.model} on {self.data}. Every value may be changed: see docs/reference/recipe.md.",
            "model:",
            _yaml_line("  hf", self.model, "folder or Hub id"),
            *self._objective(),
            *self._preference(choices),
            "data:",
            _yaml_line("  source", self.data, "file, folder, glob or Hub id"),
            _yaml_line("  tokenizer", self.model, "with its chat template"),
            _yaml_line("  sequence_length", shape.sequence_length, shape.why),
            *self._sequences(),
            _yaml_line("epochs", self.epochs, "passes over the data; or steps: N"),
            _yaml_line(
                "batch_size", self.batch_size, f"{self._samples} per optimizer step, over all devices"
            ),
            *_adapter_lines(method, why),
            "optimizer:",
            _yaml_line("  learning_rate", rate, f"the peak, usual for {usual}"),
            _yaml_line("  weight_decay", 0.0, ""),
            "schedule:",
            _yaml_line("  name", "cosine", ""),
            _yaml_line("  warmup", choices.warmup if choices else 0.03, "of all steps"),
            "cluster:",
            _yaml_line("  device", hardware.device, hardware.note),
            _yaml_line("  devices_per_node", hardware.count, ""),
            *(
                [_yaml_line("  memory_gib", hardware.memory_gib, "of one device")]
                if hardware.memory_gib
                else []
            ),
            "strategy:",
            _yaml_line("  precision", hardware.precision, _precision_comment(hardware.device)),
        ]
        return "\n".join(lines) + "\n"

    def _objective(self) -> list[str]:
        said = {"masked": "hides 15 % of the tokens", "seq2seq": "completions, from prompts in the encoder"}
        if self.objective == "causal":
            return []
        return [_yaml_line("  objective", self.objective, said[self.objective])]

    @property
    def _samples(self) -> str:
        if self.preference is None or self.shape.packing:
            return "sequences"
        return "answers" if self.preference == "kto" else "pairs"

    def _preference(self, choices: PreferenceChoices | None) -> list[str]:
        if choices is None or self.preference is None:
            return []
        lines = ["objective:", _yaml_line("  name", self.preference, "docs/how-to/train-on-preferences.md")]
        values = READ[self.preference]
        return [*lines, *(_yaml_line(f"  {key}", values[key], said) for key, said in choices.keys.items())]

    def _sequences(self) -> list[str]:
        if self.objective == "causal":
            what = "several records in a sequence, without attention between them"
            return [_yaml_line("  packing", self.shape.packing, what)]
        if self.shape.completion_length is None:
            return []
        return [
            _yaml_line(
                "  completion_length", self.shape.completion_length, "tokens of the decoder's sequence"
            )
        ]


def _precision_comment(device: str) -> str:
    """A recipe of a CPU is often planned for a GPU next, where fp32 takes twice the time and memory."""
    here = "for GPUs write bf16; " if device == "cpu" else ""
    return f"{here}the planner chooses the other settings"


_METHOD_NAMES = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}


def _adapter_lines(method: FineTuningMethod, why: str) -> list[str]:
    if method == "full":
        return [f"# no adapter: all weights are trained{'; ' + why if why else ''}"]
    lines = [f"adapter:{' ' * 32}  # {_METHOD_NAMES[method]}{': ' + why if why else ''}"]
    lines += [_yaml_line("  rank", 16, ""), _yaml_line("  alpha", 32.0, "scale = alpha / rank")]
    lines += [_yaml_line("  targets", "all", "all linear layers and experts")]
    if method == "qlora":
        lines.append(_yaml_line("  quantize", "nf4", "the frozen base in 4 bits"))
    return lines


def _yaml_line(key: str, value: object, comment: str) -> str:
    said = f"{key}: {written(value)}"
    return said.ljust(40) + f"  # {comment}" if comment else said
