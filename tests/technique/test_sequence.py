"""Sequence parallelism: one sequence on several ranks trains as on one, and sends what the papers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.checkpoint.checkpoint import restore, save_checkpoint
from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.timing import collective_seconds, predicted_step_time
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import OptimizerSpec, Recipe
from shardwise.runtime.parallel.attention_kernels import _OnCPU, _Products
from shardwise.runtime.parallel.ring import ring_attention
from shardwise.runtime.parallel.sequence import TokenShard
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.runtime.parallel.ulysses import ulysses_attention
from shardwise.technique import SETTINGS, case_of, layout_of, refuse_broken, strategy_from
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING, BUDGET
from shardwise.trainer.evaluation import evaluate
from shardwise.trainer.faults.find_non_finite import first_non_finite
from shardwise.trainer.warm_up import _tiny
from tests.harness.corpora import WORDS
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool
from tests.harness.tiers import quick
from tests.harness.tiny_run import batch, equal, full, make_run, train, whole

METHODS = ("ulysses", "ring")
SMALL = {"layers": 2, "width": 32, "heads": 4, "ffn": 44, "vocab": 257, "context": 64}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {**SMALL, "kv_heads": 2},
    "tied": {**SMALL, "kv_heads": 1, "tied": True},
    "gpt2": {**SMALL, "family": "gpt2"},  # learned positions, tied
}


EIGHT = {"sequence_length": 8}
"""Tokens of small_run's batches."""


def divided(method: str, degree: int = 2, **settings: Any) -> dict[str, Any]:
    return {"sequence_parallel": degree, "sequence_method": method, **settings}


# ---- it trains as one process does ------------------------------------------------------------------------


def small_recipe(model: dict[str, Any]) -> Recipe:
    """Samples of unequal counts: 5 are no multiple of the ranks, nor of the micro-batches."""
    data = {"source": WORDS, "sequence_length": 24}
    return recipe_of({"model": model, "data": data, "steps": 20, "batch_size": 5}, SETTINGS)


def row(model: str, precision: str, world: int, settings: dict[str, Any], *marks: Any) -> Any:
    trial = Trial(small_recipe(MODELS[model]), world, {"precision": precision, **settings})
    return pytest.param(
        trial, marks=marks, id="-".join([model, str(world), *map(str, trial.settings.values())])
    )


LONG = pytest.mark.long  # rows/rows.json trains their pairs
ROWS = [
    row("grouped", "fp64", 4, divided("ulysses", 4, zero_stage=3)),
    row("grouped", "fp64", 4, divided("ring", 4, zero_stage=2)),
    row("grouped", "fp64", 4, divided("ulysses", zero_stage=0, micro_batch_size=2), LONG),
    row("grouped", "fp64", 4, divided("ring", zero_stage=1), LONG),
    row("grouped", "fp32", 4, divided("ring", zero_stage=3), LONG),
    row("grouped", "fp32", 4, divided("ulysses", zero_stage=2, replicate=2), LONG),
    *(
        row(model, "fp64", 2, settings, *([LONG] if model in repeats else []))
        for settings, repeats in (
            (divided("ulysses", zero_stage=3, micro_batch_size=2), ["tied"]),
            (divided("ring", zero_stage=0), ["tied"]),
            (divided("ring", loss="chunked", zero_stage=1), ["gpt2"]),
        )
        for model in ("gpt2", "tied")
    ),
]
"""Degree 4, with more ranks than key/value heads; degree 2 with two data-parallel ranks; learned positions."""


@pytest.mark.parametrize("trial", ROWS)
def test_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
    verdict = parity.verdict(trial)
    assert verdict.passed, verdict
    assert verdict.tolerance == {"fp64": 1e-10, "fp32": 1e-5}[trial.settings["precision"]]


@pytest.mark.parametrize("method", METHODS)
def test_a_hugging_face_model_trains_as_one(method: str, parity: Parity, tmp_path: Path) -> None:
    """In fp32: transformers' norms and angles are computed in it, whatever the model's dtype."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    recipe = small_recipe({"hf": str(tmp_path / "model")})
    verdict = parity.verdict(Trial(recipe, 2, divided(method, zero_stage=3)))
    assert verdict.passed, verdict


def gradients(asked: list[dict[str, Any]], model: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Of two micro-batches, for each strategy."""
    found = []
    for settings in asked:
        run = make_run(3, settings=settings, model=model, data=EIGHT)
        run.passes.forward_backward([batch(0), batch(1)])
        named = named_parameters(run.model)
        found.append({name: full(p.grad) for name, p in named if p.grad is not None})
    return found


@pytest.mark.parametrize("method", quick(METHODS, "ring"))
def test_recomputation_leaves_gradients_bit_identical(method: str, pool: Pool) -> None:
    kinds = [
        kind
        for kind in ACTIVATION_CHECKPOINTING.examples
        if method == "ulysses" or BUDGET.number(kind) is None  # excluded by a rule
    ]
    asked = [divided(method, activation_checkpointing=kind) for kind in kinds]
    plain, *others = pool.run(2, gradients, asked, MODELS["grouped"] | {"layers": 4})[0]
    assert len(plain) == 39
    for kind, found in zip(kinds[1:], others, strict=True):
        assert equal(found, plain), kind


def saved_and_evaluated(folder: Path) -> tuple[dict[str, Tensor], float, str]:
    """What a checkpoint must hold, the held-out loss, and who is to blame for a weight that is not finite."""
    run = make_run(3, settings=divided("ring"), model=MODELS["grouped"], data=EIGHT)
    train(run, range(2))
    save_checkpoint(run, TrainState(2, 0), folder, 1)
    expected, held_out = whole(run), evaluate(run, [batch(7)])
    with torch.no_grad():
        dict(named_parameters(run.model))["layers.1.mlp.up_proj.weight"].fill_(torch.nan)
    finding = first_non_finite(run, [batch(7)])
    return expected, held_out, finding.words() if finding else ""


def restored(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    run = make_run(2, settings=settings, model=MODELS["grouped"], data=EIGHT)
    restore(run, folder)
    held_out = {name: tensor[run.data_rank :: run.data_degree] for name, tensor in batch(7).items()}
    return whole(run), evaluate(run, [held_out])


def test_checkpoints_evaluation_and_blame(pool: Pool, tmp_path: Path) -> None:
    expected, loss, blamed = pool.run(2, saved_and_evaluated, tmp_path)[0]
    assert "layers.1.mlp.up_proj" in blamed
    for world_size, settings in [(1, {}), (4, divided("ulysses"))]:
        found, again = pool.run(world_size, restored, tmp_path, settings)[0]
        assert equal(found, expected)
        assert again == pytest.approx(loss, rel=1e-5)


# ---- which tokens are whose -------------------------------------------------------------------------------


@pytest.mark.parametrize("balanced", [False, True])
def test_tokens_keep_their_positions_and_targets(balanced: bool) -> None:
    """Over all ranks every token once, each with its own target, the one at the edge of a part as well."""
    tokens = torch.arange(100, 225).view(5, 25)
    whole_batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    parts = [TokenShard(rank, 3, balanced).shard_batch(whole_batch) for rank in range(3)]
    for part in parts:
        assert torch.equal(part["labels"], part["input_ids"] + 1)
        assert torch.equal(part["input_ids"], tokens[:, part["positions"]])
    positions = torch.cat([part["positions"] for part in parts])
    assert torch.equal(positions.sort().values, torch.arange(24))


@pytest.mark.parametrize("balanced", [False, True])
def test_a_sample_that_cannot_be_divided_evenly_is_refused(balanced: bool) -> None:
    """As a factory's own dataset may hold: the recipe's sequence_length says nothing of it."""
    tokens = torch.zeros(1, 126, dtype=torch.int64)
    with pytest.raises(RecipeError, match="a sample has 126 tokens"):
        TokenShard(0, 4, balanced).shard_batch({"input_ids": tokens, "labels": tokens})


def ulysses_with_dropout() -> tuple[Tensor, Tensor, Tensor]:
    """What a rank gets for its tokens, what one process makes of it with the ranks' generators, and without dropout."""
    rank, ranks, heads, tokens = dist.get_rank(), dist.get_world_size(), 4, 12
    shape, generator = (2, heads, tokens, 8), torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    mine = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
    torch.manual_seed(40 + rank)
    found = ulysses_attention(*(x[:, :, mine] for x in (q, k, v)), 0.5, 1.0, dist.group.WORLD)
    expected, whole = [], F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    for other in range(ranks):
        torch.manual_seed(40 + other)
        own = (x.unflatten(1, (ranks, -1))[:, other] for x in (q, k, v))
        expected.append(F.scaled_dot_product_attention(*own, dropout_p=0.5, is_causal=True, scale=1.0))
    return found, torch.cat(expected, dim=1)[:, :, mine], whole[:, :, mine]


def test_ulysses_drops_probabilities_head_by_head(pool: Pool) -> None:
    for found, expected, undropped in pool.run(2, ulysses_with_dropout):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(found, undropped)


def test_keys_and_values_of_two_widths_do_not_go_around_a_ring() -> None:
    q, v = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 24)
    group: Any = None
    with pytest.raises(RecipeError, match="its keys have 16 channels and its values 24"):
        ring_attention(q, q, v, 1.0, group)


@pytest.mark.parametrize(("tensor", "sequence"), [(3, 3), (8, 8), (2, 1), (1, 2), (4, 2)])
def test_the_model_that_warms_kernels_can_be_divided(tensor: int, sequence: int) -> None:
    strategy = strategy_from({"tensor_parallel": tensor, "sequence_parallel": sequence})
    length = _tiny(layout_of(strategy, tensor * sequence), 2, OptimizerSpec()).data.sequence_length
    assert length % (2 * sequence * tensor) == 0


def test_the_ring_s_parts_have_equal_work() -> None:
    """Each token looks back as many tokens as its position is; every rank at as many in all."""
    tokens = torch.zeros(1, 48, dtype=torch.int64)
    parts = [
        TokenShard(rank, 4, True).shard_batch({"input_ids": tokens, "labels": tokens}) for rank in range(4)
    ]
    assert len({int(part["positions"].sum()) for part in parts}) == 1


# ---- traffic ----------------------------------------------------------------------------------------------

LAYERS, WIDTH, HEADS = 2, 64, 8


def counted(
    length: int, degree: int, method: str, kv_heads: int = HEADS, preset: str = "", **settings: Any
) -> DryRun:
    """A batch of one sequence, over ``degree`` ranks."""
    dimensions = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "kv_heads": kv_heads, "ffn": 96}
    cluster = {"preset": preset} if preset else {"devices_per_node": degree}
    values = {
        "model": {**dimensions, "vocab": 256, "context": 16384},
        "data": {"sequence_length": length},
        "steps": 1,
        "batch_size": 1,
        "cluster": cluster,
    }
    asked = recipe_of(values, SETTINGS)
    strategy = strategy_from(divided(method, degree, zero_stage=3, **settings))
    return dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster))


def sent_elements(run: DryRun, kind: str) -> int:
    """ZeRO's gathers and reductions are counted with it: with no data-parallel ranks both use one group."""
    assert {c.kind for c in run.cost.collectives} <= {kind, "all_gather", "reduce_scatter", "all_reduce"}
    sent = [c for c in run.cost.collectives if c.kind == kind]
    assert {c.axis for c in sent} == {"sequence"}
    return sum(c.calls * c.elements for c in sent)


def test_ulysses_sends_4nh_over_p_per_layer_and_pass() -> None:
    """Queries, keys, values and outputs, N h / P elements each: falls as 1/P, constant when N grows with P."""
    sent = set()
    for length, degree in [(512, 2), (512, 8), (1024, 4)]:
        run = counted(length, degree, "ulysses")
        calls = sum(c.calls for c in run.cost.collectives if c.kind == "all_to_all")
        assert calls == 2 * 4 * LAYERS
        elements = sent_elements(run, "all_to_all")
        assert elements == 2 * LAYERS * 4 * length * WIDTH // degree
        if length == 256 * degree:
            sent.add(elements)
    assert len(sent) == 1


def test_ulysses_sends_grouped_heads_as_often_as_ranks_share_them() -> None:
    for degree, sent_heads in [(2, 2), (8, 8)]:
        per_token = 2 * WIDTH + 2 * sent_heads * (WIDTH // HEADS)
        run = counted(512, degree, "ulysses", kv_heads=2)
        assert sent_elements(run, "all_to_all") == 2 * LAYERS * 512 // degree * per_token


@pytest.mark.parametrize(("degree", "kv_heads"), [(2, HEADS), (4, 2), (8, HEADS)])
def test_the_ring_sends_keys_values_and_their_gradients(degree: int, kv_heads: int) -> None:
    """n-1 blocks of keys and values in each pass, and n-1 of gradients, in fp32: 2 s/n k d elements each."""
    run = counted(512, degree, "ring", kv_heads=kv_heads, precision="bf16")
    block = 2 * 512 // degree * kv_heads * (WIDTH // HEADS)
    assert sent_elements(run, "send") == 3 * LAYERS * (degree - 1) * block
    in_bytes = sum(c.traffic_bytes for c in run.cost.collectives if c.kind == "send")
    assert in_bytes == (2 * 2 + 4) * LAYERS * (degree - 1) * block


def test_state_is_divided_over_data_and_sequence_together() -> None:
    """ZeRO's traffic is that of as many data-parallel ranks, on an axis of both names."""
    run = counted(512, 2, "ulysses", preset="4xH100-80GB")
    traffic = sum(c.traffic_elements for c in run.cost.collectives if c.axis == "shard+sequence")
    assert traffic == 3 * run.parameters
    assert {c.degree for c in run.cost.collectives if c.axis == "shard+sequence"} == {4}
    layout = layout_of(strategy_from(divided("ring", 4)), 16)
    assert (layout.degree("replicate+sequence"), layout.stride("replicate+sequence")) == (16, 1)


def test_a_second_run_of_a_block_sends_the_ring_only_where_attention_runs_again() -> None:
    plain = sent_elements(counted(512, 4, "ring"), "send")
    for kind, passes in [("selective", 3), ("full", 4)]:
        run = counted(512, 4, "ring", activation_checkpointing=kind)
        assert sent_elements(run, "send") * 3 == plain * passes, kind


# ---- memory and time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_activations_fall_with_the_degree(method: str, kind: str) -> None:
    """With the temporaries of the block that runs, for which of them is most may differ."""
    settings = {"precision": "bf16", "activation_checkpointing": kind}
    tokens = 2 * 8 * 16384  # ids and labels of the whole sequence, on every rank
    held = {}
    for degree in (2, 8):
        ledger = counted(16384, degree, method, preset=f"{degree}xH100-80GB", **settings).peak.ledger
        held[degree] = ledger.activations + ledger.temporaries
    assert (held[2] - tokens) / (held[8] - tokens) == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(("precision", "kernel"), [("bf16", "flash"), ("fp32", "efficient")])
def test_the_ring_is_planned_with_the_device_s_kernels(precision: str, kernel: str) -> None:
    run = counted(512, 4, "ring", kv_heads=2, preset="4xH100-80GB", precision=precision)
    attention = {k.operation: k.calls for k in run.cost.kernels if "attention" in k.operation}
    name = f"aten::_scaled_dot_product_{kernel}_attention"
    assert set(attention) == {name, f"{name}_backward"}
    assert sum(k.calls for k in run.cost.kernels if k.operation == name) == 4 * LAYERS


def test_all_to_alls_are_waited_for_and_rings_are_not() -> None:
    exposed, needed = {}, {}
    for method in METHODS:
        run = counted(4096, 4, method, preset="4xH100-80GB", precision="bf16")
        strategy = strategy_from(divided(method, 4, zero_stage=3))
        cluster = cluster_of(recipe_of({"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1,
                                        "cluster": {"preset": "4xH100-80GB"}}).cluster)  # fmt: skip
        layout = layout_of(strategy, 4)
        cost = replace(
            run.cost, collectives=tuple(c for c in run.cost.collectives if c.kind in ("all_to_all", "send"))
        )
        exposed[method] = predicted_step_time(cost, layout, cluster).split["exposed communication"]
        needed[method] = sum(collective_seconds(c, layout, cluster) for c in cost.collectives)
    assert exposed["ulysses"] == pytest.approx(needed["ulysses"])
    assert 0 < exposed["ring"] < 0.5 * needed["ring"]


# ---- the kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_products_are_what_the_cpu_s_kernel_computes(causal: bool) -> None:
    """The fallback for fp64 on accelerators, forward and backward."""
    torch.manual_seed(0)
    q, gradient = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 6 if causal else 9, 8, dtype=torch.float64) for _ in range(2))
    results = []
    for kernels in (_OnCPU(), _Products()):
        out, logarithms = kernels.forward(q, k, v, causal, 0.3)
        saved = gradient, q, k, v, out, logarithms
        results.append((out, logarithms, *kernels.backward(*saved, causal=causal, scale=0.3)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


# ---- refusals ---------------------------------------------------------------------------------------------


def refused(world_size: int, model: dict[str, Any], length: int, **settings: Any) -> str:
    values = {"model": model, "data": {"sequence_length": length}, "steps": 1, "batch_size": 1}
    asked = recipe_of(values | {"strategy": settings}, SETTINGS)
    with pytest.raises(RecipeError) as caught:
        refuse_broken(asked, world_size, lambda key: f"strategy.{key}")
    return caught.value.line()


@pytest.mark.parametrize(
    ("world_size", "length", "settings", "nearest"),
    [
        (4, 48, divided("ring", 3), "sequence_parallel: 2"),  # 3 does not divide the devices
        (8, 36, divided("ring", 4), "sequence_parallel: 2"),  # 8 chunks of 36 tokens
        (6, 44, divided("ulysses", 3), "sequence_parallel: 2"),
        (8, 64, divided("ulysses", 8), "sequence_parallel: 4"),  # 4 heads
        (3, 48, divided("ulysses", 3), "sequence_method: ring"),
    ],
)
def test_wrong_degrees_are_refused_with_the_nearest(
    world_size: int, length: int, settings: dict[str, Any], nearest: str
) -> None:
    line = refused(world_size, MODELS["grouped"], length, **settings)
    assert line.startswith(f"error: sequence_parallel cannot be {settings['sequence_parallel']} on")
    assert line.endswith(f"the nearest that works is {nearest}")
    assert "(strategy.sequence_parallel)" in line and len(line) <= 300


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("mask", "a mask"),
        ("both ways", "not causal"),
        ("products", "does not call scaled_dot_product_attention"),
        ("nowhere", "does not read batch['positions']"),
        ("dropout", "no dropout"),
        ("causal", ""),
    ],
)
def test_a_users_module_is_divided_or_refused_in_words(how: str, why: str) -> None:
    model = {"factory": "tests.harness.mixing:mixing", "arguments": {"how": how}}
    values = {"model": model, "data": {"sequence_length": 16}, "steps": 1, "batch_size": 1}
    asked = recipe_of(values | {"cluster": {"devices_per_node": 2}}, SETTINGS)
    strategy = strategy_from(divided("ring"))

    def planned() -> DryRun:
        return dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster))

    if not why:
        assert planned().peak.bytes > 0
        return
    with pytest.raises(RecipeError) as caught:
        planned()
    assert why in caught.value.line() and "sequence_parallel" in caught.value.line()


def test_models_whose_attention_looks_at_a_part_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from shardwise.model.hf import HuggingFaceModel

    small = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    config = transformers.MistralConfig(**small, num_attention_heads=4, sliding_window=8)
    config.save_pretrained(tmp_path)
    for length, refusal in [(8, ""), (16, "sliding_window = 8")]:
        blueprint = HuggingFaceModel(str(tmp_path), length)
        with torch.device("meta"):
            assert refusal in blueprint.context_parallel_obstacle(blueprint.build())


def test_attention_of_a_models_own_is_refused_in_words_for_packed_rows(tmp_path: Path) -> None:
    """Before it adds the mask of whole rows to products of a part."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    transformers.Gemma2Config(**small, **heads).save_pretrained(tmp_path)
    data = {"sequence_length": 16, "packing": True, "tokenizer": "bytes"}
    values = {"model": {"hf": str(tmp_path)}, "data": data, "steps": 1, "batch_size": 1}
    asked = recipe_of(values | {"cluster": {"devices_per_node": 2}}, SETTINGS)
    strategy = strategy_from(divided("ulysses"))
    with pytest.raises(RecipeError, match="does not call scaled_dot_product_attention"):
        dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster))


def test_rules_hold_for_each_tensor_parallel_rank() -> None:
    """With 4 heads over 2 tensor-parallel ranks, 2 are left to share out."""
    from shardwise.technique.sequence import RULES

    values = {"model": MODELS["grouped"], "data": {"sequence_length": 64}, "steps": 1, "batch_size": 1}
    strategy = strategy_from(divided("ulysses", 4))
    recipe = recipe_of(values, SETTINGS)
    assert not any(rule.broken(case_of(strategy, 8, recipe)) for rule in RULES)
    combined = type(strategy)({**strategy.values, "tensor_parallel": 2})
    assert any(rule.broken(case_of(combined, 8, recipe)) for rule in RULES)
