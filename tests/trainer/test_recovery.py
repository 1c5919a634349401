"""The guard within the real trainer: rewinds, skipped batches, logs, resuming and giving up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.errors import NumericsError, Preempted
from shardwise.core.run_files import StepRecord
from shardwise.engine.optim.norm import local
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.blueprint import Batch
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.loop import Job, Trainer
from shardwise.trainer.metrics import MetricsFile
from tests.harness.plans import NOTHING_TO_SEARCH
from tests.harness.pool import Pool

MODEL = {"layers": 2, "width": 24, "heads": 2, "kv_heads": 2, "ffn": 48, "vocab": 256, "context": 16}
STEPS, WORLD = 32, 2
FAULT = 24
"""The position of the first bad batch."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Case:
    """A run: its guard, its fault, and its special settings."""

    guard: dict[str, Any]
    fault: str = "none"
    settings: tuple[tuple[str, Any], ...] = (("zero_stage", 3),)
    checkpoint: int | None = None
    stop_after: int | None = None
    left_out: tuple[tuple[int, int], ...] = ()
    best: str | None = None


@pytest.fixture(scope="module")
def trained(pool: Pool, corpus: Path) -> Callable[[Case, Path], list[dict[str, Any]]]:
    """Train a case on two ranks; what each of them saw."""

    def train(case: Case, folder: Path) -> list[dict[str, Any]]:
        recipe = recipe_for(case, corpus)
        folder.mkdir(exist_ok=True)
        plan = replace(PLAN.get(recipe), strategy=strategy_from(recipe.strategy))
        write_job(folder, recipe, plan)
        return pool.run(WORLD, rank_of, case, recipe, plan, folder)

    return train


class _Plan:
    """One plan for all cases: what they differ in, the trainer reads from recipe and strategy."""

    def __init__(self) -> None:
        self._plan: Any = None

    def get(self, recipe: Recipe) -> Any:
        pinned = recipe.model_copy(update={"strategy": NOTHING_TO_SEARCH})
        self._plan = self._plan or make_plan(pinned, cluster_of(recipe.cluster))
        return self._plan


PLAN = _Plan()


def recipe_for(case: Case, corpus: Path) -> Recipe:
    in_backward = dict(case.settings).get("optimizer_in_backward", False)
    values = {
        "model": MODEL,
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": STEPS,
        "batch_size": 8,
        "optimizer": {"learning_rate": 3e-3, "clip_norm": None if in_backward else 1.0},
        "guard": {"window": 8, **case.guard},
        "checkpoint": {"every": case.checkpoint, "best": case.best, "keep": 1},
        "evaluation": {"every": 4 if case.best else None},
        "cluster": {"device": "cpu", "devices_per_node": WORLD},
        "strategy": {"precision": "fp32", "micro_batch_size": 2, **dict(case.settings)},
    }
    return recipe_of(values, SETTINGS)


def rank_of(case: Case, recipe: Recipe, plan: Any, folder: Path) -> dict[str, Any]:
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    positions: list[int] = []
    watch(trainer, positions, case.stop_after)
    FAULTS[case.fault](trainer, lambda: positions[-1] >= FAULT)
    if case.left_out:
        trainer.state = TrainState(left_out=case.left_out)
    line = ""
    try:
        trainer.train()
    except NumericsError as error:
        line = error.line()
    except Preempted:
        line = "stopped"
    samples = [trainer.data.samples(position) for position in range(2 * STEPS)]
    return {"positions": positions, "state": trainer.state, "line": line, "samples": samples}


def watch(trainer: Trainer, positions: list[int], stop_after: int | None) -> None:
    """Note the positions that are read; ask to stop when so many steps have been issued."""
    read = trainer.data.micro_batches

    def noted(position: int, *arguments: int) -> list[Batch]:
        positions.append(position)
        trainer.stopping._asked = len(positions) == stop_after or trainer.stopping._asked
        return read(position, *arguments)

    trainer.data.micro_batches = noted  # type: ignore[method-assign]


# ---- faults -----------------------------------------------------------------------------------------------

Begun = Callable[[], bool]
"""Whether the step that is running reads the first bad batch or a later one."""


def at(trainer: Trainer, width: int, change: Callable[[Batch], None]) -> None:
    """Change the batches of positions from FAULT on, on all ranks."""
    read = trainer.data.micro_batches

    def changed(position: int, *arguments: int) -> list[Batch]:
        batches = read(position, *arguments)
        if FAULT <= position < FAULT + width:
            for batch in batches:
                change(batch)
        return batches

    trainer.data.micro_batches = changed  # type: ignore[method-assign]


def random_tokens(batch: Batch) -> None:
    generator = torch.Generator().manual_seed(0)
    batch["labels"] = torch.randint(128, 256, batch["labels"].shape, generator=generator)


def corrupted(trainer: Trainer, begun: Begun) -> None:
    at(trainer, 3, random_tokens)


def corrupted_for_good(trainer: Trainer, begun: Begun) -> None:
    at(trainer, 10**6, random_tokens)


def module_of(trainer: Trainer, name: str) -> nn.Module:
    """By its canonical name, wrapped or not."""
    from shardwise.runtime.parallel.shard_slices import canonical_name

    return next(m for n, m in trainer.run.model.named_modules() if canonical_name(n) == name)


def broken_module(trainer: Trainer, begun: Begun) -> None:
    """From step FAULT on, a module of rank 1 yields a NaN."""

    def poison(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output + torch.nan if begun() and dist.get_rank() == 1 else None

    module_of(trainer, "layers.1.mlp.up_proj").register_forward_hook(poison)


def broken_gradient(trainer: Trainer, begun: Begun) -> None:
    """From step FAULT on, a module of rank 0 has an infinite gradient."""

    def poison(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        bad = begun() and dist.get_rank() == 0
        return (inputs[0] + torch.inf,) if bad else None

    module_of(trainer, "layers.0.mlp.down_proj").register_full_backward_hook(poison)


def poisoned_updates(count: int) -> Callable[[Trainer, Begun], None]:
    """So many gradients are NaN on rank 1, from step FAULT on, and would not be if made again."""

    def inject(trainer: Trainer, begun: Begun) -> None:
        finish, done = trainer.run.update.finish, [0]

        def poisoned(*arguments: Any) -> Any:
            if begun() and done[0] < count:
                done[0] += 1
                if dist.get_rank() == 1:
                    parameter = next(p for p in trainer.run.model.parameters() if p.grad is not None)
                    local(parameter.grad).fill_(torch.nan)
            return finish(*arguments)

        trainer.run.update.finish = poisoned  # type: ignore[method-assign]

    return inject


def torn(trainer: Trainer, begun: Begun) -> None:
    """One parameter's gradient is NaN on all ranks when others have been updated."""
    hit: list[bool] = []

    def poison(gradient: Tensor) -> Tensor | None:
        if begun() and len(hit) < 2:
            hit.append(True)
            return gradient * torch.nan
        return None

    def watch_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(poison)

    module_of(trainer, "embed_tokens").register_forward_hook(watch_gradient)


FAULTS: dict[str, Callable[[Trainer, Begun], None]] = {
    "none": lambda trainer, begun: None,
    "corrupted": corrupted,
    "corrupted for good": corrupted_for_good,
    "module": broken_module,
    "gradient": broken_gradient,
    "one update": poisoned_updates(1),
    "many updates": poisoned_updates(99),
    "torn": torn,
}


# ---- files after a run ------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in lines(folder / "events.jsonl") if event["event"] in kinds]


def curve(folder: Path) -> list[tuple[int, str, str]]:
    """What the run is made of: the last line of every step."""
    last = {m["step"]: m for m in lines(folder / "metrics.jsonl")}
    return [(step, m["loss"].hex(), m["grad_norm"].hex()) for step, m in sorted(last.items())]


# ---- rewinds ----------------------------------------------------------------------------------------------

SNAPSHOTS = {"snapshot_every": 5}
Trained = Callable[[Case, Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def rewound(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run that met three corrupted batches."""
    folder = tmp_path_factory.mktemp("rewound")
    return folder, trained(Case(SNAPSHOTS, "corrupted", checkpoint=15), folder)


def test_a_spike_is_taken_back_and_its_batches_are_never_read_again(
    rewound: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = rewound
    assert ranks[0]["positions"] == ranks[1]["positions"] and ranks[0]["state"] == ranks[1]["state"]
    state, positions = ranks[0]["state"], ranks[0]["positions"]
    assert state.step == STEPS and state.rewinds == 1
    assert state.left_out == ((FAULT - 1, FAULT + 3),)
    [spike, *_] = events(folder, "spike")
    assert spike["step"] <= FAULT + 3
    back = next(i for i, (a, b) in enumerate(pairwise(positions)) if b < a) + 1
    assert positions[back] == 20 and not {*range(FAULT - 1, FAULT + 3)} & {*positions[back:]}


def test_the_event_holds_the_samples_and_their_text(rewound: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = rewound
    [event] = events(folder, "rewind")
    read = ranks[0]["samples"]
    assert event["positions"] == [*range(FAULT - 1, FAULT + 3)]
    assert event["samples"] == [sample for place in event["positions"] for sample in read[place]]
    assert (event["to_step"], event["rewinds"]) == (20, 1)
    assert len(event["text"]) == 32 and all(isinstance(text, str) for text in event["text"])


def test_from_there_on_it_is_the_run_that_never_had_those_batches(
    rewound: tuple[Path, list[dict[str, Any]]], trained: Trained, tmp_path: Path
) -> None:
    folder, ranks = rewound
    trained(Case(SNAPSHOTS, left_out=ranks[0]["state"].left_out), tmp_path / "without")
    assert curve(folder) == curve(tmp_path / "without")


def test_metrics_keep_what_was_undone_and_readers_do_not_show_it(
    rewound: tuple[Path, list[dict[str, Any]]],
) -> None:
    from shardwise.report.record import read_run

    folder, _ = rewound
    found = [(m["step"], m.get("rewinds", 0)) for m in lines(folder / "metrics.jsonl")]
    undone = len(found) - STEPS
    assert found == [(n, 0) for n in range(1, 21 + undone)] + [(n, 1) for n in range(21, STEPS + 1)]
    steps = read_run(folder).steps
    assert [step.step for step in steps] == [*range(1, STEPS + 1)]
    assert [step.loss.hex() for step in steps] == [loss for _, loss, _ in curve(folder)]


def test_the_best_checkpoint_outlives_a_rewind_to_before_it(trained: Trained, tmp_path: Path) -> None:
    """Snapshots are of step 15, the best of step 24; the run stops before it evaluates again."""
    case = Case({"snapshot_every": 15}, "corrupted", best="held_out_loss", stop_after=FAULT + 5)
    ranks = trained(case, tmp_path)
    [rewind] = events(tmp_path, "rewind")
    best = ranks[0]["state"].best
    assert rewind["to_step"] == 15 and ranks[0]["line"] == "stopped" and best.step == FAULT
    assert (tmp_path / "checkpoints" / f"step-{best.step}").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("stop_after", [26, 34])
def test_resumed_in_the_middle_of_it_all_it_is_the_same_run(
    stop_after: int, rewound: tuple[Path, list[dict[str, Any]]], trained: Trained, tmp_path: Path
) -> None:
    """Stopped within the burst, whose only way back is then a checkpoint, and after the rewind."""
    case = Case(SNAPSHOTS, "corrupted", checkpoint=15)
    stopped = trained(replace(case, stop_after=stop_after), tmp_path)
    assert stopped[0]["line"] == "stopped" and stopped[0]["state"].step < STEPS
    resumed = trained(case, tmp_path)
    assert resumed[0]["state"].step == STEPS and resumed[0]["state"].rewinds == 1
    assert resumed[0]["state"].left_out == rewound[1][0]["state"].left_out
    [event] = events(tmp_path, "rewind")
    assert event["to_step"] == (15 if stop_after == 26 else 20)
    assert curve(tmp_path) == curve(rewound[0])


@pytest.mark.long
def test_without_snapshots_it_goes_back_to_the_last_checkpoint(trained: Trained, tmp_path: Path) -> None:
    [seen, _] = trained(Case({}, "corrupted", checkpoint=9), tmp_path)
    [event] = events(tmp_path, "rewind")
    assert event["to_step"] == 18 and seen["state"].left_out == ((FAULT - 1, FAULT + 3),)
    assert seen["state"].step == STEPS


@pytest.mark.long
def test_with_neither_it_says_so_and_goes_on(trained: Trained, tmp_path: Path) -> None:
    [seen, _] = trained(Case({}, "corrupted"), tmp_path)
    assert events(tmp_path, "spike") and events(tmp_path, "no way back") and not events(tmp_path, "rewind")
    assert seen["state"].step == STEPS and seen["state"].left_out == ()


@pytest.mark.long
def test_rewinds_are_bounded(trained: Trained, tmp_path: Path) -> None:
    ranks = trained(Case({**SNAPSHOTS, "rewinds": 1}, "corrupted for good"), tmp_path)
    assert len(events(tmp_path, "rewind")) == 1 and len(events(tmp_path, "gave up")) == 1
    for seen in ranks:
        assert "after 1 rewind" in seen["line"] and "no module went non-finite" in seen["line"]


def test_a_torn_update_is_taken_back(trained: Trained, tmp_path: Path) -> None:
    settings = (("zero_stage", 0), ("optimizer_in_backward", True))
    [seen, _] = trained(Case(SNAPSHOTS, "torn", settings), tmp_path)
    assert [e["to_step"] for e in events(tmp_path, "rewind")] == [20] and events(tmp_path, "torn")
    assert seen["state"].step == STEPS


# ---- skips and giving up ----------------------------------------------------------------------------------


def test_one_bad_update_is_skipped_and_shown(trained: Trained, tmp_path: Path) -> None:
    [seen, _] = trained(Case({}, "one update"), tmp_path)
    assert [m["step"] for m in lines(tmp_path / "metrics.jsonl") if m["skipped"]] == [FAULT + 1]
    [event] = events(tmp_path, "skipped")
    assert event["positions"] == [FAULT] and event["samples"] == seen["samples"][FAULT]
    assert seen["state"].step == STEPS and not events(tmp_path, "spike", "rewind")


@pytest.mark.parametrize(
    ("fault", "settings", "expected"),
    [
        ("module", {"zero_stage": 3}, "the output of layers.1.mlp.up_proj went non-finite first, on rank 1"),
        pytest.param(
            "module",
            {"zero_stage": 2, "activation_checkpointing": "full"},
            "the output of layers.1.mlp.up_proj went non-finite first, on rank 1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "gradient",
            {"zero_stage": 3, "activation_checkpointing": "full"},
            "the gradient within layers.0.mlp.down_proj went non-finite first, on rank 0",
            marks=pytest.mark.long,
        ),
        ("many updates", {"zero_stage": 1}, "the fault does not repeat"),
    ],
)
def test_too_many_skips_end_the_run_and_name_the_module(
    fault: str, settings: dict[str, Any], expected: str, trained: Trained, tmp_path: Path
) -> None:
    ranks = trained(Case({"skips": 2}, fault, tuple(settings.items())), tmp_path)
    for seen in ranks:
        assert expected in seen["line"] and "3 updates in a row" in seen["line"], seen["line"]
        assert f"step {FAULT + 3}" in seen["line"]
    assert len(events(tmp_path, "skipped")) == 3
    [event] = events(tmp_path, "gave up")
    assert expected in event["blame"]


# ---- the metrics file -------------------------------------------------------------------------------------


def test_a_resumed_file_is_cut_after_the_checkpoint_s_own_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = [1, 2, 3, 4, 2, 3, 4, 5]
    file = MetricsFile(path, 0)
    for number in written:
        file.write(StepRecord(number, 1.0, 1.0, 1e-3, 8, 0.1, 80.0))
    file.close()
    MetricsFile(path, 3).close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 2, 3]
