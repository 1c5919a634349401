"""What follows from the guard's judgement: log the event, go back and leave batches out, or give up.

Going back means the newest copy of the run that was taken before the burst began: a snapshot in host memory, or
else the last checkpoint of the run's folder. The batch before the burst is left out with it, because a loss is
measured before its own batch is learned: the update that raised it was made from the batch before. Without any
copy from before, a spike is logged and training goes on; the guard then learns the new level.

A rewind leaves the loop by an exception, ``Rewound``. The loop's way is straight for every step but these, and
there is no state in which a step is half undone. All ranks decide alike (see guard.py), so all of them raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.errors import NumericsError
from shardwise.engine.build import Run
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.model.blueprint import Batch
from shardwise.train.blame import Finding, first_non_finite
from shardwise.train.checkpoint import has_before, restore_before
from shardwise.train.data import Data
from shardwise.train.events import EventFile
from shardwise.train.guard import Action, Seen, Verdict, judge
from shardwise.train.state import TrainState, merged

LEAD = 1
"""Batches before a burst that are left out with it."""

BatchesAt = Callable[[int], list[Batch]]
"""This rank's micro-batches at a position in the order of the data, on its device."""


class Rewound(Exception):
    """The run has gone back. ``state`` is its progress now."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(f"rewound to step {state.step}")
        self.state = state


@dataclass(frozen=True)
class Observed:
    """A step's results, read from the device; ``index`` counts from 0."""

    index: int
    loss: float
    norm: float
    skipped: bool
    loss_scale: float


class Recovery:
    """Watches the results of one run and puts right what can be."""

    def __init__(
        self, run: Run, data: Data, folder: Path, batches_at: BatchesAt, warn: Callable[[str], None]
    ) -> None:
        self._run, self._data, self._folder, self._batches_at, self._warn = (
            run,
            data,
            folder,
            batches_at,
            warn,
        )
        self._spec = run.recipe.guard
        self._snapshots: Snapshots[TrainState] | None = snapshots_of(run)
        self._events: EventFile | None = None

    def begin(self, state: TrainState) -> None:
        """From here on there is something to go back to, if snapshots are asked for."""
        if dist.get_rank() == 0:
            self._events = EventFile(self._folder, self._data, fresh=state.step == 0)
        if self._snapshots is not None:
            self._snapshots.begin(state)

    def due(self, index: int) -> bool:
        """Whether a snapshot is to follow step ``index``."""
        every = self._spec.snapshot_every
        return every is not None and (index + 1) % every == 0

    def snapshot(self, state: TrainState) -> None:
        """Copy the run as it is after ``state.step`` steps, unless something may be wrong with it."""
        if self._snapshots is not None and state.guard.burst is None and not state.guard.skips:
            self._snapshots.take(state)

    def see(self, state: TrainState, seen: Observed) -> TrainState:
        """``state`` with what the guard makes of its last step.

        Raises Rewound when the run has been taken back, NumericsError when it is to end.
        """
        if not self._run.passes.in_step:
            # Of PipeDream's stages each has a norm and a verdict of its own, and only the loss is everybody's.
            seen = replace(seen, norm=1.0, skipped=not math.isfinite(seen.loss))
        final = seen.index + 1 == self._run.recipe.steps
        overflow = self._is_overflow(seen)
        memory, verdict = judge(
            self._spec,
            state.guard,
            Seen(seen.index, seen.loss, seen.norm, seen.skipped, overflow, final),
        )
        state = replace(state, guard=memory)
        if verdict.event:
            values = {"loss": seen.loss, "grad_norm": seen.norm, "loss_scale": seen.loss_scale}
            position = state.position(seen.index)
            self.log(verdict.event, seen.index, [position], **values, **verdict.against)
        if verdict.action is Action.GIVE_UP:
            self._give_up(state, seen.index, f"{memory.skips} updates in a row were not finite", finite=False)
        if verdict.action is Action.REWIND:
            self._rewind(state, verdict, seen.index)
            state = replace(state, guard=memory.forgetting())
        return state

    def _is_overflow(self, seen: Observed) -> bool:
        """Whether a skip is fp16's loss scale finding its height: it can still shrink, and the loss is sound."""
        spec = self._run.recipe.loss_scale
        scaled = self._run.loss_scale.active and spec.dynamic
        return scaled and seen.skipped and math.isfinite(seen.loss) and seen.loss_scale > spec.floor

    # ---- going back ---------------------------------------------------------------------------------------

    def _rewind(self, state: TrainState, verdict: Verdict, index: int) -> None:
        """Go back to before the burst and raise Rewound; return where there is nothing to go back to."""
        # An exhausted run is not taken back: what went wrong is looked at where it did.
        exhausted = state.rewinds >= self._spec.rewinds
        back = None if exhausted else self._restored(verdict.first)
        if exhausted and self._can_go_back(verdict.first):
            why = f"another {verdict.event or 'spike'} after {state.rewinds} rewinds"
            self._give_up(state, index, why, finite=verdict.event != "torn")
        if back is None:
            self.log("no way back", index, [])
            return
        first = max(back.step, verdict.first - LEAD)
        positions = [state.position(each) for each in range(first, verdict.last + 1)]
        left_out = merged([*state.left_out, *((place, place + 1) for place in positions)])
        after = replace(back, rewinds=state.rewinds + 1, left_out=left_out)
        self.log("rewind", index, positions, to_step=after.step, rewinds=after.rewinds)
        raise Rewound(after)

    def _can_go_back(self, first: int) -> bool:
        if self._snapshots is not None and self._snapshots.newest(_by(first)) is not None:
            return True
        return has_before(self._checkpoints, first)

    def _restored(self, first: int) -> TrainState | None:
        """Bring back the newest copy from before step ``first``, better one that has not seen the batch before.

        None where there is none; the run is then as it was.
        """
        if self._snapshots is not None:
            for latest in (first - LEAD, first):
                if self._snapshots.newest(_by(latest)) is not None:
                    return self._snapshots.restore(_by(latest))
        state = restore_before(self._run, self._checkpoints, first, self._data.fingerprint, self._warn)
        if state is not None and self._snapshots is not None:
            self._snapshots.begin(state)  # what they hold is of the branch that is abandoned
        return state

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    def newest_copy(self, step: int) -> int | None:
        """Steps done at the newest snapshot of at most ``step`` steps; None when there is none."""
        state = None if self._snapshots is None else self._snapshots.newest(_by(step))
        return None if state is None else state.step

    def restore_copy(self, step: int) -> TrainState:
        """Write the snapshot of exactly ``step`` steps, or the newest before, back into the run."""
        assert self._snapshots is not None, "asked for first"
        return self._snapshots.restore(_by(step))

    def begin_again(self, state: TrainState) -> None:
        """The run stands elsewhere, by another way than a rewind: snapshots of what was are of no use."""
        if self._snapshots is not None:
            self._snapshots.begin(state)

    # ---- giving up ----------------------------------------------------------------------------------------

    def _give_up(self, state: TrainState, index: int, why: str, finite: bool) -> None:
        """Find the module to blame and raise NumericsError."""
        position, finding = state.position(index), None
        if self._run.passes.in_step:  # else ranks have read ahead, and cannot run one step by itself
            with torch.enable_grad():
                finding = first_non_finite(self._run, self._batches_at(position))
        words = _accusation(finding, finite)
        self.log("gave up", index, [position], why=why, blame=words)
        raise NumericsError(
            f"training does not recover: {why}",
            where=f"step {index + 1}",
            why=words,
            fix="see events.jsonl for the samples; resume with a lower learning rate or a wider precision",
        )

    def log(self, event: str, index: int, positions: Iterable[int], **values: Any) -> None:
        """A line of ``events.jsonl``, on rank 0."""
        if self._events is not None:
            self._events.write(event, index + 1, positions, values)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _by(step: int) -> Callable[[TrainState], bool]:
    """Whether a copy holds nothing later than the first ``step`` steps."""
    return lambda state: state.step <= step


def _accusation(finding: Finding | None, finite: bool) -> str:
    """``finite``: whether what is complained of was so in the first place."""
    if finding is not None:
        return finding.words()
    if finite:
        return "losses and norms rose, but no module went non-finite"
    return "run once more, the batch is finite everywhere: the fault does not repeat"
