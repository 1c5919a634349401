"""Tiny configs of the causal model families of transformers, and of some encoders.

The families are those of transformers' own mapping. A config is its class's, with the sizes of ``_SIZES`` where it has
such a key: width 32, 2 blocks, 4 heads, 4 experts. Blocks of several kinds (``layer_types``) are kept, one of each.
``_MORE`` has what single families need.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rotary_dim": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "eod_token_id": 2, "decoder_start_token_id": 0,
    # windows, and low ranks of attention
    "sliding_window": 16, "sliding_window_size": 16, "attention_window_size": 16, "attention_chunk_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 8, "o_lora_rank": 8, "qk_head_dim": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16,
    # experts
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "topk_group": 1,
    "n_group": 1, "num_expert_group": 1, "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16, "shared_experts_intermediate_size": 16, "shared_intermediate_size": 16,
    "intermediate_size_mlp": 48, "dense_intermediate_size": 48, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "moe_layer_start_index": 0, "zero_expert_num": 2, "router_hidden_size": 16,
    # state spaces, and linear attention
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 8, "linear_num_heads": 4, "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_chunk_size": 16, "mamba_dt_rank": 4, "state_size": 4, "time_step_rank": 4, "chunk_size": 16,
    "ssm_state_size": 4, "use_mamba_kernels": False,
    # decoders of encoder-decoders, embeddings of layers
    "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "position_bias_num_buckets": 16, "prompt_types": 2, "segment_types": 2},
    "ctrl": {"dff": 48, "n_positions": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "layer_types": None},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 8,
        "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "distilbert": {"hidden_dim": 48, "n_layers": 2, "dim": 32, "n_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "intermediate_size": 48, "window_size": 16},
    "inkling2_loop_text": {
        "num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "loop_layer_index_start": 1,
        "loop_layer_index_end": 3, "n_layers_per_attn_res_block": 1, "loop_num_passes": 2, "loop_gate_rank": 4,
    },
    "longcat_flash": {"num_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "moe_shared_expert_intermediate_size": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "hc_lowrank": 4,
        "indexer_compress_ratio": 2,
    },
    "t5": {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "d_head": 8},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
"""Keys with the kind of every block."""
_EQUAL = (("head_dim", "qk_head_dim"), ("head_dim", "qk_rope_head_dim"))
"""Keys that stay equal to another where they are equal by default."""
_VOCABULARIES = {"unpadded_vocab_size", "vocab_size_per_layer_input"}
"""Keys that repeat the vocabulary's size."""
_OWN = {"attn_config", "ffn_config"}
"""Configs within a text model's config that are parts of it."""

DENSE = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "gptj",
    "opt", "bloom", "falcon", "mpt", "olmo2", "cohere", "starcoder2", "stablelm", "granite", "smollm3", "glm4", "mamba",
)  # fmt: skip
SPARSE = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text", "granitemoe",
    "phimoe", "jamba", "ernie4_5_moe", "glm4_moe", "minimax_m2",
)  # fmt: skip
OTHERS = ("bert", "roberta", "distilbert", "xlnet", "t5", "bart")
"""Encoders and encoder-decoders."""


def causal_families() -> Iterator[str]:
    """The model types of transformers that are causal text models and nothing else, by its own mappings."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as known

    others = {*known.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    for name in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name not in others and set(CONFIG_MAPPING[name].sub_configs) <= _OWN:
            yield name


def config_of(family: str, **changes: Any) -> Any:
    """The tiny config of a family."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    stored = kind().to_dict()
    known = {*stored, *kind.attribute_map}
    values = {kind.attribute_map.get(key, key): value for key, value in _SIZES.items() if key in known}
    values |= dict.fromkeys(_VOCABULARIES & known)
    for key, other in _EQUAL:
        if stored.get(key) is not None and stored.get(key) == stored.get(other):
            values[key] = _SIZES[other]
    if (
        stored.get("kv_lora_rank") and "num_key_value_heads" in stored
    ):  # latent attention has no groups of heads
        values["num_key_value_heads"] = _SIZES["num_attention_heads"]
    values |= _blocks_of(stored) | _MORE.get(family, {}) | changes
    values |= {key: values["vocab_size"] for key in _VOCABULARIES if key in values}
    return kind(**values)


def save_tiny(family: str, folder: Path, **changes: Any) -> int:
    """Save the tiny model with random weights; returns the number of its parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **changes))
    with torch.no_grad():  # no weight is left at 0 or 1, which would hide errors
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0  # some families reset it after reading the files
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _blocks_of(stored: dict[str, Any]) -> dict[str, Any]:
    """One block of every kind, at least two."""
    kinds = {key: list(dict.fromkeys(stored[key])) for key in _KINDS if stored.get(key)}
    count = max([2, *(len(each) for each in kinds.values())])
    found: dict[str, Any] = {
        key: [each[index % len(each)] for index in range(count)]
        for key, each in kinds.items()
        if len(each) > 1
    }
    return found | ({"num_hidden_layers": count} if found else {})
