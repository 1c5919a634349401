"""Tiny configs of the model families of transformers: 64 token ids, width 32, 2 blocks, 64 positions."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip

_Families = dict[str, tuple[str, dict[str, Any]]]
"""Class of the config and its arguments, by name."""

DENSE: _Families = {
    "llama": ("LlamaConfig", _SMALL),
    "mistral": ("MistralConfig", _SMALL),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen3": ("Qwen3Config", _SMALL | {"head_dim": 8}),
    "gemma": ("GemmaConfig", _SMALL | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", _SMALL | {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", _SMALL | {"head_dim": 8}),
    "phi": ("PhiConfig", _SMALL),
    "phi3": ("Phi3Config", _SMALL | {"pad_token_id": 0}),
    "gpt2": ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoXConfig", _SMALL),
    "gptj": (
        "GPTJConfig",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "bloom": ("BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "mpt": ("MptConfig", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "olmo2": ("Olmo2Config", _SMALL),
    "cohere": ("CohereConfig", _SMALL),
    "starcoder2": ("Starcoder2Config", _SMALL),
    "stablelm": ("StableLmConfig", _SMALL),
    "granite": ("GraniteConfig", _SMALL),
    "smollm3": ("SmolLM3Config", _SMALL | {"pad_token_id": 0}),
    "glm4": ("Glm4Config", _SMALL | {"head_dim": 8, "pad_token_id": 0}),
    "mamba": ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}
SPARSE: _Families = {
    "mixtral": ("MixtralConfig", _SMALL | {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _SMALL
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _SMALL | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "olmoe": ("OlmoeConfig", _SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        _SMALL
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "pad_token_id": 0,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        _SMALL
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _SMALL
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        _SMALL | {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "pad_token_id": 0},
    ),
    "granitemoe": ("GraniteMoeConfig", _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", _SMALL | {"num_local_experts": 4}),
    "jamba": (
        "JambaConfig",
        _SMALL
        | {
            "num_experts": 4,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        _SMALL
        | {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 0,
            "pad_token_id": 0,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _SMALL
        | {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "pad_token_id": 0,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        _SMALL | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
OTHERS: _Families = {
    "bert": ("BertConfig", _SMALL),
    "roberta": ("RobertaConfig", _SMALL),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "xlnet": ("XLNetConfig", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "t5": (
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": ("BartConfig", _BART),
}
"""Encoders and encoder-decoders."""


def config_of(family: str, **changes: Any) -> Any:
    """The tiny config of a family."""
    import transformers

    name, values = (DENSE | SPARSE | OTHERS)[family]
    return getattr(transformers, name)(**values | changes)
