"""Small models of transformers as folders, with tokenizers of the kinds that models ship with.

A tokenizer is made by transformers' own class of its family, with a vocabulary trained here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT = "The capital of Peru? The capital of Peru is Lima. I've seen 1234 models; we'll see ünïcode.\n\n" * 20
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = ("<|im_start|>", "<|im_end|>")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def write_tokenizer(folder: Path, kind: str = "gpt2", template: str = CHATML) -> Any:
    """A tokenizer of a kind: gpt2, qwen2, llama or gemma. Returns it as transformers loads it."""
    import transformers

    spaced = kind in ("llama", "gemma")
    first = {"llama": ["<unk>", "<s>", "</s>"], "gemma": ["<pad>", "<eos>", "<bos>", "<unk>"]}
    special = first.get(kind, ["<|endoftext|>"])
    trained = json.loads(_trained(spaced, special).to_str())["model"]
    parts: dict[str, Any] = {"vocab": trained["vocab"], "merges": [tuple(pair) for pair in trained["merges"]]}
    names = {"gpt2": "GPT2", "qwen2": "Qwen2", "llama": "Llama", "gemma": "Gemma"}
    if spaced:
        parts["add_bos_token"] = True
    tokenizer = getattr(transformers, f"{names[kind]}Tokenizer")(**parts)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _trained(spaced: bool, special: list[str]) -> Any:
    """A BPE of bytes, or one of characters with bytes for those that it does not know."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = models.BPE(byte_fallback=spaced, unk_token="<unk>" if spaced else None, fuse_unk=spaced)
    tokenizer = Tokenizer(model)
    if spaced:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # tokens are parts of words
        special = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 380,
        special_tokens=special,
        initial_alphabet=[] if spaced else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def write_model(
    folder: Path, family: str, kind: str = "gpt2", template: str = CHATML, **values: Any
) -> tuple[Any, Any]:
    """A model with random weights, none of them 0 or 1, and its tokenizer. Returns both.

    Args:
        family: ``model_type`` of the config.
        kind: of tokenizer. values: of the config, in addition to ``SIZES``.
    """
    import torch
    import transformers

    tokenizer = write_tokenizer(folder, kind, template)
    known = transformers.CONFIG_MAPPING[family]
    sizes = {key: value for key, value in SIZES.items() if hasattr(known(), key)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = known(**{**sizes, **ends, "vocab_size": len(tokenizer) + 3, **values})
    name = "AutoModelForCausalLM"
    if config.is_encoder_decoder:
        name = "AutoModelForSeq2SeqLM"
    elif family in ("bert", "roberta"):
        name = "AutoModelForMaskedLM"
    torch.manual_seed(0)
    model = getattr(transformers, name).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model, tokenizer
