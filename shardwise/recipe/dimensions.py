"""Dimensions of the native decoder: its shape, parameter counts and what they exclude. No torch.

Three families. ``llama``: RMSNorm, rotary position embeddings (RoPE), SwiGLU, grouped-query attention, no biases.
``qwen3``: llama with an RMSNorm of every query and key head. ``gpt2``: LayerNorm, GELU, learned positions, biases, tied
embeddings. Blocks of llama and qwen3 may be mixtures of experts: then they are Mixtral's and Qwen3-MoE's. Blocks of
llama may have latent attention: with experts they are DeepSeek-V3's.

The RoPE frequency scaling of Llama 3.1 and 3.2, and YaRN of DeepSeek-V3, are not implemented: they have no parameters
and no cost, and matter only to pretrained weights, which ``model.hf`` loads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from shardwise.core.errors import RecipeError

ModelFamily = Literal["llama", "qwen3", "gpt2"]
RouterScores = Literal["softmax", "sigmoid"]

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
        head_dim: dimension of a query and key head, if it is not ``width / heads``.
        kv_lora_rank: dimension of the vector that keys and values of a token are made from (latent attention); 0 for
            keys and values of the hidden state.
        q_lora_rank: with latent attention, the same of queries; 0 for queries of the hidden state.
        rope_head_dim: with latent attention, the part of ``head_dim`` that rotates; the keys' is one for all heads.
        v_head_dim: with latent attention, the dimension of a value head, if it is not ``head_dim``.
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
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_dim: int | None = None
    v_head_dim: int | None = None
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
    def rotary_width(self) -> int:
        """Dimensions of a head that rotate."""
        return self.rope_head_dim or self.head_width

    @property
    def value_width(self) -> int:
        """Dimension of a value head."""
        return self.v_head_dim or self.head_width

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
        if self.kv_lora_rank:
            return self._latent_parameters + ffn + 2 * self.width
        q_width, kv_width = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.width * q_width + 2 * self.width * kv_width
        if self.rotates:
            head_norms = 2 * self.head_width if self.norms_heads else 0
            return attention + ffn + 2 * self.width + head_norms
        biases = (q_width + 2 * kv_width + self.width) + (self.ffn + self.width)
        return attention + 2 * self.width * self.ffn + biases + 2 * 2 * self.width

    @property
    def _latent_parameters(self) -> int:
        """Parameters of latent attention, with the norms of its latent vectors."""
        q_width, o_width = self.heads * self.head_width, self.heads * self.value_width
        q = self.width * q_width
        if self.q_lora_rank:
            q = self.q_lora_rank * (self.width + 1 + q_width)
        to_latent = self.width * (self.kv_lora_rank + self.rotary_width) + self.kv_lora_rank
        kv_width = self.heads * (self.head_width - self.rotary_width + self.value_width)
        return q + to_latent + self.kv_lora_rank * kv_width + o_width * self.width

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
_OF_LATENT = ("q_lora_rank", "rope_head_dim", "v_head_dim")
"""Names of the dimensions that only latent attention has."""


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
    _check_latent(d)
    if d.rotates and d.head_width % 2:
        has_head_dim = d.head_dim is not None
        raise RecipeError(
            "rotary position embeddings need an even head dimension",
            where="model.head_dim" if has_head_dim else "model.heads",
            why="" if has_head_dim else f"{d.width} / {d.heads} is {d.head_width}",
            fix="use an even number" if has_head_dim else "change width or heads",
        )
    if d.experts:
        _check_experts(d)
        return
    for field in fields(d):
        if field.name in OF_MIXTURES and getattr(d, field.name) != field.default:
            what = f"{field.name} cannot be set here"
            fix = "give experts, their number in a block, or remove it"
            raise _model_error(field.name, what, "the model has no experts", fix)


def _check_latent(d: Dimensions) -> None:
    """Raise RecipeError for dimensions of latent attention that contradict each other."""
    if not d.kv_lora_rank:
        for key in _OF_LATENT:
            if getattr(d, key):
                why = "only latent attention has it"
                raise _model_error(key, f"{key} cannot be set here", why, "give kv_lora_rank, or remove it")
        return
    if d.family != "llama":
        why = f"a block of {d.family} has none"
        raise _model_error("kv_lora_rank", "latent attention cannot be set here", why, "use llama")
    if d.kv_heads != d.heads:
        why = f"latent attention makes keys and values for each of the {d.heads} heads"
        raise _model_error("kv_heads", f"there cannot be {d.kv_heads} kv_heads", why, "remove it")
    if d.rope_head_dim is None or d.rope_head_dim % 2 or d.rope_head_dim >= d.head_width:
        why = f"it is the even part of the {d.head_width} dimensions of a head that rotates"
        raise _model_error("rope_head_dim", f"rope_head_dim cannot be {d.rope_head_dim}", why, "lower it")
    if d.value_width > d.head_width:
        why = f"queries and keys have {d.head_width} dimensions, and values may not have more"
        raise _model_error("v_head_dim", f"v_head_dim cannot be {d.v_head_dim}", why, "lower it")


def _check_experts(d: Dimensions) -> None:
    """Raise RecipeError for experts that contradict each other."""
    if not d.rotates:
        raise _model_error("experts", "experts cannot be set here", "a block of gpt2 has none", "use llama")
    if d.dense_layers >= d.layers:
        why = f"the model has {d.layers} layers, and {d.dense_layers} of them are to be dense"
        raise _model_error("dense_layers", "no layer has experts", why, "lower it, or set experts: 0")
    if d.experts % d.router_groups or (d.router_groups > 1 and d.experts < 2 * d.router_groups):
        why = f"{d.experts} experts are not {d.router_groups} equal groups of two or more"
        fix = f"use {_divisor_near(d.experts, min(d.router_groups, d.experts // 2 or 1))} groups"
        raise _model_error("router_groups", "the experts cannot be grouped", why, fix)
    if d.groups_per_token > d.router_groups:
        why = f"it is {d.groups_per_token}, and there are {d.router_groups} groups"
        raise _model_error(
            "groups_per_token", "a token cannot choose more groups than there are", why, "lower it"
        )
    if not d.router_bias and d.router_bias_rate != Dimensions.router_bias_rate:
        what, why = "router_bias_rate cannot be set here", "the routers have no bias"
        raise _model_error("router_bias_rate", what, why, "set router_bias: true, or remove it")
    reach = d.experts // d.router_groups * d.groups_per_token
    if d.experts_per_token > reach:
        why = f"it is {d.experts_per_token}, and a token can choose from {reach}"
        raise _model_error(
            "experts_per_token", "a token cannot choose so many experts", why, f"use at most {reach}"
        )


def _model_error(key: str, what: str, why: str, fix: str) -> RecipeError:
    return RecipeError(what, where=f"model.{key}", why=why, fix=fix)


def _divisor_near(number: int, wanted: int) -> int:
    # Bounded, so that a huge number does not make the error slow.
    start = min(number, wanted)
    return next((n for n in range(start, max(0, start - 10_000), -1) if number % n == 0), 1)
