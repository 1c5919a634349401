"""One class writes and reads a file: strict types, and errors with the line or the key at fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import DataError
from shardwise.core.json_file import parse_json, plain, read_json, text_of
from shardwise.core.ledger import Ledger
from shardwise.core.plan import Plan, TimelinePoint
from shardwise.core.run_files import Outcome, PassesRecord, RankMemory, RankPasses, StepRecord
from tests.harness.plans import small_plan

OUTCOME = Outcome(
    ranks=(RankMemory(0, 10, 11, 12), RankMemory(1, 10, 14)),
    predicted_step_seconds=0.5,
    measured_step_seconds=None,
    ledger=Ledger(activations=10),
    passes=PassesRecord(3, (RankPasses(0, (("F", 0, 0, 0.0, 0.5), ("B", 0, 0, 0.5, 1.5))),)),
)


def test_files_read_back_equal(tmp_path: Path) -> None:
    plan = replace(small_plan(), timeline=(TimelinePoint("forward", Ledger(gradients=3)),))
    for value in (plan, OUTCOME):
        path = tmp_path / "file.json"
        path.write_text(text_of(value), encoding="utf-8")
        assert read_json(path, type(value)) == value


def test_figures_that_follow_from_others_are_written_and_not_read() -> None:
    plan = replace(small_plan(), timeline=(TimelinePoint("forward", Ledger(gradients=3)),))
    written = plan.as_dict()
    assert written["fits"] is True and written["host"]["bytes"] == 0
    assert written["step"]["tokens_per_second"] == pytest.approx(640)
    assert written["timeline"] == [{"phase": "forward", **Ledger(gradients=3).as_dict()}]
    assert parse_json(json.dumps(written | {"fits": False}), Plan, Path("plan.json")) == plan


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"step": "1"}', "m.jsonl:7: step"),
        ('{"step": 1.0}', "m.jsonl:7: step"),
        ('{"step": true}', "m.jsonl:7: step"),
        ('{"step": -1}', "m.jsonl:7: step"),
        ('{"step": 1}', "m.jsonl:7: loss"),
        ('{"step": 1,\n ]', "m.jsonl:8"),
        ('{"step": "\\ud800"}', "m.jsonl:7"),
    ],
)
def test_types_are_strict_and_errors_name_the_place(text: str, where: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_json(text, StepRecord, Path("m.jsonl"), 7)
    assert caught.value.where == where


def test_a_metrics_line_leaves_nothing_out() -> None:
    """NaN is what a failed run has."""
    record = StepRecord(1, float("nan"), 1.0, 1e-3, 8, 0.1, 80.0)
    again = parse_json(json.dumps(plain(record)), StepRecord, Path("m.jsonl"), 1)
    assert again.loss != again.loss
    assert replace(again, loss=0.0) == replace(record, loss=0.0)


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("name", "kind"), [("plan.json", Plan), ("report.json", Outcome)])
def test_files_of_the_first_version_are_read(name: str, kind: type[Plan | Outcome]) -> None:
    """Every key has kept its name and meaning: reading and writing give the same object, with newer keys added."""
    path = GOLDEN / name
    first = json.loads(path.read_text(encoding="utf-8"))
    assert _without_newer_keys(plain(read_json(path, kind)), first) == first


def _without_newer_keys(written: Any, first: Any) -> Any:
    """``written`` with only those keys that ``first`` has, at every depth."""
    if isinstance(written, dict) and isinstance(first, dict):
        return {key: _without_newer_keys(written[key], first[key]) for key in first if key in written}
    if isinstance(written, list) and isinstance(first, list) and len(written) == len(first):
        return [_without_newer_keys(*pair) for pair in zip(written, first, strict=True)]
    return written
