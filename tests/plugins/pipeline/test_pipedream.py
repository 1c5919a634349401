"""PipeDream: gradients by the weights of each micro-batch's own forward pass, step after step without a pause.

What it must be is simulated in one process: each stage's weights as they were, the whole model's gradient by them,
and each stage's update by its own part of that.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.errors import RecipeError
from shardwise.core.pipeline.schedule import Action, in_flight, orders, step_time
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.run import ListedBatches, Run
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.plugins.pipeline.pipedream import PipeDream
from shardwise.plugins.pipeline.weight_stash import Stash
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import local_part, local_slices, named_parameters
from shardwise.technique import SETTINGS, refuse_broken, strategy_from
from shardwise.trainer.evaluation import evaluate
from shardwise.verifier.reference import reference_model
from tests.harness.pool import Pool
from tests.harness.ranks import allowed

STEPS = 8
MODEL = {"layers": 5, "width": 44, "heads": 2, "kv_heads": 1, "ffn": 55, "vocab": 257, "context": 32}


def recipe(ranks: int, per_step: int, **settings: Any) -> Recipe:
    copies = settings.pop("copies", 1)
    changes = settings.pop("sections", {})
    values = {
        "model": MODEL,
        "data": {"sequence_length": 24},
        "steps": STEPS,
        "batch_size": per_step * copies,
        "optimizer": {
            "name": "sgd",
            "learning_rate": 0.02,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "clip_norm": None,
        },
        "guard": {"rewinds": 0},
        "cluster": {"devices_per_node": ranks * copies},
        "strategy": {
            "precision": "fp64",
            "micro_batch_size": 1,
            "pipeline_parallel": ranks,
            "pipeline_schedule": "pipedream",
            **settings,
        },
    }
    return recipe_of(values | changes, SETTINGS)


def batch(number: int) -> Batch:
    """A sentence of few of the words, and thus something to learn."""
    ids = torch.randint(0, 16, (1, 24), generator=torch.Generator().manual_seed(number))
    labels = ids.roll(-1, 1)
    labels[:, : number % 5] = -100  # batches count unequally many targets
    return {"input_ids": ids, "labels": labels}


def of_step(index: int, per_step: int, rank: int = 0, copies: int = 1) -> list[Batch]:
    return [batch((index * per_step + number) * copies + rank) for number in range(per_step)]


def trained(
    asked: Recipe, per_step: int, pause_after: int | None = None
) -> tuple[list[float], dict[str, tuple[Any, Tensor]], int]:
    """Losses, this rank's weights with where they lie in the whole, and the most forward passes under way."""
    run: Run = build(asked, blueprint_of(asked), strategy_from(asked.strategy), torch.device("cpu"))
    losses = []
    source = ListedBatches(
        [of_step(index, per_step, run.data_rank, run.data_degree) for index in range(STEPS)]
    )
    run.passes.begin(source, 0)
    for index in range(STEPS):
        losses.append(float(step(run, source.micro_batches(index), learning_rate(asked, index)).loss))
        if index == pause_after:
            evaluate(run, [batch(999)])
    assert isinstance(run.passes, PipeDream)
    dist.barrier()  # the last messages leave while the run lives
    weights = {n: (local_slices(p), local_part(p).clone()) for n, p in named_parameters(run.model)}
    return losses, weights, run.passes.most_in_flight


def simulated(asked: Recipe, per_step: int, stage_of: dict[str, int], ranks: int, copies: int = 1) -> Any:
    """The same in one process: (losses, weights)."""
    blueprint = blueprint_of(asked)
    model = reference_model(blueprint, asked.seed, torch.float64)
    sync = asked.strategy.get("pipeline_vertical_sync", False)
    newest = {n: p.detach().clone() for n, p in model.named_parameters()}
    momenta = {n: torch.zeros_like(p) for n, p in newest.items()}
    versions, losses = [newest], []
    for index in range(STEPS):
        drawn = [[batch((index * per_step + m) * copies + r) for r in range(copies)] for m in range(per_step)]
        count = sum(int((b["labels"] != -100).sum()) for group in drawn for b in group)
        gradient = {n: torch.zeros_like(p) for n, p in newest.items()}
        total = 0.0
        for number, group in enumerate(drawn, start=index * per_step):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    lag = ranks - 1 - (0 if sync else stage_of[name])
                    parameter.copy_(versions[max(0, number - lag) // per_step][name])
            for each in group:
                model.zero_grad()
                loss, _ = blueprint.loss(model, each)
                (loss / count).backward()
                total += float(loss.detach())
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    gradient[name] += parameter.grad
        rate = learning_rate(asked, index)
        momenta = {n: 0.9 * momenta[n] + gradient[n] for n in gradient}
        versions.append({n: versions[-1][n] - rate * momenta[n] for n in gradient})
        losses.append(total / count)
    return losses, versions[-1]


ROWS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {}),
    (4, 1, {"pipeline_vertical_sync": True}),
    (2, 3, {"copies": 2, "zero_stage": 3, "pipeline_vertical_sync": True}),
]
LONG_ROWS: list[tuple[int, int, dict[str, Any]]] = [
    (4, 1, {}),
    (4, 2, {"activation_checkpointing": "full"}),
    (4, 8, {"pipeline_vertical_sync": True}),
    (2, 1, {"copies": 2, "zero_stage": 0}),
]


@pytest.mark.parametrize(
    ("ranks", "per_step", "settings"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.long) for row in LONG_ROWS)],
    ids=str,
)
def test_every_gradient_is_by_the_weights_of_its_forward_pass(
    ranks: int, per_step: int, settings: dict[str, Any], pool: Pool
) -> None:
    copies = settings.get("copies", 1)
    asked = recipe(ranks, per_step, **settings)
    seen = pool.run(ranks * copies, trained, asked, per_step)
    whole = {name: rank // copies for rank, (_, weights, _) in enumerate(seen) for name in weights}
    losses, weights = simulated(asked, per_step, whole, ranks, copies)
    for rank, (found, mine, _) in enumerate(seen):
        assert found == pytest.approx(losses, rel=1e-10), f"rank {rank}"
        for name, (place, piece) in mine.items():
            assert torch.allclose(piece, weights[name][place], rtol=1e-10, atol=1e-13), name
        assert sum(piece.numel() for _, piece in mine.values()) > 0
    synchronous = simulated(asked, per_step, dict.fromkeys(whole, 0), 1, copies)[0]
    assert max(abs(a / b - 1) for a, b in zip(losses, synchronous, strict=True)) > 1e-6, "nothing was stale"


SQUARE = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 257, "context": 32}


def adam(name: str = "adamw") -> dict[str, Any]:
    return {"name": name, "learning_rate": 1e-2, "clip_norm": None}


MIXES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "precision": "fp32",
            "tensor_parallel": 2,
            "offload": "optimizer",
            "offload_fraction": 0.5,
            "activation_checkpointing": "selective",
        },
        adam(),
    ),
    (
        {
            "precision": "bf16",
            "master_weights": False,
            "reduce_dtype": "compute",
            "tensor_parallel": 2,
            "tensor_sequence_parallel": "gathered",
            "activation_checkpointing": "every:2",
        },
        adam(),
    ),
    (
        {
            "precision": "bf16",
            "buffer_dtype": "compute",
            "tensor_parallel": 2,
            "tensor_sequence_parallel": "regathered",
            "activation_checkpointing": "sqrt",
        },
        adam(),
    ),
    (
        {
            "precision": "fp8",
            "fp8_scaling": "row",
            "fp8_layers": "all",
            "sequence_parallel": 2,
            "activation_checkpointing": "budget:0.4",
        },
        adam(),
    ),
    (
        {
            "precision": "fp32",
            "sequence_parallel": 2,
            "sequence_method": "ring",
            "offload": "nvme:/tmp",
            "loss": "chunked",
        },
        adam("adamw_8bit"),
    ),
]
"""Settings combined with an asynchronous pipeline of two ranks, each on two, with other optimizers than SGD.

With 8-bit moments it is a GPT-2 with a head of its own.
"""


def mixed(settings: dict[str, Any], optimizer: dict[str, Any]) -> Recipe:
    eight = optimizer["name"] == "adamw_8bit"
    model = SQUARE | ({"family": "gpt2", "tied": False} if eight else {})
    return recipe(2, 2, sections={"model": model, "optimizer": optimizer}, **settings)


@functools.cache
def losses_alone(name: str, pool: Pool) -> list[float]:
    """Of two stages in fp64, with an optimizer and nothing else."""
    return pool.run(2, trained, mixed({"precision": "fp64"}, adam(name)), 2)[0][0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "optimizer"),
    MIXES,
    ids=["tensor", "gathered", "regathered", "ulysses", "ring"],
)
def test_beside_other_techniques_it_trains_as_it_does_alone(
    settings: dict[str, Any], optimizer: dict[str, Any], pool: Pool
) -> None:
    """The loss of every step, within what parity tests allow precision and optimizer, and it falls by far more."""
    asked = mixed(settings, optimizer)
    refuse_broken(asked, 4, str)
    alone = losses_alone(optimizer["name"], pool)
    found = pool.run(4, trained, asked, 2)
    apart = allowed(asked, settings["precision"])
    assert alone[-1] < (1 - 2 * apart) * alone[0], "else an update that is never made goes unseen"
    for losses, _, _ in found:
        assert losses == pytest.approx(alone, rel=apart)


def test_as_many_are_under_way_as_in_1f1b(pool: Pool) -> None:
    seen = pool.run(4, trained, recipe(4, 1), 1)
    assert (
        [most for _, _, most in seen]
        == [in_flight(order) for order in orders("pipedream", 4, 1, STEPS)]
        == [4, 3, 2, 1]
    )


def test_an_evaluation_in_between_changes_nothing(pool: Pool) -> None:
    asked = recipe(4, 2)
    plain, paused = pool.run(4, trained, asked, 2), pool.run(4, trained, asked, 2, 3)
    for (losses, weights, _), (others, theirs, _) in zip(plain, paused, strict=True):
        assert losses == others
        assert all(torch.equal(weights[name][1], theirs[name][1]) for name in weights)


def dry(asked: Recipe, rank: int) -> DryRun:
    strategy = strategy_from(asked.strategy)
    return dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster), rank=rank)


@pytest.mark.parametrize(
    ("per_step", "sync", "versions"),
    [
        (1, False, [3, 2, 1, 0]),
        pytest.param(1, True, [3] * 4, marks=pytest.mark.long),
        pytest.param(2, False, [2, 1, 1, 0], marks=pytest.mark.long),
        pytest.param(8, True, [1] * 4, marks=pytest.mark.long),
    ],
)
def test_the_plan_counts_older_weights_and_what_is_under_way(
    per_step: int, sync: bool, versions: list[int]
) -> None:
    """In the long run: also where a step has fewer micro-batches than are under way."""
    samples = 2 * 24 * 8  # bytes of a micro-batch's ids and labels, of which an endless pipeline holds more
    asked = recipe(4, per_step, pipeline_vertical_sync=sync)
    plain = asked.model_copy(
        update={
            "strategy": {**asked.strategy, "pipeline_schedule": "1f1b", "pipeline_vertical_sync": False},
            "batch_size": 8,
        }
    )
    for rank, copies in enumerate(versions):
        endless, flushed = dry(asked, rank), dry(plain, rank)
        held, plain_held = (run.peaks["setup"].ledger.parameters for run in (endless, flushed))
        assert held == (1 + copies) * plain_held
        assert max(s.ledger.activations for s in endless.timeline) == pytest.approx(
            max(s.ledger.activations for s in flushed.timeline), abs=64 * samples
        )
        assert endless.cost.flops * 8 == flushed.cost.flops * per_step


def test_a_step_of_a_full_pipeline_waits_for_nobody() -> None:
    def seconds(action: Action) -> float:
        return {"F": 1.0, "B": 2.0}[action.kind]

    assert step_time("pipedream", 4, 1, 8, seconds) == pytest.approx(8 * 3)
    assert step_time("1f1b", 4, 1, 8, seconds) == pytest.approx((8 + 3) * 3)
    assert step_time("pipedream", 4, 1, 1, seconds) == pytest.approx(3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": {"clip_norm": 1.0}}, "set optimizer.clip_norm and optimizer.adaptive_clip to null"),
        ({"guard": {"rewinds": 1}}, "set guard.rewinds to 0 and guard.snapshot_every to null"),
        ({"strategy": {"precision": "fp16"}}, "the nearest that works is precision: bf16"),
        ({"strategy": {"zero_stage": 1}}, "the nearest that works is zero_stage: 3"),
        ({"strategy": {"offload": "optimizer+parameters"}}, "the nearest that works is offload: optimizer"),
        ({"model": {"tied": True}}, "the nearest that works is pipeline_schedule: 1f1b"),
    ],
)
def test_what_cannot_be_asynchronous_is_said(changes: dict[str, Any], expected: str) -> None:
    values: dict[str, Any] = {
        "model": MODEL,
        "data": {"sequence_length": 24},
        "steps": 1,
        "batch_size": 8,
        "optimizer": {"clip_norm": None},
        "guard": {"rewinds": 0},
        "strategy": {"pipeline_parallel": 4, "pipeline_schedule": "pipedream"},
    }
    asked = recipe_of(
        {
            k: values[k]
            if k not in changes
            else (values[k] if isinstance(values[k], dict) else {}) | changes[k]
            for k in values
        },
        SETTINGS,
    )
    with pytest.raises(RecipeError, match="pipedream") as caught:
        refuse_broken(asked, 8, lambda key: f"strategy.{key}")
    assert expected in str(caught.value)


def test_stages_that_share_a_table_are_refused() -> None:
    asked = recipe(4, 1)
    tied = recipe_of(
        {
            "model": MODEL | {"tied": True},
            "data": {"sequence_length": 24},
            "steps": 1,
            "batch_size": 1,
            "optimizer": {"clip_norm": None},
            "guard": {"rewinds": 0},
            "strategy": dict(asked.strategy),
            "cluster": {"devices_per_node": 4},
        },
        SETTINGS,
    )
    with pytest.raises(RecipeError, match="its first and last stage share"):
        dry(tied, 0)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names |= {func.name()} if not func.is_view else set()
        return func(*args, **(kwargs or {}))


def test_an_exchange_of_weights_allocates_nothing() -> None:
    """Where memory runs out in a pass, all weights go back to where they were."""
    weights = [
        nn.Parameter(torch.full((3, 5), 1.0)),
        nn.Parameter(torch.full((7,), 2.0, dtype=torch.bfloat16)),
    ]
    stash = Stash(weights, lag=1, per_step=1)
    stash.before_update()
    with torch.no_grad():
        for weight in weights:
            weight.add_(10)
    with Operations() as operations, pytest.raises(MemoryError), stash.weights_of(1):
        assert [weight[..., 0].flatten()[0].item() for weight in weights] == [1.0, 2.0]
        operations.names.clear()
        raise MemoryError
    assert operations.names == {"aten::copy_"}
    assert all((weight == 10 + number).all() for number, weight in enumerate(weights, 1))
