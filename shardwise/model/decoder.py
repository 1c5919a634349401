"""The native decoder: Llama, Qwen3 and GPT-2 in plain PyTorch.

    llama   RMSNorm, rotary positions, SwiGLU, grouped key/value heads, no biases (arXiv:2302.13971)
    qwen3   llama with an RMSNorm of every query and key head before the rotation (arXiv:2505.09388)
    gpt2    LayerNorm, GELU, learned positions, biases everywhere but the head (Radford et al. 2019)

Blocks of llama and qwen3 may have a mixture of experts (mixture.py) in place of SwiGLU, all but the first ones. Blocks
of llama may have latent attention (attention.py): with both they are DeepSeek-V3's.

Parameters have the names of Hugging Face's Llama, Qwen3, Mixtral, Qwen3-MoE and DeepSeek-V3, so export only renames
them. A llama block with fused norm and flash attention saves h(12 + 4r) + 8f bytes per token in 16 bits, where
r = kv_heads / heads.

Refused: fused gate/up projections, which complicate tensor parallelism and export.

For packed documents attention takes ``Documents`` (runtime/documents.py), built once per forward pass. The key/value
cache (``KeyValues``) serves generation only.

Legend: b batch, s sequence, h width, a heads, k kv_heads, d head width, f ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.attention import Attention, KeyValues, LatentAttention, Rotation, rotary_angles
from shardwise.model.mixture import MixtureOfExperts
from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime.documents import Documents, documents_of


class Decoder(nn.Module):
    """Token ids [b, s] to logits [b, s, V].

    A stage (``keep``) takes or returns hidden states [b, s, h]. With a ``cache`` (one per block), the ids
    continue the cached tokens, positions may be [b, s], and only the last id gets logits.
    """

    embed_tokens: nn.Embedding | None
    embed_positions: nn.Embedding | None
    norm: nn.Module | None
    lm_head: nn.Linear | None
    score: nn.Linear | None

    def __init__(self, dimensions: Dimensions, blocks: range | None = None) -> None:
        """``blocks``: those that are built, if not all."""
        super().__init__()
        d = self.dimensions = dimensions
        embed_tokens = self.embed_tokens = nn.Embedding(d.vocab, d.width)
        self.embed_positions = None if d.rotates else nn.Embedding(d.context, d.width)
        built = range(d.layers) if blocks is None else blocks
        self.layers = nn.ModuleList(Block(d, index) for index in built)
        self.norm = _norm(d)
        self.lm_head = nn.Linear(d.width, d.vocab, bias=False)
        if d.tied:
            self.lm_head.weight = embed_tokens.weight
        self.score = None  # in the place of lm_head (scalar_head.py)
        self.first = True

    def keep(self, first: bool, last: bool) -> None:
        """Drop the embedding or the head of other stages. A tied table stays in both, under one name."""
        self.first = first
        if not first:
            self.embed_positions = None
            # The tied weight keeps the name of the embedding, so files and seeds find it in the last stage.
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
        hidden = inputs
        d = self.dimensions
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)
        # The last stage of a tied model has the table for its output layer, and takes hidden states.
        if self.first and self.embed_tokens is not None and not inputs.is_floating_point():
            hidden = self.embed_tokens(inputs)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        rotation: Rotation | None = None
        if d.rotates:
            rotation = rotary_angles(positions, d.rotary_width, d.rope_theta, hidden.dtype)
        documents: Documents | None = None
        # Packed rows have positions [b, s]; with a cache they may have that shape without packing.
        if positions.dim() == 2 and not cache:
            documents = documents_of(self, positions, starts, hidden, d.head_width)
        for index, layer in enumerate(self.layers):
            if cache:
                hidden = layer(hidden, rotation, None, cache[index])
            elif documents is not None:
                hidden = layer(hidden, rotation, documents)
            else:
                hidden = layer(hidden, rotation)
        output = self.lm_head or self.score
        if self.norm is None or output is None:
            return hidden
        return output(self.norm(hidden[:, -1:] if cache else hidden))


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residual connections. [b, s, h] -> [b, s, h].

    ``index``: the number of the block in the model.
    """

    def __init__(self, dimensions: Dimensions, index: int = 0) -> None:
        super().__init__()
        self.input_layernorm = _norm(dimensions)
        self.self_attn = (LatentAttention if dimensions.kv_lora_rank else Attention)(dimensions)
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
