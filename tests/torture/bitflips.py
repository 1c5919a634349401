"""Flipped bits in checkpoints: each is found and named; an older checkpoint is taken, or it ends with exit code 4."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from shardwise.checkpoint.checkpoint import latest
from shardwise.core.errors import CheckpointError
from tests.harness.tiny_run import flip, saved_as
from tests.torture.cases import Case, main

ALLOWED = (0, 4)
STEPS = (1, 2)


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process; none is made where there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def checkpoints() -> Iterator[Path]:
    """A folder with two checkpoints."""
    with tempfile.TemporaryDirectory() as name:
        with _alone():
            saved_as(Path(name), list(STEPS), len(STEPS))
        yield Path(name)


def found(folder: Path, files: list[Path], bits: list[tuple[int, int]]) -> None:
    """Flip a bit in each file and look for the newest whole checkpoint. Raises CheckpointError if both are damaged."""
    warnings: list[str] = []
    for file, (position, bit) in zip(files, bits, strict=True):
        flip(file, position, bit)
    try:
        taken = latest(folder, warnings.append)
        assert taken == folder / f"step-{STEPS[0]}", f"{taken} was taken"
        assert len(warnings) == 1 and files[0].name in warnings[0], (
            f"{files[0].name} is not named: {warnings}"
        )
    except CheckpointError as error:
        assert len(files) == 2, error.line()
        assert any(file.name in error.line() for file in files), f"not named: {error.line()}"
        raise
    finally:
        for file, (position, bit) in zip(files, bits, strict=True):
            flip(file, position, bit)


def cases(count: int, random: random.Random) -> Iterator[Case]:
    with checkpoints() as folder:
        older, newer = (sorted((folder / f"step-{step}").iterdir()) for step in STEPS)
        for number in range(count):
            files = [random.choice(newer), *([random.choice(older)] if number % 8 == 7 else [])]
            # Half of them in the first 4 KiB, where the headers are.
            limits = [file.stat().st_size if number % 2 else min(4096, file.stat().st_size) for file in files]
            bits = [(random.randrange(limit), random.randrange(8)) for limit in limits]
            names = ", ".join(f"{file.name}:{bit[0]}.{bit[1]}" for file, bit in zip(files, bits, strict=True))
            yield names, lambda files=files, bits=bits: found(folder, files, bits)  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main(cases, 1000, ALLOWED))
