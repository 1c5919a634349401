"""Expert parallelism trains as one plain process, with every other technique, whatever the router does.

Faults of other trainers have a test of their own, by name: the gradient norm without experts (Megatron-LM #5916),
expert gradients times the degree (pytorch #160285), a detached router and experts without decay (NeMo Automodel #2995),
ranks with unequal batches (TRL #5713). NaN of rows that a grouped product leaves uninitialised (transformers #48205) is
in tests/runtime/test_dispatch.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.space import Space
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, broken_rules, layout_of, strategy_from, strategy_line
from tests.harness.corpora import EVEN, WORDS
from tests.harness.families import save_tiny
from tests.harness.parity import Parity, Trial
from tests.harness.tiers import quick

pytest.importorskip("transformers")
FIXED = {"precision": "fp64", "expert_parallel": 2, "micro_batch_size": 2}


def recipe_for(folder: Path, family: str = "mixtral", **sections: Any) -> Recipe:
    if not folder.exists():
        save_tiny(family, folder, vocab_size=264)
    values = {
        "model": {"hf": str(folder)},
        "data": {"source": EVEN, "sequence_length": 16},
        "steps": 20,
        "batch_size": 8,
    }
    return recipe_of(values | sections, SETTINGS)


ON_2: list[dict[str, Any]] = [
    {"zero_stage": 3, "activation_checkpointing": "full"},
    {"zero_stage": 2, "offload": "optimizer+parameters"},
]
MORE_ON_2: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)),
    {"zero_stage": 2, "activation_checkpointing": "every:2", "loss": "chunked"},
]
ON_4: list[dict[str, Any]] = [
    {"zero_stage": 3, "tensor_parallel": 2, "expert_parallel": 4},
    {"zero_stage": 2, "sequence_parallel": 2, "expert_parallel": 4},
    {"zero_stage": 2, "pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
]
MORE_ON_4: list[dict[str, Any]] = [
    {"zero_stage": 1, "expert_parallel": 4},
    {"zero_stage": 3, "replicate": 2},
    {"zero_stage": 1, "tensor_parallel": 2},
    {"zero_stage": 1, "sequence_parallel": 2, "sequence_method": "ring"},
    {"zero_stage": 1, "pipeline_parallel": 2},
    {"zero_stage": 3, "pipeline_parallel": 2},
]


@pytest.mark.parametrize(
    ("world", "mixes"),
    quick([(2, ON_2), (2, MORE_ON_2), (4, ON_4), (4, MORE_ON_4)], (2, ON_2)),
    ids=["2", "2 more", "4", "4 more"],
)
def test_mixes_train_as_one_plain_process(
    world: int, mixes: list[dict[str, Any]], parity: Parity, tmp_path: Path
) -> None:
    """AdamW with an active clip norm, in fp64."""
    recipe = recipe_for(tmp_path / "mixtral")
    parity.all_pass(*(Trial(recipe, world, FIXED | {"zero_stage": 1} | mix) for mix in mixes))


NATIVE = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 257,
    "context": 32,
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn": 48,
    "shared_ffn": 32,
    "balance_loss": 0.0,  # it is of a micro-batch of one rank
}


SHARED = {"tensor_parallel": 2, "expert_parallel": 4, "tensor_sequence_parallel": "gathered"}
"""Ranks that share the work of a layer have different tokens of a sequence."""


@pytest.mark.parametrize(
    "mixes",
    [
        [{"tensor_parallel": 2, "expert_parallel": 4}, {"pipeline_parallel": 2}, SHARED],
        pytest.param(
            [
                {},
                {"sequence_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full"},
                SHARED | {"expert_parallel": 2, "pipeline_parallel": 2},
                SHARED
                | {
                    "tensor_sequence_parallel": "regathered",
                    "activation_checkpointing": "full",
                    "zero_stage": 3,
                },
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["layouts", "more"],
)
def test_native_mixtures_train_as_one_plain_process(mixes: list[dict[str, Any]], parity: Parity) -> None:
    values = {"data": {"source": EVEN, "sequence_length": 16}, "steps": 20, "batch_size": 8}
    recipe = recipe_of({"model": NATIVE, **values}, SETTINGS)
    parity.all_pass(*(Trial(recipe, 4, FIXED | {"zero_stage": 2} | mix) for mix in mixes))


FEW = NATIVE | {"experts": 2}
ROWS: list[Any] = [
    {"zero_stage": 3, "expert_parallel": 1},
    {"zero_stage": 2},
]
MORE_ROWS: list[Any] = [
    {"zero_stage": 1, "expert_parallel": 1},
    {"zero_stage": 3, "activation_checkpointing": "full"},
    {"zero_stage": 3, "replicate": 2, "expert_parallel": 1},
    {"zero_stage": 3, "tensor_parallel": 2, "expert_parallel": 1},
    {"zero_stage": 2, "offload": "optimizer+parameters", "expert_parallel": 1},
    {"zero_stage": 3, "compile": "block", "expert_parallel": 1},
]


@pytest.mark.parametrize("mixes", [ROWS, pytest.param(MORE_ROWS, marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.long)])
def test_more_ranks_than_experts_divide_their_rows(
    mixes: list[dict[str, Any]], optimizer: str, parity: Parity
) -> None:
    """The gate and up projections [2, 96, 32] of two experts, and the down projections [2, 32, 48], on four ranks."""
    values = {"data": {"source": EVEN, "sequence_length": 16}, "steps": 20, "batch_size": 8}
    recipe = recipe_of({"model": FEW, "optimizer": {"name": optimizer}, **values}, SETTINGS)
    mixes = [
        mix for mix in mixes if optimizer == "adamw" or "tensor_parallel" not in mix
    ]  # rows are too narrow
    parity.all_pass(*(Trial(recipe, 4, FIXED | mix) for mix in mixes))


def test_every_rank_holds_as_much_of_few_experts() -> None:
    """Sixteen of them on 64 ranks: a whole one each on some would be four times as much."""
    model = NATIVE | {"experts": 16, "layers": 4, "width": 128, "expert_ffn": 256}
    recipe = recipe_of(
        {"model": model, "data": {"sequence_length": 16}, "steps": 1, "batch_size": 64,
         "cluster": {"preset": "8xH100-80GB", "nodes": 8}}, SETTINGS,
    )  # fmt: skip
    cluster, strategy = cluster_of(recipe.cluster), strategy_from({"zero_stage": 3, "precision": "fp32"})
    whole = blueprint_of(recipe).parameter_count() * 4
    for rank in (0, 63):
        run = dry_run(recipe, blueprint_of(recipe), strategy, cluster, rank=rank)
        assert run.peaks["optimizer"].ledger.optimizer_state == pytest.approx(2 * whole / 64, rel=0.05)


def test_a_stage_of_a_pipeline_may_have_no_experts(parity: Parity) -> None:
    """As of models whose first layers are dense."""
    values = {"data": {"source": EVEN, "sequence_length": 16}, "steps": 20, "batch_size": 8}
    model = BIASED | {"layers": 4, "dense_layers": 3}
    recipe = recipe_of({"model": model, **values}, SETTINGS)
    stages = {"pipeline_parallel": 2, "pipeline_schedule": "1f1b"}
    parity.all_pass(Trial(recipe, 4, FIXED | {"zero_stage": 1} | stages))


BIASED = NATIVE | {"router": "sigmoid", "router_bias": True, "router_bias_rate": 0.1}
BIASES: list[Any] = [
    {"zero_stage": 2, "pipeline_parallel": 2},
    {"zero_stage": 1, "tensor_parallel": 2, "expert_parallel": 1, "tensor_sequence_parallel": "gathered"},
]
MORE_BIASES: list[Any] = [
    {"zero_stage": 3, "activation_checkpointing": "full"},
    {"zero_stage": 1, "precision": "bf16"},
    {"zero_stage": 1, "tensor_parallel": 2, "expert_parallel": 4},
    SHARED | {"zero_stage": 1},
    {"zero_stage": 1, "sequence_parallel": 2},
    {"zero_stage": 1, "precision": "fp16"},
    {"zero_stage": 0, "compile": "block", "expert_parallel": 1},
    {"zero_stage": 0, "compile": "block", "activation_checkpointing": "full"},
]


@pytest.mark.parametrize("mixes", [BIASES, pytest.param(MORE_BIASES, marks=pytest.mark.long)], ids=len)
def test_biases_of_routers_balance_by_the_tokens_of_all_ranks(
    mixes: list[dict[str, Any]], parity: Parity
) -> None:
    """The reference counts what its routers return. Such a rate changes choices in every step."""
    values = {"data": {"source": EVEN, "sequence_length": 16}, "steps": 20, "batch_size": 8}
    recipe = recipe_of({"model": BIASED, **values}, SETTINGS)
    parity.all_pass(*(Trial(recipe, 4, FIXED | mix) for mix in mixes))


@pytest.mark.parametrize(
    ("world", "mixes"),
    [
        (2, [{"zero_stage": 1}]),
        pytest.param(
            4,
            [
                {"zero_stage": 1, "sequence_parallel": 2},
                {"zero_stage": 1, "pipeline_parallel": 2},
                {"zero_stage": 1, "tensor_parallel": 2, "expert_parallel": 4},
                {"zero_stage": 3, "activation_checkpointing": "full"},
                {"zero_stage": 0, "compile": "block", "expert_parallel": 1},
            ],
            marks=pytest.mark.long,
        ),
    ],
)
def test_rows_that_fill_up_a_step_move_no_bias(
    world: int, mixes: list[dict[str, Any]], parity: Parity
) -> None:
    """Three sequences leave a row or more of the ranks' micro-batches of two without a target."""
    values = {"data": {"source": EVEN, "sequence_length": 16}, "steps": 20, "batch_size": 3}
    recipe = recipe_of({"model": BIASED, **values}, SETTINGS)
    parity.all_pass(*(Trial(recipe, world, FIXED | mix) for mix in mixes))


COMPILED: dict[int, list[dict[str, Any]]] = {
    2: [{"zero_stage": 3}],
    4: [
        {"zero_stage": 0},
        {"zero_stage": 3, "tensor_parallel": 2, "expert_parallel": 4},
        {"zero_stage": 1, "pipeline_parallel": 2},
        {"zero_stage": 3, "sequence_parallel": 2, "activation_checkpointing": "full"},
        {"zero_stage": 2, "sequence_parallel": 2, "sequence_method": "ring"},
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("world", COMPILED)
def test_compiled_parts_of_blocks(world: int, parity: Parity) -> None:
    """The parts around the experts' FSDP group, and the experts, each compiled."""
    values = {"data": {"source": EVEN, "sequence_length": 16}, "steps": 20, "batch_size": 8}
    recipe, fixed = recipe_of({"model": NATIVE, **values}, SETTINGS), FIXED | {"compile": "block"}
    parity.all_pass(*(Trial(recipe, world, fixed | mix) for mix in COMPILED[world]))


@pytest.mark.long  # a minute for each compilation
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {}),
        ("mixtral", {"adapter": {"rank": 2, "targets": "all"}}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
    ],
    ids=str,
)
def test_compiled_experts_of_transformers(
    family: str, settings: dict[str, Any], parity: Parity, tmp_path: Path
) -> None:
    """Inductor knows the grouped product in bf16 alone, whether experts are divided or not."""
    recipe = recipe_for(tmp_path / family, family, **settings)
    fixed = FIXED | {"zero_stage": 3, "compile": "block"}
    parity.all_pass(
        Trial(recipe, 2, fixed | {"precision": "fp32"}),
        Trial(recipe, 2, fixed | {"precision": "bf16"}),
        Trial(recipe, 2, fixed | {"precision": "fp32", "expert_parallel": 1}),
    )


DEEPSEEK = NATIVE | {
    "layers": 3,
    "kv_heads": 4,
    "head_dim": 12,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "rope_head_dim": 4,
    "v_head_dim": 8,
    "dense_layers": 1,
    "router": "sigmoid",
    "router_groups": 2,
    "router_scale": 2.5,
    "router_bias": True,
}


LATENT: list[dict[str, Any]] = [
    {"zero_stage": 3, "tensor_parallel": 2, "activation_checkpointing": "full"},
    {"pipeline_parallel": 2},
    {"sequence_parallel": 2},
]
MORE_LATENT: list[dict[str, Any]] = [
    {"zero_stage": 3},
    {"tensor_parallel": 2, "expert_parallel": 4},
    {"sequence_parallel": 2, "zero_stage": 3, "activation_checkpointing": "selective"},
    {"sequence_parallel": 2, "sequence_method": "ring"},
]


@pytest.mark.parametrize(
    ("mixes", "packing"),
    quick(
        [(LATENT[:2], False), (LATENT[2:], True), (MORE_LATENT, False)],
        (LATENT[2:], True),
    ),
    ids=["layouts", "packed", "more"],
)
def test_native_deepseek_trains_as_one_plain_process(
    mixes: list[dict[str, Any]], packing: bool, parity: Parity
) -> None:
    """Latent attention, a first block without experts, groups of experts."""
    data = {"source": EVEN, "sequence_length": 16, "packing": packing}
    recipe = recipe_of({"model": DEEPSEEK, "data": data, "steps": 20, "batch_size": 8}, SETTINGS)
    parity.all_pass(*(Trial(recipe, 4, FIXED | {"zero_stage": 2} | mix) for mix in mixes))


@pytest.mark.long
def test_adapters_of_experts(parity: Parity, tmp_path: Path) -> None:
    """Low ranks are divided with the experts that they adapt, also on a base of four bits."""
    folder, adapter = tmp_path / "mixtral", {"rank": 2, "targets": "all"}
    packed = recipe_for(folder, adapter=adapter | {"quantize": "nf4"})
    parity.all_pass(
        Trial(recipe_for(folder, adapter=adapter), 4, FIXED | {"zero_stage": 3}),
        Trial(recipe_for(folder, adapter=adapter), 4, FIXED | {"tensor_parallel": 2, "expert_parallel": 4}),
        Trial(packed, 4, FIXED | {"precision": "fp32", "zero_stage": 2}),
    )


def test_fewer_bits(parity: Parity, tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    eight_bits = recipe_for(folder, optimizer={"name": "adamw_8bit"})
    within = recipe_for(folder, optimizer={"clip_norm": None})
    parity.all_pass(
        Trial(eight_bits, 2, FIXED | {"precision": "fp32", "zero_stage": 2}),
        Trial(recipe_for(folder), 2, FIXED | {"precision": "bf16", "zero_stage": 3}),
        Trial(recipe_for(folder), 2, FIXED | {"precision": "fp16", "zero_stage": 1}),
        Trial(within, 2, FIXED | {"zero_stage": 1, "optimizer_in_backward": True}),
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "olmoe"])
def test_families(family: str, parity: Parity, tmp_path: Path) -> None:
    """With biases and clamped gates, with transposed weights, with normalised queries."""
    parity.all_pass(Trial(recipe_for(tmp_path / family, family), 2, FIXED | {"zero_stage": 3}))


# ---- faults of others -------------------------------------------------------------------------------------


def test_the_gradient_norm_has_the_experts_and_clips(parity: Parity, tmp_path: Path) -> None:
    """A limit far below the norm: its value scales every update."""
    recipe = recipe_for(
        tmp_path / "mixtral", optimizer={"name": "sgd", "learning_rate": 0.1, "clip_norm": 1e-2}
    )
    settings = FIXED | {"expert_parallel": 4, "tensor_parallel": 2, "zero_stage": 1}
    parity.all_pass(Trial(recipe, 4, settings))


def test_expert_gradients_are_not_times_the_degree(parity: Parity, tmp_path: Path) -> None:
    """SGD without clipping sees the size of a gradient, which Adam does not; the router's too."""
    recipe = recipe_for(
        tmp_path / "mixtral", optimizer={"name": "sgd", "learning_rate": 0.1, "clip_norm": None}
    )
    parity.all_pass(
        Trial(recipe, 4, FIXED | {"expert_parallel": 4, "zero_stage": 2}),
        Trial(recipe, 4, FIXED | {"sequence_parallel": 2, "expert_parallel": 4, "zero_stage": 0}),
    )


def test_experts_without_tokens_decay_and_their_rank_goes_on(parity: Parity, tmp_path: Path) -> None:
    """A bias of the router's selection leaves half of the experts, and one of the two ranks, without tokens."""
    folder = tmp_path / "deepseek_v3"
    recipe = recipe_for(folder, "deepseek_v3", optimizer={"weight_decay": 0.5})
    file = folder / "model.safetensors"
    weights = load_file(file)
    biased = [name for name in weights if name.endswith("e_score_correction_bias")]
    assert biased
    for name in biased:
        weights[name] = torch.tensor([0.0, 0.0, -100.0, -100.0], dtype=weights[name].dtype)
    save_file(weights, file, {"format": "pt"})
    # The router computes in fp32, whatever the precision.
    parity.all_pass(Trial(recipe, 2, FIXED | {"precision": "fp32", "zero_stage": 1}))


def test_ranks_with_unequal_batches(parity: Parity, tmp_path: Path) -> None:
    """Three sequences for four ranks, of unequal lengths: one rank has padding alone."""
    data = {"source": WORDS, "sequence_length": 16}
    recipe = recipe_for(tmp_path / "mixtral", data=data, batch_size=3)
    parity.all_pass(Trial(recipe, 4, FIXED | {"precision": "fp32", "micro_batch_size": 1, "zero_stage": 2}))


# ---- the plan ---------------------------------------------------------------------------------------------


def planned(folder: Path, world: int, **settings: Any) -> Any:
    recipe = recipe_for(folder, cluster={"device": "cpu", "devices_per_node": world})
    strategy = strategy_from({"micro_batch_size": 2, **settings})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))


@pytest.mark.parametrize(
    ("degree", "capacity", "rows"),
    [(2, 1.0, 27), (2, 1.5, 32), (4, 1.0, 16), (4, 1.5, 24)],
    ids=str,
)
def test_rows_cross_twice_in_each_direction(degree: int, capacity: float, rows: int, tmp_path: Path) -> None:
    """A token has 2 of 4 experts, so of two ranks 5/6 on average, of four 1/2; at most all 32 tokens go to a rank.

    Per layer and pass: rows [R c, h] there and back, and their gradients; with each row k numbers and weights.
    """
    settings = {"expert_parallel": degree, "expert_capacity": capacity, "zero_stage": 0, "precision": "fp32"}
    run = planned(tmp_path / "m", 4, **settings)
    chosen, width, layers = 2, 32, 2
    row_bytes = 4 * width * 4  # there, back, and their gradients
    small = chosen * (4 + 2 * 4)  # numbers of experts in int32, weights and their gradients
    sent = [c for c in run.cost.collectives if c.kind == "all_to_all"]
    assert {c.axis for c in sent} == {"expert"}
    assert sum(c.traffic_bytes for c in sent) == layers * (row_bytes + small) * rows * (degree - 1)


def test_a_rank_holds_its_experts_and_zero_divides_the_rest_over_the_axis(tmp_path: Path) -> None:
    layers, experts, width, inner = 2, 4, 32, 48
    one, two = (
        planned(tmp_path / "m", 2, zero_stage=stage, expert_parallel=2).peaks["setup"].ledger.parameters
        for stage in (0, 3)
    )
    of_experts = layers * experts * 3 * width * inner * 4 // 2
    alone = planned(tmp_path / "m", 2, zero_stage=0).peaks["setup"].ledger.parameters
    assert alone - one == of_experts
    assert two == pytest.approx((alone - 2 * of_experts) / 2 + of_experts, rel=0.01)


def test_the_degree_counts_all_ranks_that_divide_experts() -> None:
    strategy = strategy_from({"expert_parallel": 4, "tensor_parallel": 2, "zero_stage": 1})
    layout = layout_of(strategy, 8)
    assert {axis.name: degree for axis, degree in layout.axes if degree > 1} == {
        "tensor": 2,
        "expert": 2,
        "shard": 2,
    }
    assert strategy_line(strategy, layout, 8) == "ep4 · tp2 · fp32 · zero1×4 · mb1×ga2"


def test_latent_attention_has_no_shares_of_the_sequence() -> None:
    recipe = recipe_of(
        {"model": DEEPSEEK, "data": {"sequence_length": 16}, "steps": 1, "batch_size": 8}, SETTINGS
    )
    settings = {"tensor_parallel": 2, "tensor_sequence_parallel": "gathered"}
    (violation,) = broken_rules(strategy_from(settings), 2, recipe)
    assert violation.nearest == {"tensor_sequence_parallel": "none"}
    assert "latent attention" in violation.rule.reason


def test_a_pinned_degree_takes_all_devices_and_rules_refuse_what_is_left(tmp_path: Path) -> None:
    """The search asks for the mesh of a degree and of stages before it asks the rules."""
    sections = {"cluster": {"device": "cpu", "devices_per_node": 4}, "strategy": {"expert_parallel": 4}}
    recipe = recipe_for(tmp_path / "m", **sections)
    space = Space(recipe, cluster_of(recipe.cluster))
    fitting = [
        origin for origins in space.meshes().values() for origin in origins for _ in space.completions(origin)
    ]
    assert fitting and all(origin.values["pipeline_parallel"] == 1 for origin in fitting)


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"expert_parallel": 3}, {"expert_parallel": 2}),
        ({"expert_parallel": 2, "tensor_parallel": 4}, {"expert_parallel": 1}),
        ({"expert_parallel": 8, "replicate": 2, "zero_stage": 1}, {"expert_parallel": 4}),
        ({"expert_capacity": 2.0}, {"expert_capacity": 1.25}),
    ],
    ids=str,
)
def test_rules_name_the_nearest(settings: dict[str, Any], nearest: dict[str, Any], tmp_path: Path) -> None:
    violations = list(broken_rules(strategy_from(settings), 8, recipe_for(tmp_path / "m")))
    assert nearest in [dict(violation.nearest) for violation in violations]


def test_the_asynchronous_pipeline_refuses_biases_that_move() -> None:
    """Without a rate it runs, and counts nothing."""
    values = {"data": {"sequence_length": 16}, "steps": 2, "batch_size": 8}
    strategy = strategy_from({"pipeline_parallel": 2, "pipeline_schedule": "pipedream"})
    for rate in (0.1, 0.0):
        cluster = {"device": "cpu", "devices_per_node": 2}
        recipe = recipe_of(
            {"model": BIASED | {"router_bias_rate": rate}, "cluster": cluster, **values}, SETTINGS
        )
        with pytest.raises(RecipeError, match="not counted together") if rate else nullcontext():
            dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))


def test_a_model_without_experts_is_refused() -> None:
    model = {"layers": 2, "width": 32, "heads": 4, "vocab": 256}
    recipe = recipe_of({"model": model, "steps": 1, "batch_size": 2}, SETTINGS)
    (violation,) = broken_rules(strategy_from({"expert_parallel": 2}), 2, recipe)
    assert violation.rule.reason == "the model has no experts"


def test_a_degree_that_does_not_divide_the_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not divide the 4 experts"):
        planned(tmp_path / "m", 8, expert_parallel=8, zero_stage=1)
