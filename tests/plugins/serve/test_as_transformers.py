"""Greedy answers are those of transformers' own ``generate``, for models whose caches or angles have limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.plugins.serve.decoding import Transformers, reader_of
from shardwise.plugins.serve.evaluating import evaluate_text
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import ServedModel, load_model
from tests.harness.modules import with_large_weights

transformers = pytest.importorskip("transformers")

CONTEXT = 48
SIZES = {"vocab_size": 256, "hidden_size": 16, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
DECODER = SIZES | {
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}


def long_rope() -> nn.Module:
    """Other frequencies from 13 tokens on."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    length = {"original_max_position_embeddings": 12}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, **length}
    config = transformers.Phi3Config(**DECODER, **length, rope_parameters=rope)
    return with_large_weights(transformers.Phi3ForCausalLM(config))


def short_mask() -> nn.Module:
    """Its causal mask is a buffer as long as the context, over padding and text."""
    layers = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    config = transformers.GPTNeoConfig(
        **SIZES, **layers, window_size=8, max_position_embeddings=CONTEXT, intermediate_size=24
    )
    return with_large_weights(transformers.GPTNeoForCausalLM(config))


def greedy(model: Any, prompt: str, tokens: int) -> str:
    ids = torch.tensor([list(prompt.encode())])
    options = {"do_sample": False, "max_new_tokens": tokens, "attention_mask": torch.ones_like(ids)}
    answer = model.generate(ids, **options)[0, ids.shape[1] :].tolist()
    return bytes(token for token in answer if token).decode(errors="replace").rstrip("\ufffd")


def served_model(model: Any, folder: Path) -> ServedModel:
    model.save_pretrained(folder)
    served = load_model(folder, tokenizer="bytes")
    assert isinstance(reader_of(served._opened.blueprint, served.model, served.bank), Transformers)
    return served


@pytest.mark.parametrize("kind", [long_rope, short_mask])
def test_lengths_of_a_batch_on_both_sides_of_a_limit(kind: Any, tmp_path: Path) -> None:
    model = kind()
    asked = {"x": 30, "0123456789": 20, "longer than twelve": 9, "and one that fills up nearly all of it": 5}
    requests = [Request(text, sampling=Sampling(count, temperature=0)) for text, count in asked.items()]
    assert served_model(model, tmp_path).complete(requests) == [
        greedy(model, text, count) for text, count in asked.items()
    ]


def narrow_router() -> nn.Module:
    """Its router's weight and bias stay in fp32."""
    mixture = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    widths = {"moe_intermediate_size": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "num_key_value_heads": 2, "topk_group": 1}
    return with_large_weights(
        transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**DECODER | mixture | widths | heads)
        )
    )


def scaled_embedding() -> nn.Module:
    """Its scale is a buffer that no file has."""
    config = transformers.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=8)
    return with_large_weights(transformers.Gemma3ForCausalLM(config))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [narrow_router, scaled_embedding])
def test_logits_in_16_bits(kind: Any, precision: torch.dtype, tmp_path: Path) -> None:
    """Bitwise equal: rotary frequencies stay in fp32, as does what transformers keeps so."""
    kind().save_pretrained(tmp_path)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[precision]
    served = load_model(tmp_path, tokenizer="bytes", precision=name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=precision).eval()
    ids = torch.arange(1, CONTEXT).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(served.model(ids).logits, theirs(ids).logits)


def test_losses_of_texts_on_both_sides_of_a_limit(tmp_path: Path) -> None:
    """They do not depend on the batch."""
    long_rope().save_pretrained(tmp_path / "model")
    records = [{"prompt": "ab", "completion": "yz" * (2 + 2 * (n % 5))} for n in range(10)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    losses = [
        evaluate_text(tmp_path / "model", str(tmp_path / "data.jsonl"), tokenizer="bytes", batch=batch).loss
        for batch in (1, 8)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
