"""A user's model of which one rank hangs, in its n-th training loss; the trials of hangs.py copy this file."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


def asleep() -> None:
    time.sleep(3600)


def spinning() -> None:
    while True:
        pass


def holding_the_gil() -> None:
    ctypes.PyDLL(None).sleep(3600)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def locked() -> None:
    threading.Event().wait()


def alone_in_a_collective() -> None:
    dist.all_reduce(torch.zeros(1), group=_group[0])


def waiting_for_a_message() -> None:
    dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % dist.get_world_size(), group=_group[0])


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        asleep()
        return gradient


FAULTS: dict[str, Callable[[], None]] = {
    "sleep": asleep,
    "spin": spinning,
    "gil": holding_the_gil,
    "sigstop": stopped,
    "lock": locked,
    "collective": alone_in_a_collective,
    "recv": waiting_for_a_message,
    "backward": asleep,
    "skip": lambda: None,
}
_group: list[Any] = []


class Points(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"points": torch.full((8,), index / 4096), "labels": torch.tensor(index % 2)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, points: Tensor) -> Tensor:
        for block in self.blocks:
            points = block(points)
        return points


def make(fault: str, rank: int, call: int, began: str) -> tuple[nn.Module, Callable[..., Any], Dataset[Any]]:
    """Rank ``rank`` meets ``fault`` in the ``call``-th training loss, and writes the time into the file ``began``."""
    calls = 0

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal calls
        hidden = model(batch["points"])
        trains = torch.is_grad_enabled() and type(batch["points"]) is Tensor  # neither evaluates nor plans
        if trains and dist.is_initialized() and "RANK" in os.environ:
            calls += 1
            if not _group:
                _group.append(dist.new_group())
            hangs = calls == call and dist.get_rank() == rank
            if hangs:
                Path(began).write_text(str(time.monotonic()))
            if fault == "skip" and not hangs:
                dist.all_reduce(torch.zeros(1), group=_group[0])
            if hangs and fault == "backward":
                hidden = InBackward.apply(hidden)
            elif hangs:
                FAULTS[fault]()
        logits = hidden[:, :2]
        return F.cross_entropy(logits, batch["labels"], reduction="sum"), torch.tensor(len(logits))

    return Classifier(), loss, Points()
