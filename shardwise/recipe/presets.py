"""Model presets: dimensions of decoders by name, and the dimensions of a recipe's model. No torch.

Tests compare each published row with the parameter count that its authors published.
"""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.recipe.dimensions import Dimensions, check_dimensions
from shardwise.recipe.sections import ModelSpec

BYTES_VOCAB = 256
"""Default vocabulary size: that of the ``bytes`` tokenizer."""


def _gpt2(layers: int, width: int, heads: int) -> Dimensions:
    return Dimensions(
        layers, width, heads, heads, 4 * width, vocab=50257, context=1024, family="gpt2", tied=True
    )


def _qwen3(layers: int, width: int, heads: int, ffn: int, tied: bool = False) -> Dimensions:
    return Dimensions(
        layers, width, heads, 8, ffn, vocab=151936, context=40960, family="qwen3", tied=tied,
        rope_theta=1000000.0, norm_epsilon=1e-6, head_dim=128,
    )  # fmt: skip


def _mixtral(layers: int, width: int, heads: int, ffn: int, vocab: int, context: int) -> Dimensions:
    return Dimensions(
        layers, width, heads, 8, ffn, vocab=vocab, context=context, rope_theta=1000000.0, experts=8
    )


def _qwen3_moe(layers: int, width: int, heads: int, ffn: int, expert_ffn: int) -> Dimensions:
    dense = replace(_qwen3(layers, width, heads, ffn), kv_heads=4)
    return replace(dense, experts=128, experts_per_token=8, expert_ffn=expert_ffn)


def _deepseek_v3() -> Dimensions:
    """Without the layer that predicts one more token (multi-token prediction)."""
    return Dimensions(
        61, 7168, 128, 128, 18432, vocab=129280, context=163840, norm_epsilon=1e-6, head_dim=192, kv_lora_rank=512,
        q_lora_rank=1536, rope_head_dim=64, v_head_dim=128, experts=256, experts_per_token=8, expert_ffn=2048,
        shared_ffn=2048, dense_layers=3, router="sigmoid", router_groups=8, groups_per_token=4, router_scale=2.5,
        router_bias=True,
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
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, expert_ffn=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, expert_ffn=1536),
    # Jiang et al. 2024, arXiv:2401.04088, and the config.json of each released model.
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, vocab=32000, context=32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, vocab=32000, context=65536),
    # DeepSeek-AI 2024, arXiv:2412.19437, section 4.2, and the config.json of the released model.
    "deepseek-v3": _deepseek_v3(),
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
