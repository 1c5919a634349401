"""What the dry run counts, against the papers' formulas, exactly."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.core.cost import StepCost
from shardwise.dryrun.run import DryRun
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.technique.place import Reduced
from tests.harness.dry_runs import dry_run

MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 512, "context": 64}
LENGTH = 32


def recipe(world_size: int, batch_size: int, preset: str = "", **model: Any) -> Recipe:
    cluster = {"preset": preset} if preset else {"device": "cpu", "devices_per_node": world_size}
    values = {
        "model": {**MODEL, **model},
        "data": {"sequence_length": LENGTH},
        "steps": 2,
        "batch_size": batch_size,
        "cluster": cluster,
    }
    return recipe_of(values, SETTINGS)


def run(asked: Recipe, rank: int = 0, depth: int | None = None, **settings: Any) -> DryRun:
    cluster = cluster_of(asked.cluster)
    return dry_run(asked, blueprint_of(asked), strategy_from(settings), cluster, rank=rank, depth=depth)


def units_of_traffic(counted: DryRun, axis: str) -> float:
    """Elements that cross ``axis``, in parameters of the model; the factor (N-1)/N is left out."""
    elements = sum(c.traffic_elements for c in counted.cost.collectives if c.axis == axis)
    return elements / counted.parameters


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("stage", "axis", "expected"),
    [
        (0, "replicate", lambda m: 2),
        (1, "shard", lambda m: 2),
        (2, "shard", lambda m: 1 + m),
        (3, "shard", lambda m: 3 * m),
    ],
)
def test_traffic_of_each_stage(stage: int, axis: str, expected: Any, passes: int) -> None:
    counted = run(recipe(4, 4 * passes, layers=1), zero_stage=stage)
    assert units_of_traffic(counted, axis) == expected(passes)
    others = {c.axis for c in counted.cost.collectives} - {axis, "control"}
    assert all(c.degree == 1 for c in counted.cost.collectives if c.axis in others)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    ("stage", "expected"), [(1, lambda m: 2), (2, lambda m: 1 + m), (3, lambda m: 3 * m)]
)
def test_traffic_of_hybrid_sharding(stage: int, expected: Any, passes: int) -> None:
    """The stage's own inside each copy; one all-reduce of a shard across the copies."""
    counted = run(recipe(8, 8 * passes, layers=1), zero_stage=stage, replicate=2)
    assert units_of_traffic(counted, "shard") == expected(passes)
    assert units_of_traffic(counted, "replicate") == 2 / 4


def test_traffic_in_bytes_is_the_ring_s() -> None:
    counted = run(recipe(4, 4, layers=1), zero_stage=3)
    assert counted.cost.traffic_by_axis()["shard"] == 3 * counted.parameters * 4 * 3 // 4


@pytest.mark.parametrize("passes", [1, 3])
def test_one_rank_casts_weights_once_a_step_in_stage_1(passes: int) -> None:
    """In stage 0 in every forward and every backward pass, as stage 3 gathers them."""
    casts = [
        sum(kernel.calls for kernel in counted.cost.kernels if kernel.operation == "aten::_to_copy")
        for counted in (run(recipe(1, passes, layers=1), zero_stage=s, precision="bf16") for s in (0, 1))
    ]
    weights = 7 + 2 + 3  # matrices and norms of the block; embedding, norm and output layer
    assert casts[0] - casts[1] == weights * (2 * passes - 1)


def test_bf16_gathers_in_16_bits_and_reduces_in_32() -> None:
    counted = run(recipe(4, 4, layers=1), zero_stage=3, precision="bf16")
    assert counted.cost.traffic_by_axis()["shard"] == (2 * 2 + 4) * counted.parameters * 3 // 4


def test_one_process_sends_nothing() -> None:
    counted = run(recipe(1, 4, layers=1), zero_stage=3)
    assert sum(counted.cost.traffic_by_axis().values()) == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_state_is_sixteen_bytes_over_the_ranks(stage: int) -> None:
    """After the backward pass: fp32 weights, gradients and two moments of this rank's shard."""
    world = 8
    counted = run(recipe(world, 2 * world, layers=3), zero_stage=stage, precision="bf16")
    ledger = counted.peaks["clip"].ledger
    scalars = 4 * 30  # AdamW's step counts
    state = ledger.master_weights + ledger.gradients + ledger.optimizer_state
    assert 0 <= state - 16 * counted.parameters // world <= scalars
    assert ledger.parameters == 0


def test_stage_0_keeps_everything_on_every_rank() -> None:
    counted = run(recipe(8, 16), zero_stage=0)
    ledger = counted.peaks["clip"].ledger
    assert ledger.parameters == ledger.gradients == 4 * counted.parameters


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_tied_table_has_one_state(stage: int) -> None:
    """The optimizer's two moments and a step count; a second table would be half of the model again."""
    counted = run(recipe(1, 1, tied=True), zero_stage=stage)
    ledger = max(counted.peaks.values(), key=lambda peak: peak.ledger.optimizer_state).ledger
    assert 8 * counted.parameters <= ledger.optimizer_state < 8 * counted.parameters + 256


def test_uneven_shards_differ_by_rank() -> None:
    asked = recipe(4, 4, vocab=509)
    first, last = run(asked, rank=0, zero_stage=3), run(asked, rank=3, zero_stage=3)
    assert not first.even
    assert first.peaks["clip"].bytes > last.peaks["clip"].bytes


@pytest.mark.parametrize(
    "settings", [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3, "precision": "bf16"}]
)
def test_shallow_runs_extrapolate_to_the_byte(settings: dict[str, Any]) -> None:
    asked = recipe(4, 8, layers=6)
    shallow, deeper, whole = (run(asked, depth=depth, **settings) for depth in (2, 3, 6))
    for phase, peak in whole.peaks.items():
        guess = shallow.peaks[phase].ledger.extrapolated(deeper.peaks[phase].ledger, 4).total
        # The peak of a phase is a maximum of lines in the depth, so a secant is never above it.
        assert guess <= peak.bytes, phase
        if phase == whole.peak.phase:
            assert guess == peak.bytes

    def figures(cost: StepCost) -> dict[str, int]:
        # Clipping stacks one norm per parameter: a single kernel, so its bytes do not extrapolate.
        moved = sum(k.calls * k.bytes for k in cost.kernels if k.phase != "clip")
        return {"flops": cost.flops, "moved": moved, **cost.traffic_by_axis()}

    few, more = figures(shallow.cost), figures(deeper.cost)
    assert {key: few[key] + 4 * (more[key] - few[key]) for key in few} == figures(whole.cost)


def test_many_micro_batches_cost_as_if_all_were_run() -> None:
    asked = recipe(2, 12, layers=1)
    cluster, blueprint = cluster_of(asked.cluster), blueprint_of(asked)
    strategy = strategy_from({"zero_stage": 2})
    three = dry_run(asked, blueprint, strategy, cluster)
    all_six = dry_run(asked, blueprint, strategy, cluster, reduced=Reduced(micro_batches=6))
    assert three.cost.flops == all_six.cost.flops
    assert three.cost.traffic_by_axis() == all_six.cost.traffic_by_axis()
    scalars = 3 * 8  # counts of valid targets
    assert abs(three.peak.bytes - all_six.peak.bytes) <= scalars


def test_the_ledger_sums_to_the_peak_and_names_where() -> None:
    counted = run(recipe(2, 4), zero_stage=3)
    assert sum(counted.peak.ledger.as_dict().values()) == counted.peak.bytes
    assert counted.peak.phase in ("forward", "backward")
    highest = max(sample.ledger.total for sample in counted.timeline)
    assert highest <= counted.peak.bytes


def moved(counted: DryRun, operation: str, phase: str) -> set[int]:
    """Bytes of each kernel of this name."""
    return {k.bytes for k in counted.cost.kernels if (k.operation, k.phase) == (operation, phase)}


def test_kernels_move_what_they_read_and_write() -> None:
    """Allocations and views move nothing, a norm its input and its gradients, a lookup the rows that it names."""
    counted = run(recipe(4, 4, preset="4xH100-80GB"), zero_stage=3, precision="bf16")
    names = {kernel.operation for kernel in counted.cost.kernels}
    assert not any("empty" in name or "_unsafe_view" in name for name in names)
    tokens, width = LENGTH, MODEL["width"]
    activation, weight, row = 2 * tokens * width, 2 * width, 4 * tokens
    assert moved(counted, "shardwise::rms_norm", "forward") == {2 * activation + weight + row}
    assert moved(counted, "shardwise::rms_norm_backward", "backward") == {3 * activation + 2 * weight + row}
    assert moved(counted, "aten::embedding", "forward") == {2 * activation + 8 * tokens}
    gathered = {c.bytes for c in counted.cost.collectives if c.kind == "all_gather"}
    # FSDP2 copies this rank's quarter into the buffer that it gathers.
    assert moved(counted, "fsdp::all_gather_copy_in", "forward") == {2 * size // 4 for size in gathered}


def test_products_have_their_shape_whatever_runs_them() -> None:
    for settings in ({"precision": "fp8"}, {"precision": "bf16", "compile": "block"}):
        counted = run(recipe(1, 1, preset="1xH100-80GB", layers=1), **settings)
        assert all(len(k.shape) == 4 for k in counted.cost.kernels if k.flops), settings
