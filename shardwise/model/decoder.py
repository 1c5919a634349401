"""The native decoder: Llama, Qwen3 and GPT-2 in plain PyTorch.

    llama   RMSNorm, rotary positions, SwiGLU, grouped key/value heads, no biases (arXiv:2302.13971)
    qwen3   llama with an RMSNorm of every query and key head before the rotation (arXiv:2505.09388)
    gpt2    LayerNorm, GELU, learned positions, biases everywhere but the head (Radford et al. 2019)

Blocks of llama and qwen3 may have a mixture of experts (mixture.py) in place of SwiGLU, all but the first ones.

Parameters have the names of Hugging Face's Llama, Qwen3, Mixtral and Qwen3-MoE, so export only renames them.

Attention works on views of the projections' outputs. All blocks share the rotary angles of a forward pass. Queries and
keys are rotated in the compute dtype, with angles computed in fp32, as in transformers. A llama block with fused norm
and flash attention saves h(12 + 4r) + 8f bytes per token in 16 bits, where r = kv_heads / heads.

Refused: fp32 rotation, which saves fp32 copies; fused qkv and gate/up projections, which complicate tensor parallelism
and export.

For packed documents attention takes ``Documents`` (runtime/documents.py), built once per forward pass. The key/value
cache (``KeyValues``) serves generation only.

Legend: b batch, s sequence, h width, a heads, k kv_heads, d head width, f ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.mixture import MixtureOfExperts
from shardwise.recipe.presets import Dimensions
from shardwise.runtime.documents import Documents, documents_of

Rotation = tuple[Tensor, Tensor]
"""(cos, sin), each [s, 1, d] or [b, s, 1, d], in the compute dtype."""


class KeyValues(Protocol):
    """The key/value cache of one block."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Append keys and values [b, k, s, d].

        Returns (all keys, all values, attention mask, whether attention is causal).
        """


class Decoder(nn.Module):
    """Token ids [b, s] to logits [b, s, V].

    A stage (``keep``) takes or returns hidden states [b, s, h]. With a ``cache`` (one per block), the ids
    continue the cached tokens, positions may be [b, s], and only the last id gets logits.
    """

    embed_tokens: nn.Embedding | None
    embed_positions: nn.Embedding | None
    norm: nn.Module | None
    lm_head: nn.Linear | None

    def __init__(self, dimensions: Dimensions, blocks: range | None = None) -> None:
        """``blocks``: those that are built, if not all."""
        super().__init__()
        d = self.dimensions = dimensions
        embed_tokens = self.embed_tokens = nn.Embedding(d.vocab, d.width)
        self.embed_positions = None if d.rotates else nn.Embedding(d.context, d.width)
        self.layers = nn.ModuleList(
            Block(d, index) for index in (range(d.layers) if blocks is None else blocks)
        )
        self.norm = _norm(d)
        self.lm_head = nn.Linear(d.width, d.vocab, bias=False)
        if d.tied:
            self.lm_head.weight = embed_tokens.weight
        self.first = True

    def keep(self, first: bool, last: bool) -> None:
        """Drop the embedding or the head of other stages. A tied table stays in both, under one name."""
        self.first = first
        if not first:
            self.embed_positions = None
            if not (last and self.dimensions.tied):
                self.embed_tokens = None
        if not last:
            self.norm = self.lm_head = None

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor | None = None,
        cache: Sequence[KeyValues] = (),
        starts: Tensor | None = None,
    ) -> Tensor:
        """``inputs``: ids, or hidden states [b, s, h] in place of the embedding, as stages after the first take.

        ``starts``: where packed documents begin, [b, n].
        """
        hidden, d = inputs, self.dimensions
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)
        if self.first and self.embed_tokens is not None and not inputs.is_floating_point():
            hidden = self.embed_tokens(inputs)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        rotation: Rotation | None = None
        if d.rotates:
            rotation = rotary_angles(positions, d.head_width, d.rope_theta, hidden.dtype)
        documents: Documents | None = None
        if positions.dim() == 2 and not cache:
            documents = documents_of(self, positions, starts, hidden, d.head_width)
        for index, layer in enumerate(self.layers):
            seen = (None, cache[index]) if cache else () if documents is None else (documents,)
            hidden = layer(hidden, rotation, *seen)
        if self.norm is None or self.lm_head is None:
            return hidden
        return self.lm_head(self.norm(hidden[:, -1:] if cache else hidden))


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residual connections. [b, s, h] -> [b, s, h].

    ``index``: the number of the block in the model.
    """

    def __init__(self, dimensions: Dimensions, index: int = 0) -> None:
        super().__init__()
        self.input_layernorm = _norm(dimensions)
        self.self_attn = Attention(dimensions)
        self.post_attention_layernorm = _norm(dimensions)
        self.mlp = _feed_forward(dimensions, index)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        mask: Documents | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal attention with grouped key/value heads. [b, s, h] -> [b, s, h].

    The projections' outputs give the number of heads, so tensor parallelism can shard them.
    """

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        d = dimensions
        bias = not d.rotates
        q_width, kv_width = d.heads * d.head_width, d.kv_heads * d.head_width
        self.head_width = d.head_width
        self.grouped = d.kv_heads != d.heads
        self.q_proj = nn.Linear(d.width, q_width, bias=bias)
        self.k_proj = nn.Linear(d.width, kv_width, bias=bias)
        self.v_proj = nn.Linear(d.width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, d.width, bias=bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(d.head_width, eps=d.norm_epsilon) if d.norms_heads else None for _ in range(2)
        )

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        mask: Documents | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        per_head = (-1, self.head_width)
        q = self.q_proj(hidden).unflatten(-1, per_head)  # [b, s, a, d]
        k = self.k_proj(hidden).unflatten(-1, per_head)  # [b, s, k, d]
        v = self.v_proj(hidden).unflatten(-1, per_head)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate_positions(q, *rotation), rotate_positions(k, *rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        allowed: Any = mask
        causal = mask is None
        if cache is not None:
            k, v, allowed, causal = cache.extend(k, v)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=causal, enable_gqa=self.grouped
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x). [b, s, h] -> [b, s, h] (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ffn, bias=False)
        self.up_proj = nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class GELU(nn.Module):
    """down(gelu(up x)), with GPT-2's tanh approximation. [b, s, h] -> [b, s, h]."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dimensions.width, dimensions.ffn)
        self.down_proj = nn.Linear(dimensions.ffn, dimensions.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh"))


def _feed_forward(d: Dimensions, index: int) -> nn.Module:
    """Of the block with a number."""
    if not d.rotates:
        return GELU(d)
    if not d.experts or index < d.dense_layers:
        return SwiGLU(d.width, d.ffn)
    return MixtureOfExperts(d, SwiGLU(d.width, d.shared_ffn) if d.shared_ffn else None)


def _norm(dimensions: Dimensions) -> nn.Module:
    kind = nn.RMSNorm if dimensions.rotates else nn.LayerNorm
    return kind(dimensions.width, eps=dimensions.norm_epsilon)


def rotary_angles(positions: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of position x frequency (Su et al. 2021, arXiv:2104.09864, eq. 34).

    Args:
        positions: [s] or [b, s], integers.
        head_width: d, even. Pairs are (i, i + d/2), as in Hugging Face's checkpoints.
        theta: base of the wavelengths, theta^(2i/d).
        dtype: of the result. Angles are computed in fp32 (fp64 for fp64).
    """
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_width, 2, device=positions.device, dtype=precise) / head_width
    angles = positions.to(precise).unsqueeze(-1) * (1.0 / theta**exponents)
    angles = angles.unsqueeze(-2)  # [s, 1, d/2] or [b, s, 1, d/2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i+d/2}) of [b, s, heads, d]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
