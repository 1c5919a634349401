"""``profile: {steps: [...]}``: torch.profiler over chosen steps, as Chrome traces and memory snapshots.

    profile/step-5/rank-0.trace.json.gz     operations, kernels and phases: for Perfetto, chrome://tracing, TensorBoard
    profile/step-5/rank-0.memory.pickle     every allocation with its stack: for docs.pytorch.org/memory_viz

On CUDA the snapshot is the allocator's own record. On the CPU it comes from the profile. A recorded step is slower, and
its line in metrics.jsonl has the slower seconds. A profile that cannot be made or written is one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.core.atomic_file import write_whole
from shardwise.core.memory_snapshot import snapshot_bytes
from shardwise.engine.phase import listening
from shardwise.hardware.kinds import kind_of
from shardwise.recipe.observation import ProfileSpec
from shardwise.runtime.torch_private_profiler import dump_allocations, record_allocations
from shardwise.trainer.memory_profile import allocations_of

PROFILE_FOLDER = "profile"
"""In the folder of a run."""

MOST_ALLOCATIONS = 1_000_000
"""Allocations and frees in a snapshot of CUDA; the first ones of more are lost."""


class Profiling:
    """Records the steps that the recipe names, on the ranks that it names.

    Args:
        warn: gets the one sentence about a profile that failed.
    """

    def __init__(
        self, spec: ProfileSpec, folder: Path, device: torch.device, warn: Callable[[str], None]
    ) -> None:
        self._rank = dist.get_rank()
        self._steps = frozenset(spec.steps) if self._rank in spec.ranks else frozenset[int]()
        self._memory = spec.memory
        self._cuda = not kind_of(device).is_host
        self._folder = folder / PROFILE_FOLDER
        self._warn = warn

    def over(self, index: int) -> AbstractContextManager[None]:
        """Enclose the step ``index``, counted from 0."""
        return self._recorded(index + 1) if index + 1 in self._steps else nullcontext()

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        profiler = self._profiler()
        if self._cuda and self._memory:
            record_allocations(MOST_ALLOCATIONS)
        with profiler, _named_phases():
            yield
            if self._cuda:
                torch.cuda.synchronize()  # the kernels of this step belong to its profile
        try:
            self._write(profiler, self._folder / f"step-{step}")
        except Exception as error:  # the library's code, or a full disk
            first = (str(error).strip().splitlines() or [""])[0]
            self._warn(f"the profile of step {step} is not written: {type(error).__name__}: {first}")

    def _profiler(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        # On CUDA the allocator records stacks by itself.
        stacks = self._memory and not self._cuda
        return profile(
            activities=activities, record_shapes=stacks, profile_memory=self._memory, with_stack=stacks
        )

    def _write(self, profiler: profile, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank}"
        profiler.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        if not self._memory:
            return
        path = folder / f"{name}.memory.pickle"
        if self._cuda:
            dump_allocations(path)
        else:
            write_whole(path, snapshot_bytes(allocations_of(profiler)))


@contextmanager
def _named_phases() -> Iterator[None]:
    """Mark each phase in the profile, from its beginning to that of the next."""
    running: list[Any] = []

    def begin(name: str) -> None:
        end()
        running.append(record_function(f"phase {name}"))
        running[-1].__enter__()

    def end() -> None:
        if running:
            running.pop().__exit__(None, None, None)

    with listening(begin):
        yield
    end()
