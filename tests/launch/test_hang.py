"""The judge of hangs, on made-up marks and stacks. Processes hang in test_launcher.py, ranks in tests/cli."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest

import shardwise
from shardwise.launch.hang import Evidence, Quiet, Standing, culprit, stack_of
from shardwise.launch.user_code import Frame

OURS = str(Path(shardwise.__file__).parent)


def _torch() -> str:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin
    return str(Path(found.origin).parent)


LOOP = Frame(f"{OURS}/train/loop.py", 157, "_issue")
PASS = Frame(f"{OURS}/engine/forward_backward.py", 39, "forward_backward")
STOP = Frame(f"{OURS}/launch/signals.py", 35, "agreed")
BACKWARD = Frame(f"{_torch()}/autograd/graph.py", 800, "_engine_run_backward")
ALL_REDUCE = Frame(f"{_torch()}/distributed/distributed_c10d.py", 3252, "all_reduce")
DISPATCH = Frame(f"{_torch()}/distributed/tensor/_dispatch.py", 100, "dispatch")
LINEAR = Frame(f"{_torch()}/nn/modules/linear.py", 134, "forward")
LOSS = Frame("/home/me/model.py", 12, "loss")
LOCK = Frame(threading.__file__, 327, "wait")

IN_LOSS = (LOSS, PASS, LOOP)
IN_BACKWARD = (BACKWARD, PASS, LOOP)
IN_STOP = (ALL_REDUCE, STOP, LOOP)
USERS_COLLECTIVE = (ALL_REDUCE, LOSS, PASS, LOOP)
OWN_MODE = Frame(f"{OURS}/runtime/layer_inputs.py", 148, "__torch_function__")


@pytest.mark.parametrize(
    ("stack", "standing"),
    [
        (IN_LOSS, Standing.ELSEWHERE),
        ((LOCK, LOSS, PASS), Standing.ELSEWHERE),
        ((LINEAR, LOSS, PASS), Standing.ELSEWHERE),
        ((), Standing.ELSEWHERE),
        (USERS_COLLECTIVE, Standing.USERS_COLLECTIVE),
        ((ALL_REDUCE, OWN_MODE, *USERS_COLLECTIVE), Standing.USERS_COLLECTIVE),
        (IN_BACKWARD, Standing.UNCLEAR),
        ((DISPATCH, PASS, LOOP), Standing.UNCLEAR),
        ((PASS, LOOP), Standing.UNCLEAR),
        (IN_STOP, Standing.COLLECTIVE),
        ((ALL_REDUCE, BACKWARD, PASS), Standing.COLLECTIVE),
    ],
)
def test_where_a_rank_stands(stack: tuple[Frame, ...], standing: Standing) -> None:
    assert Evidence(0, stack=stack).standing == standing
    assert Evidence(0, stopped=True, stack=stack).standing == Standing.STOPPED


@pytest.mark.parametrize(
    ("found", "rank"),
    [
        # (step, marks, stopped, stack) of ranks 0, 1, ...
        ([(5, 20, False, IN_BACKWARD), (5, 19, False, IN_LOSS)], 1),
        ([(5, 20, False, IN_LOSS), (5, 20, True, IN_STOP)], 1),  # a stop is certain, user code may compute
        ([(5, 20, False, IN_LOSS), (5, 19, False, IN_LOSS), (5, 21, False, IN_LOSS)], 1),
        ([(5, 20, False, IN_BACKWARD), (5, 19, False, USERS_COLLECTIVE)], 1),
        ([(5, 20, False, USERS_COLLECTIVE), (5, 21, False, IN_STOP)], 0),
        ([(5, 20, False, IN_STOP), (5, 19, False, IN_BACKWARD)], 1),
        # A collective that rank 1 left out: the others wait in it, rank 1 is a step ahead.
        ([(5, 20, False, IN_STOP), (6, 24, False, IN_STOP)], 1),
        ([(5, 20, False, IN_STOP), (6, 24, False, IN_BACKWARD), (5, 20, False, IN_STOP)], 1),
        ([(5, 20, False, USERS_COLLECTIVE), (5, 21, False, IN_BACKWARD), (5, 20, False, USERS_COLLECTIVE)], 1),
        # Stages of a pipeline wait in different places; the one furthest behind is asked first.
        ([(5, 20, False, IN_STOP), (5, 22, False, IN_BACKWARD), (5, 19, False, (PASS, LOOP))], 2),
        ([(5, 20, False, ())], 0),
    ],
)  # fmt: skip
def test_the_culprit(found: list[tuple[int, int, bool, tuple[Frame, ...]]], rank: int) -> None:
    assert culprit([Evidence(number, *each) for number, each in enumerate(found)]).rank == rank


def test_quiet_seconds_are_those_in_which_no_rank_makes_progress() -> None:
    quiet = Quiet(100.0)
    quiet.look(100.5, [3, 3])
    for now, marks, seconds in (
        (101.0, [3, 3], 0.5),
        (101.5, [3, 3], 1.0),
        (102.0, [3, 4], 0.0),  # one rank saves while the other waits
        (102.5, [3, 4], 0.5),
        (9000.0, [3, 4], 1.5),  # the launcher was suspended, perhaps with the ranks
    ):
        quiet.look(now, marks)
        assert quiet.seconds == pytest.approx(seconds)


DUMP = f"""a line of the user
Thread 0x00007f0000000001 (most recent call first):
  File "{_torch()}/autograd/function.py", line 311 in apply
  File "/home/me/model.py", line 7 in backward

Thread 0x00007f0000000002 [watch] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f0000000003 [python3] (most recent call first):
"""
MAIN = f"""  File "/home/me/model.py", line 12 in loss
  File "{PASS.file}", line 39 in forward_backward
"""
ON_DEVICE = f"""  File "{BACKWARD.file}", line 800 in _engine_run_backward
  File "{PASS.file}", line 39 in forward_backward
"""


def test_the_stack_is_the_main_threads_or_of_autograd_while_that_waits_for_it() -> None:
    assert stack_of(DUMP + MAIN) == (LOSS, PASS)
    assert stack_of(DUMP + ON_DEVICE)[-1] == Frame("/home/me/model.py", 7, "backward")
    assert stack_of("no dump came") == ()


def test_words_name_the_users_frame_and_what_it_waits_in() -> None:
    assert Evidence(0, stack=IN_LOSS).words() == "in your code, loss (model.py:12)"
    assert (
        Evidence(0, stack=(LOCK, LOSS)).words()
        == "in your code, loss (model.py:12), inside wait (threading.py:327)"
    )
    assert (
        Evidence(0, stack=IN_STOP).words()
        == "in agreed (signals.py:35), inside all_reduce (distributed_c10d.py:3252)"
    )
    assert (
        Evidence(0, stopped=True, stack=IN_LOSS).words()
        == "stopped by SIGSTOP in your code, loss (model.py:12)"
    )
    assert Evidence(0).words() == "its stack cannot be read"
