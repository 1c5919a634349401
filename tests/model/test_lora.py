"""Adapters on layers: where they start, what they count, which layers they take, and PEFT's files both ways."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.model.adapted import AdaptedModel
from shardwise.model.factory import FactoryModel
from shardwise.model.files.peft import CONFIG, TENSORS, AdapterFiles, adapter_config, write_adapter
from shardwise.model.filling import fill_magnitudes
from shardwise.model.lora import LoraLinear, adapt, is_adapter
from shardwise.model.native import NativeModel
from shardwise.model.open import blueprint_of
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.load import recipe_of
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.parallel.shard_slices import named_parameters

transformers = pytest.importorskip("transformers")

SMALL = Dimensions(2, 24, 2, 1, 40, vocab=53, context=32)
LENGTH = 12


def spec(**values: Any) -> AdapterSpec:
    return AdapterSpec(**({"rank": 4, "alpha": 8.0} | values))


# ---- models -----------------------------------------------------------------------------------------------


def _models() -> dict[str, tuple[Any, str]]:
    """A small model of every family, with random weights, and the class of its blocks."""
    t = transformers
    llama = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}
    return {
        "gpt2": (
            lambda: t.GPT2LMHeadModel(
                t.GPT2Config(vocab_size=53, n_positions=32, n_embd=24, n_layer=2, n_head=2)
            ),
            "GPT2Block",
        ),
        "llama": (
            lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama, num_hidden_layers=2)),
            "LlamaDecoderLayer",
        ),
        "bert": (
            lambda: t.BertForSequenceClassification(t.BertConfig(**llama, num_hidden_layers=2)),
            "BertLayer",
        ),
        "t5": (
            lambda: t.T5ForConditionalGeneration(
                t.T5Config(vocab_size=53, d_model=24, d_kv=12, d_ff=40, num_layers=2, num_heads=2)
            ),
            "T5Block",
        ),
    }


FAMILIES = pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = _models()[family][0]()
    return model.eval()


def units_of(model: nn.Module, family: str) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == _models()[family][1]]


@torch.no_grad()
def logits(model: Any, family: str) -> Tensor:
    ids = torch.randint(1, 53, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    given = {"decoder_input_ids": ids} if family == "t5" else {}
    found: Tensor = model(input_ids=ids, **given).logits
    return found


@torch.no_grad()
def start(model: nn.Module, zero: bool) -> None:
    """Values of an adapter as they are at the start of a run, or all random."""
    chance = torch.Generator().manual_seed(1)
    for name, parameter in named_parameters(model):
        if is_adapter(name) and parameter.ndim == 2:
            parameter.normal_(0, 0.3, generator=chance)
            if zero and ".lora_B." in name:
                parameter.zero_()
    fill_magnitudes(model)
    if not zero:
        for layer in model.modules():
            if isinstance(layer, LoraLinear) and layer.lora_magnitude_vector is not None:
                layer.lora_magnitude_vector *= 1.25


# ---- layers -----------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_with_b_at_zero_logits_are_those_of_the_base(family: str, name: str) -> None:
    model = made(family)
    expected = logits(model, family)
    paths = adapt(model, units_of(model, family), spec(name=name))
    start(model, zero=True)
    assert len(paths) >= 8 and torch.equal(logits(model, family), expected)
    start(model, zero=False)
    assert (logits(model, family) - expected).abs().max() > 0.01 * expected.abs().max()


@FAMILIES
def test_attention_and_mlp_are_all(family: str) -> None:
    found = {}
    for targets in ("attention", "mlp", "all"):
        model = made(family)
        found[targets] = set(adapt(model, units_of(model, family), spec(targets=targets)))
    assert found["attention"] and found["mlp"]
    assert found["attention"].isdisjoint(found["mlp"])
    assert found["attention"] | found["mlp"] == found["all"]
    blocks = ("h.", "layers.", "layer.", "block.")
    assert all(any(block in path for block in blocks) for path in found["all"])


def test_scale_dropout_and_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    adapt(model, [], spec(rank=4, alpha=8, rank_stabilized=True, dropout=0.5))
    layer = model[0]
    assert isinstance(layer, LoraLinear) and layer.scale == 8 / 4**0.5
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "0.lora_A.weight",
        "0.lora_B.weight",
    }
    x = torch.randn(3, 6)
    with torch.no_grad():
        expected = (
            x @ layer.weight.t() + layer.bias + 4.0 * (x @ layer.lora_A.weight.t() @ layer.lora_B.weight.t())
        )
    torch.testing.assert_close(model.eval()(x), expected)
    assert not torch.allclose(model.train()(x), expected)


def test_the_norm_of_dora_is_a_constant() -> None:
    """Section 4.3 of the paper: W's part of the gradient goes through the numerator alone."""
    model = nn.Sequential(nn.Linear(6, 5, bias=False)).double()
    adapt(model, [], spec(name="dora"))
    start(model, zero=False)
    layer, x = model[0], torch.randn(3, 6, dtype=torch.float64)
    assert isinstance(layer, LoraLinear)
    model(x).sum().backward()
    a, b = layer.lora_A.weight, layer.lora_B.weight
    whole = layer.weight + layer.scale * b @ a
    share = (layer.lora_magnitude_vector / whole.norm(dim=1)).detach()
    wanted = torch.autograd.grad((share * (x @ whole.t())).sum(), [a, b])
    torch.testing.assert_close([a.grad, b.grad], list(wanted))


def test_starts_from_what_peft_starts_from_on_any_rank(gathered: Any, whole: Any) -> None:
    blueprint = AdaptedModel(NativeModel(SMALL), spec(name="dora"))
    model = whole(blueprint)
    for layer in (module for module in model.modules() if isinstance(module, LoraLinear)):
        bound = layer.in_features**-0.5
        assert 0.9 * bound < layer.lora_A.weight.abs().max() <= bound
        assert not layer.lora_B.weight.any()
        assert torch.equal(layer.lora_magnitude_vector, layer.weight.norm(dim=1))
    expected = {name: parameter.detach() for name, parameter in named_parameters(model)}
    found = gathered(blueprint, {"data": 3})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_packed_on_any_rank_alike(quantize: str, gathered: Any, whole: Any) -> None:
    blueprint = AdaptedModel(NativeModel(SMALL), spec(quantize=quantize, targets="attention"))
    expected = dict(named_parameters(whole(blueprint)))
    found = gathered(blueprint, {"data": 3})
    assert sum(name.endswith(".packed") for name in expected) == 2 * 7
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_users_module(quantize: str, whole: Any) -> None:
    """With blocks of its own, values by ``reset_parameters`` and a loss of its own."""
    blueprint = AdaptedModel(
        FactoryModel("tests.harness.dropping:dropped", {"blocks": 5}), spec(quantize=quantize)
    )
    model, base = whole(blueprint).eval(), whole(blueprint.base).eval()
    x, found = torch.randn(2, 8, 16), []
    for each in (model, base):
        torch.manual_seed(2)  # its attention always drops
        found.append(each(x).detach())
    near = {"none": 0.0, "nf4": 0.3}[quantize]
    assert float((found[0] - found[1]).norm() / found[1].norm()) <= near
    model(x).square().sum().backward()
    trained = {name for name, p in named_parameters(model) if p.grad is not None}
    assert trained == set(blueprint.adapter_shapes)


# ---- counts -----------------------------------------------------------------------------------------------

GPT3 = Dimensions(96, 12288, 96, 96, 49152, vocab=50257, context=2048, family="gpt2", tied=True)


@pytest.mark.parametrize(
    ("dimensions", "adapter", "count"),
    [
        (GPT3, {"rank": 1, "targets": ("q_proj", "v_proj")}, 4_718_592),
        (GPT3, {"rank": 8, "targets": ("q_proj", "v_proj")}, 37_748_736),
        (PRESETS["llama-3-8b"], {"rank": 16, "targets": "all"}, 41_943_040),
    ],
)
def test_published_counts(dimensions: Dimensions, adapter: dict[str, Any], count: int) -> None:
    """Hu et al. 2021, table 4: 4.7M and 37.7M of GPT-3's 175B; Llama 3 8B as PEFT counts it."""
    blueprint = AdaptedModel(NativeModel(dimensions), spec(**adapter))
    assert blueprint.parameter_counts() == (count, dimensions.parameters)


# ---- files ------------------------------------------------------------------------------------------------


def written(model: nn.Module, adapter: AdapterSpec, paths: list[str], folder: Path, transposed: bool) -> Path:
    tensors = {name: p.detach() for name, p in named_parameters(model) if is_adapter(name)}
    write_adapter(folder, tensors, adapter_config(adapter, paths, (), transposed, None), None)
    return folder


@FAMILIES
@pytest.mark.parametrize("changes", [{}, {"name": "dora", "rank_stabilized": True}], ids=["lora", "dora"])
def test_files_go_to_peft_and_back(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Ours loaded by peft, and peft's by us: equal logits."""
    peft = pytest.importorskip("peft")
    adapter, model = spec(**changes), made(family)
    paths = adapt(model, units_of(model, family), adapter)
    start(model, zero=False)
    folder = written(model, adapter, paths, tmp_path / "ours", family == "gpt2")
    theirs = peft.PeftModel.from_pretrained(made(family), str(folder)).eval()
    torch.testing.assert_close(logits(theirs.base_model, family), logits(model, family), atol=2e-6, rtol=1e-5)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=paths,
        use_dora=adapter.name == "dora",
        use_rslora=adapter.rank_stabilized,
        fan_in_fan_out=family == "gpt2",
        init_lora_weights=False,
    )
    other = peft.get_peft_model(made(family), config).eval()
    other.save_pretrained(str(tmp_path / "theirs"))
    files = AdapterFiles(tmp_path / "theirs")
    files.require(adapter, {n: tuple(p.shape) for n, p in named_parameters(model) if is_adapter(n)})
    for name, parameter in named_parameters(model):
        if is_adapter(name):
            files.read_into(parameter, name)
    torch.testing.assert_close(logits(other.base_model, family), logits(model, family), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_dropout_is_peft_s(name: str) -> None:
    """In training, with the same mask: equal results and equal gradients of the input and of the adapter."""
    peft = pytest.importorskip("peft")
    adapter = spec(name=name, dropout=0.4)
    base = nn.Sequential(nn.Linear(12, 10))
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["0"],
        use_dora=name == "dora",
        lora_dropout=0.4,
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(copy.deepcopy(base), config).base_model.model[0]
    adapt(base, [], adapter)
    ours = base[0]
    assert isinstance(ours, LoraLinear)
    pairs = [
        (ours.lora_A.weight, theirs.lora_A.default.weight),
        (ours.lora_B.weight, theirs.lora_B.default.weight),
    ]
    if name == "dora":
        magnitude = theirs.lora_magnitude_vector.default.weight
        nn.init.uniform_(magnitude, 0.5, 2.0)  # far from the norms, so that the term counts
        pairs.append((ours.lora_magnitude_vector, magnitude))
    with torch.no_grad():
        for mine, its in pairs:
            mine.copy_(its)
    x, results = torch.randn(5, 12), []
    for layer in (ours, theirs):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        out = layer.train()(given)
        out.square().sum().backward()
        results.append((out, given.grad))
    torch.testing.assert_close(results[0], results[1])
    for mine, its in pairs:
        torch.testing.assert_close(mine.grad, its.grad)


def test_a_file_in_bf16_is_two_bytes_a_weight_and_its_header(tmp_path: Path, whole: Any) -> None:
    blueprint = AdaptedModel(NativeModel(SMALL), spec())
    tensors = {n: p.bfloat16() for n, p in named_parameters(whole(blueprint)) if is_adapter(n)}
    write_adapter(tmp_path, tensors, blueprint.config(), "0" * 32)
    raw = (tmp_path / TENSORS).read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    assert len(raw) == header + 2 * blueprint.parameter_counts()[0]
    assert header <= 4096


def test_names_are_as_short_as_they_may_be(whole: Any) -> None:
    def targets(**adapter: Any) -> list[str]:
        found: list[str] = AdaptedModel(NativeModel(SMALL), spec(**adapter)).config()["target_modules"]
        return found

    assert targets(targets=("q_proj", "v_proj")) == ["q_proj", "v_proj"]
    assert targets(targets=r"layers\.1\..*q_proj") == ["layers.1.self_attn.q_proj"]


# ---- refusals ---------------------------------------------------------------------------------------------


def recipe_with(folder: Path, **adapter: Any) -> Any:
    model = {"layers": 2, "width": 24, "heads": 2, "ffn": 40, "vocab": 256}
    given = {"rank": 4, "alpha": 8, "start_from": str(folder)} | adapter
    return recipe_of({"model": model, "steps": 1, "batch_size": 1, "adapter": given})


@pytest.fixture
def folder(tmp_path: Path, whole: Any) -> Path:
    """An adapter of the model of ``recipe_with``."""
    blueprint = blueprint_of(recipe_with(tmp_path, start_from=None))
    assert isinstance(blueprint, AdaptedModel)
    tensors = {n: p.detach() for n, p in named_parameters(whole(blueprint)) if is_adapter(n)}
    write_adapter(tmp_path, tensors, blueprint.config(), "0" * 32)
    return tmp_path


def test_a_missing_target() -> None:
    with pytest.raises(RecipeError) as caught:
        AdaptedModel(NativeModel(SMALL), spec(targets=("q_proj", "c_attn")))
    line = caught.value.line()
    assert "'c_attn' (adapter.targets): their names are down_proj, gate_proj, k_proj" in line


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 8}, "rank differs from the adapter to start from (adapter.rank): it is 8 here and 4 in"),
        ({"name": "dora"}, "it is dora here and lora in"),
        ({"targets": "attention"}, "mlp.down_proj.lora_A.weight, which this model lacks"),
    ],
)
def test_an_adapter_that_is_not_the_recipes(adapter: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        blueprint_of(recipe_with(folder, **adapter))
    assert message in caught.value.line()


def test_an_adapter_of_another_base(folder: Path, whole: Any) -> None:
    with pytest.raises(CheckpointError, match="for another base") as caught:
        whole(blueprint_of(recipe_with(folder)), seed=1)
    assert caught.value.exit_code == 4 and "fingerprint 00000000" in caught.value.line()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-9]), "is damaged"),
        (lambda folder: (folder / TENSORS).unlink(), "is missing"),
        (lambda folder: (folder / CONFIG).unlink(), "not an adapter's folder"),
        (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read"),
        (lambda folder: edit(folder, peft_type="IA3"), "peft_type is IA3"),
        (lambda folder: edit(folder, modules_to_save=["lm_head"]), "has lm_head.weight trained in full"),
        (lambda folder: edit(folder, rank_pattern={"q_proj": 2}), "gives it the rank 2"),
        (
            lambda folder: edit(folder, init_lora_weights="pissa_niter_4"),
            "init_lora_weights is pissa_niter_4",
        ),
        (lambda folder: edit(folder, init_lora_weights="OLoRA"), "PEFT changed the base of this adapter"),
    ],
    ids=[
        "truncated",
        "no tensors",
        "no config",
        "no json",
        "another kind",
        "whole modules",
        "other ranks",
        "PiSSA",
        "OLoRA",
    ],
)
def test_a_damaged_folder(damage: Any, message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        blueprint_of(recipe_with(folder))
    assert message in caught.value.line() and str(folder) in caught.value.line()


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))
