"""Tensor parallelism of a transformers model: its own ``base_model_tp_plan``, completed.

The plan is made for inference: it maps layer names to styles, leaves out the embedding and gathers the logits. For
training both are sharded, as in the native decoder. Styles for layers other than plain linear ones (experts, packed
projections) are refused by name. transformers' blocks derive the number of heads from the projections' outputs.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.runtime.parallel.tensor import Split, TensorPlan, matching

_STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed"}


def tensor_plan_of(model: nn.Module, config: Any) -> TensorPlan:
    """The plan of one model. Raises RecipeError if there is none or it is not supported."""
    text, hf = config.get_text_config(), cast("Any", model)
    styles: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    if not styles:
        raise _refused(f"transformers has no tensor-parallel plan for {config.model_type}")
    paths = {module: path for path, module in model.named_modules()}
    embedding, output = hf.get_input_embeddings(), hf.get_output_embeddings()
    if type(output) is not nn.Linear:
        raise _refused("its output layer is not a plain linear layer")
    prefix = _prefix(model)
    plan: dict[str, Split] = {}
    heads = _heads(text)
    for pattern, style in styles.items():
        if style not in _STYLES:
            raise _refused(f"its plan shards {pattern} by {style!r}, which is not supported")
        plan[prefix + pattern] = Split(_STYLES[style], *heads)
    _require_named(model, plan)
    return {**plan, paths[embedding]: Split("vocabulary"), paths[output]: Split("logits")}


def _require_named(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse a model with weights between the sharded layers of a block that its plan does not name.

    There a rank has a part of the channels, so its gradient of a replicated weight is a part of the sum. Examples: the
    activation function of Apertus, the query and key norms of Phi.
    """
    among: dict[str, set[str]] = {}
    for path, _ in model.named_modules():
        if (how := matching(path, plan)) is not None:
            among.setdefault(path.rpartition(".")[0], set()).add(how.how)
    for path, module in model.named_modules():
        mixed = {"column", "row"} <= among.get(path.rpartition(".")[0], set())
        if mixed and matching(path, plan) is None and next(module.parameters(), None) is not None:
            raise _refused(f"transformers' plan does not cover {path}")


def _prefix(model: nn.Module) -> str:
    """The prefix of the base model's module names."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and hasattr(model, name) else ""


def _heads(text: Any) -> tuple[int, str]:
    """The number that the degree must divide, and its name."""
    heads = getattr(text, "num_attention_heads", 0) or 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return (kv_heads, "key/value heads") if heads % max(1, kv_heads) == 0 else (heads, "heads")


def _refused(why: str) -> RecipeError:
    return RecipeError(
        "this model has no tensor parallelism",
        where="strategy.tensor_parallel",
        why=why,
        fix="the nearest that works is tensor_parallel: 1",
    )
