"""The exit code and the error line of ranks that failed or hung."""

from __future__ import annotations

import contextlib
import signal

from shardwise.core.errors import OutOfMemory, RankError, ShardwiseError
from shardwise.launch.ranks import Rank
from shardwise.launch.waiting import Ended

_OURS = {kind.exit_code for kind in ShardwiseError.__subclasses__()}
_RESUME, _AGAIN = "run the same command to go on from the last checkpoint", "run the same command again"


def verdict(ended: Ended, stops: list[int], saves: bool = True) -> tuple[int, str]:
    """The exit code and the error line, after the launcher received ``stops``.

    ``saves``: whether the ranks save checkpoints. If not, a stop needs no logs, and nothing can be resumed.

    A code is Shardwise's own only with an error line; user code may end a process with any code.

    Raises OutOfMemory.
    """
    if ended.hang is not None:
        return _hung(ended, stops, saves)
    culprit = ended.culprit
    code = culprit.code or 0
    told = culprit.heartbeat.read().line
    if told and code == OutOfMemory.exit_code and not stops:
        raise OutOfMemory("out of memory", where=f"rank {culprit.rank}, {culprit.log}")
    if told and code in _OURS:
        return code, told
    if -code in stops or (told and code == OutOfMemory.exit_code):
        number = -code if -code in stops else stops[-1]
        what = f"stopped by {signal.Signals(number).name}"
        if not saves:
            # 128 + signal, as shells report it.
            return 128 + number, RankError(what, where=f"rank {culprit.rank}", fix=_AGAIN).line()
        return 128 + number, RankError(f"{what} before it could save", where=str(culprit), fix=_RESUME).line()
    return RankError.exit_code, _lost_rank(culprit, code, _RESUME if saves else _AGAIN).line()


def _lost_rank(culprit: Rank, code: int, resume: str) -> RankError:
    what = f"rank {culprit.rank} was lost"
    where = str(culprit)
    if code < 0:
        return RankError(what, where=where, why=f"killed by {signal_name(-code)}", fix=resume)
    if code == 0:
        why = "it ended with exit code 0 before its peers were done"
        return RankError(what, where=where, why=why, fix="look for os._exit or sys.exit in your code")
    tail = culprit.log_tail()
    why = f"it ended with exit code {code}" + (f", {tail[-1].strip()}" if tail else "")
    return RankError(what, where=where, why=why, fix="see its log")


def _hung(ended: Ended, stops: list[int], saves: bool) -> tuple[int, str]:
    rank, hang = ended.culprit, ended.hang
    assert hang is not None
    what = f"rank {rank.rank} hung" + (f" in step {hang.step}" if hang.step else "")
    logs = "the stacks are in the logs" + ("; the same command resumes" if saves else "")
    if stops:
        stopped = f"stopped by {signal.Signals(stops[-1]).name} before it could save, because {what}"
        fix = logs if saves else _AGAIN
        return 128 + stops[-1], RankError(stopped, where=str(rank), why=hang.words(), fix=fix).line()
    why = (
        f"no progress for {ended.quiet_seconds:.0f} s, {hang.words()}"
        if ended.quiet_seconds
        else hang.words()
    )
    return RankError.exit_code, RankError(what, where=str(rank), why=why, fix=logs).line()


def signal_name(number: int) -> str:
    """The name of the signal that killed a process, and its usual cause."""
    hints = {signal.SIGKILL: " (the kernel does so when memory runs out)"}
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name + hints.get(signal.Signals(number), "")
    return f"signal {number}"
