"""Adapters under strategies: memory, counts, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.adapter import gathered_adapter, leave
from shardwise.core.errors import CheckpointError, RecipeError, ResourceError
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.run_state import parameters_of
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import CONFIG, TENSORS, AdapterFiles
from shardwise.model.lora import is_adapter
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.recipe.load import recipe_of
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique import SETTINGS, broken_rules, refuse_broken, strategy_from
from tests.harness.corpora import WORDS
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool

MODEL = {"layers": 2, "width": 40, "heads": 4, "kv_heads": 2, "ffn": 55, "vocab": 257, "context": 32}
WIDE = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "ffn": 768, "vocab": 512}


def recipe_with(adapter: dict[str, Any] | None, model: dict[str, Any] = MODEL, **sections: Any) -> Any:
    values = {
        "model": model,
        "data": {"sequence_length": 16},
        "steps": 4,
        "batch_size": 4,
        "adapter": adapter,
    }
    return recipe_of(values | sections, SETTINGS)


def planned(
    adapter: dict[str, Any] | None, settings: dict[str, Any], model: dict[str, Any] = WIDE, **sections: Any
) -> DryRun:
    recipe = recipe_with(adapter, model, **sections)
    return dry_run(recipe, blueprint_of(recipe), strategy_from(settings), cluster_of(recipe.cluster))


# ---- memory and counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_frozen_weights_have_no_gradients_and_no_state(quantize: str) -> None:
    """The dry run counts: adapters in fp32 with two moments and a gradient, the rest as it is stored."""
    adapter = {"rank": 8, "quantize": quantize}
    blueprint = blueprint_of(recipe_with(adapter, WIDE))
    trained, frozen = blueprint.parameter_counts()
    run = planned(adapter, {"precision": "bf16"})
    ledger = run.peaks["clip"].ledger
    tensors = len(blueprint.adapter_shapes) if isinstance(blueprint, AdaptedModel) else 0
    assert ledger.master_weights == 4 * trained
    assert ledger.optimizer_state == 8 * trained + 4 * tensors
    assert ledger.gradients == 4 * trained
    outside = 2 * WIDE["vocab"] * WIDE["width"] + (2 * WIDE["layers"] + 1) * WIDE["width"]
    blocks = {"none": 2.0, "nf4": 4.127 / 8}[quantize] * (frozen - outside)
    assert ledger.parameters == pytest.approx(2 * outside + blocks, rel=1e-3)
    assert run.parameters == trained + frozen
    assert any("lora of rank 8 trains" in note for note in run.hints.notes)


WHOLE: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"zero_stage": 0}),
    (1, {"zero_stage": 1}),
    (2, {"zero_stage": 0}),
    (2, {"zero_stage": 1, "replicate": 2}),
    (2, {"zero_stage": 0, "sequence_parallel": 2}),
)
"""Devices and settings with which every rank has all weights."""


@pytest.mark.parametrize(("devices", "settings"), WHOLE, ids=str)
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_ranks_that_have_all_weights_copy_no_frozen_ones(
    quantize: str, devices: int, settings: dict[str, Any]
) -> None:
    """A rank has them whole in bf16: FSDP2 would copy those of a block, or of all blocks, into a gathered buffer."""
    adapter = {"rank": 2, "targets": "attention", "quantize": quantize}
    run = planned(adapter, {"precision": "bf16", **settings}, cluster={"devices_per_node": devices})
    trained = run.parameters - blueprint_of(recipe_with(adapter, WIDE)).parameter_counts()[1]
    most = max(point.ledger.parameters for point in run.timeline)
    assert most - run.peaks["clip"].ledger.parameters <= 2 * trained


def test_gradients_that_are_reduced_are_the_adapters() -> None:
    """ZeRO 3 gathers all weights and reduces the gradients of trained weights."""
    recipe = recipe_with({"rank": 8}, WIDE, cluster={"devices_per_node": 2}, batch_size=2)
    blueprint = blueprint_of(recipe)
    trained, frozen = blueprint.parameter_counts()
    run = dry_run(recipe, blueprint, strategy_from({"zero_stage": 3}), cluster_of(recipe.cluster))
    sent: dict[str, int] = {}
    for each in run.cost.collectives:
        if each.axis == "shard":
            sent[each.kind] = sent.get(each.kind, 0) + each.calls * each.bytes
    assert sent["all_gather"] == 2 * 4 * (trained + frozen)
    assert sent["reduce_scatter"] == 4 * trained


def test_training_takes_two_thirds_of_the_flops() -> None:
    """Frozen weights need no gradient of their own: products of 4 in 6, and the adapters'."""
    model = {"preset": "llama-3-8b", "layers": 2}
    counted = {
        name: planned(adapter, {"precision": "bf16"}, model, batch_size=1, data={"sequence_length": 128})
        for name, adapter in {"full": None, "lora": {"rank": 16}}.items()
    }
    assert 0.66 <= counted["lora"].cost.flops / counted["full"].cost.flops <= 0.675


@pytest.mark.long
def test_a_base_that_does_not_fit_fits_in_four_bits() -> None:
    """Llama 3 8B on one device of 16 GiB: in bf16 the weights alone are as much.

    A strategy that is given whole, in one dry run: the planner would look at all that is near it.
    """
    fits = {}
    for quantize in ("none", "nf4"):
        cluster = {"preset": "1xA100-80GB", "memory_gib": 16}
        recipe = recipe_with(
            {"rank": 16, "quantize": quantize},
            {"preset": "llama-3-8b"},
            batch_size=1,
            data={"sequence_length": 512, "tokenizer": "bytes"},
            cluster=cluster,
            strategy={"precision": "bf16", "activation_checkpointing": "full", "micro_batch_size": 1},
        )
        strategy, device = strategy_from(recipe.strategy), cluster_of(recipe.cluster)
        found = predict(recipe, blueprint_of(recipe), strategy, device)
        fits[quantize] = found.peak.bytes <= device.capacity_bytes
    assert fits == {"none": False, "nf4": True}


def test_the_memory_of_loftqs_start_is_planned() -> None:
    """A block's weights in fp32, and with them, for one layer [o, i] after the other, the eigenvectors of min(o, i)²
    values in fp64, their matrix and LAPACK's workspace."""
    adapter = {"rank": 8, "quantize": "nf4"}
    small = WIDE | {"layers": 1}
    setup = {
        init: planned(adapter | {"init": init}, {"precision": "bf16"}, small).peaks["setup"].bytes
        for init in ("default", "loftq")
    }
    width, ffn = WIDE["width"], WIDE["ffn"]
    block = 4 * (3 * width**2 + 3 * width * ffn)  # keys and values have half the width
    layer = 4 * 8 * width**2  # matrix, eigenvectors, and twice as much workspace
    more = setup["loftq"] - setup["default"]
    assert block + layer <= more <= block + layer + 16 * width * ffn


# ---- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora", pytest.param("dora", marks=pytest.mark.long)])
def test_loftq_trains_as_in_one_process(name: str, parity: Parity) -> None:
    """Under every ZeRO stage, in fp64: within 1e-10."""
    adapter = {"name": name, "rank": 3, "alpha": 6, "quantize": "nf4", "init": "loftq:2"}
    recipe = recipe_with(adapter, data={"source": WORDS, "sequence_length": 16})
    parity.all_pass(*(Trial(recipe, 2, {"precision": "fp64", "zero_stage": stage}) for stage in range(4)))


# ---- saving -----------------------------------------------------------------------------------------------


def trained_run(adapter: dict[str, Any], settings: dict[str, Any]) -> Run:
    recipe = recipe_with(adapter)
    run = build(recipe, blueprint_of(recipe), strategy_from(settings), torch.device("cpu"))
    tokens = torch.randint(257, (4, 17), generator=torch.Generator().manual_seed(3))
    mine = tokens[run.data_rank :: run.data_degree]
    for _ in range(2):
        # A pipeline takes as many micro-batches as it has ranks, at least; all others one.
        parts = [mine[row : row + 1] for row in range(len(mine))]
        step(run, [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in parts], 1e-2)
    return run


def saved_rank(adapter: dict[str, Any], settings: dict[str, Any], folder: str) -> str:
    return str(leave(trained_run(adapter, settings), Path(folder)))


LAYOUTS: list[dict[str, Any]] = [
    {"zero_stage": 3},
    {"zero_stage": 3, "tensor_parallel": 2, "pipeline_parallel": 2},
    {"zero_stage": 1, "replicate": 2, "tensor_parallel": 2},
    {"zero_stage": 0, "pipeline_parallel": 2, "offload": "nvme:/tmp"},
]


@pytest.mark.parametrize(
    "layouts", [LAYOUTS[1::2], pytest.param(LAYOUTS[::2], marks=pytest.mark.long)], ids=["stages", "others"]
)
def test_adapters_are_gathered_by_name_from_every_layout(
    layouts: list[dict[str, Any]], pool: Pool, tmp_path: Path
) -> None:
    """The file of any division is that of one process; rank 3 is divided among four ranks, so one has nothing."""
    adapter = {"rank": 3, "alpha": 6}
    (alone,) = pool.run(1, saved_rank, adapter, {"precision": "fp64"}, str(tmp_path / "alone"))
    expected = AdapterFiles(Path(alone))
    blueprint = blueprint_of(recipe_with(adapter))
    assert isinstance(blueprint, AdaptedModel) and expected.shapes == blueprint.adapter_shapes
    assert json.loads((Path(alone) / CONFIG).read_text())["r"] == 3
    for index, settings in enumerate(layouts):
        folder = str(tmp_path / str(index))
        found = pool.run(4, saved_rank, adapter, settings | {"precision": "fp64"}, folder, timeout=120)
        assert len(set(found)) == 1
        files = AdapterFiles(Path(found[0]))
        assert files.shapes == expected.shapes and files.fingerprint == expected.fingerprint
        for name in expected.shapes:
            torch.testing.assert_close(files.read(name), expected.read(name), rtol=1e-9, atol=1e-12)
            assert files.read(name).any(), name


def short_rank(folder: str) -> list[str]:
    """The errors when ranks do not hold all of a tensor, when it reads back with other values, and of a full disk."""
    run = trained_run({"rank": 3}, {"zero_stage": 3})
    assert isinstance(run.blueprint, AdaptedModel)
    said, name = [], "layers.1.mlp.up_proj.lora_B.weight"
    honest = dict(run.blueprint.adapter_shapes)
    for shapes in ({**honest, name: (56, 3)}, {**honest, "layers.2.lora_A.weight": (3, 4)}):
        run.blueprint.__dict__["adapter_shapes"] = shapes
        try:
            leave(run, Path(folder))
        except CheckpointError as error:
            said.append(error.line())
    run.blueprint.__dict__["adapter_shapes"] = honest
    Path(folder, "adapter").parent.mkdir(exist_ok=True)
    original = AdapterFiles.read
    AdapterFiles.read = lambda self, key: original(self, key) + (key == name)  # type: ignore[method-assign, assignment]
    try:
        leave(run, Path(folder))
    except (CheckpointError, ResourceError) as error:
        said.append(error.line())
    finally:
        AdapterFiles.read = original  # type: ignore[method-assign]
    return said


def test_what_is_not_whole_is_not_saved(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(2, short_rank, str(tmp_path))
    assert said[0] == said[1]
    assert "layers.1.mlp.up_proj.lora_B.weight): the ranks hold 165 of its 168 values" in said[0][0]
    assert "layers.2.lora_A.weight): the ranks hold 0 of its 12 values" in said[0][1]
    assert "up_proj.lora_B.weight reads back with other values" in said[0][2]
    assert not (tmp_path / "adapter").exists()


def values_rank(adapter: dict[str, Any], settings: dict[str, Any], folder: str) -> bool:
    """Whether a run that starts from an adapter's folder has its values."""
    recipe = recipe_with(adapter | {"start_from": folder})
    run = build(recipe, blueprint_of(recipe), strategy_from(settings), torch.device("cpu"))
    whole = gathered_adapter(run, parameters_of(run))
    files = AdapterFiles(Path(folder))
    return all(torch.equal(value, files.read(name).to(value)) for name, value in whole.items())


@pytest.mark.parametrize("adapter", [{"rank": 3}, {"rank": 3, "name": "dora", "quantize": "nf4"}])
def test_a_run_starts_from_an_adapter(adapter: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    (left,) = pool.run(1, saved_rank, adapter, {}, str(tmp_path))
    assert set(pool.run(2, values_rank, adapter, {"zero_stage": 3}, left)) == {True}


def test_optimizers_know_the_adapter_alone(pool: Pool) -> None:
    assert pool.run(1, known_rank) == [True]


def known_rank() -> bool:
    run = trained_run({"rank": 3, "learning_rate_ratio": 16.0}, {"zero_stage": 2})
    trained = {name for name, p in named_parameters(run.model) if p in run.optimizer.state}
    rates = {
        name: run.optimizer.rate_of(p).learning_rate
        for name, p in named_parameters(run.model)
        if p in run.optimizer.state
    }
    right = all(rate == (0.16 if "lora_B" in name else 0.01) for name, rate in rates.items())
    return right and trained == {n for n, _ in named_parameters(run.model) if is_adapter(n)}


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "settings", "reason"),
    [
        ({}, {"precision": "fp8"}, "multiply in bf16"),
        ({}, {"tensor_parallel": 2, "tensor_sequence_parallel": "regathered"}, "keep their own inputs"),
        ({"quantize": "nf4"}, {"tensor_parallel": 2}, "packed weights are rows of bytes"),
        ({"quantize": "int8"}, {"tensor_parallel": 2}, "packed weights are rows of bytes"),
        ({"name": "dora"}, {"tensor_parallel": 2}, "norms of whole rows"),
    ],
)
def test_what_cannot_be_combined(adapter: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    strategy = strategy_from(settings)
    broken = list(broken_rules(strategy, 2, recipe_with(adapter)))
    assert [reason in violation.rule.reason for violation in broken] == [True]
    assert not list(broken_rules(strategy.with_values(**broken[0].nearest), 2, recipe_with(adapter)))
    assert not list(broken_rules(strategy, 2, recipe_with(None)))


def test_the_refusal_names_the_adapter_and_no_devices() -> None:
    recipe = recipe_with({}, strategy={"precision": "fp8"})
    with pytest.raises(RecipeError, match=r"^precision cannot be fp8 with an adapter "):
        refuse_broken(recipe, 1, lambda key: f"strategy.{key}")


def test_files_are_named_as_peft_names_them() -> None:
    assert (CONFIG, TENSORS) == ("adapter_config.json", "adapter_model.safetensors")
