"""Memory that really runs out, in the real trainer: on one rank or all, in any part of a step, and what comes of it.

A limit of the operating system on the data of a process makes PyTorch's own allocator fail. Activations are large
here and the model is small, so a step of the whole micro-batch does not fit under the limit and one of half of it does.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from small_run import whole
from torch import Tensor

from shardwise import api
from shardwise.core.errors import ResourceError
from shardwise.core.recipe import Recipe, recipe_of
from shardwise.core.units import MiB
from shardwise.model.blueprint import Batch
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS, strategy_from
from shardwise.train.folder import prepare
from shardwise.train.loop import Job, Trainer
from shardwise.train.meter import return_large_frees
from shardwise.train.shortage import remembered

MODEL = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 1021, "context": 256}
WORLD, STEPS, BATCH, SIZE = 2, 6, 32, 16
ROOM = 33 * MiB
"""Beside what a process has when the limit is set."""


@dataclass(frozen=True)
class Case:
    """A run, and where its memory runs out: at the ``step``-th reading of data, on ``ranks``."""

    step: int = 0
    ranks: tuple[int, ...] = ()
    size: int = SIZE
    settings: tuple[tuple[str, Any], ...] = (("zero_stage", 3),)
    sections: tuple[tuple[str, Any], ...] = ()
    room: int = ROOM


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(Path(__file__).read_text(encoding="utf-8") * 40, encoding="utf-8")
    return path


def recipe_for(case: Case, corpus: Path) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"source": str(corpus), "sequence_length": 256},
        "steps": STEPS,
        "batch_size": BATCH,
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 1.0},
        "cluster": {"device": "cpu", "devices_per_node": WORLD},
        "strategy": {"precision": "fp32", "micro_batch_size": case.size, **dict(case.settings)},
    }
    return recipe_of({**values, **dict(case.sections)}, SETTINGS)


def status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def limit(room: int) -> None:
    """From here on this process may have so many bytes of data more."""
    gc.collect()
    return_large_frees(True)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + room, resource.RLIM_INFINITY))


def rank_of(case: Case, recipe: Recipe, plan: Any, folder: Path) -> dict[str, Any]:
    import faulthandler; faulthandler.dump_traceback_later(17)  # DEBUG
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    read, read_so_far = trainer.data.micro_batches, []

    def limited(position: int, *arguments: int) -> list[Batch]:
        read_so_far.append((position, arguments[-1]))
        if dist.get_rank() in case.ranks and len(read_so_far) == case.step + 1:
            limit(case.room)
        return read(position, *arguments)

    trainer.data.micro_batches = limited  # type: ignore[method-assign]
    line = ""
    try:
        trainer.train()
    except ResourceError as error:
        return {"read": read_so_far, "line": error.line()}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    size = trainer.run.strategy[MICRO_BATCH_SIZE]
    return {
        "read": read_so_far,
        "line": line,
        "size": size,
        "state": trainer.state,
        "run": whole(trainer.run),
    }
