"""Records with completions train as one plain process does, packed or not, and packed they take the memory planned."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.errors import RecipeError
from shardwise.dryrun.model_flops import model_flops
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.blueprint import batch_shapes
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, refuse_broken, strategy_from
from shardwise.trainer.meter import MemoryMeter
from shardwise.trainer.warm_up import warm_kernels
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool

SMALL = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 44, "vocab": 257, "context": 64}

STEPS = 3

ASKED: dict[str, dict[str, Any]] = {
    "zero 3, selective": {"zero_stage": 3, "activation_checkpointing": "selective", "micro_batch_size": 2},
    "zero 2, a budget": {"zero_stage": 2, "activation_checkpointing": "budget:0.5"},
    "zero 1, offload": {"zero_stage": 1, "offload": "activations", "loss": "chunked"},
    "tensor in shares": {"tensor_parallel": 2, "tensor_sequence_parallel": "gathered"},
    "pipeline": {"pipeline_parallel": 2, "activation_checkpointing": "full", "zero_stage": 0},
    "ulysses": {"sequence_parallel": 2, "zero_stage": 3, "activation_checkpointing": "selective"},
}
FOUR: list[dict[str, Any]] = [
    {"sequence_parallel": 2, "pipeline_parallel": 2, "micro_batch_size": 2},
    {"sequence_parallel": 2, "tensor_parallel": 2, "tensor_sequence_parallel": "gathered"},
]
"""On four ranks."""


def records(folder: Path) -> str:
    draw = random.Random(0)
    path = folder / "records.jsonl"
    lines = (
        {"prompt": f"{n} is " * draw.randint(1, 3), "completion": "so " * draw.randint(1, 5)}
        for n in range(90)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def small(folder: Path, packing: bool, model: dict[str, Any], **sections: Any) -> Recipe:
    data = {"source": records(folder), "sequence_length": 48, "packing": packing}
    values = {"model": model, "data": data, "steps": STEPS, "batch_size": 5}
    return recipe_of(values | sections, SETTINGS)


def agree(parity: Parity, recipe: Recipe, precision: str, *names: str) -> None:
    parity.all_pass(*(Trial(recipe, 2, {"precision": precision, **ASKED[name]}) for name in names))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


FIRST = ("zero 1, offload", "tensor in shares", "pipeline")


@pytest.mark.parametrize(
    "names",
    [FIRST, pytest.param([name for name in ASKED if name not in FIRST], marks=pytest.mark.long)],
    ids=["some", "others"],
)
def test_packed_records_train_on_two_ranks_as_on_one(
    names: Sequence[str], parity: Parity, tmp_path: Path
) -> None:
    agree(parity, small(tmp_path, True, SMALL), "fp64", *names)


@pytest.mark.long
def test_packed_records_in_divided_rows_of_a_divided_model(parity: Parity, tmp_path: Path) -> None:
    recipe = small(tmp_path, True, SMALL)
    parity.all_pass(*(Trial(recipe, 4, {"precision": "fp64", **settings}) for settings in FOUR))


@pytest.mark.long
def test_padded_records_train_on_two_ranks_as_on_one(parity: Parity, tmp_path: Path) -> None:
    agree(parity, small(tmp_path, False, SMALL), "fp64", "tensor in shares", "pipeline")


@pytest.mark.long
def test_learned_positions_in_shares(parity: Parity, tmp_path: Path) -> None:
    """Each rank looks up the positions of its share, of which every sequence has its own."""
    model = {**{k: v for k, v in SMALL.items() if k != "kv_heads"}, "family": "gpt2"}
    agree(parity, small(tmp_path, True, model), "fp64", "tensor in shares", "pipeline", "ulysses")


@pytest.mark.parametrize("name", ["ulysses", pytest.param("pipeline", marks=pytest.mark.long)])
def test_a_hugging_face_model_trains_as_one(name: str, parity: Parity, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=44, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    recipe = small(tmp_path, True, {"hf": str(tmp_path / "model")})
    agree(parity, recipe, "fp32", name)


# ---- memory -----------------------------------------------------------------------------------------------

LONG = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 512, "context": 4096}


def measured(recipe: Recipe, settings: dict[str, Any]) -> int:
    """Real steps on packed sequences; the peak above the level before the model."""
    device, strategy = torch.device("cpu"), strategy_from(settings)
    blueprint = blueprint_of(recipe)
    warm_kernels(device, strategy)
    meter = MemoryMeter(device)
    run = build(recipe, blueprint, strategy, device)
    for _ in range(2):
        shapes = batch_shapes(blueprint, recipe.data)
        batch = {name: torch.zeros((2, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
        batch["positions"] += torch.arange(2048) % 300
        step(run, [batch], 1e-4)
        meter.sample()
    return meter.peak.allocated


@pytest.mark.long
def test_packed_sequences_take_the_memory_that_was_planned(pool: Pool) -> None:
    """Of it the mask: 16 MiB in fp32 for a sequence of 2,048 tokens."""
    values = {"model": LONG, "steps": 3, "batch_size": 2, "cluster": {"devices_per_node": 1}}
    recipes = [
        recipe_of(
            {**values, "data": {"source": "a.jsonl", "sequence_length": 2048, "packing": packing}}, SETTINGS
        )
        for packing in (True, False)
    ]
    cluster, two = cluster_of(recipes[0].cluster), {"micro_batch_size": 2}
    packed, plain = (dry_run(r, blueprint_of(r), strategy_from(two), cluster).peak.bytes for r in recipes)
    assert packed - plain >= 2 * 2048 * 2048 * 4
    peak = pool.run(1, measured, recipes[0], two, timeout=120)[0]
    error = (packed + cluster.device.overhead.workspace_bytes) / peak - 1
    assert abs(error) <= 0.05, f"predicted {packed:,}, measured {peak:,}, {error:+.1%}"


# ---- flash attention of variable length on accelerators ----------------------------------------------------

ROW = 8192


def planned(packing: bool, preset: str = "1xH100-80GB", **settings: Any) -> DryRun:
    """Of one micro-batch of two rows."""
    data = {"source": "a.jsonl", "sequence_length": ROW, "packing": packing}
    model = {**LONG, "context": ROW}
    values = {"model": model, "data": data, "steps": 1, "batch_size": 2, "cluster": {"preset": preset}}
    recipe = recipe_of(values, SETTINGS)
    strategy = strategy_from({"micro_batch_size": 2, "precision": "bf16", **settings})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), history=False)


def attention_of(run: DryRun) -> tuple[set[str], int]:
    """Names and FLOPs of the attention kernels."""
    kernels = [kernel for kernel in run.cost.kernels if "attention" in kernel.operation]
    return {kernel.operation for kernel in kernels}, sum(k.flops * k.calls for k in kernels)


@pytest.mark.parametrize(
    "settings", [{}, {"activation_checkpointing": "selective"}, {"sequence_parallel": 2}], ids=str
)
def test_no_mask_is_planned_where_the_kernel_takes_offsets(settings: dict[str, Any]) -> None:
    """The mask of two rows would have 256 MiB. The rest of packing: positions, and a row's own rotary angles."""
    preset = "2xH100-80GB" if settings.get("sequence_parallel") else "1xH100-80GB"
    packed, plain = (planned(packing, preset, **settings) for packing in (True, False))
    extra = packed.peak.bytes - plain.peak.bytes
    positions, angles, starts = 2 * ROW * 8, 2 * ROW * 64 * 2, 2 * 2 * 4 * ROW // 128 + 4
    starts += 2 * 8  # the generator's state, which the kernel for offsets saves and cuDNN's does not
    assert extra <= positions + angles + starts
    assert extra <= 2 * ROW * ROW * 2 // 100
    assert attention_of(packed)[0] == {"aten::_flash_attention_forward", "aten::_flash_attention_backward"}
    assert attention_of(packed)[1] == attention_of(plain)[1] > 0


@pytest.mark.parametrize(("preset", "precision"), [("1xH100-80GB", "fp32"), ("1xMI300X-192GB", "bf16")])
def test_a_mask_is_planned_elsewhere(preset: str, precision: str) -> None:
    packed, plain = (planned(packing, preset, precision=precision) for packing in (True, False))
    width = 4 if precision == "fp32" else 2
    assert packed.peak.bytes - plain.peak.bytes >= 2 * ROW * ROW * width


def test_model_flops_of_packed_rows_are_those_of_plain_ones() -> None:
    counted = []
    for packing in (True, False):
        data = {"source": "a.jsonl", "sequence_length": ROW, "packing": packing}
        values = {"model": {**LONG, "context": ROW}, "data": data, "steps": 1, "batch_size": 2}
        recipe = recipe_of(values, SETTINGS)
        counted.append(model_flops(blueprint_of(recipe), recipe.data, 2, "bf16", "cuda"))
    assert counted[0] == counted[1]


# ---- what cannot be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degree", "nearest"), [(2, "sequence_method: ulysses"), (3, "sequence_parallel: 1")]
)
def test_the_ring_takes_no_mask(degree: int, nearest: str, tmp_path: Path) -> None:
    """Three ranks cannot share out four heads, so there ulysses is no way out."""
    asked = {"sequence_parallel": degree, "sequence_method": "ring"}
    recipe = small(tmp_path, True, SMALL, strategy=asked)
    with pytest.raises(RecipeError) as caught:
        refuse_broken(recipe, degree, lambda key: f"strategy.{key}")
    line = caught.value.line()
    assert line.startswith("error: sequence_method cannot be ring") and "data.packing" in line
    assert line.endswith(f"the nearest that works is {nearest}") and "\n" not in line


def test_packed_rows_do_not_advise_a_ring(tmp_path: Path) -> None:
    recipe = small(tmp_path, True, SMALL, strategy={"sequence_parallel": 3})
    with pytest.raises(RecipeError) as caught:
        refuse_broken(recipe, 3, lambda key: f"strategy.{key}")
    assert caught.value.line().endswith("the nearest that works is sequence_parallel: 1")


def test_a_model_that_cannot_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2, state_size=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    recipe = small(tmp_path, True, {"hf": str(tmp_path / "model")})
    with pytest.raises(RecipeError) as caught:
        dry_run(recipe, blueprint_of(recipe), strategy_from({}), cluster_of(recipe.cluster))
    assert "data.packing" in caught.value.line()
    assert "MambaForCausalLM" in caught.value.line()
