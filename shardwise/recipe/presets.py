"""Model presets: dimensions of decoders by name, and parameter counts. No torch.

Three families. ``llama``: RMSNorm, rotary position embeddings (RoPE), SwiGLU, grouped-query attention, no biases.
``qwen3``: llama with an RMSNorm of every query and key head. ``gpt2``: LayerNorm, GELU, learned positions, biases, tied
embeddings. Blocks of llama and qwen3 may be mixtures of experts: then they are Mixtral's and Qwen3-MoE's. Tests compare
each published row with the parameter count that its authors published.

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
RouterScores = Literal["softmax", "sigmoid"]

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
        experts: feed-forward networks that a router chooses from, in every block; 0 for a dense model.
        experts_per_token: how many of them compute a token.
        expert_ffn: intermediate size of an expert, if it is not ``ffn``.
        shared_ffn: intermediate size of an expert that computes every token; 0 for none.
        dense_layers: number of first blocks without experts.
        router: what makes scores of the router's logits.
        router_groups: groups of equally many experts; only those of ``groups_per_token`` groups are chosen.
        normalized_weights: whether the weights of a token's experts add up to ``router_scale``.
        router_scale: factor of the weights.
        router_bias: whether a bias of each expert is added to the scores for the choice.
        router_bias_rate: by which every step moves that bias towards a balanced load.
        balance_loss: coefficient of the load-balancing loss.
        z_loss: coefficient of the mean square of the logits' logsumexp.
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
    experts: int = 0
    experts_per_token: int = 2
    expert_ffn: int | None = None
    shared_ffn: int = 0
    dense_layers: int = 0
    router: RouterScores = "softmax"
    router_groups: int = 1
    groups_per_token: int = 1
    normalized_weights: bool = True
    router_scale: float = 1.0
    router_bias: bool = False
    router_bias_rate: float = 0.001
    balance_loss: float = 0.0
    z_loss: float = 0.0

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
    def expert_width(self) -> int:
        """Intermediate size of an expert."""
        return self.expert_ffn or self.ffn

    @property
    def mixtures(self) -> int:
        """Number of blocks with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def adds_router_loss(self) -> bool:
        """Whether auxiliary losses of the routers are added to the training loss."""
        return self.experts > 0 and (self.balance_loss > 0 or self.z_loss > 0)

    @property
    def block_parameters(self) -> int:
        """Parameters of the last block: attention, feed-forward or mixture, two norms."""
        ffn = 3 * self.width * self.ffn
        if self.experts:  # the experts, their router, and the shared expert
            ffn = self.width * (3 * self.experts * self.expert_width + self.experts + 3 * self.shared_ffn)
        return self._parameters_of_block(ffn)

    def _parameters_of_block(self, ffn: int) -> int:
        """Parameters of a block with so many in its feed-forward layers, if it is not GPT-2's."""
        q_width, kv_width = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.width * q_width + 2 * self.width * kv_width
        if self.rotates:
            head_norms = 2 * self.head_width if self.norms_heads else 0
            return attention + ffn + 2 * self.width + head_norms
        biases = (q_width + 2 * kv_width + self.width) + (self.ffn + self.width)
        return attention + 2 * self.width * self.ffn + biases + 2 * 2 * self.width

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied weight counts once."""
        embeddings = self.vocab * self.width * (1 if self.tied else 2)
        outside = self.width  # the final norm
        if self.family == "gpt2":
            outside += self.width + self.context * self.width  # the final norm's bias, and the positions
        dense = self._parameters_of_block(3 * self.width * self.ffn)
        blocks = self.mixtures * self.block_parameters + (self.layers - self.mixtures) * dense
        return embeddings + outside + blocks

    @property
    def active_parameters(self) -> int:
        """Parameters that compute a token: all but those of the experts that it does not choose."""
        idle = self.experts - self.experts_per_token
        return self.parameters - self.mixtures * idle * 3 * self.width * self.expert_width


_FIELDS = [field.name for field in fields(Dimensions)]
OF_MIXTURES = frozenset(_FIELDS[_FIELDS.index("experts_per_token") :])
"""Names of the dimensions that only mixtures have."""


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
    if d.experts:
        _check_experts(d)
        return
    for field in fields(d):
        if field.name in OF_MIXTURES and getattr(d, field.name) != field.default:
            what, fix = (
                f"{field.name} cannot be set here",
                "give experts, their number in a block, or remove it",
            )
            raise _of_experts(field.name, what, "the model has no experts", fix)


def _check_experts(d: Dimensions) -> None:
    """Raise RecipeError for experts that contradict each other."""
    if not d.rotates:
        raise _of_experts("experts", "experts cannot be set here", "a block of gpt2 has none", "use llama")
    if d.dense_layers >= d.layers:
        why = f"the model has {d.layers} layers, and {d.dense_layers} of them are to be dense"
        raise _of_experts("dense_layers", "no layer has experts", why, "lower it, or set experts: 0")
    if d.experts % d.router_groups or (d.router_groups > 1 and d.experts < 2 * d.router_groups):
        why = f"{d.experts} experts are not {d.router_groups} equal groups of two or more"
        fix = f"use {_divisor_near(d.experts, min(d.router_groups, d.experts // 2 or 1))} groups"
        raise _of_experts("router_groups", "the experts cannot be grouped", why, fix)
    if d.groups_per_token > d.router_groups:
        why = f"it is {d.groups_per_token}, and there are {d.router_groups} groups"
        raise _of_experts(
            "groups_per_token", "a token cannot choose more groups than there are", why, "lower it"
        )
    reach = d.experts // d.router_groups * d.groups_per_token
    if d.experts_per_token > reach:
        why = f"it is {d.experts_per_token}, and a token can choose from {reach}"
        raise _of_experts(
            "experts_per_token", "a token cannot choose so many experts", why, f"use at most {reach}"
        )


def _of_experts(key: str, what: str, why: str, fix: str) -> RecipeError:
    return RecipeError(what, where=f"model.{key}", why=why, fix=fix)


def _divisor_near(number: int, wanted: int) -> int:
    # Bounded, so that a huge number does not make the error slow.
    start = min(number, wanted)
    return next((n for n in range(start, max(0, start - 10_000), -1) if number % n == 0), 1)
