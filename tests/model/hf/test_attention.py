"""Models of transformers with sinks or sliding windows run kernels, and compute what transformers computes without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.hf import HuggingFaceModel
from shardwise.model.hf.attention import takes_windows
from shardwise.model.hf.calls import no_guessing
from shardwise.model.hf.objective import build_for

transformers = pytest.importorskip("transformers")

SIZES = {
    "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash")


WINDOWED = ("gemma3_text", "mistral", "qwen2", "cohere2")
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma4_text": {"num_kv_shared_layers": 1, "global_head_dim": 8, "hidden_size_per_layer_input": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}


def model_of(family: str, **changed: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **SPECIAL.get(family, {}), **changed})
    model = build_for("causal", config, family)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.double()


def by_transformers(model: nn.Module, implementation: str = "eager") -> Any:
    other: Any = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    return other


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with no_guessing():
        return model(input_ids=ids, use_cache=False, **inputs).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", SINKS)
def test_sinks_are_those_of_eager_mode(family: str) -> None:
    model = model_of(family)
    assert model.config._attn_implementation == "shardwise_sinks"  # type: ignore[union-attr]
    in_fp64 = family in ("gpt_oss", "mimo_v2_flash")  # the softmax of the others' eager mode is in fp32
    _compare(model, by_transformers(model), 1e-12 if in_fp64 else 1e-6)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_those_of_masks(family: str) -> None:
    model = model_of(family)
    assert model.config._attn_implementation == "shardwise_windows"  # type: ignore[union-attr]
    _compare(model, by_transformers(model, "sdpa"), 1e-12)


def _compare(model: nn.Module, other: nn.Module, bound: float) -> None:
    """Compare logits and gradients of rows that are longer than the window."""
    ids = torch.randint(3, 64, (2, 33))
    mine, theirs = logits(model, ids), logits(other, ids)
    assert (mine - theirs).abs().max() <= bound * theirs.abs().max()
    gradients = torch.autograd.grad(mine.square().sum(), [*model.parameters()])
    references = torch.autograd.grad(theirs.square().sum(), [*other.parameters()])
    pairs = zip(gradients, references, strict=True)
    assert all((a - b).abs().max() <= 10 * bound * b.abs().max() for a, b in pairs)


@pytest.mark.parametrize(("family", "implementation"), [("gpt_oss", "eager"), ("gemma3_text", "sdpa")])
def test_generation_with_a_cache_and_padding(family: str, implementation: str) -> None:
    model: Any = model_of(family)
    other = by_transformers(model, implementation)
    ids, mask = torch.randint(3, 64, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), other.generate(ids, **options))


@pytest.mark.parametrize("keys", ["shared", "own"])
def test_generation_with_a_static_cache(keys: str) -> None:
    model: Any = model_of("mistral") if keys == "own" else sharing_keys()
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    other = by_transformers(model, "sdpa")
    for length in (4, 12):
        ids = torch.randint(3, 64, (1, length))
        assert torch.equal(model.generate(ids, **options), other.generate(ids, **options))


def sharing_keys() -> nn.Module:
    return model_of(
        "gemma4_text", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2
    )


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_layers_that_share_keys_compute_the_last_tokens_alone(kept: int) -> None:
    model = sharing_keys().eval()
    ids = torch.randint(3, 64, (2, 33))
    mine, theirs = (logits(m, ids, logits_to_keep=kept) for m in (model, by_transformers(model, "sdpa")))
    assert mine.shape[1] == (kept or 33) and (mine - theirs).abs().max() < 1e-12 * theirs.abs().max()


def test_a_window_of_no_tokens_is_none() -> None:
    model: Any = model_of("qwen2_moe", num_experts=4, num_experts_per_tok=2)
    assert model.config.sliding_window == 0 and model.config._attn_implementation == "sdpa"


def test_dropout_of_probabilities_with_sinks_stays_in_eager_mode() -> None:
    model: Any = model_of("gpt_oss", attention_dropout=0.1)
    assert model.config._attn_implementation == "eager"


def test_dropout_of_probabilities_within_a_window() -> None:
    model = model_of("gemma3_text", attention_dropout=0.4).train()
    other, ids, results = by_transformers(model, "sdpa"), torch.randint(3, 64, (2, 33)), []
    for attending in (model, other):
        torch.manual_seed(1)
        results.append(logits(attending, ids))
    assert torch.equal(*results) and not torch.equal(results[0], logits(model, ids))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "gemma2", "mistral", "cohere2"])
def test_packed_documents_and_a_window_both_apply(family: str, tmp_path: Path) -> None:
    model = model_of(family).eval()
    model.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    blueprint = HuggingFaceModel(str(tmp_path), 33)
    assert blueprint.packing_obstacle(model) == ""
    ids, border = torch.randint(3, 64, (1, 33)), 20
    positions = torch.cat((torch.arange(border), torch.arange(33 - border)))[None]
    alone = torch.cat([blueprint.logits(model, part) for part in (ids[:, :border], ids[:, border:])], 1)
    for starts in (None, torch.tensor([[0, border]], dtype=torch.int32)):
        packed = blueprint.logits(model, ids, positions, starts)
        assert (packed - alone).abs().max() < 1e-6 * alone.abs().max()


def test_packing_is_refused_if_full_layers_have_the_window() -> None:
    model = model_of("minimax", layer_types=["full_attention"] * 2, num_local_experts=4)
    assert (
        not takes_windows(model) and takes_windows(model_of("mistral")) and takes_windows(model_of("gpt_oss"))
    )


def test_models_without_sinks_or_windows_keep_their_attention() -> None:
    config = transformers.AutoConfig.for_model("qwen3", **{**SIZES, "layer_types": None})
    model: Any = build_for("causal", config, "qwen3")
    assert model.config._attn_implementation == "sdpa"


def test_the_meta_device_has_shapes() -> None:
    with torch.device("meta"):
        model = model_of("gpt_oss")
        assert logits(model, torch.zeros((2, 33), dtype=torch.int64)).shape == (2, 33, 64)
