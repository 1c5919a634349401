"""Memory that really runs out, in the real trainer: on one rank or all, in any part of a step, and what comes of it.

A limit of the operating system on the data of a process makes PyTorch's own allocator fail. Activations are large
here and the model is small, so a step of the whole micro-batch does not fit under the limit and one of half of it does.
Where it matters in which line memory runs out, the error is raised there instead: of every micro-batch that is larger
than what ``fits``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from pool import Pool
from small_run import whole
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import api
from shardwise.core.errors import Preempted, ResourceError
from shardwise.core.recipe import Recipe, recipe_of
from shardwise.core.units import MiB
from shardwise.model.blueprint import Batch
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS, strategy_from
from shardwise.train import alarm as alarms
from shardwise.train.folder import prepare
from shardwise.train.loop import Job, Trainer
from shardwise.train.meter import Measured, return_large_frees
from shardwise.train.shortage import remembered

MODEL = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 1021, "context": 256}
STEPS, BATCH = 6, 32
ROOM = 33 * MiB
"""Beside what a process has when the limit is set."""


@dataclass(frozen=True)
class Case:
    """A run, and how its memory runs out: from the ``step``-th reading of data on, on ``ranks``.

    ``room`` limits the process; else ``where`` says in what an error is raised: loss, evaluation, or update (once).
    """

    step: int = 0
    ranks: tuple[int, ...] = ()
    room: int = 0
    where: str = ""
    fits: int = 2
    size: int = 4
    world: int = 2
    settings: tuple[tuple[str, Any], ...] = (("zero_stage", 3),)
    sections: tuple[tuple[str, Any], ...] = ()
    stop_after: int | None = None

    @property
    def large(self) -> bool:
        return self.size > 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text("".join(f"line {number} of {number % 7}\n" for number in range(40_000)), encoding="utf-8")
    return path


def recipe_for(case: Case, corpus: Path) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"source": str(corpus), "sequence_length": 256 if case.large else 16},
        "steps": STEPS,
        "batch_size": BATCH if case.large else 10,
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 1.0},
        "evaluation": {"sequences": 4},
        "cluster": {"device": "cpu", "devices_per_node": case.world},
        "strategy": {"precision": "fp32", "micro_batch_size": case.size, **dict(case.settings)},
    }
    return recipe_of({**values, **dict(case.sections)}, SETTINGS)


def limit(room: int) -> None:
    """From here on this process may have so many bytes of data more."""
    gc.collect()
    return_large_frees(True)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    found = re.search(
        r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    resource.setrlimit(resource.RLIMIT_DATA, (int(found[1]) * 1024 + room, resource.RLIM_INFINITY))


class Faulty:
    """A trainer whose memory runs out as a case says; notes what is read."""

    def __init__(self, trainer: Trainer, case: Case) -> None:
        self.case, self.trainer = case, trainer
        self.read: list[tuple[int, int, list[int]]] = []
        self.done = False
        self.reading, self.loss = trainer.data.micro_batches, trainer.blueprint.loss
        trainer.data.micro_batches = self.micro_batches  # type: ignore[method-assign]
        trainer.blueprint.loss = self.limited_loss  # type: ignore[method-assign]

    @property
    def due(self) -> bool:
        return dist.get_rank() in self.case.ranks and len(self.read) > self.case.step

    def micro_batches(self, position: int, *arguments: int) -> list[Batch]:
        self.read.append((position, arguments[-1], self.trainer.data.samples(position)))
        if self.case.room and self.due and len(self.read) == self.case.step + 1:
            limit(self.case.room)
        if self.case.where == "update" and self.due and not self.done:
            self.trainer.run.optimizer.update = self.failing  # type: ignore[method-assign]
        if len(self.read) == self.case.stop_after:
            self.trainer.stopping._asked = True
        return self.reading(position, *arguments)

    def failing(self, *arguments: Any) -> None:
        self.done = True
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    def limited_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        sums = self.loss(model, batch)
        where = "loss" if torch.is_grad_enabled() else "evaluation"
        if self.case.where == where and self.due and len(batch["labels"]) > self.case.fits:
            self.failing()
        return sums


def rank_of(case: Case, recipe: Recipe, plan: Any, folder: Path) -> dict[str, Any]:
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    faulty, line = Faulty(trainer, case), ""
    try:
        trainer.train()
    except (ResourceError, Preempted) as error:
        return {"read": faulty.read, "line": error.line()}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    size = trainer.run.strategy[MICRO_BATCH_SIZE]
    tensors = {name: tensor.double() for name, tensor in whole(trainer.run).items()}
    return {"read": faulty.read, "line": line, "size": size, "state": trainer.state, "run": tensors}


PLANS: dict[bool, Any] = {}


def train(pool: Pool, case: Case, corpus: Path, folder: Path) -> list[dict[str, Any]]:
    recipe = recipe_for(case, corpus)
    folder.mkdir(exist_ok=True)
    if case.large not in PLANS:
        PLANS[case.large] = api.plan(recipe)
    # What cases differ in, the trainer reads from recipe and strategy.
    plan = replace(PLANS[case.large], strategy=strategy_from(recipe.strategy), world_size=case.world)
    prepare(folder, recipe, plan)
    return pool.run(case.world, rank_of, case, recipe, plan, folder, timeout=120)


Trained = Callable[[Case], tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def trained(pool: Pool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a case's ranks have seen, and its folder; each is trained once."""
    known: dict[str, tuple[list[dict[str, Any]], Path]] = {}

    def run(case: Case) -> tuple[list[dict[str, Any]], Path]:
        if repr(case) not in known:
            folder = tmp_path_factory.mktemp("run")
            known[repr(case)] = (train(pool, case, corpus, folder), folder)
        return known[repr(case)]

    return run


def without_fault(case: Case, size: int) -> Case:
    """The run that has the smaller micro-batch from its start."""
    return replace(case, step=0, ranks=(), room=0, where="", size=size, fits=2)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_same_run(
    found: tuple[list[dict[str, Any]], Path], expected: tuple[list[dict[str, Any]], Path], tolerance: float
) -> None:
    """The same weights, moments and progress on all ranks; one line for each step; the same samples in each."""
    (ranks, folder), (others, elsewhere) = found, expected
    for name, tensor in others[0]["run"].items():
        for rank in ranks:
            assert_close(
                rank["run"][name], tensor, rtol=tolerance, atol=tolerance * float(tensor.abs().max())
            )
            assert torch.equal(rank["run"][name], ranks[0]["run"][name])
    mine, theirs = lines(folder / "metrics.jsonl"), lines(elsewhere / "metrics.jsonl")
    assert [line["step"] for line in mine] == list(range(1, STEPS + 1))
    for line, other in zip(mine, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=tolerance)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=max(tolerance, 1e-12) * 10)
        assert (line["tokens"], line["learning_rate"]) == (other["tokens"], other["learning_rate"])
    for rank in ranks:
        last = {position: samples for position, _, samples in rank["read"]}
        assert list(last.items()) == [(position, samples) for position, _, samples in others[0]["read"]]
        assert replace(rank["state"], guard=others[0]["state"].guard) == others[0]["state"]
        assert rank["state"].guard.losses == pytest.approx(others[0]["state"].guard.losses, rel=tolerance)


# ---- real ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(step=2, ranks=(1,), room=ROOM, size=16, settings=(("zero_stage", 3),)),
        Case(step=0, ranks=(0, 1), room=ROOM, size=16, settings=(("zero_stage", 1),)),
        Case(step=3, ranks=(0,), room=ROOM, size=16, settings=(("zero_stage", 0),)),
    ],
    ids=("one rank, later", "all ranks, at first", "the store's rank"),
)
def test_memory_that_really_runs_out(trained: Trained, case: Case) -> None:
    """Half the micro-batch from that step on, and the run of one that had it from the start."""
    ranks, folder = found = trained(case)
    assert all(rank["size"] == 8 for rank in ranks)
    reference = replace(without_fault(case, 8), settings=(("zero_stage", 3),))
    assert_same_run(found, trained(reference), 1e-5)
    assert all([size for _, size, _ in rank["read"]][case.step : case.step + 2] == [16, 8] for rank in ranks)
    [event] = lines(folder / "events.jsonl")
    assert (event["event"], event["step"]) == ("out of memory", case.step + 1)
    assert event["rank"] in case.ranks and event["micro_batch_size"] == 8


# ---- in every part -------------------------------------------------------------------------------------------

FP64 = (("zero_stage", 2), ("precision", "fp64"))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (Case(1, (1,), where="loss", settings=FP64), [4, 4, 2]),
        (Case(1, (0, 1), where="loss", settings=FP64, size=3, fits=1), [3, 3, 2, 1]),
        (Case(0, (0,), where="evaluation", settings=FP64), [4] * STEPS),
        (
            Case(2, (1,), where="update", settings=FP64, sections=(("checkpoint", {"every": 2}),)),
            [4, 4, 4, 2],
        ),
        (Case(3, (0,), where="update", settings=FP64, sections=(("guard", {"snapshot_every": 1}),)), [4] * 4),
        (Case(1, (1,), where="update", settings=FP64), [4, 4, 2]),
        (
            Case(2, (3,), where="loss", size=2, fits=1, world=4, settings=(*FP64, ("replicate", 2))),
            [2, 2, 2, 1],
        ),
    ],
    ids=(
        "forward",
        "twice",
        "evaluation",
        "update, checkpoint",
        "update, snapshot",
        "update, neither",
        "hybrid",
    ),
)
def test_every_part_of_a_run(trained: Trained, case: Case, sizes: list[int]) -> None:
    ranks, folder = found = trained(case)
    last = ranks[0]["size"]
    assert last == -(-case.size // 2) or sizes[-1] == last == 1
    assert [size for _, size, _ in ranks[0]["read"]][: len(sizes)] == sizes
    if case.where == "loss":  # the very step again, as often as memory ran out
        again = [case.step] * (len(sizes) - case.step)
        assert [position for position, _, _ in ranks[0]["read"]] == [
            *range(case.step),
            *again,
            *range(case.step + 1, STEPS),
        ]
    # One plain run for all: any split of a batch, and any way back to a step, must come to the same.
    assert_same_run(found, trained(Case(size=2, settings=FP64)), 1e-10)
    assert lines(folder / "metrics.jsonl")[-1]["held_out_loss"] > 0


def test_a_pipeline(trained: Trained) -> None:
    """Memory runs out on the last stage while the first waits for a gradient."""
    settings = (("precision", "fp64"), ("pipeline_parallel", 2))
    (ranks, folder), (others, elsewhere) = (
        trained(case)
        for case in (Case(1, (1,), where="loss", settings=settings), Case(size=2, settings=settings))
    )
    assert [[size for _, size, _ in rank["read"]] for rank in ranks] == [[4, 4, *[2] * (STEPS - 1)]] * 2
    for rank, other in zip(ranks, others, strict=True):
        assert rank["run"].keys() == other["run"].keys()
        for name, tensor in other["run"].items():
            assert_close(rank["run"][name], tensor, rtol=1e-10, atol=1e-10 * float(tensor.abs().max()))
    assert ranks[0]["run"].keys() != ranks[1]["run"].keys()
    mine, theirs = lines(folder / "metrics.jsonl"), lines(elsewhere / "metrics.jsonl")
    assert [line["loss"] for line in mine] == pytest.approx([line["loss"] for line in theirs], rel=1e-10)


def test_the_optimizer_in_the_backward_pass(trained: Trained) -> None:
    """Its update is torn when the last backward pass breaks off: all go back, here to the start."""
    settings = (("zero_stage", 3), ("precision", "fp64"), ("optimizer_in_backward", True))
    optimizer = ("optimizer", {"learning_rate": 3e-3, "clip_norm": None})
    case = Case(2, (1,), where="update", settings=settings, sections=(optimizer,))
    found = trained(case)
    assert [position for position, _, _ in found[0][0]["read"]] == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert_same_run(found, trained(without_fault(case, 2)), 1e-10)


def test_loss_scale_and_guard_are_untouched(trained: Trained) -> None:
    """fp16: an update that memory forbids is no overflow, and no skip."""
    sections = (("loss_scale", {"initial": 1024.0, "growth_interval": 4}),)
    case = Case(2, (1,), where="loss", settings=(("zero_stage", 2), ("precision", "fp16")), sections=sections)
    found, expected = trained(case)[0], trained(without_fault(case, 2))[0]
    for name in ("loss_scale", "clean_steps", "overflows_left"):
        assert all(
            torch.equal(r["run"][f"optimizer/{name}"], expected[0]["run"][f"optimizer/{name}"]) for r in found
        )
    assert float(expected[0]["run"]["optimizer/loss_scale"]) == 2048
    assert all(len(rank["state"].guard.losses) == STEPS and rank["state"].guard.skips == 0 for rank in found)


def test_a_micro_batch_of_one_ends_the_run(trained: Trained, pool: Pool, corpus: Path) -> None:
    """Exit code 7 on all ranks with one line; the checkpoint is whole, and a resume begins with what is smallest."""
    case = Case(3, (1,), where="loss", fits=0, sections=(("checkpoint", {"every": 2}),))
    ranks, folder = trained(case)
    assert ranks[0]["line"] == ranks[1]["line"]
    assert ranks[0]["line"].startswith(
        "error: out of memory with a micro-batch of 1 (rank 1, step 4): 2.00 GiB"
    )
    assert [line["step"] for line in lines(folder / "metrics.jsonl")][:2] == [1, 2]
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-2"}
    short = remembered(folder)
    assert short is not None and short.exhausted and short.smallest == 1
    again = train(pool, without_fault(case, 1), corpus, folder)
    assert [position for position, _, _ in again[0]["read"]] == [2, 3, 4, 5]
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("in_step", [True, False])
def test_only_an_update_in_which_all_ranks_are_can_be_held_off(in_step: bool) -> None:
    """On CUDA a rank's verdict holds off its peers' updates, but not those of another stage of PipeDream."""
    stands: Any = SimpleNamespace(
        survival=SimpleNamespace(alarm=SimpleNamespace(own=None, spoils=lambda part: True)),
        run=SimpleNamespace(
            device=torch.device("cuda"),
            passes=SimpleNamespace(in_step=in_step),
            update=SimpleNamespace(begun=False, voidable=True),
        ),
        pending=SimpleNamespace(part=7),
        state=SimpleNamespace(step=3, rewinds=0),
        recovery=SimpleNamespace(newest_copy=lambda step: None),
        meter=SimpleNamespace(reached=lambda: Measured(0, 0)),
    )
    assert Trainer._standing(stands).ahead == (not in_step)


def test_alone(trained: Trained) -> None:
    """One process has nobody to tell."""
    case = Case(1, (0,), where="loss", world=1, size=4, settings=FP64)
    assert_same_run(trained(case), trained(Case(size=2, settings=FP64)), 1e-10)


def alarm_that_breaks(error: type[Exception]) -> tuple[bool, float]:
    """What an alarm says whose thread fails where it breaks the communicators, and after how long."""

    def breaks(but: int) -> None:
        raise error("as torch may")

    alarms._shut_accepted = breaks
    alarm = alarms.Alarm(c10d._get_default_store(), torch.device("cpu"), torch.zeros(()))
    alarm.enter()
    began = time.monotonic()
    return alarm.met(MemoryError()), time.monotonic() - began


@pytest.mark.parametrize("error", [ValueError, RuntimeError, dist.DistBackendError])
def test_nobody_waits_for_an_alarm_that_has_failed(error: type[Exception], pool: Pool) -> None:
    """The error that sounded it is then told, and not after half an hour."""
    for met, seconds in pool.run(2, alarm_that_breaks, error):
        assert not met and seconds < 20
