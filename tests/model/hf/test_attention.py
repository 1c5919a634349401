"""Models of transformers with sinks run kernels, and compute what transformers computes in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.hf.calls import no_guessing
from shardwise.model.hf.objective import build_for

transformers = pytest.importorskip("transformers")

SIZES = {
    "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    "granite_swa": {},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "flint": {},
}


def model_of(family: str, **changed: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changed})
    model = build_for("causal", config, family)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.double()


def in_eager_mode(model: nn.Module) -> Any:
    other: Any = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with no_guessing():
        return model(input_ids=ids, use_cache=False, **inputs).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_eager_mode(family: str) -> None:
    model = model_of(family)
    other, ids = in_eager_mode(model), torch.randint(3, 64, (2, 33))
    assert model.config._attn_implementation == "shardwise"  # type: ignore[union-attr]
    mine, theirs = logits(model, ids), logits(other, ids)
    bound = 1e-12 if family == "gpt_oss" else 1e-6  # the others' eager softmax is in fp32
    assert (mine - theirs).abs().max() <= bound * theirs.abs().max()
    gradients = torch.autograd.grad(mine.square().sum(), [*model.parameters()])
    references = torch.autograd.grad(theirs.square().sum(), [*other.parameters()])
    pairs = zip(gradients, references, strict=True)
    assert all((a - b).abs().max() <= 10 * bound * b.abs().max() for a, b in pairs)


def test_generation_with_a_cache_and_padding_is_that_of_eager_mode() -> None:
    model: Any = model_of("gpt_oss")
    ids, mask = torch.randint(3, 64, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), in_eager_mode(model).generate(ids, **options))


def test_dropout_of_probabilities_stays_in_eager_mode() -> None:
    model: Any = model_of("gpt_oss", attention_dropout=0.1)
    assert model.config._attn_implementation == "eager"


def test_models_without_sinks_keep_their_attention() -> None:
    config = transformers.AutoConfig.for_model("qwen3", **{**SIZES, "layer_types": None})
    model: Any = build_for("causal", config, "qwen3")
    assert model.config._attn_implementation == "sdpa"


def test_the_meta_device_has_shapes() -> None:
    with torch.device("meta"):
        model = model_of("gpt_oss")
        assert logits(model, torch.zeros((2, 33), dtype=torch.int64)).shape == (2, 33, 64)
