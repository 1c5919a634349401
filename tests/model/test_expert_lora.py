"""Adapters of experts: the products, other ranks' experts, which matrices are reached, and PEFT's files both ways."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.model.adapted import AdaptedModel
from shardwise.model.expert_lora import AdaptedExperts, expert_stacks
from shardwise.model.files.peft import CONFIG, AdapterFiles, write_adapter
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import is_adapter
from shardwise.runtime.parallel.shard_slices import named_parameters
from tests.harness.adapted_experts import (
    EXPERTS,
    RANK,
    WIDTH,
    adapted,
    apart,
    experts_of,
    gradients,
    logits,
    materialised,
    opened,
    pack,
    routed,
    spec,
)
from tests.harness.families import causal_families, config_of, save_tiny

transformers = pytest.importorskip("transformers")

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
"""Two of the common layout, and one with transposed stacks, biases and a gate of its own."""
# ---- products ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("partial", [False, True], ids=["all experts", "some experts"])
def test_gradients_are_those_of_the_materialised_update(family: str, partial: bool) -> None:
    module = experts_of(family)
    module._is_expert_parallel = partial
    x, index, weights = routed(torch.float64, EXPERTS + partial)
    if partial:
        weights = weights.detach().masked_fill(index == EXPERTS, 0.0).requires_grad_()
    found, expected = module(x, index, weights), materialised(module, x, index, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    ours, theirs = gradients(module, found, x, weights), gradients(module, expected, x, weights)
    theirs["w"] = theirs["w"].masked_fill(index == EXPERTS, 0.0)
    assert apart(ours, theirs) <= 1e-10
    assert set(ours) - {"x", "w"} == {n for n, _ in module.named_parameters() if "_lora_" in n}
    unused = [ours[name][2] for name in ours if "_lora_" in name]
    assert all(not gradient.any() for gradient in unused), "no token goes to expert 2"


class _Poisoned(torch.autograd.Function):
    """``grouped_mm`` whose rows beyond the groups are NaN, in the result and in the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, stack, ends)
        out = torch._grouped_mm(rows, stack, offs=ends)
        out[ends[-1] :] = torch.nan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, stack, ends = ctx.saved_tensors
        back = torch._grouped_mm(grads[0], stack.transpose(1, 2), offs=ends)
        back[ends[-1] :] = torch.nan
        return back, torch._grouped_mm(rows.t(), grads[0], offs=ends), None


@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("rank", [3, 4])
def test_rows_that_the_kernel_leaves_are_never_read(
    rank: int, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the rows go to other ranks' experts, with NaN where the kernel writes nothing."""
    module = experts_of("qwen3_moe", quantize, torch.float32, rank=rank)
    if quantize != "none":
        pack(module)
    module._is_expert_parallel = True
    x, index, weights = routed(torch.float32, EXPERTS + 2)
    here = index < EXPERTS
    weights = weights.detach().masked_fill(~here, 0.0).requires_grad_()
    index = index.clamp(max=EXPERTS)
    clean = module(x, index, weights)
    expected = gradients(module, clean, x, weights)
    monkeypatch.setattr(F, "grouped_mm", lambda rows, stack, offs: _Poisoned.apply(rows, stack, offs))
    found = module(x, index, weights)
    assert torch.isfinite(found).all() and torch.equal(found, clean)
    ours = gradients(module, found, x, weights)
    assert all(torch.isfinite(value).all() for value in ours.values())
    assert apart(ours, expected) <= 1e-6 * max(float(value.abs().max()) for value in expected.values())
    assert not ours["w"][~here].any() and not ours["x"][~here.any(1)].any()
    assert not found[~here.any(1)].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_packed_base_computes_with_what_it_stands_for(family: str, quantize: str) -> None:
    module = experts_of(family, quantize, torch.float64)
    stacks = pack(module)
    x, index, weights = routed(torch.float64)
    found = module(x, index, weights)
    ours = gradients(module, found, x, weights)
    for name, stack in stacks.items():
        whole = (stack.transpose(1, 2) if module.is_transposed else stack).double()
        module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    expected = materialised(module, x, index, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert apart(ours, gradients(module, expected, x, weights)) <= 1e-9


def test_dropout_is_on_the_inputs_of_a_alone() -> None:
    module = experts_of("qwen3_moe", dropout=0.5)
    x, index, weights = routed(torch.float64)
    trained, still = module.train()(x, index, weights), module.eval()(x, index, weights)
    assert not torch.equal(trained, still)
    for name in ("gate_up_proj", "down_proj"):
        module.get_parameter(f"{name}_lora_B").data.zero_()
    assert torch.equal(module.train()(x, index, weights), module.eval()(x, index, weights))


# ---- which matrices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "linear", "stacks"),
    [
        ("all", True, ("down_proj", "gate_up_proj")),
        ("attention", True, ()),
        ("mlp", False, ("down_proj", "gate_up_proj")),
        ("experts", False, ("down_proj", "gate_up_proj")),
        (("q_proj", "experts"), True, ("down_proj", "gate_up_proj")),
        (("down_proj",), False, ("down_proj",)),
        (r".*experts\.gate_up_proj|.*_proj", True, ("down_proj", "gate_up_proj")),
        (r".*layers\.1\..*experts", False, ("down_proj", "gate_up_proj")),
    ],
    ids=str,
)
def test_targets(targets: Any, linear: bool, stacks: tuple[str, ...], tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    blueprint = AdaptedModel(HuggingFaceModel(str(tmp_path), 12), spec(targets=targets))
    names = blueprint.adapter_shapes
    found = {name.rpartition(".")[2].removesuffix("_lora_A") for name in names if name.endswith("_lora_A")}
    assert sorted(found) == [*stacks]
    assert any("self_attn" in name for name in names) == linear
    if isinstance(targets, str) and "layers" in targets:
        assert all("layers.1" in name for name in names)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_bias": True}, "experts have no lora_bias (adapter.lora_bias)"),
        ({"init": "loftq", "quantize": "nf4"}, "experts have no loftq (adapter.init)"),
        ({"targets": ("w1",)}, "no linear layer of the model's blocks is 'w1'"),
    ],
    ids=["bias", "loftq", "name"],
)
def test_what_experts_cannot_have(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    with pytest.raises(RecipeError) as raised:
        AdaptedModel(HuggingFaceModel(str(tmp_path), 12), spec(**values))
    assert message in str(raised.value)
    if "lora_bias" in values:
        AdaptedModel(HuggingFaceModel(str(tmp_path), 12), spec(**values, targets="attention"))


def test_ranks_and_scales_of_single_stacks(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    pattern = {"layers.0.mlp.experts.down_proj": 5}
    blueprint, model = adapted(tmp_path, "mixtral", rank_pattern=pattern, rank_stabilized=True)
    first, second = (model.get_submodule(f"model.layers.{i}.mlp.experts") for i in range(2))
    assert isinstance(first, AdaptedExperts) and isinstance(second, AdaptedExperts)
    assert first.scales == {"gate_up_proj": 6 / 3**0.5, "down_proj": 6 / 5**0.5}
    assert second.get_parameter("down_proj_lora_A").shape == (EXPERTS, 3, 48)
    assert blueprint.adapter_shapes["model.layers.0.mlp.experts.down_proj_lora_B"] == (EXPERTS, WIDTH, 5)
    trained, frozen = blueprint.parameter_counts()
    assert trained == sum(p.numel() for n, p in named_parameters(model) if is_adapter(n))
    assert trained + frozen == sum(p.numel() for _, p in named_parameters(model))


# ---- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "values",
    [
        {"targets": "all"},
        {"targets": ("down_proj",)},
        {
            "targets": "experts",
            "layers_to_transform": (1,),
            "rank_pattern": {"gate_up_proj": 7},
            "dropout": 0.5,
        },
    ],
    ids=["all", "one stack", "one block"],
)
def test_our_files_in_peft(family: str, values: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save_tiny(family, tmp_path / "base")
    blueprint, model = adapted(tmp_path / "base", family, **values)
    tensors = {name: p.detach() for name, p in named_parameters(model) if p.requires_grad}
    write_adapter(tmp_path / "ours", tensors, blueprint.config(), None)
    theirs = peft.PeftModel.from_pretrained(opened(tmp_path / "base"), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(logits(theirs), logits(model), atol=5e-6, rtol=1e-5)
    assert float((logits(model) - logits(opened(tmp_path / "base"))).abs().max()) > 1e-2
    files = AdapterFiles(tmp_path / "ours")
    files.require(blueprint.spec, blueprint.adapter_shapes)
    assert all(torch.equal(files.read(name), tensor) for name, tensor in tensors.items())


LOST = {
    "inkling2_loop_text": "sconv.weight_proj",
    "inkling2_text": "sconv.weight_proj",
    "laguna": "mlp.shared_experts.",
}
"""Families whose own folders PEFT 0.21 cannot read, and layers that it warns of. It applies the renamings of the base's
checkpoint to the adapter's names, and these match names that are not renamed."""
REFUSED = {"nemotron_h": "'out_proj' is incompatible with Mamba-based models"}
"""A family in which PEFT refuses adapters of Mamba's ``out_proj``, also as a parameter."""
QUICK = {"jamba", "laguna", "nemotron_h", "phimoe"}
"""`make test-all` has all families."""


@cache
def mixtures() -> list[str]:
    """The families with stacks of experts that can be adapted."""
    found = []
    for family in causal_families():
        try:
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config_of(family))
        except Exception:  # not causal: tests/families has the reasons
            continue
        found += [family] if any(expert_stacks(model, [])) else []
    return found


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.long) for f in causal_families()]
)
def test_every_mixtures_files_in_peft(family: str, tmp_path: Path) -> None:
    """With adapters on all linear layers and experts: PEFT's logits are ours, or PEFT says which layers it loses."""
    peft = pytest.importorskip("peft")
    if family not in mixtures():
        assert family not in QUICK and family not in LOST
        return
    save_tiny(family, tmp_path / "base")
    blueprint, model = adapted(tmp_path / "base", family, targets="all")
    tensors = {name: p.detach() for name, p in named_parameters(model) if p.requires_grad}
    write_adapter(tmp_path / "ours", tensors, blueprint.config(), None)
    files = AdapterFiles(tmp_path / "ours")
    files.require(blueprint.spec, blueprint.adapter_shapes)
    assert all(torch.equal(files.read(name), tensor) for name, tensor in tensors.items())
    if family in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family]):
            peft.PeftModel.from_pretrained(opened(tmp_path / "base"), str(tmp_path / "ours"))
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        theirs = peft.PeftModel.from_pretrained(opened(tmp_path / "base"), str(tmp_path / "ours")).eval()
    (missing,) = [str(w.message) for w in said if "missing adapter keys" in str(w.message)] or [""]
    assert (LOST[family] in missing) if family in LOST else not missing
    if family not in LOST:
        ours = logits(model)
        assert float((logits(theirs) - ours).abs().max()) <= 1e-5 * max(1.0, float(ours.abs().max()))


def test_shared_experts_and_dense_blocks_in_peft(tmp_path: Path) -> None:
    """In target_modules, PEFT would take their gate_proj, up_proj and down_proj for those of the experts."""
    peft = pytest.importorskip("peft")
    save_tiny("deepseek_v3", tmp_path / "base")
    values = {"rank_pattern": {"shared_experts.down_proj": 5}, "alpha_pattern": {"layers.0.mlp.up_proj": 2.0}}
    blueprint, model = adapted(tmp_path / "base", "deepseek_v3", targets="all", **values)
    config = blueprint.config()
    assert "shared_experts.up_proj.weight" in config["target_parameters"]
    assert not {"gate_proj", "up_proj", "down_proj"} & set(config["target_modules"])
    tensors = {name: p.detach() for name, p in named_parameters(model) if p.requires_grad}
    write_adapter(tmp_path / "ours", tensors, config, None)
    theirs = peft.PeftModel.from_pretrained(opened(tmp_path / "base"), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(logits(theirs), logits(model), atol=5e-6, rtol=1e-5)
    files = AdapterFiles(tmp_path / "ours")
    files.require(blueprint.spec, blueprint.adapter_shapes)
    named = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert not list(files.lacks(path for path in named if f"{path}.lora_A.weight" in tensors))
    files.shapes.pop("model.layers.0.mlp.up_proj.lora_A.weight")
    assert list(files.lacks(["model.layers.0.mlp.up_proj"])) == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [["gate_up_proj", "down_proj"], ["experts.down_proj"]], ids=["both", "one"])
def test_pefts_files_here(family: str, names: list[str], tmp_path: Path) -> None:
    """Bare names of parameters, as PEFT's conversion of older configs writes them, and a linear layer."""
    peft = pytest.importorskip("peft")
    save_tiny(family, tmp_path / "base")
    config = peft.LoraConfig(
        r=RANK, lora_alpha=6, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False
    )
    theirs = peft.get_peft_model(opened(tmp_path / "base"), config).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    targets = ("q_proj", *names)
    base = HuggingFaceModel(str(tmp_path / "base"), 12)
    blueprint = AdaptedModel(base, spec(targets=targets, start_from=str(tmp_path / "theirs")))
    model = blueprint.build()
    blueprint.fill(model, 0)
    blueprint.restore(model)
    torch.testing.assert_close(logits(model.eval()), logits(theirs), atol=5e-6, rtol=1e-5)


def test_files_that_are_not_of_experts_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save_tiny("qwen3_moe", tmp_path / "base")
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    peft.get_peft_model(opened(tmp_path / "base"), config).save_pretrained(str(tmp_path / "theirs"))
    base = HuggingFaceModel(str(tmp_path / "base"), 12)
    with pytest.raises(
        CheckpointError, match=r"it has model.layers.0.mlp.gate.lora_A.weight, which this model lacks"
    ):
        AdaptedModel(base, spec(targets=("q_proj",), alpha=8.0, start_from=str(tmp_path / "theirs")))
    config = tmp_path / "theirs" / CONFIG
    config.write_text(config.read_text().replace("mlp.gate.weight", "self_attn.sinks"))
    with pytest.raises(CheckpointError, match="target_parameters is "):
        AdapterFiles(tmp_path / "theirs")


def test_stacks_of_models_without_experts(tmp_path: Path) -> None:
    """Other layouts are left to the notes: Dbrx has three stacks, Llama 4 another contract."""
    for family, count in (("llama", 0), ("dbrx", 0), ("llama4_text", 0), ("deepseek_v3", 2)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config_of(family))
        assert len(list(expert_stacks(model, []))) == count, family
