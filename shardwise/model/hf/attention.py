"""Attention with sinks of transformers' models (gpt-oss and others), by kernels instead of whole scores.

transformers computes it in eager mode, or by packages of FlashAttention that have sinks. In eager mode a layer saves
its scores [b, a, s, s] several times. Here such a model runs ``local_attention`` (runtime/attention/local.py).

Refused: dropout of attention's probabilities, and layers of other kinds than full and sliding attention. These models
stay in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from shardwise.runtime.attention.local import local_attention

LOCAL_ATTENTION = "shardwise"
"""Name of ``_attention`` among transformers' implementations."""
_KINDS = {"full_attention", "sliding_attention"}


def use_local_attention(model: nn.Module) -> None:
    """Let a causal model whose layers have sinks run ``local_attention``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = model.config
    text = config.get_text_config()
    if not any(isinstance(getattr(module, "sinks", None), Tensor) for module in model.modules()):
        return
    kinds: Iterable[str] = getattr(text, "layer_types", None) or ()
    dropout: float = getattr(text, "attention_dropout", 0.0)
    if dropout or not _KINDS.issuperset(kinds) or not getattr(model, "_supports_attention_backend", False):
        return
    ALL_ATTENTION_FUNCTIONS.register(LOCAL_ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(LOCAL_ATTENTION, _mask)
    model.set_attn_implementation(LOCAL_ATTENTION)  # type: ignore[operator]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """q [b, a, s, d], k and v [b, k, t, d]; the output is [b, s, a, d]."""
    out = local_attention(query, key, value, scaling, sliding_window, s_aux, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **named: Any,
) -> Tensor | None:
    """None for whole rows without padding, else transformers' boolean mask."""
    from transformers.masking_utils import sdpa_mask

    if allow_is_causal_skip and attention_mask is None and q_length == kv_length:
        return None
    sizes = {"q_length": q_length, "kv_length": kv_length, "attention_mask": attention_mask}
    mask: Tensor | None = sdpa_mask(**sizes, allow_is_causal_skip=False, **named)
    return mask
