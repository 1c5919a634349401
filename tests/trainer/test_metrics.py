"""``metrics.jsonl`` of a resumed run: no line is lost by a kill, and a malformed line stops no run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.core.run_files import StepRecord
from shardwise.trainer.metrics import MetricsFile


def record(step: int) -> StepRecord:
    return StepRecord(step, 1.0, 1.0, 1e-3, 8, 0.1, 80.0)


def written(path: Path, steps: list[int]) -> bytes:
    file = MetricsFile(path, 0)
    for number in steps:
        file.write(record(number))
    file.close()
    return path.read_bytes()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().split(b"\n")[:-1]]


class Killed(Exception):
    pass


def test_a_kill_while_the_file_is_cut_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    before = written(path, [1, 2, 3, 4])

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            MetricsFile(path, 2)
    assert path.read_bytes() == before
    MetricsFile(path, 2).close()
    assert steps_in(path) == [1, 2]


def test_a_file_with_nothing_to_cut_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, [1, 2])
    inode = path.stat().st_ino
    file = MetricsFile(path, 2)
    file.write(record(3))
    file.close()
    assert path.stat().st_ino == inode and steps_in(path) == [1, 2, 3]
    assert [each.step for each in file.before] == [1, 2] and file.seconds == [0.1]


@pytest.mark.parametrize(
    "line",
    [
        b"a line of text",
        b"[1]",
        b"null",
        b'{"loss": 1.0}',
        b'{"step": "\xff"}',
        b'{"step": "2\xe2\x80\xa8"}',
        b'{"step": 2, "lo',
        b"[" * 100_000,
        b'{"step": 1' + b"0" * 5000 + b"}",
    ],
)
def test_a_line_that_is_no_record_is_left_out_and_kept_aside(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second, third = written(path, [1, 2, 3]).split(b"\n")[:3]
    raw = b"\n".join([first, line, second, third, b""])
    path.write_bytes(raw)
    said: list[str] = []
    MetricsFile(path, 2, said.append).close()
    assert steps_in(path) == [1, 2] and len(said) == 1
    assert (tmp_path / "damaged-metrics.jsonl").read_bytes() == raw
