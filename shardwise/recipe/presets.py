"""Model presets: dimensions of decoders by name, and parameter counts. No torch.

Three families. ``llama``: RMSNorm, rotary position embeddings (RoPE), SwiGLU, grouped-query attention, no biases.
``qwen3``: llama with an RMSNorm of every query and key head. ``gpt2``: LayerNorm, GELU, learned positions, biases, tied
embeddings. Tests compare each published row with the parameter count that its authors published.

The RoPE frequency scaling of Llama 3.1 and 3.2 is not implemented here: it has no parameters and no cost, and matters
only to pretrained weights, which ``model.hf`` loads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from shardwise.core.errors import RecipeError
from shardwise.recipe.sections import ModelSpec

ModelFamily = Literal["llama", "qwen3", "gpt2"]

BYTES_VOCAB = 256
"""Default vocabulary size: that of the ``bytes`` tokenizer."""

DEFAULT_CONTEXT = 2048
"""Default maximum sequence length."""


@dataclass(frozen=True)
class Dimensions:
    """The shape of a decoder.

    Attributes:
        layers: number of blocks.
        width: hidden size.
        heads: query heads.
        kv_heads: key/value heads, each shared by ``heads / kv_heads`` query heads.
        ffn: intermediate size of the feed-forward network.
        vocab: vocabulary size.
        context: maximum sequence length (gpt2: the number of learned positions).
        tied: whether the head shares the embedding's weight.
        rope_theta: base of the rotary position embedding (not gpt2).
        norm_epsilon: added to the variance in every norm.
        head_dim: dimension of a head, if it is not ``width / heads``.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int = DEFAULT_CONTEXT
    family: ModelFamily = "llama"
    tied: bool = False
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    head_dim: int | None = None

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def rotates(self) -> bool:
        """Whether a block is Llama's: rotary positions, RMSNorm, SwiGLU, no biases. Else it is GPT-2's."""
        return self.family != "gpt2"

    @property
    def norms_heads(self) -> bool:
        """Whether every query and key head has an RMSNorm before the rotation."""
        return self.family == "qwen3"

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: attention, feed-forward, two norms."""
        q_width, kv_width = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.width * q_width + 2 * self.width * kv_width
        if self.rotates:
            head_norms = 2 * self.head_width if self.norms_heads else 0
            return attention + 3 * self.width * self.ffn + 2 * self.width + head_norms
        biases = (q_width + 2 * kv_width + self.width) + (self.ffn + self.width)
        return attention + 2 * self.width * self.ffn + biases + 2 * 2 * self.width

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied weight counts once."""
        embeddings = self.vocab * self.width * (1 if self.tied else 2)
        outside = self.width  # the final norm
        if self.family == "gpt2":
            outside += self.width + self.context * self.width  # the final norm's bias, and the positions
        return embeddings + outside + self.layers * self.block_parameters


def _gpt2(layers: int, width: int, heads: int) -> Dimensions:
    return Dimensions(
        layers, width, heads, heads, 4 * width, vocab=50257, context=1024, family="gpt2", tied=True
    )


def _qwen3(layers: int, width: int, heads: int, ffn: int, tied: bool = False) -> Dimensions:
    return Dimensions(
        layers, width, heads, 8, ffn, vocab=151936, context=40960, family="qwen3", tied=tied,
        rope_theta=1000000.0, norm_epsilon=1e-6, head_dim=128,
    )  # fmt: skip


def _llama3(
    layers: int, width: int, heads: int, ffn: int, context: int = 8192, tied: bool = False
) -> Dimensions:
    return Dimensions(
        layers, width, heads, 8, ffn, vocab=128256, context=context, tied=tied, rope_theta=500000.0
    )


PRESETS: dict[str, Dimensions] = {
    # Small byte-level models for a laptop.
    "tiny": Dimensions(2, 64, 4, 2, 192, vocab=256, context=512),
    "python-6m": Dimensions(8, 256, 8, 4, 768, vocab=256, context=1024),
    "small": Dimensions(8, 512, 8, 8, 1408, vocab=256, context=2048),
    # Radford et al. 2019; sizes as counted from the released weights.
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    # Touvron et al. 2023, arXiv:2307.09288.
    "llama-2-7b": Dimensions(32, 4096, 32, 32, 11008, vocab=32000, context=4096),
    "llama-2-13b": Dimensions(40, 5120, 40, 40, 13824, vocab=32000, context=4096),
    "llama-2-70b": Dimensions(80, 8192, 64, 8, 28672, vocab=32000, context=4096),
    # Grattafiori et al. 2024, arXiv:2407.21783, and the model cards of Llama 3.2.
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, context=131072, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8192, context=131072, tied=True),
    "llama-3-8b": _llama3(32, 4096, 32, 14336),
    "llama-3-70b": _llama3(80, 8192, 64, 28672),
    "llama-3-405b": _llama3(126, 16384, 128, 53248, context=131072),
    # Yang et al. 2025, arXiv:2505.09388, table 1; widths from the config.json of each released model.
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
}


def dimensions_of(spec: ModelSpec) -> Dimensions:
    """The dimensions of a recipe's ``model:`` section: a preset with overrides, or dimensions alone.

    Without a preset, ``layers``, ``width`` and ``heads`` are required. Defaults of the others: ``kv_heads`` is
    ``heads``; ``ffn`` is 4 widths (gpt2), or 8/3 widths rounded up to a multiple of 64 (others), which costs the same;
    gpt2 is tied. Overriding ``heads`` of a preset without grouped-query attention also changes ``kv_heads``.

    Raises:
        RecipeError: for an unknown preset, a missing dimension, or dimensions that contradict each other.
    """
    given = {
        field.name: value
        for field in fields(Dimensions)
        if (value := getattr(spec, field.name, None)) is not None
    }
    if spec.preset is None:
        dimensions = _from_given(given)
    elif spec.preset in PRESETS:
        base = PRESETS[spec.preset]
        if "heads" in given and base.kv_heads == base.heads:
            given.setdefault("kv_heads", given["heads"])
        dimensions = replace(base, **given)
    else:
        nearest = get_close_matches(spec.preset.lower(), PRESETS, n=1, cutoff=0.4)
        fix = f"did you mean {nearest[0]}?" if nearest else f"choose one of {', '.join(PRESETS)}"
        raise RecipeError(f"unknown preset {spec.preset!r}", where="model.preset", fix=fix)
    check_dimensions(dimensions)
    return dimensions


def _from_given(given: dict[str, Any]) -> Dimensions:
    for key in ("layers", "width", "heads"):
        if key not in given:
            raise RecipeError(
                f"the model's {key} is missing",
                where=f"model.{key}",
                fix=f"give {key}, or start from a preset such as preset: python-6m",
            )
    gpt2 = given.get("family") == "gpt2"
    width = given["width"]
    ffn = 4 * width if gpt2 else -(-8 * width // (3 * 64)) * 64
    derived = {"kv_heads": given["heads"], "ffn": ffn, "vocab": BYTES_VOCAB, "tied": gpt2}
    return Dimensions(**{**derived, **given})


def check_dimensions(dimensions: Dimensions) -> None:
    """Raise RecipeError for dimensions that contradict each other."""
    d = dimensions
    if d.head_dim is None and d.width % d.heads:
        raise RecipeError(
            "the width is not divisible by the heads",
            where="model.heads",
            why=f"{d.width} is not a multiple of {d.heads}",
            fix=f"use {_divisor_near(d.width, d.heads)} heads, or give head_dim",
        )
    if d.heads % d.kv_heads:
        raise RecipeError(
            "the heads are not divisible by the kv_heads",
            where="model.kv_heads",
            why=f"{d.heads} is not a multiple of {d.kv_heads}",
            fix=f"use {_divisor_near(d.heads, d.kv_heads)} kv_heads",
        )
    if d.rotates and d.head_width % 2:
        given = d.head_dim is not None
        raise RecipeError(
            "rotary position embeddings need an even head dimension",
            where="model.head_dim" if given else "model.heads",
            why="" if given else f"{d.width} / {d.heads} is {d.head_width}",
            fix="use an even number" if given else "change width or heads",
        )


def _divisor_near(number: int, wanted: int) -> int:
    # Bounded, so that a huge number does not make the error slow.
    start = min(number, wanted)
    return next((n for n in range(start, max(0, start - 10_000), -1) if number % n == 0), 1)
