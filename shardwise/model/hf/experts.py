"""Mixture-of-experts models of transformers: the kernel of their experts, and the router's auxiliary loss.

Experts. transformers groups the tokens by expert and multiplies with ``grouped_mm``, which needs fp32 or 16 bits and
rows of a multiple of 16 bytes. Other weights (fp64, odd widths) take ``batched_mm``: the same product with a copy of
an expert's weights for every token. Both are independent of the routing's values, so a dry run runs them too.
transformers' ``eager`` loop over the experts that were hit is not.

Auxiliary loss (Fedus et al. 2021, equations 4 to 6). A model whose config sets ``output_router_logits`` adds
``router_aux_loss_coef`` x its load-balancing loss to the mean cross-entropy of every forward pass, as in transformers.
The engine sums losses and divides by all targets of the global batch, so a micro-batch's auxiliary loss counts with its
number of targets. The model's own function computes it; padding is left out, as an attention mask would leave it out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.mixture import filled_tokens
from shardwise.runtime.grouped_products import has_grouped_products, plan_grouped_products

_EXPERTS = "shardwise"
"""Name of ``_experts_forward`` among transformers' implementations."""
_FUNCTION = "load_balancing_loss_func"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def experts_implementation() -> str:
    """The name under which transformers runs experts by ``_experts_forward``."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts_forward)
    plan_grouped_products()
    return _EXPERTS


def _experts_forward(experts: nn.Module, *args: Any, **named: Any) -> Tensor:
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    matrices = [parameter for parameter in experts.parameters() if parameter.dim() == 3]
    grouped = has_grouped_products(matrices)
    forward = grouped_mm_experts_forward if grouped else batched_mm_experts_forward
    return cast("Tensor", forward(experts, *args, **named))


def adds_router_loss(config: Any) -> bool:
    """Whether transformers adds the router's auxiliary loss to the training loss of this config."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


@contextmanager
def router_losses(model: nn.Module, labels: Tensor) -> Iterator[list[Tensor]]:
    """The auxiliary losses that the model computes within the block: one per forward pass, [] if it has none.

    Args:
        labels: int64 [b, s]. The tokens after the last target of a row are padding.
    """
    # FSDP2 subclasses the model's class, so search the base classes too.
    modules = (sys.modules[base.__module__] for base in type(model).__mro__)
    module = next((module for module in modules if hasattr(module, _FUNCTION)), None)
    losses: list[Tensor] = []
    if module is None:
        yield losses
        return
    original = getattr(module, _FUNCTION)
    filled = filled_tokens(labels)

    def recorded(gate_logits: Any, *args: Any) -> Any:
        """Every model passes its attention mask last; it has none here."""
        losses.append(original(gate_logits, *args[:-1], attention_mask=filled))
        return losses[-1]

    setattr(module, _FUNCTION, recorded)  # the model calls it by its name in this module
    try:
        yield losses
    finally:
        setattr(module, _FUNCTION, original)


def router_coefficient(model: nn.Module, config: Any) -> float:
    """The weight of the auxiliary loss. Raises RecipeError if the model does not say."""
    owners = (model, config.get_text_config())
    for owner in owners:
        for name in _COEFFICIENTS:
            if isinstance(value := getattr(owner, name, None), int | float):
                return float(value)
    raise RecipeError(
        "the router's auxiliary loss has no coefficient",
        where="model.hf",
        why=f"config.json sets output_router_logits, and {type(model).__name__} has no {_COEFFICIENTS[0]}",
        fix=f"set {_COEFFICIENTS[0]}, or output_router_logits: false",
    )
