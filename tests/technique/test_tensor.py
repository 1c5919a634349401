"""Tensor parallelism: trains as one process does, sends and keeps what the papers say, and refuses in words."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.checkpoint.checkpoint import restore, save_checkpoint
from shardwise.checkpoint.saved_weights import load_weights
from shardwise.core.cost import Collective, StepCost
from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.run_state import tensors_of
from shardwise.engine.seeding import seed_step
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.model.hf.tensor_plan import tensor_plan_of
from shardwise.model.open import blueprint_of
from shardwise.planner.timing import collective_seconds, predicted_step_time
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import local_part, local_slices
from shardwise.runtime.parallel.tensor_hooks import VocabularyRows
from shardwise.runtime.parallel.tp_collectives import TPGroup
from shardwise.technique import SETTINGS, layout_of, refuse_broken, strategy_from
from tests.harness import paper_block
from tests.harness.corpora import EVEN
from tests.harness.families import save_tiny
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool
from tests.harness.tiny_run import make_run, train

STEPS = 20
LLAMA = {"layers": 2, "width": 40, "heads": 4, "kv_heads": 4, "ffn": 55, "vocab": 257, "context": 32}
GROUPED = {**LLAMA, "width": 48, "heads": 8}
GPT2 = {"family": "gpt2", "layers": 2, "width": 44, "heads": 4, "ffn": 51, "vocab": 263, "context": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "kv_heads": 2},
    "grouped": GROUPED,
    "gpt2": GPT2,
    "tied": {**LLAMA, "tied": True},
    "eights": {**LLAMA, "layers": 1, "width": 256, "ffn": 256},
    "paper": {
        "factory": "tests.harness.paper_block:paper",
        "arguments": {"layers": 2, "width": 36, "heads": 4, "vocab": 257, "length": 24, "drop": 0.0},
    },
}

# ---- it trains as one plain process does ------------------------------------------------------------------


def parity_recipe(model: dict[str, Any], **sections: Any) -> Recipe:
    values = {
        "model": model,
        "data": {"source": EVEN, "sequence_length": 24},
        "steps": STEPS,
        "batch_size": 7,
        "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0},
    }
    return recipe_of(values | sections, SETTINGS)


SHARES, AGAIN = ({"tensor_sequence_parallel": how} for how in ("gathered", "regathered"))


def row(name: str, precision: str, ranks: int, *marks: Any, **settings: Any) -> Any:
    more = {"optimizer": {"name": "adamw_8bit", "learning_rate": 1e-3}} if name == "eights" else {}
    settings = {"precision": precision, "micro_batch_size": 2, "tensor_parallel": 2, **settings}
    trial = Trial(parity_recipe(MODELS[name], **more), ranks, settings)
    return pytest.param(trial, marks=marks, id="-".join([name, str(ranks), *map(str, settings.values())]))


LONG = pytest.mark.long  # rows/rows.json trains their pairs
PARITY = [
    row("grouped", "fp64", 4, tensor_parallel=4, **SHARES),
    row("llama", "fp64", 2, LONG),
    row("llama", "fp64", 4, LONG, zero_stage=3, **SHARES, loss="chunked"),
    row("llama", "fp32", 4, LONG, zero_stage=2, activation_checkpointing="full"),
    row("llama", "fp16", 2, LONG, **SHARES),
    row("gpt2", "fp64", 4, LONG, zero_stage=1, **AGAIN),
    row("gpt2", "fp32", 2, LONG, **AGAIN, activation_checkpointing="budget:0.4"),
    row("tied", "fp64", 4, LONG, zero_stage=2, **SHARES),
    row("tied", "fp32", 4, tensor_parallel=4, loss="chunked"),
    row("paper", "fp64", 2, **AGAIN, activation_checkpointing="sqrt"),
    row("eights", "fp32", 4, LONG, zero_stage=3),
    row("eights", "fp32", 2, LONG, **SHARES),
    row("eights", "fp32", 2, LONG, **AGAIN),
]


@pytest.mark.parametrize("trial", PARITY)
def test_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
    """Loss, gradient norm and weights, with parts of 257, 263, 55 and 51 that nothing divides."""
    refuse_broken(trial.recipe.model_copy(update={"strategy": trial.settings}), trial.world, str)
    verdict = parity.verdict(trial)
    allowed = {"fp64": 1e-10, "fp32": 1e-5, "fp16": 1e-2}[trial.settings["precision"]]
    assert verdict.tolerance == (5e-2 if trial.recipe.optimizer.name == "adamw_8bit" else allowed)
    assert verdict.passed, verdict


def test_a_model_of_transformers_by_its_own_plan(parity: Parity, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=55,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    recipe = parity_recipe({"hf": str(tmp_path / "llama")})
    verdict = parity.verdict(Trial(recipe, 2, {"tensor_parallel": 2, "micro_batch_size": 2}))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("family", "left_out"), [("Apertus", "layers.0.mlp.act_fn"), ("Phi", "layers.0.self_attn.q_layernorm")]
)
def test_a_plan_of_transformers_that_leaves_weights_out_is_refused(family: str, left_out: str) -> None:
    """Each rank would have a part of their gradients."""
    transformers = pytest.importorskip("transformers")
    more = {"qk_layernorm": True} if family == "Phi" else {}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(vocab_size=64, **sizes, **more)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(RecipeError, match=f"does not cover .*{left_out}"):
        tensor_plan_of(model, config)


def test_an_adapted_output_layer_of_transformers_is_refused_by_its_key(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_tiny("llama", tmp_path / "llama")
    blueprint = blueprint_of(
        recipe_of(
            {
                "model": {"hf": str(tmp_path / "llama")},
                "adapter": {"targets": ["lm_head"]},
                "data": {"sequence_length": 16},
                "steps": 1,
                "batch_size": 1,
            }
        )
    )
    with torch.device("meta"):
        model = blueprint.build()
    with pytest.raises(RecipeError, match=r"output layer has an adapter, by adapter\.targets"):
        blueprint.tensor_plan(model)


@pytest.mark.parametrize("start", [0, 4])
def test_an_id_beyond_the_vocabulary_is_no_row_of_zeros(start: int) -> None:
    """Rows 0 to 3 or 4 to 7 of eight are local."""
    whole = nn.Embedding(8, 2)
    ranks: Any = SimpleNamespace(span=lambda size: (start, start + 4))
    rows = VocabularyRows(ranks, sequence_parallel=False)
    local = whole.weight[start : start + 4]
    for ids in ([0, 3, 4, 7], [1], [6]):
        (index,) = rows.before(whole, (torch.tensor(ids),))
        own = torch.tensor([start <= number < start + 4 for number in ids])
        assert torch.equal(functional.embedding(index, local)[own], whole(torch.tensor(ids))[own])
    for wrong in (8, 100, -1):
        (index,) = rows.before(whole, (torch.tensor([2, wrong]),))
        with pytest.raises(IndexError):
            functional.embedding(index, local)


# ---- dropout ----------------------------------------------------------------------------------------------


def dropped(settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Of one forward pass with dropout: what each block returns, and where its hidden states were dropped."""
    shape = {**MODELS["paper"]["arguments"], "drop": 0.3}
    recipe = parity_recipe({"factory": "tests.harness.paper_block:paper", "arguments": shape})
    run = build(recipe, blueprint_of(recipe), strategy_from(settings), torch.device("cpu"))
    results: list[Tensor] = []
    masks: list[Tensor] = []

    def seen(x: Tensor, p: float) -> Tensor:
        result = torch.nn.functional.dropout(x, p)
        if x.ndim == 3:  # [b, s, h]; attention's weights are [b, a, s, s]
            masks.append(result == 0)
        return result

    # Only the block's name: torch.nn.functional calls its own dropout again when a function mode is active.
    paper_block.F = SimpleNamespace(**{**vars(torch.nn.functional), "dropout": seen})
    for module in run.model.modules():
        if isinstance(module, paper_block.PaperBlock):
            module.register_forward_hook(lambda _, args, result: results.append(result.detach().clone()))
    seed_step(recipe.seed, 0, run.random_rank)
    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        run.blueprint.loss(run.model, {"input_ids": tokens, "labels": tokens})
    return results, masks


@pytest.mark.parametrize("how", ["none", "gathered", "regathered"])
def test_ranks_drop_the_same_of_what_they_share_and_their_own_of_shares(how: str, pool: Pool) -> None:
    """Else what each rank computes for itself would be several models, or shares would repeat one mask."""
    settings = {"tensor_parallel": 2, "tensor_sequence_parallel": how, "micro_batch_size": 2}
    (results, masks), (others, their_masks) = pool.run(2, dropped, settings)
    assert len(masks) == len(their_masks) == 4 and len(results) == len(others) == 2
    assert all(0.2 < mask.double().mean() < 0.4 for mask in masks)
    same = [torch.equal(a, b) for a, b in zip(masks, their_masks, strict=True)]
    if how == "none":
        assert all(same) and all(torch.equal(a, b) for a, b in zip(results, others, strict=True))
    else:
        assert masks[0].shape[1] == 12 and not any(same)


# ---- what it sends ----------------------------------------------------------------------------------------

B, S, H = 2, 32, 64
WIDE = {"width": H, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 514, "context": S}


def asked_for(layers: int = 2, preset: str = "2xH100-80GB", **sections: Any) -> Recipe:
    values = {
        "model": {"layers": layers, **WIDE},
        "data": {"sequence_length": S},
        "steps": 1,
        "batch_size": B,
        "cluster": {"preset": preset},
    }
    return recipe_of(values | sections, SETTINGS)


def counted(settings: dict[str, Any], layers: int = 2, **sections: Any) -> DryRun:
    recipe = asked_for(layers, **sections)
    strategy = strategy_from({"micro_batch_size": B, "tensor_parallel": 2, **settings})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))


@functools.cache
def per_layer(**settings: Any) -> dict[tuple[str, int], int]:
    """Calls on the tensor axis that one block more adds to a micro-batch, by kind and elements."""

    def calls(run: DryRun) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for c in run.cost.collectives:
            if c.axis == "tensor":
                found[c.kind, c.elements] = found.get((c.kind, c.elements), 0) + c.calls
        return found

    shallow, deep = (calls(counted(settings, layers)) for layers in (2, 3))
    more = {key: deep[key] - shallow.get(key, 0) for key in deep}
    return {key: count for key, count in more.items() if count}


def traffic(calls: dict[tuple[str, int], int]) -> float:
    """Elements that each of two ranks sends."""
    return sum(
        Collective(kind, "tensor", 2, count, elements, elements).traffic_bytes
        for (kind, elements), count in calls.items()
    )


def test_four_all_reduces_per_layer_and_micro_batch() -> None:
    """Two forward, two backward, of [b, s, h] (Shoeybi et al. 2019, section 3)."""
    assert per_layer() == {("all_reduce", B * S * H): 4}


def test_shares_of_the_sequence_send_no_more() -> None:
    """Each all-reduce becomes an all-gather and a reduce-scatter; gradients of the two norms' weights are summed."""
    norms = {("all_reduce", H): 2}
    shares = {("all_gather", B * S * H): 4, ("reduce_scatter", B * S * H): 4}
    assert per_layer(**SHARES) == shares | norms
    assert traffic(shares) == traffic(per_layer())


def test_keeping_shares_alone_gathers_twice_more() -> None:
    """The inputs of qkv and of the feed-forward layer, once each: what section 4.2.2 of Korthikanti et al. overlaps."""
    assert per_layer(**AGAIN) == per_layer(**SHARES) | {("all_gather", B * S * H): 6}


def test_full_checkpointing_repeats_what_its_forward_pass_sends_but_the_last() -> None:
    assert per_layer(activation_checkpointing="full") == {("all_reduce", B * S * H): 5}


def test_the_loss_sends_three_numbers_a_token_and_never_logits() -> None:
    for settings in ({}, {"loss": "chunked", "precision": "bf16"}):
        run = counted(settings)
        sent = [c for c in run.cost.collectives if c.axis == "tensor" and c.elements != B * S * H]
        assert sum(c.calls * c.elements for c in sent) == 3 * B * S
        assert all(c.kind == "all_reduce" for c in sent)


def test_nothing_hides_what_is_sent_between_layers() -> None:
    """The same bytes of ZeRO would cost the first gathering alone, which is a part of it."""
    asked = asked_for()
    cluster, layout = cluster_of(asked.cluster), layout_of(strategy_from({"tensor_parallel": 2}), 2)
    cost = counted({}).cost
    sent = [c for c in cost.collectives if c.axis == "tensor"]
    needed = sum(collective_seconds(c, layout, cluster) for c in sent)
    hidden = StepCost(cost.kernels, tuple(replace(c, axis="shard") for c in sent))
    exposed, overlapped = (
        predicted_step_time(each, layout, cluster).split["exposed communication"]
        for each in (StepCost(cost.kernels, tuple(sent)), hidden)
    )
    assert exposed == pytest.approx(needed)
    assert 0 < overlapped < exposed


# ---- what it keeps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [pytest.param(2, marks=LONG), 8])
@pytest.mark.parametrize("how", ["none", "gathered", "regathered"])
def test_activations_per_layer_are_the_papers_to_the_byte(how: str, degree: int) -> None:
    """Korthikanti et al. 2022, equation 2: sbh(10 + 24/t + 5as/ht), and equation 4: sbh/t (34 + 5as/h), in 16 bits.

    With gathered inputs kept, 4sbh of equation 4 stay whole. What the paper leaves out is the mean and the inverse
    deviation of two norms: 2 bytes each per token on the planner's tensors (4 on CUDA).
    """
    h, a, s, b = 12288, 96, 2048, 1
    shape = {"width": h, "heads": a, "vocab": 256, "length": s, "drop": 0.1}
    kept = []
    for layers in (2, 3):
        model = {"factory": "tests.harness.paper_block:paper", "arguments": {"layers": layers, **shape}}
        run = counted(
            {
                "precision": "bf16",
                "tensor_parallel": degree,
                "tensor_sequence_parallel": how,
                "micro_batch_size": b,
            },
            preset=f"{degree}xH100-80GB",
            model=model,
            data={"sequence_length": s},
            batch_size=b,
        )
        kept.append(run.peaks["forward"].ledger.activations)
    t = degree
    papers = {
        "none": s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        "gathered": s * b * h / t * (30 + 5 * a * s / h) + 4 * s * b * h,
        "regathered": s * b * h / t * (34 + 5 * a * s / h),
    }
    statistics = 2 * 2 * 2 * s * b / (1 if how == "none" else t)
    assert kept[1] - kept[0] == papers[how] + statistics


class _Sent(TorchDispatchMode):
    """Records the names of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def gathering_rank() -> tuple[set[str], list[float]]:
    ranks = TPGroup.of(dist.group.WORLD)
    with _Sent() as sent:
        whole = ranks.all_gather(torch.full((1, 2, 1), float(ranks.rank)))
    return sent.names, whole.flatten().tolist()


def test_gathering_spares_the_collective_whose_name_corrupts_the_heap(pool: Pool) -> None:
    """It crashed once in thousands of runs with two of it on their way: see ``TPGroup.start_all_gather``."""
    for names, whole in pool.run(2, gathering_rank):
        assert whole == [0.0, 0.0, 1.0, 1.0]
        assert names == {"_c10d_functional::all_gather_into_tensor_out", "_c10d_functional::wait_tensor"}


# ---- checkpoints ------------------------------------------------------------------------------------------

SMALL = {"layers": 2, "width": 12, "heads": 2, "kv_heads": 2, "ffn": 13, "vocab": 257}


def saved_and_resumed(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> tuple[Any, ...]:
    """Train with one layout, go on with another and save there; losses, and pieces of all that was saved."""
    run = make_run(settings=first, model=SMALL)
    before = train(run, range(2))
    save_checkpoint(run, TrainState(2, 20), folder / "a", 2)
    after = train(run, range(2, 4))
    other = make_run(settings=second, model=SMALL)
    restore(other, folder / "a")
    save_checkpoint(other, TrainState(2, 20), folder / "b", 2)
    held = {name: (local_slices(t), local_part(t).clone()) for name, t in tensors_of(other).items()}
    return before, after, train(other, range(2, 4)), held


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 zero3": {"tensor_parallel": 2, "zero_stage": 3},
    "tp2 copies": {"tensor_parallel": 2, "zero_stage": 0, **SHARES},
    "zero3": {"zero_stage": 3},
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp2 zero3", "zero3"),
        pytest.param("zero3", "tp2 zero3", marks=LONG),
        pytest.param("tp2 zero3", "tp2 copies", marks=LONG),
    ],
)
def test_resumes_on_another_layout(first: str, second: str, pool: Pool, tmp_path: Path) -> None:
    """Weights and moments to the bit, from 257 rows in 2 times 2 uneven parts; then losses to rounding."""
    ranks = pool.run(4, saved_and_resumed, tmp_path, LAYOUTS[first], LAYOUTS[second])
    weights, again = (load_weights(tmp_path / name / "step-2") for name in ("a", "b"))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    covered = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in weights.items()}
    for _, after, resumed, held in ranks:
        assert [float.fromhex(x) for x in resumed] == pytest.approx(
            [float.fromhex(x) for x in after], rel=1e-5
        )
        for name, (slices, piece) in held.items():
            if name in weights:
                assert torch.equal(weights[name][slices], piece)
                covered[name][slices] = True
    assert all(every.all() for every in covered.values())


# ---- what it refuses --------------------------------------------------------------------------------------


def refusal(model: dict[str, Any], settings: dict[str, Any], world: int, **sections: Any) -> str:
    values = {"model": model, "steps": 1, "batch_size": 8, "data": {"sequence_length": 32}} | sections
    with pytest.raises(RecipeError) as caught:
        recipe = recipe_of({**values, "strategy": settings}, SETTINGS)
        refuse_broken(recipe, world, lambda key: f"strategy.{key}")
    assert caught.value.exit_code == 2
    return caught.value.line()


@pytest.mark.parametrize(
    ("model", "settings", "world", "says", "nearest"),
    [
        (LLAMA, {"tensor_parallel": 3}, 8, "divide the number of devices", "tensor_parallel: 2"),
        (LLAMA, {"tensor_parallel": 8}, 8, "must divide the number of both", "tensor_parallel: 4"),
        (
            {**LLAMA, "kv_heads": 2},
            {"tensor_parallel": 4},
            8,
            "must divide the number of both",
            "tensor_parallel: 2",
        ),
        (
            {"layers": 1, "width": 6, "heads": 3, "family": "gpt2"},
            {"tensor_parallel": 2},
            2,
            "heads",
            "tensor_parallel: 1",
        ),
        ({**LLAMA, "ffn": 5}, {"tensor_parallel": 4}, 4, "nothing of the vocabulary", "tensor_parallel: 2"),
        (LLAMA, SHARES, 4, "only tensor_parallel above 1", "tensor_sequence_parallel: none"),
        ({"hf": "x"}, {"tensor_parallel": 2, **SHARES}, 4, "transformers", "tensor_sequence_parallel: none"),
        (
            LLAMA,
            {"tensor_parallel": 2, "precision": "fp8", **AGAIN},
            4,
            "8-bit products",
            "tensor_sequence_parallel: gathered",
        ),
    ],
)
def test_refused_before_torch_is_needed(
    model: dict[str, Any], settings: dict[str, Any], world: int, says: str, nearest: str
) -> None:
    line = refusal(model, settings, world)
    assert says in line and line.endswith(f"the nearest that works is {nearest}"), line


def test_refused_sequences_and_moments() -> None:
    line = refusal(LLAMA, {"tensor_parallel": 4, **SHARES}, 4, data={"sequence_length": 30})
    assert "data.sequence_length" in line
    line = refusal(LLAMA, {"tensor_parallel": 2}, 2, optimizer={"name": "adamw_8bit"})
    assert "128 neighbours" in line and line.endswith("tensor_parallel: 1")


def test_models_that_do_not_say_how() -> None:
    with pytest.raises(RecipeError, match="does not say how its layers are sharded") as caught:
        counted({}, model={"factory": "tests.harness.dropping:dropped"})
    assert caught.value.where == "strategy.tensor_parallel"


def test_models_of_transformers_that_cannot_be_split(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(vocab_size=53, n_embd=36, n_layer=2, n_head=3, n_positions=64)
    llama = transformers.LlamaConfig(
        vocab_size=53, hidden_size=36, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3,
    )  # fmt: skip
    for config, says in (
        (
            gpt2,
            "transformers has no tensor-parallel plan for gpt2; the nearest that works is tensor_parallel: 1",
        ),
        (
            llama,
            "it does not divide the 3 key/value heads of the model; the nearest that works is tensor_parallel: 1",
        ),
    ):
        config.save_pretrained(tmp_path / config.model_type)
        with pytest.raises(RecipeError) as caught:
            counted({}, model={"hf": str(tmp_path / config.model_type)})
        assert caught.value.line().endswith(says)
