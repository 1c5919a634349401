"""A run's folder is read whole or refused with file and line; a run that still trains is no error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import DataError
from shardwise.core.plan import Plan
from shardwise.core.timetable import Timetable
from shardwise.report.record import SETTLING_STEPS, read_run

MakeRun = Callable[..., Path]


def test_reads_what_was_written(plan: Plan, make_run: MakeRun) -> None:
    run = read_run(make_run(plan, sample="def f(): pass"))
    assert run.name == "example"
    assert run.plan == plan
    assert run.recipe.startswith("model:\n")
    assert [step.step for step in run.steps] == list(range(1, 31))
    assert run.steps[6].skipped
    assert run.steps[9].held_out_loss == 1.6
    assert run.outcome is not None
    assert run.outcome.worst.rank == 7
    assert run.outcome.sample == "def f(): pass"
    assert (run.step_seconds, run.held_out_loss) == (1.79, 1.5213)


def test_a_run_that_trains(plan: Plan, make_run: MakeRun) -> None:
    run = read_run(make_run(plan, finished=False))
    assert run.outcome is None
    assert (run.step_seconds, run.held_out_loss) == (1.8, 1.6)


def test_typical_figures_leave_out_the_first_steps(plan: Plan, make_run: MakeRun) -> None:
    run = read_run(make_run(plan, steps=SETTLING_STEPS + 2, finished=False))
    slow = [replace(step, seconds=9.0, tokens_per_second=1.0) for step in run.steps[:SETTLING_STEPS]]
    settled = replace(run, steps=(*slow, *run.steps[SETTLING_STEPS:]))
    assert (settled.step_seconds, settled.tokens_per_second) == (1.8, plan.step.tokens / 1.8)
    begun = replace(run, steps=tuple(slow))
    assert (begun.step_seconds, begun.tokens_per_second) == (9.0, 1.0)


def test_a_rewind_undoes_all_from_its_step_on(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan, steps=6, finished=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    once = [*lines, *(line | {"rewinds": 1} for line in lines[3:5])]
    twice = [*once, lines[2] | {"rewinds": 2}]
    for written, kept in (
        (once, [(1, None), (2, None), (3, None), (4, 1), (5, 1)]),
        (twice, [(1, None), (2, None), (3, 2)]),
    ):
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in written))
        assert [(step.step, step.rewinds) for step in read_run(folder).steps] == kept


@pytest.mark.parametrize("tail", [b'{"step": 3', b"{", b'{"step": "\xc3', b"   "])
def test_half_a_last_line_is_being_written(plan: Plan, make_run: MakeRun, tail: bytes) -> None:
    folder = make_run(plan, steps=4, finished=False)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert len(read_run(folder).steps) == 4


def test_before_the_first_step(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan, steps=0, finished=False)
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert (run.steps, run.step_seconds, run.held_out_loss) == ((), None, None)
    assert run.tokens_per_second is None


def test_a_loss_may_be_no_number(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan, steps=1, finished=False)
    line = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps(line | {"loss": float("nan")}) + "\n")
    assert read_run(folder).steps[0].loss != read_run(folder).steps[0].loss


def test_newer_keys_in_metrics_and_report_are_ignored(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan, steps=1)
    for name in ("metrics.jsonl", "report.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"new": {"key": 1}}) + "\n")
    assert read_run(folder).outcome is not None


@pytest.mark.parametrize("name", ["recipe.yaml", "plan.json"])
def test_names_the_file_that_is_missing(plan: Plan, make_run: MakeRun, name: str) -> None:
    folder = make_run(plan)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"it has no {name}"):
        read_run(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("metrics.jsonl", b'{"step": 1}\n', "metrics.jsonl:1: loss"),
        ("metrics.jsonl", b"\n\nnonsense\n", "metrics.jsonl:3"),
        ("metrics.jsonl", b"\n\xff\n", "metrics.jsonl:2"),
        ("metrics.jsonl", b"[1]\n", "metrics.jsonl:1"),
        ("report.json", b'{\n "ranks": ]', "report.json:2"),
        ("report.json", b"{}", "report.json: ranks"),
        ("report.json", b'{"ranks": [], "ledger": {}}', "report.json: ranks"),
        ("report.json", b"[" * 100_000, "report.json:1"),
        ("plan.json", b"", "plan.json:1"),
        ("plan.json", b"null", "plan.json"),
        ("recipe.yaml", b"a: 1\nb: \xff", "recipe.yaml:2"),
    ],
)
def test_names_file_and_line(plan: Plan, make_run: MakeRun, name: str, content: bytes, where: str) -> None:
    folder = make_run(plan)
    (folder / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_run(folder)
    assert caught.value.where.startswith(str(folder / where))
    assert "\n" not in caught.value.line()


def test_a_folder_where_a_file_should_be(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(DataError, match=r"cannot read metrics\.jsonl"):
        read_run(folder)


def _damaged(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of the top two levels taken away, or given a value of another kind."""
    wrong: Any
    for key, value in values.items():
        yield key, {k: v for k, v in values.items() if k != key}
        for wrong in (None, [{}], -1.5, "x"):
            if type(wrong) is not type(value):
                yield key, values | {key: wrong}
        for inner in value if isinstance(value, dict) else ():
            for wrong in (None, [1]):
                yield f"{key}.{inner}", values | {key: {**value, inner: wrong}}


PIPELINE = Timetable("1f1b", 2, 1, 4, (1.0, 1.5), (2.0, 2.5), place=1, pass_bytes=1000)


@pytest.mark.parametrize("pipeline", [None, PIPELINE], ids=["alone", "pipeline"])
def test_no_damage_to_a_plan_gets_through(pipeline: Timetable | None, plan: Plan, make_run: MakeRun) -> None:
    plan = replace(plan, pipeline=pipeline)
    folder = make_run(plan)
    harmless = ("fits", "host.bytes", "step.tokens_per_second")  # these follow from the rest
    for damage, values in _damaged(json.loads(plan.to_json())):
        if pipeline is not None and values.get("pipeline", "missing") is None:
            continue  # a plan without one
        (folder / "plan.json").write_text(json.dumps(values))
        try:
            read_run(folder)
        except DataError:
            assert not damage.startswith(harmless), damage
        else:
            assert damage.startswith(harmless) or _lacks_a_setting(plan, values), damage


def _lacks_a_setting(plan: Plan, values: dict[str, Any]) -> bool:
    """Whether settings are missing, and the others right: as in a plan of an older version."""
    optional = {field.name for field in fields(Plan) if field.default is not MISSING}
    stored = json.loads(plan.to_json())
    missing = stored.keys() - values.keys()
    if missing:
        return missing <= optional and values.items() <= stored.items()
    return dict(plan.strategy.values).items() > values["strategy"].items()


def test_a_row_that_the_ledger_has_not(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan)
    values = json.loads(plan.to_json())
    (folder / "plan.json").write_text(json.dumps(values | {"ledger": values["ledger"] | {"misc": 1}}))
    with pytest.raises(DataError, match="not a plan of this version"):
        read_run(folder)
