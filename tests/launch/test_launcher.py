"""The launcher: environment, logs, the right culprit, signals, no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from shardwise.checkpoint.run_folder import scratch
from shardwise.cli.common import run_workers
from shardwise.core.errors import OutOfMemory, ResourceError
from shardwise.launch import launcher as launching
from shardwise.launch import stops, waiting
from shardwise.launch.launcher import run_ranks

WORKER = """
import faulthandler, importlib.util, json, os, signal, sys, time
from pathlib import Path

from shardwise.core import heartbeat
from shardwise.launch.waiting import DUMP_SIGNAL

rank = int(os.environ["RANK"])
folder = Path(sys.argv[1])

def lost_peer():
    sys.exit("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer")

def save_and_stop(number, frame):
    (folder / f"stopped-{rank}-{number}").touch()
    heartbeat.own.end()
    sys.exit(75)

def boom():
    raise ValueError("boom")

def tell(line, code):
    heartbeat.own.tell(line)
    heartbeat.own.end()
    sys.exit(code)

def no_space():
    print("error: of the user's code", file=sys.stderr)
    tell("error: cannot write the checkpoint (here): No space left on device", 7)

def watched():
    heartbeat.own.at_step(7)
    heartbeat.own.watch(1.0)

def waiting():
    # As a rank that waits for its peers makes no progress, but is in torch.
    torch = Path(importlib.util.find_spec("torch").origin).parent
    exec(compile("time.sleep(60)", torch / "distributed/distributed_c10d.py", "exec"))

def hanging():
    time.sleep(60)

def show():
    # Whole lines in one write each: print writes the end of a line separately, and both go to one log.
    sys.stdout.write(f"rank {rank} says héllo\\n")
    sys.stderr.write("to stderr\\n")
    (folder / f"environment-{rank}").write_text(json.dumps(dict(os.environ)))

def meet():
    while len(list(folder.glob("ready-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

def sleep():
    time.sleep(60)

actions = {
    "show": show,
    "meet": meet,
    "sleep": sleep,
    "boom": boom,
    "no-space": no_space,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "wait": lambda: time.sleep(0.3),
    "victim": lost_peer,
    "timed-out": lambda: sys.exit("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv"),
    "exit-0": lambda: os._exit(0),
    "exit-3": lambda: os._exit(3),
    "oom": lambda: tell("error: out of memory", 101),
    "stop": lambda: [signal.signal(n, save_and_stop) for n in (
        signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)],
    "deaf": lambda: [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)],
    "watched": watched,
    "waiting": waiting,
    "hanging": hanging,
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "many-lines": lambda: print("x" * 100_000),
}
heartbeat.attach()
faulthandler.register(DUMP_SIGNAL, all_threads=True)
for action in sys.argv[2 + rank].split(","):
    actions[action]()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    (folder / f"pid-{rank}").rename(folder / f"ready-{rank}")
heartbeat.own.end()
"""


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without torch that does, per rank, what its arguments say."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "acting_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "modules"), str(Path.cwd())]))
    monkeypatch.setattr(launching, "WORKER", "acting_worker")


def run(folder: Path, *actions: str) -> int:
    """Launch one rank per action, as a command does."""
    code, line = run_ranks(len(actions), [str(folder), *actions], folder / "logs", aloud=True)
    print(line, file=sys.stderr, end="\n" if line else "")
    return code


def gone(folder: Path, ranks: int, seconds: float = 5.0) -> bool:
    """Whether the processes that got ready end within so many seconds."""
    pids = [int(path.read_text()) for path in folder.glob("ready-*")]
    assert len(pids) == ranks
    return eventually(lambda: not any(running(pid) for pid in pids), seconds)


def running(pid: int) -> bool:
    """Zombies have ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ---- what a rank gets and leaves --------------------------------------------------------------------------


def test_environment_output_and_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    environment = {"SHARDWISE_TEST": "given"}
    ended = run_ranks(2, [str(tmp_path), "show", "show"], tmp_path / "deep" / "logs", environment, aloud=True)
    assert ended == (0, "")
    assert signal.getsignal(signal.SIGTERM) == before
    out, err = capfd.readouterr()
    assert (out, err) == ("rank 0 says héllo\n", "")
    for rank in (0, 1):
        log = (tmp_path / "deep" / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"rank {rank} says héllo", "to stderr"]
        values = json.loads((tmp_path / f"environment-{rank}").read_text())
        assert values["RANK"] == values["LOCAL_RANK"] == str(rank)
        assert values["WORLD_SIZE"] == "2"
        assert values["MASTER_ADDR"] == "127.0.0.1"
        assert values["SHARDWISE_TEST"] == "given"
        assert values["OMP_NUM_THREADS"] == os.environ.get(
            "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2))
        )


def test_threads_are_never_zero_and_the_users_choice_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launching._shared_environment(10_000, 1)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launching._shared_environment(10_000, 1)["OMP_NUM_THREADS"] == "3"


def test_logs_are_appended_and_only_this_runs_lines_are_quoted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "no-space") == 7
    assert run(tmp_path, "exit-3") == 5
    assert "ended with exit code 3; see its log" in capfd.readouterr().err.splitlines()[1]
    assert "of the user's code" in (tmp_path / "logs" / "rank-0.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_log_that_cannot_be_written_does_not_block(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """More than a pipe holds; without a reader, rank 0 would wait in print for ever."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    assert run(tmp_path, "many-lines") == 0
    out, err = capfd.readouterr()
    assert (len(out), err) == (100_001, "")


def test_a_large_output_does_not_block(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "many-lines", "many-lines") == 0
    assert len(capfd.readouterr().out) == 100_001
    assert len((tmp_path / "logs" / "rank-1.log").read_text()) == 100_001


def test_whoever_asks_hears_nothing_but_the_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What rank 0 prints is in its log alone, and the line of a failure is returned."""
    logs = tmp_path / "logs"
    assert run_ranks(2, [str(tmp_path), "show", "show"], logs) == (0, "")
    assert sorted((logs / "rank-0.log").read_text().splitlines()) == ["rank 0 says héllo", "to stderr"]
    line = "error: cannot write the checkpoint (here): No space left on device"
    assert run_ranks(2, [str(tmp_path), "sleep", "no-space"], logs) == (7, line)
    assert run_ranks(1, [str(tmp_path), "no-space"], logs) == (7, line)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


# ---- who was to blame -------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_and_the_others_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "show,sleep", "show,meet,kill", "show,sleep") == 5
    assert gone(tmp_path, 3)
    (line,) = capfd.readouterr().err.splitlines()
    pid = (tmp_path / "ready-1").read_text()
    log = tmp_path / "logs" / "rank-1.log"
    assert line.startswith(f"error: rank 1 was lost (pid {pid}, {log}): killed by SIGKILL")
    assert line.endswith("run the same command to go on from the last checkpoint")


@pytest.mark.parametrize(
    ("actions", "code", "line"),
    [
        (["sleep", "no-space"], 7, "error: cannot write the checkpoint (here): No space left on device"),
        (["boom", "sleep"], 5, "ended with exit code 1, ValueError: boom; see its log"),
        (["sleep", "exit-3"], 5, "ended with exit code 3; see its log"),
        (["show,meet,victim", "show,meet,wait,exit-0"], 5, "error: rank 1 was lost"),
        (["exit-0", "sleep"], 5, "ended with exit code 0 before its peers were done"),
        (["show,meet,timed-out", "show,hanging"], 5, "error: rank 1 hung (pid"),
        (["show,meet,victim", "show,meet,wait,kill"], 5, "error: rank 1 was lost"),
        (["victim", "sleep"], 5, "error: rank 0 was lost"),
        (["show,meet,victim", "show,meet,victim", "show,meet,wait,boom"], 5, "error: rank 2 was lost"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_the_culprits_code_and_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], actions: list[str], code: int, line: str
) -> None:
    assert run(tmp_path, *actions) == code
    (told,) = capfd.readouterr().err.splitlines()
    assert line in told


@pytest.mark.parametrize("actions", [["oom", "sleep"], ["show,meet,victim", "show,meet,wait,oom"]])
def test_out_of_memory_is_raised(tmp_path: Path, actions: list[str]) -> None:
    """The caller starts the ranks again; none of the old ones is left."""
    with pytest.raises(OutOfMemory, match=f"rank {actions.index(next(a for a in actions if 'oom' in a))}, "):
        run(tmp_path, *actions)
    assert not any(running(int(path.read_text())) for path in tmp_path.glob("ready-*"))


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "GRACE_SECONDS", 0.3)
    assert run(tmp_path, "deaf,sleep", "show,meet,kill") == 5
    assert gone(tmp_path, 2, 1.0)


def test_what_cannot_start_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(ResourceError, match=r"cannot start 1 processes \(.*logs\): File exists"):
        run(tmp_path, "show")


# ---- hangs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "rank", "where"),
    [
        (
            ["show,watched,waiting", "show,meet,watched,hanging"],
            1,
            "in your code, hanging (acting_worker.py:",
        ),
        (
            ["show,meet,watched,sigstop", "show,watched,waiting"],
            0,
            "stopped by SIGSTOP in your code",
        ),
    ],
    ids=["sleep", "sigstop"],
)
def test_a_rank_that_hangs_is_named_with_its_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], actions: list[str], rank: int, where: str
) -> None:
    assert run(tmp_path, *actions) == 5
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"error: rank {rank} hung in step 7 (pid {(tmp_path / f'ready-{rank}').read_text()}, "
    )
    assert f"no progress for 1 s, {where}" in line
    logs = [(tmp_path / "logs" / f"rank-{each}.log").read_text() for each in (0, 1)]
    assert all("acting_worker.py" in log.partition("(most recent call first):")[2] for log in logs)
    assert gone(tmp_path, 2)


# ---- signals ----------------------------------------------------------------------------------------------


def send_when_ready(folder: Path, ranks: int, number: signal.Signals, pause: float = 0.0) -> None:
    def send() -> None:
        eventually(lambda: len(list(folder.glob("ready-*"))) == ranks, 20)
        time.sleep(pause)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_passed_on_and_75_comes_back(tmp_path: Path, number: signal.Signals) -> None:
    send_when_ready(tmp_path, 2, number)
    assert run(tmp_path, "stop,sleep", "stop,sleep") == 75
    assert {path.name for path in tmp_path.glob("stopped-*")} == {f"stopped-{r}-{number}" for r in (0, 1)}


def test_ranks_stopped_before_they_can_save(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    send_when_ready(tmp_path, 2, signal.SIGTERM)
    assert run(tmp_path, "show,sleep", "show,sleep") == 128 + signal.SIGTERM
    assert "stopped by SIGTERM before it could save" in capfd.readouterr().err
    assert gone(tmp_path, 2)


def test_ranks_that_save_nothing_are_not_said_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As those of ``verify``, whose temporary folder goes with a signal and stays with a failure."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    send_when_ready(tmp_path, 1, signal.SIGTERM)
    with pytest.raises(typer.Exit) as caught, scratch("verify-") as folder:
        run_workers(1, [str(tmp_path), "show,sleep"], folder / "logs", saves=False)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    line = capfd.readouterr().err.strip()
    assert line.startswith("error: stopped by SIGTERM (") and line.endswith("run the same command again")
    assert not any((tmp_path / "scratch").iterdir())
    with pytest.raises(typer.Exit), scratch("verify-") as folder:
        run_workers(1, [str(tmp_path), "no-space"], folder / "logs", saves=False)
    assert folder.exists()


def test_nohup_keeps_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal.SIGHUP in stops.stop_signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stops.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_ends_ranks_that_make_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks ignore the first, as a rank does that hangs: its handler only sets a flag."""
    monkeypatch.setattr(stops, "STOP_PATIENCE", 0.3)
    monkeypatch.setattr(stops, "_BURST", 0.1)
    for pause in (0.0, 0.5):
        send_when_ready(tmp_path, 2, signal.SIGTERM, pause)
    begun = time.monotonic()
    assert run(tmp_path, "deaf,show,waiting", "deaf,show,hanging") == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 8
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: stopped by SIGTERM before it could save, because rank 1 hung (pid ")
    assert gone(tmp_path, 2)


def test_a_burst_of_signals_is_one_request() -> None:
    """A scheduler may signal the job and its processes; only a later signal ends ranks that still work."""
    asked = stops.Stops()
    for now in (10.0, 10.2, 10.9):
        asked.receive(signal.SIGTERM, now)
    assert not asked.out_of_patience(100.0, quiet_seconds=90.0)
    asked.receive(signal.SIGTERM, 11.5)
    assert not asked.out_of_patience(16.0, quiet_seconds=90.0)
    assert not asked.out_of_patience(100.0, quiet_seconds=4.9)  # they save
    assert asked.out_of_patience(16.5, quiet_seconds=5.0)


def start_launcher(folder: Path, *actions: str) -> subprocess.Popen[bytes]:
    """A launcher in a process of its own."""
    code = f"""
        import sys
        from pathlib import Path
        from shardwise.launch import launcher as launch
        launch.WORKER = "acting_worker"
        sys.exit(launch.run_ranks({len(actions)}, {[str(folder), *actions]!r}, Path({str(folder)!r}) / "logs")[0])
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux only")
def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, "deaf,sleep", "deaf,sleep")
    assert eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 20)
    launcher.kill()
    launcher.communicate()
    assert gone(tmp_path, 2)


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, "show,many-lines,show")
    assert launcher.stdout is not None
    launcher.stdout.close()
    assert launcher.wait(20) == 0
    assert len((tmp_path / "logs" / "rank-0.log").read_text()) > 100_000
