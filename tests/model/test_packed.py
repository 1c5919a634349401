"""Packed documents: each is what it is alone, to the last digits, and no gradient crosses from one to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.native import NativeModel
from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime.documents import same_document

LENGTHS = (5, 9, 1, 4)
"""Of the documents; 5 tokens of padding follow, a document of their own."""
TOTAL = 24
NATIVE = {
    "llama": Dimensions(3, 48, 4, 2, 40, vocab=51, context=64),
    "gpt2": Dimensions(3, 48, 4, 4, 192, vocab=51, context=64, family="gpt2", tied=True),
    "latent": Dimensions(
        3,
        48,
        4,
        4,
        40,
        vocab=51,
        context=64,
        head_dim=12,
        kv_lora_rank=16,
        q_lora_rank=20,
        rope_head_dim=4,
        v_head_dim=8,
    ),
}
HF = {"hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
      "num_key_value_heads": 2, "vocab_size": 51, "max_position_embeddings": 64}  # fmt: skip


def _positions() -> Tensor:
    lengths = (*LENGTHS, TOTAL - sum(LENGTHS))
    row = torch.cat([torch.arange(length) for length in lengths])
    return torch.stack((row, torch.arange(TOTAL)))  # the second sequence is one document


def _ids() -> Tensor:
    return torch.randint(0, 51, (2, TOTAL), generator=torch.Generator().manual_seed(0))


def _spans() -> list[slice]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


@pytest.fixture(
    params=["llama", "gpt2", "latent", "hf-llama", "hf-gpt2", "hf-qwen2-eager", "hf-mistral-window"]
)
def blueprint(request: pytest.FixtureRequest, saved: Any) -> Blueprint:
    name: str = request.param
    if name in NATIVE:
        return NativeModel(NATIVE[name])
    transformers = pytest.importorskip("transformers")
    config = {
        "hf-llama": lambda: transformers.LlamaConfig(**HF),
        "hf-gpt2": lambda: transformers.GPT2Config(
            vocab_size=51, n_embd=36, n_layer=3, n_head=3, n_positions=64
        ),
        "hf-qwen2-eager": lambda: transformers.Qwen2Config(**HF, tie_word_embeddings=True),
        "hf-mistral-window": lambda: transformers.MistralConfig(**HF, sliding_window=4),
    }[name]()
    found = HuggingFaceModel(str(saved(config)), TOTAL)
    if name.endswith("eager"):
        found.config._attn_implementation = "eager"
    return found


def _model(blueprint: Blueprint, dtype: torch.dtype) -> nn.Module:
    """Loud enough that what one token adds to another shows."""
    torch.manual_seed(1)
    model = blueprint.build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_a_packed_document_is_the_document_alone(
    blueprint: Blueprint, dtype: torch.dtype, close: float
) -> None:
    model, ids, positions = _model(blueprint, dtype), _ids(), _positions()
    assert blueprint.packing_obstacle(model) == ""
    if isinstance(blueprint, HuggingFaceModel) and blueprint.config._attn_implementation == "eager":
        close = 1e-6  # transformers takes its softmax in fp32
    with torch.no_grad():
        packed = blueprint.logits(model, ids, positions)
        end_to_end = blueprint.logits(model, ids)
        for span in _spans():
            alone = blueprint.logits(model, ids[:1, span])
            assert (packed[:1, span] - alone).abs().max() <= close
        torch.testing.assert_close(packed[1], end_to_end[1], rtol=0, atol=close)
    for span in _spans()[1:]:  # or else nothing was shown
        assert (packed[0, span] - end_to_end[0, span]).abs().max() > 1e-3


def test_no_gradient_crosses_documents(blueprint: Blueprint) -> None:
    model, ids, positions = _model(blueprint, torch.float64), _ids(), _positions()
    kept: list[Tensor] = []
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    embedding.register_forward_hook(lambda _, args, result: kept.append(result))
    span = _spans()[1]
    logits = blueprint.logits(model, ids, positions)
    (gradient,) = torch.autograd.grad(logits[0, span].square().sum(), kept[0])
    inside = torch.zeros(2, TOTAL, dtype=torch.bool)
    inside[0, span] = True
    assert (gradient[inside].abs().amax(-1) > 0).all()
    assert (gradient[~inside] == 0).all()


def test_the_mask_sees_a_document_and_back() -> None:
    seen = same_document(nn.Module(), torch.tensor([[0, 1, 0, 0, 1]]))[0, 0]
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_models_that_would_let_documents_meet_are_refused(saved: Any) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 51, "hidden_size": 32, "num_hidden_layers": 2}
    alibi = {**small, "num_attention_heads": 4, "alibi": True}
    cases = {
        "mask of attention_chunk_size": transformers.Llama4TextConfig(**HF, attention_chunk_size=8),
        "its own attention mask": transformers.MambaConfig(**small, state_size=4),
        "uses ALiBi": transformers.FalconConfig(**alibi),
        "layers of the type conv": transformers.Lfm2Config(
            **HF, layer_types=["conv", "full_attention", "full_attention"]
        ),
    }
    for says, config in cases.items():
        blueprint = HuggingFaceModel(str(saved(config)), TOTAL)
        with torch.device("meta"):
            assert says in blueprint.packing_obstacle(blueprint.build())
