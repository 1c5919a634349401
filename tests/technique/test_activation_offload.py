"""Activation offload: the same gradients to the bit; what leaves the device, what stays, and whether it is hidden."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.optim.norm import local
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.explain import offload_in_words
from shardwise.planner.predict import predict
from shardwise.planner.predictor import Predictor
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.offload.activations import SMALLEST, OffloadedBlocks
from shardwise.runtime.offload.host import separate_host_memory
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique import SETTINGS, layout_of, strategy_from, strategy_line
from tests.harness.pool import Pool
from tests.harness.ranks import counted_copies
from tests.harness.tiny_run import equal

# -- the same gradients -------------------------------------------------------------------------------


SHAPE = {"blocks": 6, "width": 64}  # tensors that are large enough to be moved
FACTORY: dict[str, Any] = {"factory": "tests.harness.dropping:dropped", "arguments": SHAPE}
NATIVE = {"layers": 6, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 512, "context": 128}


def recipe(model: dict[str, Any], length: int = 128, batch_size: int = 4, **values: Any) -> Recipe:
    asked = {"model": model, "data": {"sequence_length": length}, "steps": 1, "batch_size": batch_size}
    return recipe_of(asked | values, SETTINGS)


def gradients(model: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Of two micro-batches, with the generator's state after them; and the bytes copied to the host."""
    asked = recipe(model, optimizer={"clip_norm": None})
    with separate_host_memory(True), counted_copies(SMALLEST) as copied:
        run = build(asked, blueprint_of(asked), strategy_from(settings), torch.device("cpu"))
        torch.manual_seed(11)
        tokens = torch.arange(128).repeat(4, 1)
        batch = {"input_ids": tokens, "labels": tokens}
        with torch.no_grad():
            run.blueprint.loss(run.model, batch)
        assert not copied, "an evaluation keeps nothing"
        run.passes.forward_backward([batch] * 2)
    # Where the optimizer runs in the backward pass, the gradients are gone and the weights tell.
    named = {name: p if p.grad is None else p.grad for name, p in named_parameters(run.model)}
    found = {name: local(tensor).detach().clone() for name, tensor in named.items()}
    return found | {"generator": torch.get_rng_state()}, sum(copied)


def differing(model: dict[str, Any], settings: dict[str, Any], kinds: list[str]) -> list[str]:
    """The kinds of recomputation with which offload changes a bit, or moves nothing."""
    plain, copied = gradients(model, settings)
    assert copied == 0 and any(plain[name].abs().sum() > 0 for name in plain if name != "generator")
    found = {
        kind: gradients(model, settings | {"offload": "activations", "activation_checkpointing": kind})
        for kind in kinds
    }
    return [kind for kind, (mine, moved) in found.items() if moved == 0 or not equal(mine, plain)]


@pytest.mark.parametrize(
    ("world", "settings", "kinds"),
    [
        (1, {"zero_stage": 0}, ["none", "selective", "budget:0.4"]),
        pytest.param(1, {"zero_stage": 0}, ["full", "sqrt", "budget:0"], marks=pytest.mark.long),
        # tests/test_agreement.py trains offloaded activations with every ZeRO stage, in `make test-all`.
        pytest.param(2, {"zero_stage": 1, "precision": "fp64"}, ["none", "every:2"], marks=pytest.mark.long),
        pytest.param(2, {"zero_stage": 2}, ["selective", "budget:0.6"], marks=pytest.mark.long),
        (2, {"zero_stage": 3, "precision": "bf16"}, ["full", "every:2"]),
        pytest.param(
            2, {"zero_stage": 3, "precision": "bf16"}, ["none", "sqrt", "budget:0.4"], marks=pytest.mark.long
        ),
        pytest.param(
            2,
            {"zero_stage": 3, "optimizer_in_backward": True},
            ["none", "full", "budget:0.2"],
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_gradients_are_bit_identical_with_dropout(
    world: int, settings: dict[str, Any], kinds: list[str], pool: Pool
) -> None:
    """Of two micro-batches, also in the generator's next numbers, for every recomputation and sharding."""
    assert pool.run(world, differing, FACTORY, settings, kinds) == [[]] * world


def test_frozen_weights(pool: Pool) -> None:
    frozen = FACTORY | {"arguments": {**SHAPE, "frozen": True}}
    assert pool.run(2, differing, frozen, {"zero_stage": 3}, ["none"]) == [[], []]


@pytest.mark.long
def test_the_native_decoder(pool: Pool) -> None:
    settings = {"zero_stage": 3, "precision": "bf16"}
    assert pool.run(2, differing, NATIVE, settings, ["none", "selective", "budget:0.4"]) == [[], []]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_of_transformers(attention: str) -> None:
    """With a mask that all blocks share, where attention is not fused."""
    transformers = pytest.importorskip("transformers")

    def once(offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            "llama",
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.2,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
        blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
        home = OffloadedBlocks(model, blocks) if offloaded else None
        torch.manual_seed(3)
        with separate_host_memory(True):
            mask = torch.ones(2, 160, dtype=torch.long)
            mask[1, 100:] = 0
            tokens = torch.arange(160).remainder(97).repeat(2, 1)
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            logits.square().mean().backward()
        assert home is None or sum(map(len, home.stream._free.values())) > 5
        return [*(p.grad for p in model.parameters()), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(once(True), once(False), strict=True))


# -- what the dry run counts --------------------------------------------------------------------------


@functools.cache
def counted(offload: str, layers: int, kind: str = "none", accumulate: int = 1) -> DryRun:
    asked = recipe({**NATIVE, "layers": layers}, batch_size=4 * accumulate, cluster={"preset": "1xH100-80GB"})
    settings = {"micro_batch_size": 4, "offload": offload, "activation_checkpointing": kind}
    return dry_run(asked, blueprint_of(asked), strategy_from(settings), cluster_of(asked.cluster))


def most(run: DryRun) -> int:
    """The most activations that the device holds in a step."""
    return max(sample.ledger.activations for sample in run.timeline)


def moved(run: DryRun) -> dict[tuple[str, str], int]:
    """Bytes copied, by phase and way."""
    found: dict[tuple[str, str], int] = {}
    for t in run.cost.transfers:
        found[t.phase, t.way] = found.get((t.phase, t.way), 0) + t.calls * t.bytes
    return found


def test_two_blocks_stay_on_the_device_and_what_is_small() -> None:
    """To the byte: without offload n blocks and the rest lie there, with it two of them."""
    none, offload = counted("none", 16), counted("activations", 16)
    per_block = (most(none) - most(counted("none", 5))) // 11
    small = per_block - moved(offload)["forward", "to_host"] // 14
    assert 0 < small < 0.05 * per_block, "sums of squares and of exponents"
    assert most(offload) == most(none) - 14 * (per_block - small)
    assert most(offload) < 0.20 * most(none)


@pytest.mark.parametrize("kind", ["none", "every:2"])
def test_what_is_copied_lies_in_host_memory_and_comes_back(kind: str) -> None:
    """In buffers of a power of two each; once, however many micro-batches there are."""
    once, thrice = counted("activations", 5, kind), counted("activations", 5, kind, 3)
    assert moved(once).keys() == {("forward", "to_host"), ("backward", "to_device")}
    assert len(set(moved(once).values())) == 1
    assert moved(thrice) == {way: 3 * size for way, size in moved(once).items()}
    sizes = [t.bytes for t in once.cost.transfers if t.way == "to_host" for _ in range(t.calls)]
    assert once.host.activations == sum(1 << (size - 1).bit_length() for size in sizes)
    assert once.host.total == once.host.activations == thrice.host.activations
    assert counted("none", 5, kind).host.total == 0


@pytest.mark.parametrize("kind", ["full", "budget:0"])
def test_inputs_of_blocks_are_left_to_move(kind: str) -> None:
    """One input of each of three blocks; nothing else is kept."""
    assert moved(counted("activations", 5, kind))["forward", "to_host"] == 3 * 4 * 128 * 64 * 4


@pytest.mark.long
def test_what_a_budget_keeps_leaves_but_for_two_blocks() -> None:
    """To the byte, but for the block that runs a second time or chooses: that one is whole for a while."""
    kept, left = counted("none", 16, "budget:0.4"), counted("activations", 16, "budget:0.4")
    everything = moved(counted("activations", 16))["forward", "to_host"]
    assert 0 < moved(left)["forward", "to_host"] <= 0.4 * everything + 14 * 4 * 128 * 64 * 4
    assert most(left) < 0.5 * most(kept)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("none", 3),
        *(pytest.param(*some, marks=pytest.mark.long) for some in (("every:2", 0), ("budget:0.4", 3))),
    ],
)
def test_estimates_are_whole_dry_runs_to_the_byte(kind: str, stage: int) -> None:
    asked = recipe({**NATIVE, "layers": 10}, cluster={"preset": "4xH100-80GB"})
    strategy = strategy_from(
        {"zero_stage": stage, "offload": "activations", "activation_checkpointing": kind}
    )
    predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
    estimate, whole = predictor.estimate(strategy, alone=True), predictor.confirm(strategy)
    assert not estimate.exact
    assert (estimate.bytes, estimate.host_bytes) == (whole.sum_bytes, whole.host.total)
    assert estimate.seconds == pytest.approx(whole.step.seconds, rel=1e-6)


def sentences(model: dict[str, Any], length: int, **settings: Any) -> list[str]:
    """What the plan says of the copies."""
    asked = recipe(model, length, 8, cluster={"preset": "8xH100-80GB"})
    cluster = cluster_of(asked.cluster)
    strategy = strategy_from({"precision": "bf16", "zero_stage": 3, "offload": "activations", **settings})
    found = predict(asked, blueprint_of(asked), strategy, cluster)
    return list(offload_in_words(found, cluster))


@pytest.mark.long
def test_the_plan_says_whether_compute_hides_the_copies() -> None:
    """Of Llama-3-8B the inputs of blocks at 32,768 tokens are hidden; all activations at 8,192 are not."""
    model = {"preset": "llama-3-8b", "context": 32768}
    inputs = sentences(model, 32768, activation_checkpointing="full")
    everything = sentences(model, 8192)
    for words, end in ((inputs, r"hidden by .* of compute$"), (everything, r"the device waits")):
        assert len(words) == 2
        assert re.search(rf"in the forward phase: copies to the host .*{end}", words[0])
        assert re.search(rf"in the backward phase: copies to the device .*{end}", words[1])


def test_what_does_nothing_says_so() -> None:
    asked = recipe(NATIVE)
    strategy = strategy_from({"micro_batch_size": 4, "offload": "activations"})
    on_cpu = dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster))
    assert on_cpu.hints.notes == ["activations are not offloaded: the memory of this device is the host's"]
    assert (
        on_cpu.peak
        == dry_run(
            asked, blueprint_of(asked), strategy.with_values(offload="none"), cluster_of(asked.cluster)
        ).peak
    )
    assert counted("activations", 2).hints.notes == [
        "activations are not offloaded: of 2 blocks all are needed at once",
    ]
    assert counted("activations", 2).cost.transfers == ()


def test_the_strategy_in_one_line() -> None:
    strategy = strategy_from({"offload": "activations", "activation_checkpointing": "full"})
    assert strategy_line(strategy, layout_of(strategy, 1), 4).startswith(
        "full checkpointing · activations offloaded · "
    )
