"""Attention with sinks and with sliding windows in transformers' models, by kernels that form no whole scores or masks.

Sinks (gpt-oss and others): transformers computes them in eager mode, or by packages of FlashAttention. In eager mode a
layer saves its scores [b, a, s, s] several times.

Sliding windows (Gemma 3, Mistral and others): transformers passes a mask [1, 1, s, s] to SDPA, whose kernels then
compute the whole square.

Here both run ``local_attention`` (runtime/attention/local.py). ``SlidingWindow`` takes the place of the mask. Whole
rows of other layers call SDPA as before.

Refused: sinks with dropout of attention's probabilities, or next to layers of other kinds than full and sliding
attention. These models stay in eager mode.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.runtime.attention.local import local_attention, seen_keys
from shardwise.runtime.documents import additive, same_document
from shardwise.runtime.parallel.sequence import not_replaced

_WINDOWS = "shardwise_windows"
_SINKS = "shardwise_sinks"
LOCAL_ATTENTION = {_WINDOWS, _SINKS}
"""Names of ``_local_or_sdpa`` among transformers' implementations."""
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_TAKES_MASKS = re.compile(r"isinstance\((?:\w+ := )?attention_mask, dict\)")
"""In the code of models that take a mask for each kind of layer."""
_SLIDING_KIND = '"sliding_attention"'
"""In the code of those whose kinds tell windows: all full layers of MiniMax have the window, if its config has one."""


@dataclass(frozen=True)
class SlidingWindow:
    """The mask of whole rows in which a query sees itself and the ``tokens - 1`` tokens before it."""

    tokens: int

    def __getitem__(self, parts: tuple[slice, ...]) -> SlidingWindow:
        """The mask of the last queries: Gemma 4 computes no others in layers that share keys."""
        assert all(part.stop is None for part in parts)
        return self


def use_local_attention(model: nn.Module) -> None:
    """Let a causal model with sinks or sliding windows run ``local_attention``."""
    config: Any = model.config
    text = config.get_text_config()
    kinds: Iterable[str] = getattr(text, "layer_types", None) or ()
    if not _LAYER_KINDS.issuperset(kinds) or not getattr(model, "_supports_attention_backend", False):
        return
    dropout: float = getattr(text, "attention_dropout", 0.0)
    has_sinks = any(isinstance(getattr(module, "sinks", None), Tensor) for module in model.modules())
    by_kernels = config._attn_implementation == "sdpa" and window_of(text) is not None
    if by_kernels or (has_sinks and not dropout):
        _register()
        model.set_attn_implementation(_SINKS if has_sinks else _WINDOWS)  # type: ignore[operator]
        model.create_masks_for_generate = _made_by_the_model  # type: ignore[assignment]


def window_of(text: Any) -> int | None:
    """Tokens that a query of a sliding layer sees; None or 0 in a config (Qwen 2 MoE) means no window."""
    window = getattr(text, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def takes_windows(model: nn.Module) -> bool:
    """Whether the model takes masks of packed documents within sliding windows: one mask, or one for each kind."""
    text = cast("Any", model).config.get_text_config()
    if getattr(text, "attention_chunk_size", None):
        return False
    if not getattr(text, "layer_types", None):
        return True
    source = inspect.getsource(sys.modules[type(model).__module__])
    return bool(_TAKES_MASKS.search(source)) and _SLIDING_KIND in source


def document_masks(model: nn.Module, positions: Tensor, starts: Tensor | None) -> Tensor | dict[str, Tensor]:
    """The masks of packed documents: boolean for kernels, additive for eager attention, which needs whole rows.

    One for each kind of layer, if there are kinds with a window that is shorter than a row.
    """
    config = cast("Any", model).config
    text = config.get_text_config()
    seen = same_document(model, positions, starts)
    length = seen.shape[-1]
    window = window_of(text)
    masks = {"full_attention": seen}
    if window is not None and window < length:
        masks["sliding_attention"] = seen & seen_keys(length, window, seen.device)
    if config._attn_implementation not in {"sdpa", *LOCAL_ATTENTION}:
        if length != positions.shape[-1]:
            raise not_replaced(type(model).__name__)
        masks = {kind: additive(mask, torch.float32) for kind, mask in masks.items()}
    if len(masks) > 1 and getattr(text, "layer_types", None):
        return masks
    # A config with a window and without kinds has it in every layer (Mistral).
    return masks.get("sliding_attention", masks["full_attention"])


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in LOCAL_ATTENTION:
        ALL_ATTENTION_FUNCTIONS.register(name, _local_or_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_WINDOWS, _mask)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_SINKS, partial(_mask, of_sinks=True))


def _made_by_the_model(*, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
    """The mask that ``generate`` passes for a static cache: transformers takes tensors as made masks, not windows."""
    return attention_mask


def _local_or_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SlidingWindow | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """q [b, a, s, d], k and v [b, k, t, d]; the output is [b, s, a, d]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    queries = query.shape[2]
    keys = key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None
    mask = attention_mask
    if isinstance(mask, SlidingWindow):
        window = mask.tokens
        mask = None
    elif mask is None and 1 < queries < keys and getattr(module, "is_causal", True):
        # SDPA's causal flag would align queries with the first keys; a window of all keys aligns them with the last.
        window = keys
    if window is not None and (dropout or queries != keys):
        # ``local_attention`` has no dropout, and windows for whole rows alone.
        mask = seen_keys(keys, window, query.device)[-queries:][None, None]
        window = None
    if s_aux is not None or window is not None:
        out = local_attention(query, key, value, scale, window, s_aux, mask)
        return out.transpose(1, 2).contiguous(), None
    options = {"scaling": scale, "dropout": dropout, **named}
    out, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    return out, None


def _mask(
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    of_sinks: bool = False,
    **named: Any,
) -> Tensor | SlidingWindow | None:
    """The window, or None, for whole rows without padding, else transformers' boolean mask.

    SDPA knows what no mask means for one query and many keys; sinks need a mask there. The first queries of a static
    cache, whose other keys are empty, get a mask: without one, ``_local_or_sdpa`` takes queries as the last keys'.
    """
    from transformers.masking_utils import sdpa_mask

    if allow_is_causal_skip and attention_mask is None and q_length == kv_length:
        if local_size is None or local_size >= q_length:
            return None
        return SlidingWindow(local_size)
    skip = allow_is_causal_skip and q_length in {1, kv_length} and not of_sinks
    named |= {"local_size": local_size, "allow_is_causal_skip": skip}
    mask: Tensor | None = sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **named
    )
    return mask
