"""8-bit products: their error, their range, which layers take them, plans and refusals."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Strategy
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.hardware.profiles import PROFILES
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime import compiled, float8
from shardwise.runtime.float8 import EMULATED, Float8Linear, Scaling, scaling_named
from shardwise.runtime.torch_private_fake import StaticFakeMode
from shardwise.technique import SETTINGS, broken_rules, refuse_unsupported, strategy_from
from shardwise.technique.float8 import can_run, gains
from tests.harness.corpora import EVEN
from tests.harness.parity import Parity, Trial

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensorwise", "rowwise")


def passed(layer: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.backward(gradient)
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    assert x.grad is not None
    return [out.detach(), x.grad, *gradients]


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def a_layer(rows: int = 96, columns: int = 64) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(columns, rows, dtype=torch.bfloat16)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


# -- one product ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [(32,), (2, 20), (3, 5, 1)])
def test_a_layer_computes_what_torchao_s_own_emulation_does(name: str, tokens: tuple[int, ...]) -> None:
    """But for the order of scaling and summing: a rounding of bf16 here and there."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Theirs

    linear = a_layer()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    x, gradient = normal(*tokens, 64), normal(*tokens, 96)
    mine = passed(Float8Linear(linear, scaling_named(name)), x, gradient)
    theirs = passed(Theirs.from_float(linear, config), x, gradient)
    assert all(difference(a, b) < 1e-3 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_the_three_products_are_within_six_per_cent_of_fp32(name: str) -> None:
    """e4m3 rounds by up to 1/16, e5m2 by up to 1/8; the root mean square over a product is less."""
    linear, x, gradient = a_layer(256, 512), normal(128, 512), normal(128, 256)
    exact = nn.Linear(512, 256)
    exact.load_state_dict({k: v.float() for k, v in linear.state_dict().items()})
    wanted = passed(exact, x.float(), gradient.float())
    found = passed(Float8Linear(linear, scaling_named(name)), x, gradient)
    bounds = (0.04, 0.06, 0.06, 0.01)
    assert all(difference(a, b) < limit for a, b, limit in zip(found, wanted, bounds, strict=True))


def test_a_scale_for_each_row_keeps_rows_that_differ_by_more_than_the_range_of_8_bits() -> None:
    linear = a_layer()
    linear.bias = None  # type: ignore[assignment]
    x = normal(32, 64) * torch.logspace(0, -9, 32).unsqueeze(1).bfloat16()
    with torch.no_grad():
        wanted = linear(x)[-1]
        errors = {n: difference(Float8Linear(linear, scaling_named(n))(x)[-1], wanted) for n in RECIPES}
    assert errors["tensorwise"] > 0.5  # the smallest row has become zero, or nearly
    assert errors["rowwise"] < 0.1


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [1e-30, 1e-3, 1.0, 3e4, 3e38])
def test_nothing_overflows_and_what_is_far_below_the_largest_becomes_zero(
    dtype: torch.dtype, largest: float
) -> None:
    x = torch.tensor([[largest, -largest, largest * 2.0**-40, 0.0]])
    factor, inverse = float8.scale(x, dtype, None, False)
    bits = float8.cast(x, factor, dtype, False).float()
    assert bits.isfinite().all()
    assert bits[0, 2:].tolist() == [0.0, 0.0]
    if largest > 1e-12:  # smaller errors count as zero
        assert bits[0, 0] == torch.finfo(dtype).max == -bits[0, 1]
        assert float(bits[0, 0] * inverse) == pytest.approx(largest, rel=1e-6)


def test_gradients_keep_the_range_of_e5m2() -> None:
    """A gradient 2^-28 below the largest survives in e5m2 and not in e4m3."""
    x = torch.tensor([[1.0, 2.0**-28]])
    for dtype, survives in ((E5M2, True), (E4M3, False)):
        bits = float8.cast(x, float8.scale(x, dtype, None, False)[0], dtype, False).float()
        assert bool(bits[0, 1] > 0) is survives
    assert scaling_named("tensorwise").gradient == E5M2


def test_what_is_not_finite_is_not_hidden() -> None:
    for bad in (float("nan"), float("inf")):
        x = normal(16, 64)
        x[3, 3] = bad
        assert not Float8Linear(a_layer(), scaling_named("tensorwise"))(x).isfinite().all()


def test_it_keeps_its_input_and_weight_for_the_backward_pass_and_no_copy() -> None:
    kept: list[Tensor] = []
    layer, x = Float8Linear(a_layer(), scaling_named("tensorwise")), normal(32, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x)
    large = {t.untyped_storage()._cdata for t in kept if t.numel() > 1}
    assert large == {x.untyped_storage()._cdata, layer.weight.untyped_storage()._cdata}


@pytest.mark.parametrize("rows", [32, 33])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_operators_return_what_their_fakes_say(rows: int, transposed: bool, dim: int | None) -> None:
    x = normal(rows, 48)
    factor, _ = float8.scale(x, E4M3, dim, True)
    real = float8.cast(x, factor, E4M3, transposed)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake_x = mode.from_tensor(x)
        fake_factor, fake_inverse = float8.scale(fake_x, E4M3, dim, True)
        fake = float8.cast(fake_x, fake_factor, E4M3, transposed)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake_factor.shape == fake_inverse.shape == factor.shape


@pytest.mark.long
@pytest.mark.parametrize("name", ["float8_scale", "float8_cast"])
def test_the_compiled_steps_of_a_cast_change_no_bit(name: str) -> None:
    """The same compiler as on accelerators, another back end."""
    compiled = float8.compiled_on_call(EMULATED[name])
    for rows in (32, 40):
        x = normal(rows, 48)
        factor = float8.scale(x, E4M3, None, False)[0]
        rest: tuple[Any, ...] = (E4M3, None, False) if name == "float8_scale" else (factor, E4M3, True)
        found, wanted = compiled(x, *rest), EMULATED[name](x, *rest)
        pairs = zip(found, wanted, strict=True) if name == "float8_scale" else [(found, wanted)]
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs)


class Normed(nn.Module):
    """A layer after a norm."""

    def __init__(self, how: Scaling, columns: int = 512, rows: int = 256) -> None:
        super().__init__()
        linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
        self.norm, self.linear = nn.RMSNorm(columns, dtype=torch.bfloat16), Float8Linear(linear, how)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.long
def test_a_compiled_layer_is_as_close_to_fp32_as_an_uncompiled_one() -> None:
    """Each within the bounds above: a norm that is fused with a cast is not rounded to bf16 in between."""
    torch.manual_seed(1)
    block, x, gradient = Normed(scaling_named("tensorwise")), normal(120, 512), normal(120, 256)
    exact = nn.Sequential(nn.RMSNorm(512), nn.Linear(512, 256, bias=False))
    exact.load_state_dict(dict(zip(exact.state_dict(), block.state_dict().values(), strict=True)))
    wanted = passed(exact, x.float(), gradient.float())
    compiled.compile_blocks([block])
    found = passed(block, x, gradient)
    assert all(difference(a, b) < 0.07 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_layer_saves_its_input_in_8_bits_with_one_scale_and_no_copy_of_its_weight(
    name: str,
) -> None:
    saved: list[Tensor] = []
    with StaticFakeMode():
        block, x = (
            Normed(scaling_named(name)),
            torch.empty(120, 512, dtype=torch.bfloat16, requires_grad=True),
        )
        compiled.compile_blocks([block])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            block(x)
    large = {(t.dtype, t.numel()) for t in saved if t.numel() > 512}
    own = {(torch.bfloat16, x.numel()), (torch.bfloat16, block.linear.weight.numel())}
    assert large == own | ({(E4M3, x.numel())} if name == "tensorwise" else set())


@pytest.mark.long
def test_a_plan_with_compiled_blocks_counts_8_bit_products_and_no_step_of_a_cast() -> None:
    recipe, cluster = a_recipe(), dataclasses.replace(h100("llama-3-8b")[1], devices_per_node=1)
    runs = [
        dry_run(recipe, blueprint_of(recipe), strategy_from({"compile": "block", **settings}), cluster)
        for settings in ({"precision": "fp8", "fp8_layers": "all"}, {"precision": "bf16"})
    ]
    fp8, bf16 = runs
    names = {
        kernel.operation for kernel in fp8.cost.kernels if kernel.operation.startswith("shardwise::float8")
    }
    assert names == {"shardwise::float8_product"}
    assert fp8.cost.flops == bf16.cost.flops
    assert fp8.peak.ledger.activations < bf16.peak.ledger.activations


# -- which layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "tensor", "row"),
    [
        (4096, 4096, True, True),  # q_proj of Llama 3 8B
        (1024, 4096, False, False),  # its k_proj
        (14336, 4096, True, True),
        (4096, 14336, True, True),
        (1600, 1600, True, False),  # GPT-2 1.5B
        (6400, 1600, True, True),
        (1600, 6400, True, False),
        (4097, 4096, False, False),
        (4096, 4104, False, False),
    ],
)
def test_small_layers_and_odd_ones_stay_in_bf16(rows: int, columns: int, tensor: bool, row: bool) -> None:
    assert (gains(rows, columns, "tensor"), gains(rows, columns, "row")) == (tensor, row)


def test_the_gate_is_torchao_s() -> None:
    from torchao.float8 import float8_linear_utils as theirs

    for rows in (16, 1024, 1040, 2048, 2064, 4096, 4112, 5000):
        for columns in (16, 1024, 1040, 2048, 2064, 4096, 4112, 5000):
            layer = nn.Linear(columns, rows, device="meta")
            assert gains(rows, columns, "tensor") == theirs._auto_filter_for_tensorwise(layer, "", [])
            assert gains(rows, columns, "row") == theirs._auto_filter_for_rowwise(layer, "", [])
            assert not gains(rows, columns, "tensor") or can_run(rows, columns)


SIXTEENS = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 1, "ffn": 144, "vocab": 256, "context": 64}


def a_recipe(model: dict[str, Any] = SIXTEENS, length: int = 48, **rest: Any) -> Recipe:
    values: dict[str, Any] = {"model": model, "steps": 20, "batch_size": 4}
    values["data"] = {"sequence_length": length}
    return recipe_of({**values, **rest}, SETTINGS)


def notes_of(recipe: Recipe, **settings: Any) -> list[str]:
    strategy = strategy_from({"precision": "fp8", **settings})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster)).hints.notes


def test_the_plan_says_how_many_layers_run_in_8_bits() -> None:
    [few] = notes_of(a_recipe())
    assert few.startswith("fp8 changes nothing: none of the 21 linear layers")
    [all_] = notes_of(a_recipe(), fp8_layers="all")
    assert all_.startswith("fp8 in 21 of the 21 linear layers")
    [odd] = notes_of(a_recipe({**SIXTEENS, "ffn": 145}), fp8_layers="all")
    assert odd.startswith("fp8 in 12 of the 21 linear layers")


def test_where_no_layer_gains_fp8_costs_what_bf16_does() -> None:
    recipe = a_recipe()
    cluster = cluster_of(recipe.cluster)
    runs = [
        dry_run(recipe, blueprint_of(recipe), strategy_from({"precision": p}), cluster)
        for p in ("bf16", "fp8")
    ]
    assert runs[0].peaks == runs[1].peaks
    assert runs[0].cost == runs[1].cost


# -- planning ------------------------------------------------------------------------------------------


def h100(model: str, **strategy: Any) -> tuple[Recipe, Cluster, Strategy]:
    recipe = recipe_of(
        {
            "model": {"preset": model},
            "data": {"sequence_length": 4096},
            "steps": 1,
            "batch_size": 8,
            "cluster": {"preset": "8xH100-80GB"},
            "strategy": {"zero_stage": 3, **strategy},
        },
        SETTINGS,
    )
    return recipe, cluster_of(recipe.cluster), strategy_from(recipe.strategy)


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["tensor", pytest.param("row", marks=pytest.mark.long)])
def test_llama_3_8b_on_h100_is_planned_faster_than_bf16_and_in_as_much_memory(scaling: str) -> None:
    found = {}
    for precision in ("bf16", "fp8"):
        pinned = {"precision": precision, **({"fp8_scaling": scaling} if precision == "fp8" else {})}
        recipe, cluster, strategy = h100("llama-3-8b", **pinned)
        found[precision] = predict(recipe, blueprint_of(recipe), strategy, cluster)
    bf16, fp8 = found["bf16"], found["fp8"]
    assert bf16.cost.flops == fp8.cost.flops
    products = sum(k.calls * k.flops for k in fp8.cost.kernels if k.dtype == "fp8")
    assert products > 0.7 * fp8.cost.flops
    assert fp8.step.seconds < 0.88 * bf16.step.seconds
    assert fp8.sum_bytes == pytest.approx(bf16.sum_bytes, rel=0.02)


def test_a_target_with_8_bits_counts_each_operator_once_and_the_cpu_what_it_is_made_of() -> None:
    recipe = a_recipe()
    strategy = strategy_from({"precision": "fp8", "fp8_layers": "all"})
    here = cluster_of(recipe.cluster)
    there = h100("llama-3-8b")[1]
    names = {
        kind: {k.operation for k in dry_run(recipe, blueprint_of(recipe), strategy, cluster).cost.kernels}
        for kind, cluster in (("cpu", here), ("cuda", dataclasses.replace(there, devices_per_node=1)))
    }
    operators = {f"shardwise::{name}" for name in EMULATED}
    assert operators <= names["cuda"]
    assert not operators & names["cpu"]


def test_devices_without_units_are_refused_before_torch_is_loaded_and_the_cpu_emulates() -> None:
    for device, nearest in (
        ("A100-80GB", "bf16"),
        ("RTX3090-24GB", "bf16"),
        ("V100-32GB", "fp32"),
        ("T4-16GB", "fp32"),
        ("M3-Max-128GB", "bf16"),
    ):
        with pytest.raises(
            RecipeError, match=f"fp8 on {device}.*the nearest that works is precision: {nearest}"
        ):
            refuse_unsupported({"precision": "fp8"}, PROFILES[device], lambda key: key)
    for device in ("H100-80GB", "L4-24GB", "MI300X-192GB"):
        refuse_unsupported({"precision": "fp8"}, PROFILES[device], lambda key: key)
    recipe = a_recipe(strategy={"precision": "fp8", "zero_stage": 0, "micro_batch_size": 1})
    plan = plan_for(recipe, blueprint_of(recipe), cluster_of(recipe.cluster), compare=False)
    assert any("precision fp8 is emulated on" in sentence for sentence in plan.assumptions)
    assert any("fp8 changes nothing" in sentence for sentence in plan.reasons)


def test_settings_that_only_fp8_reads_are_refused_without_it() -> None:
    for key, value in (("fp8_scaling", "row"), ("fp8_layers", "all")):
        [violation] = broken_rules(strategy_from({"precision": "bf16", key: value}), 1, a_recipe())
        assert violation.rule.key == key


def test_a_missing_torchao_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RecipeError, match="fp8 needs torchao"):
        scaling_named("tensorwise")


def test_torchao_s_warnings_are_silent_only_while_it_is_imported() -> None:
    scaling_named("tensorwise")
    assert logging.getLogger("torchao").level == logging.NOTSET


# -- training ------------------------------------------------------------------------------------------


def trial(world: int, **settings: Any) -> Trial:
    recipe = a_recipe(
        data={"source": EVEN, "sequence_length": 40}, optimizer={"learning_rate": 3e-4}, steps=20
    )
    return Trial(recipe, world, {"precision": "fp8", "fp8_layers": "all", **settings})


@pytest.mark.parametrize(
    "trial",
    [
        trial(1, zero_stage=0),
        trial(2, zero_stage=0, fp8_scaling="row"),
        trial(2, zero_stage=3, activation_checkpointing="full"),
        pytest.param(
            Trial(
                a_recipe(
                    {"layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 256},
                    data={"source": EVEN, "sequence_length": 32},
                    optimizer={"learning_rate": 3e-4},
                ),
                1,
                {
                    "precision": "fp8",
                    "fp8_layers": "all",
                    "fp8_scaling": "row",
                    "compile": "block",
                    "loss": "chunked",
                    "micro_batch_size": 2,
                },
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        "one rank",
        "row",
        "full",
        "compiled rows of 64",
    ],  # the last one's gradients were 1e6 times too large
)
def test_training_follows_fp32(trial: Trial, parity: Parity) -> None:
    """Loss within 1 %; gradient norm and weights within the tolerance of ``shardwise verify``.

    The learning rate is small: at larger ones this model's gradient jumps by factors of 50, which
    no two precisions do alike.
    """
    verdict = parity.verdict(trial)
    assert verdict.passed, verdict
    assert 1e-5 < verdict.max_loss_difference < 1e-2, verdict


def test_a_model_of_transformers_is_planned_and_trained_alike(parity: Parity, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=144,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    recipe = a_recipe({"hf": str(tmp_path / "llama")}, data={"source": EVEN, "sequence_length": 40}, steps=8)
    [note] = notes_of(recipe, fp8_layers="all")
    assert note.startswith("fp8 in 14 of the 14 linear layers")
    verdict = parity.verdict(Trial(recipe, 2, {"precision": "fp8", "fp8_layers": "all", "zero_stage": 3}))
    assert verdict.passed, verdict
    assert 1e-5 < verdict.max_loss_difference < 1e-2, verdict


def test_scaling_is_data() -> None:
    assert scaling_named("rowwise") == Scaling(E4M3, E4M3, True, True, True)
    assert scaling_named("tensorwise") == Scaling(E4M3, E5M2, False, False, True)
