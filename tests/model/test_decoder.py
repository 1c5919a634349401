"""The native decoder: the same function as transformers', few saved tensors, no host syncs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.model.attention import rotary_angles, rotate_positions
from shardwise.model.blueprint import Batch
from shardwise.model.decoder import Block, Decoder
from shardwise.model.native import NativeModel
from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime.parallel.shard_slices import share, shared_names

LLAMA = Dimensions(3, 48, 4, 2, 40, vocab=51, context=64)
QWEN3 = Dimensions(3, 48, 4, 2, 40, vocab=51, context=64, family="qwen3", head_dim=16)
GPT2 = Dimensions(3, 48, 4, 4, 192, vocab=51, context=64, family="gpt2", tied=True)
ALL = pytest.mark.parametrize("dimensions", [LLAMA, QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])


def _batch(length: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 51, (2, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, :5] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def _loud(model: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dimensions", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_llama_and_qwen3_are_those_of_transformers(dimensions: Dimensions, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    kind = dimensions.family.capitalize()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=51, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64, head_dim=dimensions.head_width,
        rope_parameters={"rope_type": "default", "rope_theta": dimensions.rope_theta},
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    _loud(theirs)
    ours = Decoder(dimensions).to(dtype)
    ours.load_state_dict({name.removeprefix("model."): value for name, value in theirs.state_dict().items()})
    ids = _batch()["input_ids"]
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours(ids)
    # In fp64 theirs still rotates by fp32 angles, ours by fp64 ones.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


def test_gpt2_is_transformers_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=51, n_embd=48, n_layer=3, n_head=4, n_positions=64)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    _loud(theirs)
    ours = Decoder(GPT2).double()
    ours.load_state_dict(_from_gpt2(theirs.state_dict()))
    ids = _batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-10, atol=1e-10)


def _from_gpt2(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their fused and transposed weights under our names."""
    plain = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
    transposed = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
    ours = {
        "embed_tokens.weight": theirs["transformer.wte.weight"],
        "embed_positions.weight": theirs["transformer.wpe.weight"],
        "lm_head.weight": theirs["lm_head.weight"],
        "norm.weight": theirs["transformer.ln_f.weight"],
        "norm.bias": theirs["transformer.ln_f.bias"],
    }
    for layer in range(3):
        for kind in ("weight", "bias"):
            for old, new in plain.items():
                ours[f"layers.{layer}.{new}.{kind}"] = theirs[f"transformer.h.{layer}.{old}.{kind}"]
            for old, new in transposed.items():
                ours[f"layers.{layer}.{new}.{kind}"] = theirs[f"transformer.h.{layer}.{old}.{kind}"].t()
            fused = theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"].t()
            for name, part in zip("qkv", fused.chunk(3), strict=True):
                ours[f"layers.{layer}.self_attn.{name}_proj.{kind}"] = part
    return ours


@ALL
def test_a_token_sees_only_what_came_before(dimensions: Dimensions) -> None:
    model = Decoder(dimensions)
    _loud(model)
    ids = _batch()["input_ids"]
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 51
    with torch.no_grad():
        difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:10].max() == 0
    assert difference[10:].min() > 0


def test_rotary_angles_are_relative_and_precise() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    positions = torch.tensor([0, 3, 100_000, 100_003])
    cos, sin = rotary_angles(positions, 16, 500000.0, torch.float64)
    turned_query, turned_key = (
        rotate_positions(x.expand(1, 4, 1, 16), cos, sin)[0, :, 0] for x in (query, key)
    )
    near, far = turned_query[1] @ turned_key[0], turned_query[3] @ turned_key[2]
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)
    rounded = rotary_angles(positions, 16, 500000.0, torch.bfloat16)[0]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), cos, rtol=0, atol=0.005)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_real_and_fake_runs_are_one_program_without_waits(
    dimensions: Dimensions, dtype: torch.dtype, recorder: Any
) -> None:
    blueprint = NativeModel(dimensions)
    real, fake = recorder(), recorder()
    with torch.device("meta"):
        model, imagined = blueprint.build().to(dtype), blueprint.build().to(dtype)
        aliases = shared_names(blueprint.build())
    model.to_empty(device="cpu")
    blueprint.fill(model, 0)
    batch = _batch()
    with real:
        _forward_backward(blueprint, model, batch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        imagined.to_empty(device="cpu")
        share(imagined, aliases)
        batch = {name: torch.empty_like(value) for name, value in batch.items()}
        with fake:
            _forward_backward(blueprint, imagined, batch)
    assert len(real.names) > 50
    assert real.names == fake.names


def _forward_backward(blueprint: NativeModel, model: nn.Module, batch: Batch) -> None:
    loss, count = blueprint.loss(model, batch)
    (loss / count.clamp(min=1)).backward()


class _FusedNorm(torch.autograd.Function):
    """What CUDA's kernel keeps: the input and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.float().pow(2).mean(-1).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd.unsqueeze(-1)).to(x.dtype) * weight


def test_a_llama_block_keeps_the_standard_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """h(12 + 4r) + 8f bytes per token in 16 bits, and per token an fp32 per head and norm."""
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: _FusedNorm.apply(x, weight))
    d = Dimensions(1, 64, 4, 2, 160, vocab=8)
    block = Block(d).bfloat16()
    batch, length = 2, 32
    hidden = torch.randn(batch, length, d.width, dtype=torch.bfloat16, requires_grad=True)
    rotation = rotary_angles(torch.arange(length), d.head_width, d.rope_theta, torch.bfloat16)
    known = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *rotation)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.dtype in (torch.bfloat16, torch.float32):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(hidden, rotation)
    ratio = d.kv_heads / d.heads
    per_token = d.width * (12 + 4 * ratio) + 8 * d.ffn + 4 * d.heads + 2 * 4
    assert sum(kept.values()) == batch * length * per_token
    assert out.shape == hidden.shape
