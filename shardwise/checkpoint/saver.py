"""Saves the checkpoints of one run, in the foreground or in the background (``checkpoint.background``).

A save in the background has two parts. The training loop waits for a copy of this rank's shards to host memory
(``engine/snapshot.py``). A thread then writes, syncs and commits the copy exactly as a save in the foreground does,
over a process group of its own. So a crash at any time leaves the same complete checkpoints. One save runs at a time:
the next one first waits for it. A failed save raises on every rank when the run waits for it.

An adapter is gathered with the copy, and written when the run has waited for the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist

from shardwise.checkpoint.adapter import adapter_writer
from shardwise.checkpoint.checkpoint import description_of, save_checkpoint, save_tensors
from shardwise.checkpoint.planners import SavePlanner
from shardwise.checkpoint.run_folder import CHECKPOINTS
from shardwise.engine.run import Run
from shardwise.engine.run_state import share_buffers, tensors_of
from shardwise.engine.snapshot import HostCopy, save_copy_of
from shardwise.engine.train_state import TrainState
from shardwise.hardware.kinds import kind_of


class Saver:
    """The checkpoints below a run's ``folder``, and its adapter after each of them.

    Args:
        fingerprint: identifies the data.
    """

    def __init__(self, run: Run, folder: Path, fingerprint: str) -> None:
        self._run, self._folder, self._fingerprint = run, folder, fingerprint
        copy = save_copy_of(run)
        self._background = None if copy is None else _Background(run, copy)

    def save(self, state: TrainState) -> None:
        """Save the run after ``state.step`` steps. Collective. Raises like ``checkpoint.save``."""
        self.wait()
        share_buffers(self._run)
        checkpoints = self._folder / CHECKPOINTS
        keep = self._run.recipe.checkpoint.keep
        checkpoint = checkpoints / f"step-{state.step}"
        if self._background is None:
            save_checkpoint(self._run, state, checkpoints, keep, self._fingerprint)
            adapter_writer(self._run, self._folder, checkpoint)()
            return
        after = adapter_writer(self._run, self._folder, checkpoint)
        description = description_of(self._run, state, self._fingerprint)
        self._background.start(
            lambda tensors, planner, group: save_tensors(
                tensors, planner, checkpoints, keep, description, group
            ),
            after,
        )

    def wait(self) -> None:
        """Return when the last save is committed. Collective. Raises its error, on every rank."""
        if self._background is not None:
            self._background.wait()


Write = Callable[[dict[str, torch.Tensor], SavePlanner, "dist.ProcessGroup | None"], Path]


class _Background:
    """A copy of the run, and the thread that writes it."""

    def __init__(self, run: Run, copy: HostCopy) -> None:
        self._run, self._copy = run, copy
        self._group = dist.new_group(backend="gloo")
        self._saving: Future[Path] | None = None
        self._after: Callable[[], None] = lambda: None
        copy.take()  # touches the memory before the first step

    def start(self, write: Write, after: Callable[[], None]) -> None:
        """Copy the run and ``write`` the copy in a thread; ``wait`` then calls ``after``."""
        tensors, planner = tensors_of(self._run), SavePlanner(self._copy.tensors)
        self._copy.take()
        copied = _event_wait(self._run.device)
        saving = self._saving = Future()

        def work() -> None:
            try:
                copied()
                saving.set_result(write(tensors, planner, self._group))
            except BaseException as error:
                saving.set_exception(error)

        self._after = after
        # A daemon: a process that ends after an error does not wait for ranks that are gone.
        Thread(target=work, name="checkpoint", daemon=True).start()

    def wait(self) -> None:
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()
            self._after()


def _event_wait(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done its present work."""
    if kind_of(device).is_host:
        return lambda: None
    event = torch.Event(device)
    event.record()
    return event.synchronize
