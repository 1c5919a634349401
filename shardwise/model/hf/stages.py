"""Stages of a transformers model, by its class's ``base_model_pp_plan``: embedding, blocks, norm.

A stage passes hidden states alone. So a model is not cut whose base has other layers, changes its embeddings before the
first block, or passes more than hidden states from block to block. A run on the meta device shows this.

Blocks need not be alike: layers of different attention, dense and sparse feed-forward layers. A stage is the whole
model without the other blocks, and with the config's values of its own blocks. A model of fewer blocks is another one:
MiniCPM scales its residual branches by the number of blocks.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.model.hf.calls import no_guessing
from shardwise.model.stage import Stage
from shardwise.runtime.parallel.shard_slices import shared_names
from shardwise.runtime.torch_private import tree_iter

BASE_PARTS = {"embed_tokens", "layers", "norm"}
"""Modules of a decoder that can be cut; a model with another ``base_model_pp_plan`` is not."""
_TRIAL_TOKENS = 4


def per_layer(config: Any) -> dict[str, list[Any]]:
    """The config's lists of one value per layer, such as ``layer_types``."""
    text = config.get_text_config()
    layers = text.num_hidden_layers
    return {
        k: v
        for k, v in text.to_dict().items()
        if isinstance(v, list) and len(v) == layers and not k.endswith(("_token_id", "architectures"))
    }


def cut(model: nn.Module, stage: Stage) -> nn.Module:
    """The stage of a model on the meta device, which is changed."""
    causal: Any = model
    base = causal.base_model
    tied = bool(shared_names(model))
    _keep(base, stage.blocks)
    # The last stage of a tied model keeps the table as its output layer, and reads hidden states all the same.
    if not stage.first and not (stage.last and tied):
        base.embed_tokens = nn.Identity()  # a stage after the first gets hidden states instead of ids
    if not stage.last:
        base.norm = nn.Identity()
        causal.set_output_embeddings(nn.Identity())
    return model


def _keep(base: Any, blocks: range) -> None:
    """Remove the other blocks, whose names stay; the base, not the blocks, gets a config of these blocks alone."""
    for name in list(base.layers._modules):
        if int(name) not in blocks:
            del base.layers._modules[name]  # not base.layers[i]: that would number the others anew
    lists = per_layer(base.config)
    base.config = copy.deepcopy(base.config)
    text = base.config.get_text_config()
    text.num_hidden_layers = len(blocks)
    for key, values in lists.items():
        setattr(text, key, values[blocks.start : blocks.stop])


def ends(model: nn.Module) -> bool:
    """Whether this is the last stage, or a whole model."""
    return not isinstance(cast("Any", model).get_output_embeddings(), nn.Identity)


def hidden_states(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What a stage before the last returns: not through the model's head, which scales logits in some models."""
    base = cast("Any", model).base_model
    return cast("Tensor", base(**inputs, use_cache=False).last_hidden_state)


@torch.no_grad()
def cut_obstacle(model: nn.Module, width: int) -> str:
    """Why a model on the meta device with the parts of ``BASE_PARTS`` cannot be cut into stages; "" if it can."""
    base = cast("Any", model).base_model
    for name, child in base.named_children():
        if name not in BASE_PARTS and next(child.parameters(), None) is not None:
            return f"its {name} is neither embedding, block nor norm"
    inputs = torch.empty((1, _TRIAL_TOKENS, width), device="meta")
    if not _starts_with_its_blocks(base, inputs):
        return "its embeddings are changed before they enter the first block"
    try:
        passes_more = _passes_more(base, inputs)
    except Exception as error:  # whatever a model's code does without values
        return f"its blocks do not run on the meta device ({type(error).__name__})"
    return "its blocks pass more than hidden states to later ones" if passes_more else ""


def _starts_with_its_blocks(base: Any, inputs: Tensor) -> bool:
    """Whether embeddings reach the first block unchanged; some models scale them first."""
    layers = base.layers
    norm = base.norm
    base.layers = nn.ModuleList()
    base.norm = nn.Identity()
    try:
        with no_guessing():
            result = base(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return result is inputs  # the same object: no layer has made another tensor of it
    finally:
        base.layers = layers
        base.norm = norm


def _passes_more(base: Any, inputs: Tensor) -> bool:
    """Whether a block gets another tensor of earlier ones than its first argument, or a container that all share."""
    results: list[Tensor] = []  # of blocks; kept alive, so that no other tensor gets the same id
    passes_more = False

    def before(module: nn.Module, args: Any, named: Any) -> None:
        nonlocal passes_more
        others = {name: value for name, value in named.items() if name != "hidden_states"}
        mutable = any(isinstance(value, dict | list) for value in (*args[1:], *others.values()))
        ids = {id(tensor) for tensor in results}
        passes_more |= mutable or any(id(value) in ids for value in tree_iter((args[1:], others)))

    def after(module: nn.Module, args: Any, result: Any) -> None:
        results.extend(value for value in tree_iter(result) if isinstance(value, Tensor))

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in base.layers]
    handles += [block.register_forward_hook(after) for block in base.layers]
    try:
        with no_guessing():
            base(inputs_embeds=inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return passes_more
