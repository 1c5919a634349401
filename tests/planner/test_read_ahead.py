"""Tasks done ahead by forked processes: same results, whatever becomes of a child."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.planner import read_ahead
from shardwise.planner.read_ahead import ReadAhead

HERE = os.getpid()


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(read_ahead, "usable_cores", lambda: 3)
    yield
    assert not read_ahead._children, "every child has ended"


def here() -> bool:
    return os.getpid() == HERE


def slow_square(number: int) -> tuple[int, int]:
    time.sleep(0.02)
    return number * number, os.getpid()


@pytest.mark.parametrize("order", [range(12), range(11, -1, -1), [5, 5, 0, 11, 3]])
def test_results_are_those_of_one_process_and_several_take_part(order: list[int]) -> None:
    with ReadAhead(slow_square, range(12)) as ahead:
        found = [ahead.get(number) for number in order]
    assert [square for square, _ in found] == [number**2 for number in order]
    assert {pid for _, pid in found} - {os.getpid()}, "children did some"


def raising(number: int) -> int:
    if not here():
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing"
        )
    return number


def dying(number: int) -> int:
    if not here() and number % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def unpicklable_there(number: int) -> object:
    return number if here() else (lambda: number)


@pytest.mark.parametrize("run", [raising, dying, unpicklable_there])
def test_tasks_that_a_child_cannot_do_are_done_here(run: Callable[[int], object]) -> None:
    with ReadAhead(run, range(8)) as ahead:
        time.sleep(0.2)
        assert [ahead.get(number) for number in range(8)] == list(range(8))


def stuck(number: int) -> int:
    if not here():
        time.sleep(600)
    return number


def test_a_child_that_is_stuck_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "CHILD_PATIENCE", 0.3)
    began = time.monotonic()
    with ReadAhead(stuck, range(4)) as ahead:
        time.sleep(0.2)
        assert [ahead.get(number) for number in range(4)] == [0, 1, 2, 3]
    assert time.monotonic() - began < 60


def test_an_error_of_a_task_is_raised_where_its_result_is_asked_for() -> None:
    def failing(number: int) -> int:
        if number == 2:
            raise ValueError("no such strategy")
        return number

    with ReadAhead(failing, range(4)) as ahead:
        assert ahead.get(3) == 3
        with pytest.raises(ValueError, match="no such strategy"):
            ahead.get(2)


def test_what_a_child_prints_is_not_seen_and_it_is_prepared(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def printing(number: int) -> int:
        if not here():
            print("from a child")
        return number

    with ReadAhead(printing, range(4), prepare=(tmp_path / "prepared").touch) as ahead:
        time.sleep(0.2)
        assert [ahead.get(number) for number in range(4)] == [0, 1, 2, 3]
    assert capfd.readouterr() == ("", "") and (tmp_path / "prepared").exists()


@pytest.mark.parametrize("cores", [1, 2])
def test_one_core_or_one_task_needs_no_child(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "usable_cores", lambda: cores)
    with ReadAhead(slow_square, range(3 - cores)) as ahead:
        assert not read_ahead._children
        assert [ahead.get(number)[0] for number in range(3 - cores)] == [n * n for n in range(3 - cores)]


def test_lists_within_lists_start_no_more_children_than_there_are_cores() -> None:
    with ReadAhead(stuck, range(4)), ReadAhead(slow_square, range(4)) as inner:
        assert len(read_ahead._children) == 2
        assert inner.get(3)[1] == os.getpid()
