"""Activation checkpointing: the same gradients to the bit, whatever is recomputed; dropout, frozen weights, any dtype.

What each value keeps and costs is in test_checkpointing_costs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.strategy import Layout
from shardwise.engine.build import build
from shardwise.engine.optim.norm import local
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.offload.activations import OffloadedBlocks
from shardwise.runtime.offload.host import separate_host_memory
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique import SETTINGS, strategy_from
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING, Checkpointing
from shardwise.technique.site import Context, EngineOptions, ModelView, Site, StageView
from tests.harness.dropping import Dropped
from tests.harness.pool import Pool
from tests.harness.tiny_run import equal


def recipe(model: dict[str, Any], **values: Any) -> Recipe:
    return recipe_of(
        {"model": model, "data": {"sequence_length": 32}, "steps": 1, "batch_size": 4, **values}, SETTINGS
    )


def gradients(settings: dict[str, Any], frozen: bool = False) -> dict[str, Tensor]:
    """Of two micro-batches, and the generator's state after them."""
    model = {"factory": "tests.harness.dropping:dropped", "arguments": {"frozen": frozen}}
    asked = recipe(model, optimizer={"clip_norm": None})
    blueprint = blueprint_of(asked)
    run = build(asked, blueprint, strategy_from(settings), torch.device("cpu"))
    torch.manual_seed(11)
    tokens = torch.arange(32).repeat(2, 1)
    run.passes.forward_backward([{"input_ids": tokens, "labels": tokens}] * 2)
    # Where the optimizer runs in the backward pass, the gradients are gone and the weights tell.
    named = {name: p if p.grad is None else p.grad for name, p in named_parameters(run.model)}
    return {name: local(tensor).detach().clone() for name, tensor in named.items()} | {
        "generator": torch.get_rng_state()
    }


def differing(settings: dict[str, Any], kinds: list[str], frozen: bool = False) -> list[str]:
    """The kinds whose gradients, or whose generator afterwards, are other bits than without recomputation."""
    plain = gradients(settings, frozen)
    assert frozen or len(plain) == 21
    assert any(plain[name].abs().sum() > 0 for name in plain if name != "generator")
    found = {kind: gradients(settings | {"activation_checkpointing": kind}, frozen) for kind in kinds}
    return [kind for kind, mine in found.items() if not equal(mine, plain)]


KINDS = [*ACTIVATION_CHECKPOINTING.examples[1:]]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {"zero_stage": 0}),
        (2, {"zero_stage": 1}),
        pytest.param(2, {"zero_stage": 2, "precision": "fp64"}, marks=pytest.mark.long),
        pytest.param(2, {"zero_stage": 3}, marks=pytest.mark.long),  # with frozen weights below
        pytest.param(2, {"zero_stage": 3, "precision": "bf16"}, marks=pytest.mark.long),
        (2, {"zero_stage": 3, "precision": "fp8", "fp8_layers": "all"}),
        (2, {"zero_stage": 3, "optimizer_in_backward": True}),
        pytest.param(4, {"zero_stage": 2, "replicate": 2, "precision": "bf16"}, marks=pytest.mark.long),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_gradients_are_bit_identical_with_dropout(world: int, settings: dict[str, Any], pool: Pool) -> None:
    """Also in the generator's next numbers; under every ZeRO stage, in every kind of dtype."""
    if settings.get("precision") == "fp8":
        pytest.importorskip("torchao")
    assert pool.run(world, differing, settings, KINDS) == [[]] * world


def test_frozen_weights(pool: Pool) -> None:
    """The input of the first blocks requires no gradient, and the last has a frozen layer."""
    kinds = [*KINDS, "budget:0", "budget:0.8"]
    assert pool.run(2, differing, {"zero_stage": 3}, kinds, True) == [[], []]


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_dropout": 0.2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 32},
}


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "sdpa"),
        ("gpt2", "eager"),
        pytest.param("llama", "eager", marks=pytest.mark.long),
        pytest.param("gpt2", "sdpa", marks=pytest.mark.long),
    ],
)
def test_models_of_transformers_with_dropout(family: str, attention: str) -> None:
    """Shardwise itself switches their dropout off; a technique must not depend on that."""
    transformers = pytest.importorskip("transformers")

    def once(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, vocab_size=97, **TRANSFORMERS[family])
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
        blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
        Checkpointing().apply(unsharded(model, blocks, kind))
        torch.manual_seed(3)
        logits = model(input_ids=torch.arange(24).repeat(2, 1), use_cache=False).logits
        logits.square().mean().backward()
        return [*(p.grad for p in model.parameters()), torch.get_rng_state()]

    theirs = once("none")
    for kind in (*ACTIVATION_CHECKPOINTING.examples[1:], "budget:0", "budget:0.8"):
        mine = once(kind)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), kind


def unsharded(model: nn.Module, blocks: list[nn.Module], kind: str) -> Site:
    """A site on which nothing but checkpointing is built."""
    nothing: Any = None
    strategy = strategy_from({"activation_checkpointing": kind})
    context = Context(nothing, nothing, strategy, *[nothing] * 4)
    view = ModelView(model, [StageView(model, blocks)], [], None)
    return Site(context, view, EngineOptions(nothing))


@pytest.mark.parametrize("kind", ACTIVATION_CHECKPOINTING.examples)
def test_names_stay_and_units_are_what_the_model_holds(kind: str) -> None:
    model = Dropped()
    names = [name for name, _ in model.named_parameters()]
    site = unsharded(model, model.units(), kind)
    Checkpointing().apply(site)
    assert [name for name, _ in named_parameters(model)] == names
    assert site.view.blocks == list(model.blocks)


class Overwriting(nn.Module):
    """Writes to results of products: one block to the first before anybody has saved it, the caller to the second."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.up(x)
        product.add_(1)
        result = self.down(product.sin() * product.detach())
        return result, result.exp()


class Chain(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Overwriting(bias) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            result, exponential = block(x)
            x = result.add_(exponential).sigmoid()
        return x


@pytest.mark.parametrize("shape", [(512, 64), (4, 128, 64)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_kept_result_that_is_written_to_is_computed_again(
    offloaded: bool, bias: bool, shape: tuple[int, ...]
) -> None:
    """Three dimensions without a bias: a view of the product that counts its versions apart."""

    def once(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Chain(bias)
        site = unsharded(model, list(model.blocks), kind)
        with separate_host_memory(offloaded):
            Checkpointing().apply(site)
            if offloaded and kind != "none":
                OffloadedBlocks(model, site.view.blocks)
            model(torch.linspace(-1, 1, 512 * 64).view(shape)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = once("none")
    for kind in ("selective", "full"):
        assert all(torch.equal(a, b) for a, b in zip(plain, once(kind), strict=True)), kind


class UnderAutocast(Dropped):
    """A model that chooses its own precision, around its blocks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", ACTIVATION_CHECKPOINTING.examples[1:])
def test_autocast_around_the_blocks_is_that_of_the_second_run(kind: str) -> None:
    def once(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = UnderAutocast()
        Checkpointing().apply(unsharded(model, model.units(), kind))
        torch.manual_seed(1)
        model(torch.linspace(-1, 1, 512).view(2, 16, 16)).float().square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    found = once(kind)
    assert found and all(torch.equal(a, b) for a, b in zip(once("none"), found, strict=True))


@pytest.mark.parametrize("value", ["every:1", "every:x", "every:", "every:2.5", "every:-2", "every"])
def test_what_is_no_whole_number(value: str) -> None:
    with pytest.raises(ValueError, match="every:K with a whole number K ≥ 2"):
        ACTIVATION_CHECKPOINTING.parse(value)


WRONG = ("1.5", "x", "", "-0.1", "nan", "inf", "1e-1", "0,4", "0.4 ", ".", "1.0000001", "40%")


@pytest.mark.parametrize("value", ["budget", *(f"budget:{number}" for number in WRONG)])
def test_what_is_no_share(value: str) -> None:
    with pytest.raises(ValueError, match=r"budget:F with a number 0 ≤ F ≤ 1$"):
        ACTIVATION_CHECKPOINTING.parse(value)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("every:007", "every:7"),
        ("budget:0.40", "budget:0.4"),
        ("budget:.25", "budget:0.25"),
        ("budget:1.0", "budget:1"),
        ("budget:0", "budget:0"),
    ],
)
def test_a_number_is_shown_in_one_way(written: str, shown: str) -> None:
    assert ACTIVATION_CHECKPOINTING.parse(written) == shown


def test_the_share_is_in_the_line() -> None:
    strategy = strategy_from({"activation_checkpointing": "budget:0.4"})
    assert Checkpointing().label(strategy, Layout(())) == "budget:0.4 checkpointing"
