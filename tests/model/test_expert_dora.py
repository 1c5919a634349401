"""DoRA of experts: PEFT's own DoRA layers one by one, other ranks' experts, packed stacks, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model import expert_lora
from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import AdapterFiles, write_adapter
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import is_adapter
from shardwise.runtime.parallel.shard_slices import named_parameters

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.harness.adapted_experts import (  # noqa: E402  transformers is optional
    EXPERTS,
    RANK,
    adapted,
    apart,
    experts_of,
    gradients,
    logits,
    opened,
    pack,
    routed,
    spec,
)
from tests.harness.families import save_tiny  # noqa: E402

STACKS = ("gate_up_proj", "down_proj")
PARTS = ("_lora_A", "_lora_B", "_lora_magnitude_vector")


def layers_of_peft(module: Any, stacks: dict[str, Tensor]) -> dict[str, list[Any]]:
    """For every expert and stack an ``nn.Linear`` with PEFT's DoRA, and the values of a module's adapters."""
    layers: dict[str, list[Any]] = {}
    config = peft.LoraConfig(r=RANK, lora_alpha=6, use_dora=True, target_modules=["0"])
    for name, stack in stacks.items():
        layers[name] = []
        for expert, matrix in enumerate(stack):
            plain = nn.Linear(matrix.shape[1], matrix.shape[0], bias=module.has_bias, dtype=matrix.dtype)
            plain.weight.data.copy_(matrix)
            if module.has_bias:
                plain.bias.data.copy_(getattr(module, f"{name}_bias")[expert])
            tree = peft.inject_adapter_in_model(config, nn.Sequential(plain)).to(matrix.dtype)
            for parameter, end in zip(parts(tree[0]), PARTS, strict=True):
                parameter.data.copy_(module.get_parameter(name + end)[expert])
            layers[name].append(tree[0])
    return layers


def parts(layer: Any) -> tuple[nn.Parameter, ...]:
    magnitude = layer.lora_magnitude_vector["default"].weight
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight, magnitude


def one_by_one(
    module: Any, layers: dict[str, list[Any]], x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """One token and expert after the other."""
    tokens = []
    for token, chosen, shares in zip(x, index.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            if expert < module.num_experts:
                inner = module._apply_gate(layers["gate_up_proj"][expert](token.unsqueeze(0)))
                total = total + share * layers["down_proj"][expert](inner)[0]
        tokens.append(total)
    return torch.stack(tokens)


def gradients_of_peft(layers: dict[str, list[Any]], out: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    (out * target).sum().backward()
    found = {key: value.grad for key, value in zip("xw", inputs, strict=True)}
    for name, experts in layers.items():
        for end, values in zip(PARTS, zip(*map(parts, experts), strict=True), strict=True):
            grads = [value.grad if value.grad is not None else torch.zeros_like(value) for value in values]
            found[name + end] = torch.stack(grads)
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("partial", [False, True], ids=["all experts", "some experts"])
def test_gradients_are_pefts(
    family: str, quantize: str, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of three experts at a time, of four; expert 2 gets no token."""
    module = experts_of(family, quantize, name="dora")
    monkeypatch.setattr(expert_lora, "_SUMMED", 3 * 2 * 48 * 32)
    stacks = pack(module)
    for name in STACKS:
        if quantize == "none":
            stack = module.get_parameter(name).detach()
            stacks[name] = stack.transpose(1, 2) if module.is_transposed else stack
    module._is_expert_parallel = partial
    x, index, weights = routed(torch.float64, EXPERTS + partial)
    if partial:
        weights = weights.detach().masked_fill(index == EXPERTS, 0.0).requires_grad_()
    layers = layers_of_peft(module, {name: stack.double() for name, stack in stacks.items()})
    found = module(x, index, weights)
    ours = gradients(module, found, x, weights)
    expected = one_by_one(module, layers, x, index, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    theirs = gradients_of_peft(layers, expected, x, weights)
    theirs["w"] = theirs["w"].masked_fill(index == EXPERTS, 0.0)
    assert apart(ours, theirs) <= 1e-10
    assert all(ours[name + end].any() for name in STACKS for end in PARTS)


def test_rows_of_other_ranks_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN where the kernel writes nothing reaches no gradient, also not of the magnitudes."""
    module = experts_of("qwen3_moe", "none", torch.float32, name="dora", rank=4)
    module._is_expert_parallel = True
    x, index, weights = routed(torch.float32, EXPERTS + 2)
    weights = weights.detach().masked_fill(index >= EXPERTS, 0.0).requires_grad_()
    index = index.clamp(max=EXPERTS)
    kernel = F.grouped_mm

    def poisoned(rows: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
        out = kernel(rows, stack, offs=offs)
        beyond = torch.arange(len(out)).unsqueeze(1) >= offs[-1]
        return torch.where(beyond, torch.nan, out)

    clean = gradients(module, module(x, index, weights), x, weights)
    monkeypatch.setattr(F, "grouped_mm", poisoned)
    ours = gradients(module, module(x, index, weights), x, weights)
    assert all(torch.isfinite(value).all() for value in ours.values())
    assert apart(ours, clean) <= 1e-6 * max(float(value.abs().max()) for value in clean.values())


def test_dropout_is_also_on_the_inputs_of_w_in_the_change_of_direction() -> None:
    """As PEFT: with magnitudes at the norms, only the inputs of A are dropped."""
    module = experts_of("qwen3_moe", name="dora", dropout=0.5)
    x, index, weights = routed(torch.float64)
    for name in STACKS:
        module.get_parameter(f"{name}_lora_B").data.zero_()
        norms = module.get_parameter(name).detach().norm(dim=2)
        module.get_parameter(f"{name}_lora_magnitude_vector").data.copy_(norms)
    assert torch.equal(module.train()(x, index, weights), module.eval()(x, index, weights))
    module.get_parameter("down_proj_lora_magnitude_vector").data.mul_(2)
    assert not torch.allclose(module.train()(x, index, weights), module.eval()(x, index, weights))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_the_start_and_the_files(family: str, quantize: str, tmp_path: Path) -> None:
    """The first logits are the base's; files come back bit-equal, and PEFT refuses them in one sentence."""
    save_tiny(family, tmp_path / "base")
    values = {"name": "dora", "targets": ("q_proj", "experts"), "quantize": quantize}
    base = HuggingFaceModel(str(tmp_path / "base"), 12)
    blueprint = AdaptedModel(base, spec(**values))
    model = blueprint.build()
    blueprint.fill(model, 0)
    blueprint.restore(model)
    started = logits(model.eval())
    plain = AdaptedModel(base, spec(**values | {"name": "lora"}))
    without = plain.build()
    plain.fill(without, 0)
    plain.restore(without)
    assert torch.equal(started, logits(without.eval()))
    blueprint, model = adapted(tmp_path / "base", family, **values)
    assert float((logits(model) - started).abs().max()) > 1e-2
    tensors = {name: p.detach() for name, p in named_parameters(model) if p.requires_grad}
    assert sum(name.endswith("_lora_magnitude_vector") for name in tensors) == 4
    write_adapter(tmp_path / "ours", tensors, blueprint.config(), None)
    files = AdapterFiles(tmp_path / "ours")
    files.require(blueprint.spec, blueprint.adapter_shapes)
    assert all(torch.equal(files.read(name), tensor) for name, tensor in tensors.items())
    again = AdaptedModel(base, spec(**values, start_from=str(tmp_path / "ours")))
    resumed = again.build()
    again.fill(resumed, 0)
    again.restore(resumed)
    assert torch.equal(logits(resumed.eval()), logits(model))
    with pytest.raises(ValueError, match="ParamWrapper does not work with use_dora"):
        peft.PeftModel.from_pretrained(opened(tmp_path / "base"), str(tmp_path / "ours"))
    assert any("PEFT cannot load" in note for note in blueprint.departures(16))
    assert all(is_adapter(name) for name in tensors)
