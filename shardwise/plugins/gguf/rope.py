"""Rotary positions in a GGUF file: their base, how they are scaled, and the factors of single frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]

_YARN = {"type", "rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "partial_rotary_factor"}
_TRAINED_LENGTH = "original_max_position_embeddings"
_FULL_ATTENTION, _SLIDING_WINDOW = "full_attention", "sliding_attention"


class Rope:
    """The rotary positions of a model of Hugging Face.

    Attributes:
        head: channels of a head.
        part: fraction of them that is rotated.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        heads = config.get("num_attention_heads") or 1
        self.head = int(config.get("head_dim") or config.get("hidden_size", 0) // heads)
        self._whole = self._of(_FULL_ATTENTION)
        self._local = (
            self._of(_SLIDING_WINDOW) if _SLIDING_WINDOW in (config.get("rope_parameters") or {}) else None
        )
        self.part = float(self._whole.get("partial_rotary_factor") or 1.0)

    def _of(self, kind: str) -> Config:
        """The parameters of blocks of a kind. Before transformers 5 they had keys of their own in the config."""
        all_kinds: Config = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        rope: Config = all_kinds.get(kind, all_kinds)
        base = {
            "rope_theta": self._config.get("rope_theta") or 10000.0,
            "rope_type": rope.get("type", "default"),
        }
        return base | {key: value for key, value in rope.items() if value is not None}

    def obstacle(self, scalings: Sequence[str]) -> str:
        """The kind of scaling that is none of ``scalings``, or the setting of YaRN that llama.cpp does not have."""
        kind = str(self._whole["rope_type"])
        if kind not in scalings:
            return kind
        if kind == "yarn" and (odd := sorted(self._whole.keys() - _YARN - {_TRAINED_LENGTH})):
            return f"yarn with {odd[0]}"
        if self._local is not None and self._local["rope_type"] != "default":
            return f"{self._local['rope_type']}, in blocks with a window"
        return ""

    def differences(self) -> Iterator[str]:
        """Where llama.cpp rotates otherwise than the model, in sentences."""
        if self._whole["rope_type"] == "longrope":
            yield (
                "llama.cpp takes the rotary factors of long texts whenever its context (-c) is above"
                f" {self._original:,}, this model when the text is"
            )

    def describe(self, writer: Any) -> None:
        """Write the keys."""
        import gguf

        kind = self._whole["rope_type"]
        kinds = gguf.RopeScalingType
        writer.add_rope_dimension_count(int(self.head * self.part))
        writer.add_rope_freq_base(float(self._whole["rope_theta"]))
        if self._local is not None:
            writer.add_float32(f"{writer.arch}.rope.freq_base_swa", float(self._local["rope_theta"]))
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(kinds.LINEAR if kind == "linear" else kinds.YARN)
            writer.add_rope_scaling_factor(float(self._whole["factor"]))
        if kind == "yarn":
            for key in ("beta_fast", "beta_slow"):
                if key in self._whole:
                    writer.add_float32(f"{writer.arch}.rope.scaling.yarn_{key}", float(self._whole[key]))
        if kind == "yarn" or writer.arch == "phi3":
            writer.add_rope_scaling_orig_ctx_len(self._original)
        if kind == "longrope":
            writer.add_rope_scaling_attn_factors(self._long_factor)

    def factors(self) -> dict[str, Tensor]:
        """What divides each frequency, by the tensor's name in a file: [rotated channels / 2] in fp32."""
        rope = self._whole
        if rope["rope_type"] == "longrope":
            kinds = ("long", "short")
            return {
                f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]).float() for kind in kinds
            }
        if rope["rope_type"] != "llama3":
            return {}
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        channels = torch.arange(0, self.head, 2, dtype=torch.float64)
        lengths = 2 * math.pi * float(rope["rope_theta"]) ** (channels / self.head)
        # Long waves (0) are stretched by the factor, short ones (1) stay, those between change smoothly.
        share = ((self._original / lengths - low) / (high - low)).clamp(0, 1)
        return {"rope_freqs.weight": (1 / ((1 - share) / float(rope["factor"]) + share)).float()}

    @property
    def _original(self) -> int:
        """The context before it was made longer."""
        known = self._whole.get(_TRAINED_LENGTH) or self._config.get(_TRAINED_LENGTH)
        return int(known or self._config["max_position_embeddings"])

    @property
    def _long_factor(self) -> float:
        """What LongRoPE multiplies the rotated channels by (arXiv:2402.13753, sec. 3.4)."""
        if "attention_factor" in self._whole:
            return float(self._whole["attention_factor"])
        longer = self._config["max_position_embeddings"] / self._original
        return math.sqrt(1 + math.log(longer) / math.log(self._original)) if longer > 1 else 1.0
