"""Attention of the native decoder: grouped key/value heads, or multi-head latent attention.

    Attention         queries, keys and values are projections of the hidden state; keys and values may be grouped
    LatentAttention   keys and values of all heads are made from one short vector per token, and so may queries be
                      (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1). A part of a head rotates, and the keys' is
                      shared by all heads

Both end in one call of ``scaled_dot_product_attention``, which packing, context parallelism, recomputation and the dry
run know. They work on views of the projections' outputs. All blocks share the rotary angles of a forward pass. Queries
and keys are rotated in the compute dtype, with angles computed in fp32, as in transformers.

Latent attention computes the keys and values of every head, as training does; the key/value cache holds those. Values
that are narrower than keys are padded with zeros: flash attention, its kernel for packed documents and the ring need
one width. For DeepSeek-V3 (192 and 128) attention has a fifth more FLOPs for it, and saves a fifth more activations.

Refused: fp32 rotation, which saves fp32 copies; fused qkv projections, which complicate tensor parallelism and export.

Legend: b batch, s sequence, h width, a heads, k kv_heads, d head width, r its rotary part, v values' width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime.documents import Documents

Rotation = tuple[Tensor, Tensor]
"""(cos, sin), each [s, 1, d] or [b, s, 1, d], in the compute dtype."""

_LATENT_EPSILON = 1e-6
"""Of the norms of latent vectors, whatever that of the others is (as in transformers)."""


class KeyValues(Protocol):
    """The key/value cache of one block."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Append keys and values [b, k, s, d].

        Returns (all keys, all values, attention mask, whether attention is causal).
        """


class Attention(nn.Module):
    """Causal attention with grouped key/value heads. [b, s, h] -> [b, s, h].

    The projections' outputs give the number of heads, so tensor parallelism can shard them.
    """

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        d = dimensions
        bias = not d.rotates
        q_width = d.heads * d.head_width
        kv_width = d.kv_heads * d.head_width
        self.head_width = d.head_width
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
        v = self.v_proj(hidden).unflatten(-1, per_head)  # [b, s, k, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate_positions(q, *rotation), rotate_positions(k, *rotation)
        mixed = _attention(q, k, v, mask, cache)
        return self.o_proj(mixed.flatten(2))


class LatentAttention(nn.Module):
    """Causal multi-head latent attention. [b, s, h] -> [b, s, h].

    Parameters have the names of transformers' DeepSeek-V3. Tensor parallelism divides the heads; projections to latent
    vectors, and their norms, are on every rank.
    """

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        d = dimensions
        self.head_width = d.head_width
        self.rotary = d.rotary_width
        self.value_width = d.value_width
        self.latent = d.kv_lora_rank
        self.latent_queries = d.q_lora_rank > 0
        q_width = d.heads * d.head_width
        if self.latent_queries:
            self.q_a_proj = nn.Linear(d.width, d.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(d.q_lora_rank, eps=_LATENT_EPSILON)
            self.q_b_proj = nn.Linear(d.q_lora_rank, q_width, bias=False)
        else:
            self.q_proj = nn.Linear(d.width, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d.width, d.kv_lora_rank + d.rotary_width, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(d.kv_lora_rank, eps=_LATENT_EPSILON)
        kv_width = d.heads * (d.head_width - d.rotary_width + d.value_width)
        self.kv_b_proj = nn.Linear(d.kv_lora_rank, kv_width, bias=False)
        self.o_proj = nn.Linear(d.heads * d.value_width, d.width, bias=False)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        mask: Documents | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        assert rotation is not None
        fixed = self.head_width - self.rotary  # the part of a head that does not rotate
        q = self._queries(hidden).unflatten(-1, (-1, self.head_width))  # [b, s, a, d]
        # [b, s, latent]; [b, s, r] is the rotary part of the keys, one for all heads
        latent, shared = self.kv_a_proj_with_mqa(hidden).split((self.latent, self.rotary), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, fixed + self.value_width))
        k, v = kv.split((fixed, self.value_width), -1)  # [b, s, a, d - r], [b, s, a, v]
        turned = rotate_neighbours(shared.unsqueeze(-2), *rotation).expand(*k.shape[:-1], self.rotary)
        q = torch.cat((q[..., :fixed], rotate_neighbours(q[..., fixed:], *rotation)), -1)
        k = torch.cat((k, turned), -1)
        v = F.pad(v, (0, self.head_width - self.value_width))
        mixed = _attention(q, k, v, mask, cache)
        # The padding of the values is zero in the result, too.
        return self.o_proj(mixed[..., : self.value_width].flatten(2))

    def _queries(self, hidden: Tensor) -> Tensor:
        if not self.latent_queries:
            return self.q_proj(hidden)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Documents | None, cache: KeyValues | None) -> Tensor:
    """q [b, s, a, d]; k, v [b, s, k, d]; returns [b, s, a, d]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # Documents are causal by themselves, and a cache says whether its mask is needed.
    allowed: Any = mask
    causal = mask is None
    if cache is not None:
        k, v, allowed, causal = cache.extend(k, v)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed.transpose(1, 2)


def rotary_angles(positions: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of position x frequency (Su et al. 2021, arXiv:2104.09864, eq. 34).

    Args:
        positions: [s] or [b, s], integers.
        head_width: d, even. Pairs are (i, i + d/2), as in Hugging Face's checkpoints.
        theta: base of the wavelengths, theta^(2i/d).
        dtype: of the result. Angles are computed in fp32 (fp64 for fp64).
    """
    # In bf16 positions above 256 would not be exact.
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


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_2i, x_2i+1) of [b, s, heads, d], as DeepSeek's checkpoints need. The first of all pairs come
    first in the result, which changes no product of queries and keys.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    # Both halves of the angles are equal (``rotary_angles``): here one angle is for one pair.
    cos, sin = cos[..., : even.shape[-1]], sin[..., : even.shape[-1]]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
