"""GGUF files in llama.cpp itself, through `pip install xllamacpp`; skipped without it.

Tokens, the next token's log-probabilities for all of the vocabulary, and a rendered chat are those of transformers.
llama.cpp looks GELU up in a table in fp16, so the families with it agree to three digits, the others to fp32.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.plugins.gguf.export import export_gguf
from tests.harness.small_models import TEXT, write_model

llama_cpp = pytest.importorskip("xllamacpp")

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "gpt2", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", "qwen2", {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 32}}),
    "mistral": ("mistral", "llama", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen2", {"head_dim": 32, "rope_parameters": YARN}),
    "gemma": ("gemma", "gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", "gemma", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}),
    "gemma3": (
        "gemma3_text",
        "gemma",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
            "final_logit_softcapping": 20.0,
        },
    ),
    "phi3": (
        "phi3",
        "gpt2",
        {"rope_parameters": LONG, "original_max_position_embeddings": 32, "pad_token_id": 0},
    ),
    "gpt2": ("gpt2", "gpt2", {}),
}
PROBE = "I've been told: 1234 models don't fit, ünïcode 日本 <think>x"


@contextmanager
def served(path: Path) -> Iterator[Any]:
    """A function that asks llama.cpp's server."""
    options = llama_cpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.n_gpu_layers = str(path), 128, 1, 0
    options.warmup = options.fit_params = False
    options.verbosity, options.cpuparams.n_threads = -1, 1
    options.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.cache_type_k = options.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    server = llama_cpp.Server(options)
    address = server.listening_address
    address = address if address.startswith("http") else f"http://{address}"

    def ask(what: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/{what}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    yield ask


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    family, kind, values = CASES[name]
    model, tokenizer = write_model(tmp_path / "model", family, kind, **values)
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", "fp32")
    ids = tokenizer(TEXT).input_ids[:70]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    # The server gives no probabilities of a token that ends within a character.
    whole = [at for at in range(40, 70) if "\ufffd" not in tokenizer.decode([int(logits[at].argmax())])]
    expected = logits[whole[-1]].log_softmax(-1)
    with served(tmp_path / "out.gguf") as ask:
        probe = PROBE if kind != "llama" else PROBE.partition("<think>")[0]  # which the export says
        found = ask("tokenize", content=probe, add_special=True, parse_special=True)
        assert found["tokens"] == tokenizer(probe).input_ids
        asked: dict[str, Any] = {"prompt": ids[: whole[-1] + 1], "n_predict": 1, "n_probs": len(expected)}
        [token] = ask("completion", **asked, temperature=0, cache_prompt=False)["completion_probabilities"]
        near = 2e-3 if family.startswith(("gemma", "gpt2")) else 1e-5
        probabilities = {each["id"]: each["logprob"] for each in token["top_logprobs"]}
        assert len(probabilities) == len(expected)
        worst = max(abs(value - float(expected[number])) for number, value in probabilities.items())
        assert worst < near
        chat = [{"role": "user", "content": "Hi"}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ask("apply-template", messages=chat)["prompt"] == rendered
