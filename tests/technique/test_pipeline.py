"""Pipelines: they train as one process does, hold and send what their schedules say, and are refused in words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.checkpoint import restore, save_checkpoint
from shardwise.core.errors import RecipeError
from shardwise.core.json_file import parse_json
from shardwise.core.pipeline.schedule import in_flight, orders, play
from shardwise.core.plan import Plan
from shardwise.core.units import format_percent
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.pipeline.executor import Pipelined
from shardwise.engine.run_state import tensors_of
from shardwise.engine.step import step
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.model.balance import Costs, blocks_per_stage
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.planner.ranks import predict_worst
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import local_part
from shardwise.technique import SETTINGS, broken_rules, refuse_broken, strategy_from
from shardwise.technique.place import Reduced
from shardwise.trainer.evaluation import evaluate
from shardwise.trainer.faults.find_non_finite import first_non_finite
from tests.harness.corpora import FEW_LETTERS
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")
LLAMA = {"layers": 5, "width": 44, "heads": 2, "kv_heads": 1, "ffn": 55, "vocab": 257, "context": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": LLAMA | {"layers": 4, "tied": True},
    "gpt2": {"family": "gpt2", "layers": 4, "width": 42, "heads": 3, "ffn": 51, "vocab": 263, "context": 32},
    "eight": LLAMA | {"layers": 8},
}


# ---- it trains as one process does ------------------------------------------------------------------------


def trial(model: dict[str, Any], world: int, settings: dict[str, Any]) -> Trial:
    values = {
        "model": model,
        "data": {"source": FEW_LETTERS, "sequence_length": 24},
        "steps": 20,
        "batch_size": 5,  # unequal counts on ranks and in micro-batches
        "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0},
    }
    return Trial(recipe_of(values, SETTINGS), world, settings)


def row(model: str, ranks: int, schedule: str, *marks: Any, **settings: Any) -> Any:
    values = {"pipeline_parallel": ranks, "pipeline_schedule": schedule, "precision": "fp64", **settings}
    name = "-".join(str(value) for value in (model, *values.values()))
    world = values.pop("world", ranks)
    return pytest.param(trial(MODELS[model], world, {"micro_batch_size": 1} | values), marks=marks, id=name)


LONG = pytest.mark.long  # rows/rows.json trains their pairs on two stages
ROWS = [
    row("llama", 2, "1f1b", micro_batch_size=2),
    *(
        row("llama", 2, schedule, LONG, micro_batch_size=2)
        for schedule in ("naive", "gpipe", "interleaved", "zero_bubble")
    ),
    row("eight", 4, "interleaved"),
    *(row("eight", 4, schedule, LONG) for schedule in ("1f1b", "zero_bubble")),
    row("eight", 4, "naive", LONG),
    row("gpt2", 4, "gpipe", LONG),
    row("tied", 4, "1f1b"),
    row("llama", 2, "1f1b", LONG, world=4, zero_stage=0),
    row("gpt2", 2, "interleaved", LONG, world=4, zero_stage=1),
    row("tied", 2, "zero_bubble", LONG, world=4, zero_stage=2, replicate=2),
    row("tied", 2, "interleaved", LONG, world=4, zero_stage=3),
    row("llama", 2, "gpipe", LONG, world=4, zero_stage=3, activation_checkpointing="full", loss="chunked"),
    row("llama", 2, "1f1b", LONG, activation_checkpointing="sqrt", precision="fp32"),
    row("gpt2", 2, "zero_bubble", LONG, precision="bf16"),
    row("tied", 2, "1f1b", LONG, world=4, zero_stage=2, precision="fp16"),
]


@pytest.mark.parametrize("trial", ROWS)
def test_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
    """Loss, norm and weights: 1e-10 in fp64, 1e-5 in fp32, wider in 16 bits; a batch of 5."""
    verdict = parity.verdict(trial)
    assert verdict.passed, verdict


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_llama_trains_as_one_plain_process(tied: bool, parity: Parity, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    settings = {"precision": "fp32", "pipeline_parallel": 2, "micro_batch_size": 2}
    verdict = parity.verdict(trial({"hf": str(tmp_path / "llama")}, 2, settings))
    assert verdict.passed, verdict


# ---- a run ------------------------------------------------------------------------------------------------


def small(batch_size: int, model: str = "llama", **settings: Any) -> Recipe:
    return recipe_of(
        {
            "model": MODELS[model],
            "data": {"sequence_length": 24},
            "steps": 4,
            "batch_size": batch_size,
            "strategy": {"micro_batch_size": 1, **settings},
            "cluster": {"devices_per_node": 2 if settings.get("pipeline_parallel") == 2 else 4},
        },
        SETTINGS,
    )


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 257, (1, 24), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids.roll(-1, 1)} for ids in drawn]


def made(recipe: Recipe) -> Any:
    strategy = strategy_from(recipe.strategy)
    return build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))


def held_in_flight(recipe: Recipe, count: int) -> int:
    run = made(recipe)
    step(run, batches(count), 1e-3)
    assert isinstance(run.passes, Pipelined)
    return run.passes.most_in_flight


def test_a_run_holds_p_minus_s_micro_batches_with_1f1b_and_all_with_gpipe(pool: Pool) -> None:
    for count in (2, 5):
        one = pool.run(4, held_in_flight, small(count, pipeline_parallel=4), count)
        assert one == [min(count, 4 - rank) for rank in range(4)]
    assert pool.run(4, held_in_flight, small(6, pipeline_parallel=4, pipeline_schedule="gpipe"), 6) == [6] * 4


def channels_of(recipe: Recipe) -> set[str]:
    pipeline: Any = made(recipe).options.place
    return {group.group_name for group in pipeline.channels.values()}


@pytest.mark.parametrize(("schedule", "channels"), [("1f1b", 2), ("interleaved", 4)])
def test_every_direction_has_a_communicator_of_its_own(schedule: str, channels: int, pool: Pool) -> None:
    """Also where the pipeline is the whole world, and so the default group."""
    for ranks, more in ((2, {}), (4, {"zero_stage": 1})):
        asked = small(4, pipeline_parallel=2, pipeline_schedule=schedule, **more)
        assert all(len(names) == channels for names in pool.run(ranks, channels_of, asked))


def evaluated(recipe: Recipe) -> float:
    return evaluate(made(recipe), batches(3))


def test_held_out_loss_is_that_of_one_process(pool: Pool) -> None:
    [alone] = pool.run(1, evaluated, small(3, precision="fp64"))
    for settings in ({"pipeline_parallel": 4}, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}):
        ranks = pool.run(settings["pipeline_parallel"], evaluated, small(3, precision="fp64", **settings))
        assert ranks == pytest.approx([alone] * len(ranks), rel=1e-12)


def trained_and_saved(recipe: Recipe, folder: Path) -> None:
    run = made(recipe)
    step(run, batches(4), 1e-3)
    save_checkpoint(run, TrainState(step=1), folder, keep=2)


def gone_on(recipe: Recipe, folder: Path) -> tuple[dict[str, Tensor], float]:
    """The restored value of every tensor that one rank alone holds, and the loss of the next step."""
    run = made(recipe)
    assert restore(run, folder) == TrainState(step=1)
    held = {name: local_part(tensor).clone() for name, tensor in tensors_of(run).items()}
    return held, float(step(run, batches(4, seed=1), 1e-3).loss)


def test_a_checkpoint_is_read_by_any_number_of_stages(pool: Pool, tmp_path: Path) -> None:
    """Of a model whose first and last stage share a table."""
    kinds = {ranks: small(4, "tied", precision="fp64", pipeline_parallel=ranks) for ranks in (1, 2, 4)}
    for ranks in (1, 2):
        pool.run(ranks, trained_and_saved, kinds[ranks], tmp_path / str(ranks))
        [(whole, loss)] = pool.run(1, gone_on, kinds[1], tmp_path / str(ranks))
        parts = pool.run(4, gone_on, kinds[4], tmp_path / str(ranks))
        assert all(part_loss == pytest.approx(loss, rel=1e-12) for _, part_loss in parts)
        assert {name for part, _ in parts for name in part} == whole.keys()
        for part, _ in parts:
            for name, tensor in part.items():
                assert torch.equal(tensor, whole[name]), name


def blamed(recipe: Recipe, name: str) -> str:
    run = made(recipe)
    for module_name, module in run.model.named_modules():
        if module_name.endswith(name):
            module.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    finding = first_non_finite(run, batches(3))
    return "" if finding is None else finding.words()


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "layers.4.self_attn.v_proj"])
def test_the_first_module_that_went_wrong_is_named_whatever_its_stage(name: str, pool: Pool) -> None:
    ranks = pool.run(2, blamed, small(3, pipeline_parallel=2), name)
    rank = 0 if name.startswith("layers.1") else 1
    assert ranks == [f"the output of {name} went non-finite first, on rank {rank}, micro-batch 1"] * 2


# ---- what the dry run counts ------------------------------------------------------------------------------


def dry(recipe: Recipe, rank: int, **how: Any) -> DryRun:
    strategy = strategy_from(recipe.strategy)
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), rank=rank, **how)


def activations(recipe: Recipe, rank: int) -> int:
    return max(sample.ledger.activations for sample in dry(recipe, rank).timeline)


@pytest.mark.long
def test_activations_of_a_stage_are_those_of_its_micro_batches_in_flight() -> None:
    """Of the two middle stages, which hold nothing but two blocks each."""
    labels = 2 * 8 * 24  # bytes of a micro-batch's ids and labels, which all lie there from the start

    def of_blocks(schedule: str, rank: int, count: int) -> int:
        recipe = small(count, "eight", pipeline_parallel=4, pipeline_schedule=schedule)
        return activations(recipe, rank) - count * labels

    one = of_blocks("naive", 1, 8)
    for rank in (1, 2):
        for count in (2, 8):
            assert of_blocks("1f1b", rank, count) == pytest.approx(min(count, 4 - rank) * one, rel=0.02)
            assert of_blocks("gpipe", rank, count) == pytest.approx(count * one, rel=0.02)


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=LONG), "1f1b", "interleaved"])
def test_what_a_pass_leaves_is_what_one_micro_batch_more_holds(schedule: str) -> None:
    """To the byte, with ids and labels of one more: of the first stage, a middle one and the last.

    With two stages on a rank only where both are alike, and but for one hidden state that is on its way between them.
    """
    each = 2 if schedule == "interleaved" else 1
    for rank in (1,) if each > 1 else (0, 1, 3):
        runs = [
            dry(small(count, "eight", pipeline_parallel=4, pipeline_schedule=schedule), rank)
            for count in (1, 2)
        ]
        one, two = (run.peaks["forward"].ledger.activations for run in runs)
        passes = [in_flight(orders(schedule, 4, each, count)[rank]) for count in (1, 2)]
        if rank < 3 or schedule == "gpipe":  # the last stage of 1f1b never holds a second one
            assert passes[1] > passes[0]
            assert runs[0].pass_bytes == runs[1].pass_bytes > 0
            wanted = (passes[1] - passes[0]) * runs[0].pass_bytes + 2 * 8 * 24
            assert abs(two - one - wanted) <= (4 * 24 * 44 if each > 1 else 0)


@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved", *(pytest.param(s, marks=LONG) for s in SCHEDULES[:2] + SCHEDULES[4:])]
)
def test_every_stage_sends_hidden_states_forward_and_their_gradients_back(schedule: str) -> None:
    ranks, count, hidden = 4, 8, 1 * 24 * 44
    each = 2 if schedule == "interleaved" else 1
    recipe = small(count, "eight", pipeline_parallel=ranks, pipeline_schedule=schedule)
    for rank in (0, 1, ranks - 1):
        sends = [c for c in dry(recipe, rank).cost.collectives if c.kind == "send"]
        assert {(c.axis, c.elements, c.bytes) for c in sends} == {("pipeline", hidden, 4 * hidden)}
        neither_end = 2 * each - (rank == 0) - (rank == ranks - 1)
        assert sum(c.calls for c in sends) == count * neither_end


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(s, marks=LONG) for s in ("interleaved", "zero_bubble"))]
)
def test_of_many_micro_batches_a_few_cost_and_hold_what_all_do(schedule: str) -> None:
    recipe = small(10, "eight", pipeline_parallel=4, pipeline_schedule=schedule)
    few, all_of_them = dry(recipe, 1), dry(recipe, 1, reduced=Reduced(micro_batches=10))
    assert few.peak.bytes == all_of_them.peak.bytes
    assert few.cost.flops == all_of_them.cost.flops
    assert few.cost.traffic_by_axis() == all_of_them.cost.traffic_by_axis()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=LONG)])
def test_a_shortened_prediction_of_a_stage_is_the_whole_one(schedule: str) -> None:
    """Over micro-batches in flight, except for messages in flight when the pipeline is full."""
    model = {"layers": 8, "width": 64, "heads": 2, "ffn": 96, "vocab": 256}
    values = {"model": model, "data": {"sequence_length": 32}, "steps": 1, "batch_size": 6}
    recipe = recipe_of(values | {"cluster": {"devices_per_node": 4}}, SETTINGS)
    strategy = strategy_from({"pipeline_parallel": 4, "pipeline_schedule": schedule, "micro_batch_size": 1})
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)
    for rank in (0, 3):
        short, whole = (
            predict(recipe, blueprint, strategy, cluster, rank=rank, whole=how) for how in (False, True)
        )
        assert short.peak.bytes == pytest.approx(whole.peak.bytes, rel=0.01)
        assert short.cost.flops == whole.cost.flops


@pytest.mark.long
def test_a_plan_shows_the_worst_stage_and_predicts_all_of_them() -> None:
    recipe = small(4, pipeline_parallel=2)
    plan = plan_for(recipe, blueprint_of(recipe), cluster_of(recipe.cluster), compare=False)
    assert plan.allocated_bytes.keys() == {0, 1}
    assert plan.peak.rank == max(plan.allocated_bytes, key=lambda rank: plan.allocated_bytes[rank])
    assert "pp2 1f1b" in plan.line
    assert plan.step.split["waiting for other stages"] > 0
    assert plan.step.seconds == pytest.approx(math.fsum(plan.step.split.values()))
    played = parse_json(plan.to_json(), Plan, Path("plan.json")).pipeline
    assert played is not None and played == plan.pipeline
    assert (played.schedule, played.ranks, played.micro_batches, played.place) == (
        "1f1b",
        2,
        4,
        plan.peak.rank,
    )
    exposed = plan.step.split["exposed communication"]
    assert 0 < played.step_seconds("1f1b") <= plan.step.seconds - exposed
    assert played.pass_bytes == dry(recipe, plan.peak.rank).pass_bytes


@pytest.mark.long
def test_the_time_of_a_step_has_the_schedules_bubble() -> None:
    """Stages that take as long as each other wait for (p - 1) of (M + p - 1) slots, and less with zero_bubble.

    Of the time in which they compute or wait; messages and the update come on top.
    """
    recipe = small(8, "eight", pipeline_parallel=4)
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)

    def waiting(schedule: str) -> float:
        strategy = strategy_from({**recipe.strategy, "pipeline_schedule": schedule})
        split = predict_worst(recipe, blueprint, strategy, cluster).step.split
        computing = split["matrix products"] + split["memory-bound"]
        return split["waiting for other stages"] / (split["waiting for other stages"] + computing)

    one = waiting("1f1b")
    assert one == pytest.approx(3 / 11, abs=0.06)
    assert waiting("zero_bubble") < one and waiting("interleaved") < one


# ---- where a model is cut ---------------------------------------------------------------------------------


def test_blocks_go_to_the_stage_that_has_least_to_do() -> None:
    assert blocks_per_stage(8, 4, Costs(block=10, rest=0)) == [2, 2, 2, 2]
    assert blocks_per_stage(32, 4, Costs(block=10, rest=24)) == [8, 9, 9, 6]
    assert blocks_per_stage(4, 4, Costs(block=1, rest=100)) == [1, 1, 1, 1]
    for parts in (2, 3, 5):
        counts = blocks_per_stage(17, parts, Costs(block=7, rest=11))
        costs = [7 * n + (11 if i == parts - 1 else 0) for i, n in enumerate(counts)]
        assert sum(counts) == 17 and max(costs) - min(costs) <= 7


# ---- what cannot be done ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"pipeline_parallel": 8},
            "pipeline_parallel cannot be 8 on 8 devices (strategy.pipeline_parallel): every stage needs a block of"
            " the model; the nearest that works is pipeline_parallel: 4",
        ),
        (
            {"pipeline_parallel": 4, "pipeline_schedule": "interleaved"},
            "the nearest that works is pipeline_schedule: 1f1b",
        ),
        ({"pipeline_parallel": 3}, "the nearest that works is pipeline_parallel: 2"),
        ({"pipeline_parallel": 2, "optimizer_in_backward": True}, "optimizer_in_backward: False"),
        ({"pipeline_parallel": 2, "offload": "activations"}, "one micro-batch at a time"),
        ({"pipeline_parallel": 2, "offload": "activations+optimizer"}, "works is offload: optimizer"),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble", "zero_stage": 3},
            "the nearest that works is pipeline_schedule: 1f1b",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble", "activation_checkpointing": "full"},
            "both halves of a backward pass would recompute",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble", "loss": "chunked"},
            "together, not in halves",
        ),
    ],
)
def test_what_excludes_a_pipeline_is_said_with_the_nearest_that_works(
    settings: dict[str, Any], expected: str
) -> None:
    clip = {"optimizer": {"clip_norm": None}} if "optimizer_in_backward" in settings else {}
    values = {"model": LLAMA, "data": {"sequence_length": 24}, "steps": 1, "batch_size": 8}
    recipe = recipe_of({**values, "strategy": settings, **clip}, SETTINGS)
    with pytest.raises(RecipeError) as caught:
        refuse_broken(recipe, 8, lambda key: f"strategy.{key}")
    assert expected in str(caught.value)
    strategy = strategy_from(settings)
    [violation] = broken_rules(strategy, 8, recipe)
    assert not list(broken_rules(strategy.with_values(**violation.nearest), 8, recipe))


def test_a_factorys_model_is_not_cut() -> None:
    model = {"factory": "nowhere:nothing"}
    recipe = recipe_of(
        {"model": model, "steps": 1, "batch_size": 8, "strategy": {"pipeline_parallel": 2}}, SETTINGS
    )
    with pytest.raises(RecipeError, match="the nearest that works is pipeline_parallel: 1"):
        refuse_broken(recipe, 2, str)


def test_a_model_that_does_not_say_how_it_is_cut_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=53, n_embd=36, n_layer=3, n_head=3, n_positions=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    recipe = small(4, pipeline_parallel=2)
    values = {"model": recipe.model.model_copy(update={"hf": str(tmp_path / "gpt2")})}
    with pytest.raises(RecipeError, match="cannot be cut into stages"):
        dry(recipe.model_copy(update=values), 0)


def test_fewer_micro_batches_than_ranks_are_allowed_and_said() -> None:
    [note] = [note for note in dry(small(2, pipeline_parallel=4), 0).hints.notes if "do not fill" in note]
    lists = orders("1f1b", 4, 1, 2)
    bubble = play(lists, lambda action: 2.0 if action.kind == "B" else 1.0).bubble
    assert f"2 micro-batches do not fill 4 ranks: they wait for {format_percent(bubble)}" in note
    assert in_flight(lists[0]) == 2
