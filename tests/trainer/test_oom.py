"""Out of memory (OOM) in the real trainer: on one rank or all, in each part of a step. The run ends as one without OOM.

A limit of the operating system on the data of a process makes PyTorch's own allocator fail. Activations are large
here and the model is small: a step of the whole micro-batch exceeds the limit, and a step of half of it does not. Other
cases raise the error at a certain line, for every micro-batch that is larger than what ``fits``.

The tests start the ranks again as a launcher does. ``tests/cli/test_out_of_memory.py`` has the launchers.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.errors import OutOfMemory
from shardwise.core.plan import Plan
from shardwise.core.units import MiB
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.blueprint import Batch
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.faults.oom_record import read_record
from shardwise.trainer.loop import Job, Trainer
from shardwise.trainer.meter import return_large_frees
from tests.harness.pool import Pool
from tests.harness.tiny_run import whole

MODEL = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 1021, "context": 256}
STEPS, BATCH = 6, 32
ROOM = 33 * MiB
"""More than a process has when the limit is set."""

EVERY_2 = (("checkpoint", {"every": 2}),)


@dataclass(frozen=True)
class Case:
    """A run, and its OOM: from step ``step`` (from 0) on, on ``ranks``.

    ``room`` limits the process; else ``where`` names the place of the error: loss, evaluation, or update (once).
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
    """A trainer that runs out of memory as a case says; records the batches that it reads."""

    def __init__(self, trainer: Trainer, case: Case) -> None:
        self.case, self.trainer = case, trainer
        self.read: list[tuple[int, int, list[int]]] = []
        self.reading, self.loss = trainer.data.micro_batches, trainer.blueprint.loss
        trainer.data.micro_batches = self.micro_batches  # type: ignore[method-assign]
        trainer.blueprint.loss = self.limited_loss  # type: ignore[method-assign]

    @property
    def due(self) -> bool:
        return dist.get_rank() in self.case.ranks and self.trainer.index >= self.case.step

    def micro_batches(self, position: int, *arguments: int) -> list[Batch]:
        self.read.append((position, arguments[-1], self.trainer.data.samples(position)))
        if self.case.room and self.due:
            limit(self.case.room)
        if self.case.where == "update" and self.due and read_record(self.trainer.job.folder) is None:
            self.trainer.run.optimizer.update = self.failing  # type: ignore[method-assign]
        return self.reading(position, *arguments)

    def failing(self, *arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    def limited_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        sums = self.loss(model, batch)
        where = "loss" if torch.is_grad_enabled() else "evaluation"
        if self.case.where == where and self.due and len(batch["labels"]) > self.case.fits:
            self.failing()
        return sums


def rank_of(case: Case, recipe: Recipe, plan: Plan, folder: Path) -> dict[str, Any]:
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    faulty = Faulty(trainer, case)
    trainer.train()
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tensors = {name: tensor.double() for name, tensor in whole(trainer.run).items()}
    return {"read": faulty.read, "state": trainer.state, "run": tensors}


PLANS: dict[bool, Plan] = {}


def plan_of(case: Case, recipe: Recipe) -> Plan:
    if case.large not in PLANS:
        PLANS[case.large] = make_plan(recipe, cluster_of(recipe.cluster))
    # The trainer reads the settings that differ between cases.
    return replace(PLANS[case.large], strategy=strategy_from(recipe.strategy), world_size=case.world)


def train(pool: Pool, case: Case, corpus: Path, folder: Path) -> list[dict[str, Any]]:
    """Train as a launcher does: after an OOM again, with the micro-batch of the record, until that is final."""
    recipe = recipe_for(case, corpus)
    folder.mkdir(exist_ok=True)
    plan = plan_of(case, recipe)
    while True:
        write_job(folder, recipe, plan)
        try:
            return pool.run(case.world, rank_of, case, recipe, plan, folder, timeout=120)
        except OutOfMemory:
            record = read_record(folder)
            assert record is not None
            if record.is_final:
                raise
            assert record.applies_to(plan.strategy, case.world)
            size = record.next_micro_batch_size
            plan = replace(plan, strategy=plan.strategy.with_values(micro_batch_size=size))


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


def assert_resumed(ranks: list[dict[str, Any]], first: int, size: int) -> None:
    """The last start of the ranks read the batches from step ``first`` on, once each, in micro-batches of ``size``."""
    for rank in ranks:
        assert [(position, size) for position, size, _ in rank["read"]] == [
            (p, size) for p in range(first, STEPS)
        ]


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
        assert line["loss"] == pytest.approx(other["loss"], rel=min(tolerance, 1e-6))
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=max(tolerance, 1e-12) * 10)
        assert (line["tokens"], line["learning_rate"]) == (other["tokens"], other["learning_rate"])
    for rank in ranks:
        read = [(position, samples) for position, _, samples in rank["read"]]
        assert read == [(position, samples) for position, _, samples in others[0]["read"]][-len(read) :]
        assert replace(rank["state"], guard=others[0]["state"].guard) == others[0]["state"]
        assert rank["state"].guard.losses == pytest.approx(others[0]["state"].guard.losses, rel=tolerance)


# ---- real ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(step=2, ranks=(1,), room=ROOM, size=16, settings=(("zero_stage", 3),)),
        pytest.param(
            Case(step=0, ranks=(0, 1), room=ROOM, size=16, settings=(("zero_stage", 1),)),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Case(step=3, ranks=(0,), room=ROOM, size=16, settings=(("zero_stage", 0),), sections=EVERY_2),
            marks=pytest.mark.long,
        ),
    ],
    ids=("one rank, later", "all ranks, at first", "the store's rank"),
)
def test_memory_that_really_runs_out(trained: Trained, case: Case) -> None:
    """Half the micro-batch from the last checkpoint on, and the run of one that had it from the start."""
    ranks, folder = found = trained(case)
    first = 2 if case.sections else 0
    assert_resumed(ranks, first, 8)
    reference = replace(without_fault(case, 8), settings=(("zero_stage", 3),), sections=())
    assert_same_run(found, trained(reference), 1e-5)
    [event] = lines(folder / "events.jsonl")
    assert (event["event"], event["step"], event["to_step"]) == ("out of memory", case.step + 1, first)
    assert event["rank"] in case.ranks and event["micro_batch_size"] == 8
    record = read_record(folder)
    assert record is not None and record.requested_bytes > 0 and 0 < record.allocated_bytes < 200 * MiB
    assert record.step == case.step + 1 and record.rank in case.ranks


# ---- in every part -------------------------------------------------------------------------------------------

FP64 = (("zero_stage", 2), ("precision", "fp64"))


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("case", "first", "size"),
    [
        (Case(1, (1,), where="loss", settings=FP64), 0, 2),
        long(Case(3, (0, 1), where="loss", settings=FP64, size=3, fits=1, sections=EVERY_2), 2, 1),
        long(Case(0, (0,), where="evaluation", settings=FP64, sections=EVERY_2), 4, 2),
        long(Case(2, (1,), where="update", settings=FP64, sections=EVERY_2), 2, 2),
        (Case(3, (0,), where="update", settings=FP64, sections=(("guard", {"snapshot_every": 1}),)), 0, 2),
        long(Case(2, (3,), where="loss", size=2, fits=1, world=4, settings=(*FP64, ("replicate", 2))), 0, 1),
        long(Case(1, (0,), where="loss", world=1, settings=FP64), 0, 2),
    ],
    ids=("forward", "twice", "evaluation", "update", "update, snapshot", "hybrid", "alone"),
)
def test_every_part_of_a_run(trained: Trained, case: Case, first: int, size: int) -> None:
    ranks, folder = found = trained(case)
    assert_resumed(ranks, first, size)
    # One plain run for all: any split of a batch, and any way back to a step, must come to the same.
    assert_same_run(found, trained(Case(size=2, settings=FP64)), 1e-10)
    assert lines(folder / "metrics.jsonl")[-1]["held_out_loss"] > 0


@pytest.mark.long
def test_a_pipeline(trained: Trained) -> None:
    """Memory runs out on the last stage while the first waits for a gradient."""
    settings = (("precision", "fp64"), ("pipeline_parallel", 2))
    (ranks, folder), (others, elsewhere) = (
        trained(case)
        for case in (Case(1, (1,), where="loss", settings=settings), Case(size=2, settings=settings))
    )
    assert_resumed(ranks, 0, 2)
    for rank, other in zip(ranks, others, strict=True):
        assert rank["run"].keys() == other["run"].keys()
        for name, tensor in other["run"].items():
            assert_close(rank["run"][name], tensor, rtol=1e-10, atol=1e-10 * float(tensor.abs().max()))
    assert ranks[0]["run"].keys() != ranks[1]["run"].keys()
    mine, theirs = lines(folder / "metrics.jsonl"), lines(elsewhere / "metrics.jsonl")
    assert [line["loss"] for line in mine] == pytest.approx([line["loss"] for line in theirs], rel=1e-10)


@pytest.mark.long
def test_the_optimizer_in_the_backward_pass(trained: Trained) -> None:
    """Its update is torn when the last backward pass breaks off."""
    settings = (("zero_stage", 3), ("precision", "fp64"), ("optimizer_in_backward", True))
    optimizer = ("optimizer", {"learning_rate": 3e-3, "clip_norm": None})
    case = Case(2, (1,), where="update", settings=settings, sections=(optimizer,))
    found = trained(case)
    assert_resumed(found[0], 0, 2)
    assert_same_run(found, trained(without_fault(case, 2)), 1e-10)


@pytest.mark.long
def test_loss_scale_and_guard_are_restored(trained: Trained) -> None:
    """fp16: an OOM is no overflow, and no skipped update."""
    sections = (("loss_scale", {"initial": 1024.0, "growth_interval": 4}), *EVERY_2)
    case = Case(3, (1,), where="loss", settings=(("zero_stage", 2), ("precision", "fp16")), sections=sections)
    found, expected = trained(case)[0], trained(without_fault(case, 2))[0]
    for name in ("loss_scale", "clean_steps", "overflows_left"):
        assert all(
            torch.equal(r["run"][f"optimizer/{name}"], expected[0]["run"][f"optimizer/{name}"]) for r in found
        )
    assert float(expected[0]["run"]["optimizer/loss_scale"]) == 2048
    assert all(len(rank["state"].guard.losses) == STEPS and rank["state"].guard.skips == 0 for rank in found)


@pytest.mark.long
def test_a_micro_batch_of_one_ends_the_run(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    """With one line and the data for advice; the checkpoint is whole, and a resume begins with the smallest."""
    case = Case(3, (1,), where="loss", fits=0, sections=EVERY_2)
    with pytest.raises(
        OutOfMemory, match=r"micro-batch of 1 \(rank 1, step 4\): tried to allocate 2.00 GiB with "
    ):
        train(pool, case, corpus, tmp_path)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")][:2] == [1, 2]
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-2"}
    record = read_record(tmp_path)
    assert record is not None and record.is_final and record.smallest == 1
    again = train(pool, without_fault(case, 1), corpus, tmp_path)
    assert_resumed(again, 2, 1)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
