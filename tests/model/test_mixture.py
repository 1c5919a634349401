"""Mixtures of experts: transformers' functions, exact zeros for absent experts, auxiliary losses, FLOPs, no waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Batch
from shardwise.model.decoder import Decoder, SwiGLU
from shardwise.model.mixture import Experts, MixtureOfExperts, Router, filled_tokens
from shardwise.model.native import NativeModel
from shardwise.model.stage import Stage
from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime.flops import FlopCounter
from shardwise.runtime.parallel.experts import divisible_experts

MIXTRAL = Dimensions(3, 48, 4, 2, 40, vocab=51, context=64, experts=5)
QWEN3 = Dimensions(
    3, 48, 4, 2, 40, vocab=51, context=64, family="qwen3", head_dim=16, experts=6, experts_per_token=3,
    expert_ffn=24, dense_layers=1, normalized_weights=False,
)  # fmt: skip
DEEPSEEK = Dimensions(
    2, 32, 4, 4, 40, vocab=51, context=64, head_dim=12, kv_lora_rank=10, q_lora_rank=14, rope_head_dim=4,
    v_head_dim=6, experts=8, experts_per_token=3, expert_ffn=16, shared_ffn=32, dense_layers=1, router="sigmoid",
    router_groups=4, groups_per_token=2, router_scale=2.5, router_bias=True,
)  # fmt: skip
ALL = pytest.mark.parametrize(
    "dimensions", [MIXTRAL, QWEN3, DEEPSEEK], ids=["mixtral", "qwen3-moe", "deepseek"]
)


def _batch(length: int = 24) -> Batch:
    ids = torch.randint(0, 51, (2, length + 1), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[0, :5] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


@torch.no_grad()
def _loud(model: nn.Module) -> None:
    torch.manual_seed(0)
    biases = (buffer for name, buffer in model.named_buffers() if name.endswith("bias"))
    for tensor in (*model.parameters(), *biases):
        tensor.normal_(0.0, 0.2)


def _theirs(d: Dimensions, **given: Any) -> Any:
    """transformers' model of these dimensions."""
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": d.vocab, "hidden_size": d.width, "intermediate_size": d.ffn, "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads, "num_key_value_heads": d.kv_heads, "head_dim": d.head_width,
        "rms_norm_eps": d.norm_epsilon, "num_experts_per_tok": d.experts_per_token,
        "rope_parameters": {"rope_type": "default", "rope_theta": d.rope_theta},
    }  # fmt: skip
    if d.kv_lora_rank:
        shape |= {
            "head_dim": d.rotary_width, "qk_rope_head_dim": d.rotary_width, "v_head_dim": d.value_width,
            "qk_nope_head_dim": d.head_width - d.rotary_width, "kv_lora_rank": d.kv_lora_rank,
            "q_lora_rank": d.q_lora_rank or None, "n_group": d.router_groups, "topk_group": d.groups_per_token,
            "n_shared_experts": d.shared_ffn // d.expert_width, "routed_scaling_factor": d.router_scale,
            "first_k_dense_replace": d.dense_layers, "norm_topk_prob": d.normalized_weights,
        }  # fmt: skip
        config = transformers.DeepseekV3Config(
            **shape, n_routed_experts=d.experts, moe_intermediate_size=d.expert_width, **given
        )
    elif d.family == "qwen3":
        config = transformers.Qwen3MoeConfig(
            **shape, num_experts=d.experts, moe_intermediate_size=d.expert_width, **given,
            norm_topk_prob=d.normalized_weights, mlp_only_layers=list(range(d.dense_layers)),
        )  # fmt: skip
    else:
        config = transformers.MixtralConfig(**shape, num_local_experts=d.experts, **given)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@ALL
def test_logits_and_gradients_are_transformers(dimensions: Dimensions, dtype: torch.dtype) -> None:
    theirs = _theirs(dimensions).to(dtype)
    if dtype == torch.float64:
        theirs.set_experts_implementation("eager")
    _loud(theirs)
    ours = Decoder(dimensions).to(dtype)
    ours.load_state_dict({name.removeprefix("model."): value for name, value in theirs.state_dict().items()})
    ids = _batch()["input_ids"]
    logits, expected = ours(ids), theirs(ids).logits
    # In fp64 theirs still chooses and rotates in fp32.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.square().sum().backward()
    expected.square().sum().backward()
    mine = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            mine[name.removeprefix("model.")].grad, parameter.grad, rtol=1e-4, atol=1e-4
        )


def test_a_mixture_with_groups_bias_and_shared_experts_is_deepseeks() -> None:
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    d = DEEPSEEK
    config = DeepseekV3Config(
        hidden_size=d.width, moe_intermediate_size=d.expert_width, n_routed_experts=d.experts, n_shared_experts=2,
        num_experts_per_tok=d.experts_per_token, n_group=d.router_groups, topk_group=d.groups_per_token,
        routed_scaling_factor=d.router_scale, norm_topk_prob=True,
    )  # fmt: skip
    theirs = DeepseekV3MoE(config)
    _loud(theirs)
    ours = MixtureOfExperts(d, SwiGLU(d.width, d.shared_ffn))
    ours.load_state_dict(theirs.state_dict())
    hidden = torch.randn(2, 40, d.width)
    torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=1e-5, atol=1e-5)
    unbiased = MixtureOfExperts(replace(d, router_bias=False), SwiGLU(d.width, d.shared_ffn))
    unbiased.load_state_dict(theirs.state_dict(), strict=False)
    assert not torch.allclose(unbiased(hidden), theirs(hidden), atol=1e-2), "the bias changes the choice"


class _Poisoned(TorchDispatchMode):
    """Writes NaN into what ``_grouped_mm`` does not initialise: the rows after the last group."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name() == "aten::_grouped_mm" and out.dim() == 2:
            ends = next(value for value in (*args[2:], *(kwargs or {}).values()) if value is not None)
            out[int(ends[-1]) :] = float("nan")
            self.rows += len(out) - int(ends[-1])
        return out


def _part(whole: Experts, first: int, last: int) -> Experts:
    """The experts of one rank."""
    part = Experts(replace(MIXTRAL, experts=last - first)).to(whole.down_proj.dtype)
    part._is_expert_parallel = True
    part.load_state_dict({name: value[first:last] for name, value in whole.state_dict().items()})
    return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absent_experts_add_exactly_zero_to_results_and_gradients(dtype: torch.dtype) -> None:
    """Three ranks: two with experts, one whose expert no token chooses."""
    whole = Experts(MIXTRAL).to(dtype)
    assert divisible_experts(whole)
    _loud(whole)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(30)])
    index[:5] = torch.tensor([0, 1])  # tokens for which the second rank has nothing
    tokens, weight = torch.randn(30, 48, dtype=dtype), torch.rand(30, 2, dtype=dtype)
    expected, *gradients = _passes(whole, tokens, index, weight)
    total, sums = torch.zeros_like(expected), [torch.zeros_like(gradient) for gradient in gradients[:2]]
    of_weights: dict[str, list[Tensor]] = {}
    for first, last in ((0, 2), (2, 4), (4, 5)):
        part, here = _part(whole, first, last), (index >= first) & (index < last)
        given = tokens.clone()
        given[~here.any(1)] = float("nan")  # what an exchange left undefined
        local = (index - first).masked_fill(~here, last - first)
        with _Poisoned() as poisoned:
            result, of_tokens, of_choices, *others = _passes(part, given, local, weight.masked_fill(~here, 0))
        assert dtype == torch.float64 or poisoned.rows > 0
        nothing = ~here.any(1)
        assert (result[nothing] == 0).all() and (of_tokens[nothing] == 0).all()
        assert (of_choices[~here] == 0).all()
        total += result
        sums[0] += of_tokens
        sums[1] += of_choices
        for (name, _), gradient in zip(part.named_parameters(), others, strict=True):
            of_weights.setdefault(name, []).append(gradient)
            assert first < 4 or (gradient == 0).all(), "no token came"
    for part_sum, one in zip((total, *sums), (expected, *gradients[:2]), strict=True):
        torch.testing.assert_close(part_sum, one)
    for (name, _), gradient in zip(whole.named_parameters(), gradients[2:], strict=True):
        torch.testing.assert_close(torch.cat(of_weights[name]), gradient)


def _passes(experts: Experts, tokens: Tensor, index: Tensor, weight: Tensor) -> list[Tensor]:
    """The result, and the gradients of tokens, weights and parameters."""
    tokens, weight = tokens.clone().requires_grad_(), weight.clone().requires_grad_()
    out = experts(tokens, index, weight)
    wanted = (tokens, weight, *experts.parameters())
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out))]


def test_no_tokens_at_all() -> None:
    experts = Experts(MIXTRAL)
    _loud(experts)
    index = torch.zeros(0, 2, dtype=torch.int64)
    result, *gradients = _passes(experts, torch.zeros(0, 48), index, torch.zeros(0, 2))
    assert result.shape == (0, 48)
    assert all((gradient == 0).all() for gradient in gradients)


def test_both_ways_of_computing_experts_agree() -> None:
    """Widths of a multiple of 16 bytes take the grouped product; 41 does not."""
    odd = Experts(replace(MIXTRAL, ffn=41))
    _loud(odd)
    wide = Experts(replace(MIXTRAL, ffn=44))
    with torch.no_grad():
        gate, up = odd.gate_up_proj.chunk(2, dim=1)
        padded = [F.pad(half, (0, 0, 0, 3)) for half in (gate, up)]
        wide.gate_up_proj.copy_(torch.cat(padded, dim=1))
        wide.down_proj.copy_(F.pad(odd.down_proj, (0, 3)))
    index = torch.randint(0, 5, (30, 2))
    tokens, weight = torch.randn(30, 48), torch.rand(30, 2)
    for one, other in zip(
        _passes(odd, tokens, index, weight)[:3], _passes(wide, tokens, index, weight)[:3], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_real_and_fake_runs_are_one_program_without_waits(
    dimensions: Dimensions, dtype: torch.dtype, recorder: Any
) -> None:
    blueprint = NativeModel(replace(dimensions, balance_loss=0.01, z_loss=0.001))
    real, fake = recorder(), recorder()
    with torch.device("meta"):
        model, imagined = blueprint.build().to(dtype), blueprint.build().to(dtype)
    model.to_empty(device="cpu")
    blueprint.fill(model, 0)
    batch = _batch()
    with real:
        _forward_backward(blueprint, model, batch)
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters()
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        imagined.to_empty(device="cpu")
        batch = {name: torch.empty_like(value) for name, value in batch.items()}
        with fake:
            _forward_backward(blueprint, imagined, batch)
    assert len(real.names) > 50
    assert real.names == fake.names


def _forward_backward(blueprint: NativeModel, model: nn.Module, batch: Batch) -> None:
    loss, count = blueprint.loss(model, batch)
    (loss / count.clamp(min=1)).backward()


# -- auxiliary losses -------------------------------------------------------------------------------------


def test_the_balance_loss_is_transformers_of_each_router() -> None:
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    labels = _batch()["labels"]
    labels[0, 7:] = -100
    labels[1] = -100
    filled = filled_tokens(labels)
    assert filled.sum() == 7
    logits = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    loss = Router(replace(MIXTRAL, balance_loss=0.3)).losses(logits, filled.flatten())
    expected = load_balancing_loss_func((logits,), 5, 2, attention_mask=filled)
    torch.testing.assert_close(loss, 0.3 * expected)
    even = Router(replace(MIXTRAL, balance_loss=0.3, experts_per_token=5)).losses(logits, filled.flatten())
    assert even.item() == pytest.approx(0.3 * 5)


def test_the_z_loss_is_the_mean_square_of_the_logsumexp() -> None:
    logits = torch.randn(48, 5, dtype=torch.float64)
    filled = torch.arange(48) < 30
    loss = Router(replace(MIXTRAL, z_loss=0.2)).losses(logits, filled)
    torch.testing.assert_close(loss, 0.2 * logits[:30].logsumexp(-1).square().mean())


def test_a_micro_batchs_auxiliary_losses_count_by_its_targets(whole: Any) -> None:
    balanced = NativeModel(replace(QWEN3, balance_loss=0.1, z_loss=0.01))
    model, batch = whole(balanced), _batch()
    _loud(model)
    logits: list[Tensor] = []
    for layer in list(model.layers)[1:]:
        router = layer.mlp.gate
        router.register_forward_hook(lambda r, args, _: logits.append(F.linear(args[0], r.weight)))
    total, count = balanced.loss(model, batch)
    plain, _ = NativeModel(QWEN3).loss(model, batch)
    filled = filled_tokens(batch["labels"]).flatten()
    auxiliary = sum(model.layers[1].mlp.gate.losses(each, filled) for each in logits[:2])
    torch.testing.assert_close(total, plain + count * auxiliary)
    before = torch.autograd.grad(plain, model.layers[1].mlp.gate.weight)[0]
    after = torch.autograd.grad(total, model.layers[1].mlp.gate.weight)[0]
    assert (after - before).abs().max() > 1e-3 and before.abs().max() > 1e-3
    batch["labels"].fill_(-100)
    total, count = balanced.loss(model, batch)
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all((p.grad is None) or (p.grad == 0).all() for p in model.parameters())


def test_what_auxiliary_losses_exclude_is_refused_in_one_line() -> None:
    blueprint = NativeModel(replace(MIXTRAL, balance_loss=0.1))
    with pytest.raises(RecipeError, match=r"cannot be cut into stages.*auxiliary losses"):
        blueprint.stage(Stage(range(1)))
    assert "auxiliary losses" in blueprint.compile_obstacle()
    assert "whole sequences" in blueprint.context_parallel_obstacle(nn.Module())
    plain = NativeModel(MIXTRAL)
    assert not plain.compile_obstacle() and not plain.context_parallel_obstacle(nn.Module())


# -- size and cost ----------------------------------------------------------------------------------------


@ALL
def test_counted_flops_are_those_of_the_active_parameters(dimensions: Dimensions) -> None:
    """Six FLOPs per active parameter and token. Attention: twelve per head, channel and pair of tokens, causal half."""
    blueprint = NativeModel(dimensions)
    batch, counter = _batch(), FlopCounter()
    with torch.device("meta"):
        model = blueprint.build()
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        model.to_empty(device="cpu")
        _forward_backward(blueprint, model, {name: torch.empty_like(value) for name, value in batch.items()})
    d, (rows, length) = dimensions, batch["input_ids"].shape
    vectors = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 1)
    products = d.active_parameters - d.vocab * d.width - vectors
    attention = 6 * d.layers * d.heads * d.head_width * length
    assert counter.flops - counter.recomputed == rows * length * (6 * products + attention)


@ALL
def test_counts(dimensions: Dimensions) -> None:
    with torch.device("meta"):
        model = NativeModel(dimensions).build()
    assert sum(p.numel() for p in model.parameters()) == dimensions.parameters
    assert sum(p.numel() for p in model.layers[-1].parameters()) == dimensions.block_parameters
    chosen = sum(
        p.numel() // d * k
        for name, p in model.named_parameters()
        for d, k in [(dimensions.experts, dimensions.experts_per_token) if p.dim() == 3 else (1, 1)]
    )
    assert chosen == dimensions.active_parameters


@ALL
def test_stages_are_the_model(dimensions: Dimensions, whole: Any) -> None:
    """Blocks keep their numbers, and with them their kind and their initial values."""
    blueprint = NativeModel(dimensions)
    expected = dict(whole(blueprint).named_parameters())
    seen: set[str] = set()
    for stage in (Stage(range(1), last=False), Stage(range(1, dimensions.layers), first=False)):
        with torch.device("meta"):
            part = blueprint.stage(stage)
        part.to_empty(device="cpu")
        blueprint.fill(part, 0)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, expected[name]), name
            seen.add(name)
    assert seen == expected.keys()


@pytest.mark.parametrize("degrees", [{"data": 2}, {"data": 7}])
def test_sharded_fill_is_the_whole_fill(degrees: dict[str, int], whole: Any, gathered: Any) -> None:
    blueprint = NativeModel(QWEN3)
    expected = dict(whole(blueprint, seed=3).named_parameters())
    parts = gathered(blueprint, degrees, seed=3)
    for name, parameter in expected.items():
        assert torch.equal(parts[name], parameter), name
    experts = expected["layers.1.mlp.experts.down_proj"]
    assert experts.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert not torch.equal(experts[0], experts[1])
