"""How a transformers model is split over ranks: its own ``base_model_tp_plan``, completed.

The plan is a table of the config's class, for inference: names of the base model's layers, each with a style. It leaves
out the embedding, and has the logits gathered; for training both are divided, as in the native decoder. Styles that
split anything but plain linear layers (experts, packed projections) are refused by name.

transformers' blocks read the number of heads off what the projections return, so they run on this rank's heads.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.model.split import Split, TensorPlan, matching

_STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed"}


def tensor_plan_of(model: nn.Module, config: Any) -> TensorPlan:
    """The plan of one model. Raises RecipeError where there is none, or one that cannot be followed."""
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
            raise _refused(f"its plan splits {pattern} by {style!r}, which is not known here")
        plan[prefix + pattern] = Split(_STYLES[style], *heads)
    _require_named(model, plan)
    return {**plan, paths[embedding]: Split("vocabulary"), paths[output]: Split("logits")}


def _require_named(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse a model with weights of its own among the split layers of a block that its plan does not name.

    Between a column and a row layer a rank has a part of the channels, so its gradient of a weight that all ranks share
    is a part of the sum. transformers' plans are for inference and leave such weights out: Apertus' activation
    function, Phi's norms of queries and keys.
    """
    among: dict[str, set[str]] = {}
    for path, _ in model.named_modules():
        if (how := matching(path, plan)) is not None:
            among.setdefault(path.rpartition(".")[0], set()).add(how.how)
    for path, module in model.named_modules():
        mixed = {"column", "row"} <= among.get(path.rpartition(".")[0], set())
        if mixed and matching(path, plan) is None and next(module.parameters(), None) is not None:
            raise _refused(f"transformers' plan does not say what becomes of {path}")


def _prefix(model: nn.Module) -> str:
    """What stands before the names of the base model's modules."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and hasattr(model, name) else ""


def _heads(text: Any) -> tuple[int, str]:
    """The number that every degree must divide, and what it counts."""
    heads = getattr(text, "num_attention_heads", 0) or 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return (kv_heads, "key/value heads") if heads % max(1, kv_heads) == 0 else (heads, "heads")


def _refused(why: str) -> RecipeError:
    return RecipeError(
        "this model cannot be split over ranks",
        where="strategy.tensor_parallel",
        why=why,
        fix="the nearest that works is tensor_parallel: 1",
    )
