"""Tensor parallelism of a transformers model: its own ``base_model_tp_plan``, completed.

The plan is made for inference: it maps layer names to styles, and leaves out the embedding and the logits. For training
both are sharded, as in the native decoder. Experts are divided whole (runtime/parallel/experts.py), where transformers
divides the width of each. Styles that are not in the tables are refused by name. transformers' blocks derive the number
of heads from the projections' outputs.
"""

from __future__ import annotations

import math
import re
from typing import Any, cast

from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.model.lora import LoraLinear
from shardwise.runtime.parallel.experts import divisible_experts
from shardwise.runtime.parallel.tensor import Split, TensorPlan, matching

_HEAD_STYLES = {"colwise": "column", "rowwise": "row"}
_OTHER_STYLES = {
    "replicated_with_grad_allreduce": "summed",
    "colwise_gather_output": "gathered",
    "rowwise_split_input": "split",
    "local_params": "own",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "tail",
}
_BEFORE_LATENT = re.compile(r"(q|kv)_a_(proj|layernorm|norm)|indexer")
"""Modules of multi-head latent attention whose inputs are whole on every rank."""
_WHOLE_STYLES = {"embedding_rowwise", "replicate"}
"""Styles of the embedding, which is sharded in any case, and of weights that stay whole."""


def tensor_plan_of(model: nn.Module, config: Any) -> TensorPlan:
    """The plan of one model. Raises RecipeError if there is none or it is not supported."""
    text = config.get_text_config()
    hf = cast("Any", model)
    styles: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    if not styles:
        raise _no_tensor_plan(f"transformers has no tensor-parallel plan for {config.model_type}")
    paths = {module: path for path, module in model.named_modules()}
    embedding = hf.get_input_embeddings()
    output = hf.get_output_embeddings()
    if type(output) is not nn.Linear:
        if isinstance(output, LoraLinear):
            raise _no_tensor_plan(
                "its output layer has an adapter, by adapter.targets, and is sharded without one"
            )
        raise _no_tensor_plan("its output layer is not a plain linear layer")
    if any(True for _ in embedding.children()):
        raise _no_tensor_plan(f"its embedding ({type(embedding).__name__}) does more than look up rows")
    prefix = _prefix(model)
    plan: dict[str, Split] = {}
    for pattern, style in styles.items():
        if _is_of_a_whole(pattern, styles, model, prefix):
            continue
        split = _split_of_style(style, text)
        if split is not None:
            plan[prefix + pattern] = split
        elif style not in _WHOLE_STYLES:
            raise _no_tensor_plan(f"its plan shards {pattern} by {style!r}, which is not supported")
    if not plan:
        raise _no_tensor_plan(f"transformers' plan for {config.model_type} shards no layer of its blocks")
    _require_divisible(model, plan)
    _require_named(model, plan)
    return {**plan, paths[embedding]: Split("vocabulary"), paths[output]: Split("logits")}


def _split_of_style(style: str, text: Any) -> Split | None:
    """The split of a module with a style; None if there is none."""
    if style in _HEAD_STYLES:
        return Split(_HEAD_STYLES[style], *_heads_to_divide(text))
    if style in _OTHER_STYLES:
        # Only "tail" reads ``last``: the rotary part of the keys follows the latent vector.
        return Split(_OTHER_STYLES[style], last=getattr(text, "qk_rope_head_dim", None) or 0)
    return None


def _is_of_a_whole(pattern: str, styles: dict[str, str], model: nn.Module, prefix: str) -> bool:
    """Whether a pattern is of weights, not of modules, whose module is sharded as a whole."""
    if styles.get(pattern.rpartition(".")[0]) not in ("moe_tp_experts", "local_params"):
        return False
    return not any(matching(path, {prefix + pattern: Split("own")}) for path, _ in model.named_modules())


def _require_divisible(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse experts that are not transformers' usual module."""
    for path, module in model.named_modules():
        how = matching(path, plan)
        if how is not None and how.how == "experts" and not divisible_experts(module):
            raise _no_tensor_plan(
                f"its experts ({type(module).__name__}) are not divided: they have a layout of their own"
            )


def _require_named(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse a model with weights between the sharded layers of a block that its plan does not name.

    There a rank has a part of the channels, so its gradient of a replicated weight is a part of the sum. Examples: the
    activation function of Apertus, the query and key norms of Phi. In multi-head latent attention the projections to
    the latent vectors, their norms, and what chooses the keys come before the sharded layers.
    """
    splits: dict[str, set[str]] = {}  # of the children of each module
    for path, _ in model.named_modules():
        if (how := matching(path, plan)) is not None:
            splits.setdefault(path.rpartition(".")[0], set()).add(how.how)
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        siblings = splits.get(parent, set())
        before = "tail" in siblings and _BEFORE_LATENT.fullmatch(name)
        between = {"column", "row"} <= siblings and not before
        if between and matching(path, plan) is None and next(module.parameters(), None) is not None:
            raise _no_tensor_plan(f"transformers' plan does not cover {path}")


def _prefix(model: nn.Module) -> str:
    """The prefix of the base model's module names."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and hasattr(model, name) else ""


def _heads_to_divide(text: Any) -> tuple[int, str]:
    """The number that the degree must divide, and its name."""
    heads = _in_all_layers(text, "num_attention_heads")
    kv_heads = _in_all_layers(text, "num_key_value_heads") or heads
    # A rank needs whole key/value heads, and then has whole groups of query heads.
    return (kv_heads, "key/value heads") if heads % max(1, kv_heads) == 0 else (heads, "heads")


def _in_all_layers(text: Any, key: str) -> int:
    """A number of the config, or the greatest common divisor of those of its layers, where they differ."""
    try:
        return getattr(text, key, None) or 0
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return math.gcd(*(getattr(layer, key) for layer in text.per_layer_config))


def _no_tensor_plan(why: str) -> RecipeError:
    return RecipeError(
        "this model has no tensor parallelism",
        where="strategy.tensor_parallel",
        why=why,
        fix="the nearest that works is tensor_parallel: 1",
    )
