"""Writes the native decoder as a folder that transformers loads: its Llama, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-V3 or
GPT-2.

The llama and qwen3 families have Hugging Face's own names. Experts are written one by one, as in the released folders
of mixtures, which other programs read too. The gpt2 family becomes its GPT-2, which fuses queries, keys
and values and stores weights transposed, [i, o] (``Conv1D``). transformers' GPT-2 has no grouped key/value heads, so a
model with them is refused (repeated heads would train differently), and so are heads of another width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.model.files.folder_layout import (
    HFFolder,
    StackSlice,
    TensorGroup,
    TensorShape,
    unchanged_tensor,
)
from shardwise.recipe.dimensions import Dimensions

_GPT2_PARTS = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_OUTSIDE = {
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "score": "score",
}


def native_hf_folder(d: Dimensions, shapes: Mapping[str, TensorShape]) -> HFFolder:
    """The folder of a decoder with these dimensions and tensor shapes."""
    if d.experts or d.kv_lora_rank:
        _require_known_mixture(d)
        biases = frozenset(name for name in shapes if name.endswith("e_score_correction_bias"))
        groups = [_mixture_group(d, name, shapes[name]) for name in shapes]
        return HFFolder(_mixture_config(d), groups, unrounded=biases)
    if d.rotates:
        return HFFolder(
            _rotary_config(d), [unchanged_tensor(name, _rotary_name(name), shapes[name]) for name in shapes]
        )
    if d.kv_heads != d.heads:
        why = f"its GPT-2 has no grouped heads, and this model has {d.kv_heads} key/value heads for {d.heads}"
        raise _not_written("kv_heads", why)
    if d.heads * d.head_width != d.width:
        why = f"heads of its GPT-2 are {d.width} / {d.heads} wide, and this model's {d.head_width}"
        raise _not_written("head_dim", why)
    return HFFolder(_gpt2_config(d), list(_gpt2_groups(shapes)))


def scoring_folder(causal: HFFolder) -> HFFolder:
    """The folder of a decoder with ``score`` in the place of its output layer."""
    causal_class: str = causal.config["architectures"][0]
    kind = causal_class.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return replace(causal, config=scoring_config(causal.config, f"{kind}ForSequenceClassification"))


def scoring_config(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """A language model's config for a class of transformers that returns one number for a sequence."""
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**config, **labels, "architectures": [architecture], "tie_word_embeddings": False}


def _rotary_name(name: str) -> str:
    """The name of transformers' Llama."""
    return name if name.startswith(("lm_head.", "score.")) else f"model.{name}"


def _class_of(d: Dimensions) -> str:
    """The class of transformers, without its ending, of a model with experts or latent attention."""
    if d.kv_lora_rank:
        return "DeepseekV3"
    return "Mixtral" if d.family == "llama" else "Qwen3Moe"


_PLAIN_ROUTING: dict[str, Any] = {
    "shared_ffn": 0,
    "router": "softmax",
    "router_groups": 1,
    "router_scale": 1.0,
    "router_bias": False,
}
_ONLY: dict[str, dict[str, Any]] = {
    "Mixtral": {**_PLAIN_ROUTING, "dense_layers": 0, "normalized_weights": True},
    "Qwen3Moe": _PLAIN_ROUTING,
    "DeepseekV3": {"router": "sigmoid", "router_bias": True},
}
"""Dimensions of mixtures that a class has at one value."""


def _require_known_mixture(d: Dimensions) -> None:
    """Raise RecipeError for a mixture that transformers has in no class."""
    kind = _class_of(d)
    fixed = _ONLY[kind] if d.experts else {}
    for key, value in fixed.items():
        if getattr(d, key) != value:
            raise _not_written(key, f"its {kind} has it at {str(value).lower()}")
    if d.experts and d.kv_lora_rank and (not d.shared_ffn or d.shared_ffn % d.expert_width):
        raise _not_written("shared_ffn", f"its {kind} has a multiple of the {d.expert_width} of an expert")


def _not_written(key: str, why: str) -> RecipeError:
    return RecipeError(
        "this model cannot be written for transformers",
        where=f"model.{key}",
        why=why,
        fix="use generate, which reads the run as it is; a model to export has to be trained with another value",
    )


def _mixture_group(d: Dimensions, name: str, shape: TensorShape) -> TensorGroup:
    """A tensor under its released name; of experts, one for each projection of each."""
    mixtral = _class_of(d) == "Mixtral"
    stored = _rotary_name(name)
    if mixtral:
        stored = stored.replace(".mlp.", ".block_sparse_moe.")
    path, _, kind = stored.rpartition(".")
    if len(shape) < 3:
        return unchanged_tensor(name, stored, shape)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    parts = (gate, up) if kind == "gate_up_proj" else (down,)
    experts, rows, columns = shape  # rows: those of the gate and then those of up
    height = rows // len(parts)
    slices: dict[str, StackSlice] = {}
    for number in range(experts):
        for index, part in enumerate(parts):
            stored_name = f"{path}.{number}.{part}.weight"
            slices[stored_name] = StackSlice(name, number, index * height, (index + 1) * height)
    shapes = dict.fromkeys(slices, (height, columns))

    def make(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        # The order of ``slices``: expert by expert, the gate before up.
        matrices = (part for matrix in tensors[0] for part in matrix.chunk(len(parts)))
        return dict(zip(shapes, matrices, strict=True))

    return TensorGroup((name,), shapes, make, slices=slices)


def _gpt2_groups(shapes: Mapping[str, TensorShape]) -> Iterator[TensorGroup]:
    for name, shape in shapes.items():
        path, _, kind = name.rpartition(".")
        if path in _GPT2_OUTSIDE:
            yield unchanged_tensor(name, f"{_GPT2_OUTSIDE[path]}.{kind}", shape)
            continue
        number, _, part = path.removeprefix("layers.").partition(".")
        # c_attn is written where queries come; keys and values are passed over.
        if part == "self_attn.q_proj":
            names = tuple(name.replace("q_proj", f"{letter}_proj") for letter in "qkv")
            yield _joined_linear(names, f"transformer.h.{number}.attn.c_attn.{kind}", shape)
        elif part in _GPT2_PARTS:
            stored = f"transformer.h.{number}.{_GPT2_PARTS[part]}.{kind}"
            if len(shape) == 2:
                yield _joined_linear((name,), stored, shape)
            else:
                yield unchanged_tensor(name, stored, shape)


def _joined_linear(names: tuple[str, ...], stored: str, shape: TensorShape) -> TensorGroup:
    """Linear layers with one input as one ``Conv1D``."""
    rows = len(names) * shape[0]

    def make(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        whole = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        return {stored: whole.t() if whole.ndim == 2 else whole}

    return TensorGroup(names, {stored: (shape[1], rows) if len(shape) == 2 else (rows,)}, make)


def _rotary_config(d: Dimensions) -> dict[str, Any]:
    """Of Llama or Qwen3."""
    return {
        "architectures": [f"{d.family.capitalize()}ForCausalLM"],
        "model_type": d.family,
        "vocab_size": d.vocab,
        "hidden_size": d.width,
        "intermediate_size": d.ffn,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_width,
        "max_position_embeddings": d.context,
        "rms_norm_eps": d.norm_epsilon,
        "rope_theta": d.rope_theta,  # before transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": d.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **_common_config(d),
    }


def _mixture_config(d: Dimensions) -> dict[str, Any]:
    """Of a mixture, or a model with latent attention. The balance loss is added only with ``output_router_logits``."""
    if d.kv_lora_rank:
        return {**_rotary_config(d), **_latent_config(d)}
    known: dict[str, Any] = {
        "num_experts_per_tok": d.experts_per_token,
        "router_aux_loss_coef": d.balance_loss,
    }
    if _class_of(d) == "Mixtral":
        known |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": d.experts,
            "intermediate_size": d.expert_width,
            "sliding_window": None,
        }
    else:
        known |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": d.experts,
            "moe_intermediate_size": d.expert_width,
            "norm_topk_prob": d.normalized_weights,
            "mlp_only_layers": list(range(d.dense_layers)),
            "decoder_sparse_step": 1,
        }
    return {**_rotary_config(d), **known}


def _latent_config(d: Dimensions) -> dict[str, Any]:
    """What DeepSeek-V3 has other than Llama. Without experts, all its blocks are dense ones."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "head_dim": d.rotary_width,  # of DeepSeek-V3: that of the rotation
        "kv_lora_rank": d.kv_lora_rank,
        "q_lora_rank": d.q_lora_rank or None,
        "qk_nope_head_dim": d.head_width - d.rotary_width,
        "qk_rope_head_dim": d.rotary_width,
        "v_head_dim": d.value_width,
        "rope_interleave": True,
        "first_k_dense_replace": d.layers - d.mixtures,
        "num_nextn_predict_layers": 0,
    }
    if d.experts:
        config |= {
            "n_routed_experts": d.experts,
            "n_shared_experts": d.shared_ffn // d.expert_width,
            "num_experts_per_tok": d.experts_per_token,
            "moe_intermediate_size": d.expert_width,
            "moe_layer_freq": 1,
            "n_group": d.router_groups,
            "topk_group": d.groups_per_token,
            "norm_topk_prob": d.normalized_weights,
            "routed_scaling_factor": d.router_scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    return config


def _gpt2_config(d: Dimensions) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": d.vocab,
        "n_embd": d.width,
        "n_inner": d.ffn,
        "n_layer": d.layers,
        "n_head": d.heads,
        "n_positions": d.context,
        "layer_norm_epsilon": d.norm_epsilon,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        **_common_config(d),
    }


def _common_config(d: Dimensions) -> dict[str, Any]:
    return {
        "tie_word_embeddings": d.tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }
