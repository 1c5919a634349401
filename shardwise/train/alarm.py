"""How all ranks learn that one of them ran out of memory, and leave the same step together.

That rank is alone: its peers wait in collectives that it will never join. So it sounds an alarm in the job's store,
which it can do without them. On every rank a small thread looks there twice a second. It answers once its own rank
has reached the same part of the run and its device has finished everything before that, so that no earlier step can
be hurt; when all have answered, the communicators are broken, the collectives fail, and the ranks meet again.

That thread breaks them, because a host that waits in a collective, or for its device, cannot be reached otherwise.
NCCL has an abort for this. Gloo's (2.13) wakes nobody, and its connections close only when nothing refers to a group
any more, which an error from deep within a backward pass prevents: so the thread shuts them. Each connection was
accepted by one of its two ranks, at a port on which that rank listens, and that rank shuts it.

An error on a rank whose alarm has not sounded is that rank's own, and none of this module's business: a peer that
dies is reported as before. Refused: an all-reduce of a flag in every step, as Composer has it, which does not
reach ranks that wait in another collective; the launcher restarting all ranks from the last checkpoint, which
loses steps and is not there under torchrun or srun. The price is a small request to the store per rank and half a
second, and that NCCL's part has not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import traceback
from dataclasses import asdict, dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from shardwise.train.process import TIMEOUT
from shardwise.train.shortage import asked_for, chain, is_shortage

POLL_SECONDS, PAUSE_SECONDS = 0.5, 0.02
_SOUNDED, _ANSWERS, _ALL = "sounded", "answers", "all"
_MARKS = 4
"""Parts whose beginning on the device is remembered; the host is never further ahead."""


@dataclass(frozen=True)
class Alert:
    """Where memory ran out: the rank, how manieth part of the run, the bytes that found no room (0: unknown)."""

    rank: int
    part: int
    asked_bytes: int


class Alarm:
    """Listens from the moment it is made, over the default process group's store; for one set of groups.

    A *part* is a step or an evaluation: all ranks enter the same parts in the same order. ``void`` is the run's
    flag that holds off updates.
    """

    def __init__(self, store: Store, device: torch.device, void: Tensor) -> None:
        self._store, self._device, self._void = PrefixStore("alarm", store), device, void
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.part = 0
        self._since = 0
        self._failed = False
        self._marks: dict[int, torch.cuda.Event] = {}
        self._own: Alert | None = None
        self._heard, self._all, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="alarm")
        if self._world_size > 1:
            self._thread.start()

    def enter(self) -> None:
        """A part begins; what the device has been given so far belongs to those before."""
        if self._device.type == "cuda":
            mark = torch.cuda.Event()
            mark.record()
            self._marks[self.part + 1] = mark
            self._marks.pop(self.part + 1 - _MARKS, None)
        self.part += 1

    def spoils(self, part: int) -> bool:
        """Whether some rank ran out of memory in this part or an earlier one: its results mean nothing."""
        return self._heard.is_set() and part >= self._since

    def met(self, error: Exception) -> bool:
        """Whether ``error`` means that memory ran out, here or elsewhere; if so, returns when all ranks know.

        The frames that the error came through are cleared then, and with them what they held.
        """
        if is_shortage(error):
            _let_go(error)
            self._own = Alert(self._rank, self.part, asked_for(error))
            self._sound(self._own)
        elif not self._heard.is_set():
            return False
        _let_go(error)
        if self._world_size == 1:
            self._since = self.part
            self._heard.set()
        if self._world_size == 1:
            return True
        return self._all.wait(TIMEOUT.total_seconds()) and not self._failed

    @property
    def own(self) -> Alert | None:
        """What happened here; None where it happened elsewhere."""
        return self._own

    def close(self) -> None:
        """Listen no longer."""
        self._closed.set()

    # ---- among ranks --------------------------------------------------------------------------------------

    def _sound(self, alert: Alert) -> None:
        """Tell everybody, unless somebody has and at no later part."""
        if not self._store.check([_SOUNDED]) or self._alert().part > alert.part:
            self._store.set(_SOUNDED, json.dumps(asdict(alert)))

    def _alert(self) -> Alert:
        return Alert(**json.loads(self._store.get(_SOUNDED)))

    def _listen(self) -> None:
        try:
            while not self._closed.wait(POLL_SECONDS):
                if self._store.check([_SOUNDED]):
                    self._answer()
                    return
        except (dist.DistNetworkError, dist.DistStoreError):
            return  # the store has gone with its rank, which is for the collectives to report
        except Exception:
            # Nobody may wait for this thread: the error that sounded the alarm is told instead.
            traceback.print_exc()
            self._failed = True
            self._all.set()

    def _answer(self) -> None:
        while not self._has_reached(self._alert().part):
            if self._closed.wait(PAUSE_SECONDS):
                return
            if self._own is not None:
                self._sound(self._own)  # two ranks, two parts, at the same time: the earlier one counts
        self._since = self._alert().part
        self._void.fill_(1)
        self._heard.set()
        if self._store.add(_ANSWERS, 1) == self._world_size:
            self._store.set(_ALL, "")
        self._store.wait([_ALL], TIMEOUT)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            c10d._abort_process_group()
        else:
            _shut_accepted(_port_of(self._store))
        self._all.set()

    def _has_reached(self, part: int) -> bool:
        """Whether this rank is within ``part`` or later, and its device has nothing left to do from before."""
        mark = self._marks.get(part)
        return self.part >= part and (mark is None or mark.query())


def _shut_accepted(but: int) -> None:
    """Shut what this process accepted at any port but one: it listens for gloo and for the store."""
    process = psutil.Process()
    name = "net_connections" if hasattr(process, "net_connections") else "connections"  # before psutil 6
    found = getattr(process, name)("tcp")
    ports = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN} - {but}
    for each in found:
        if each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports and each.fd >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _port_of(store: Store) -> int:
    """Where a store listens, or would; 0 for one that does not."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return int(getattr(store, "port", 0))


def _let_go(error: BaseException) -> None:
    """Drop what the frames of an error and of its causes hold: the activations of the step."""
    for each in chain(error):
        for known in (each, each.__context__):
            if known is not None:
                traceback.clear_frames(known.__traceback__)
