"""Carries out the guard's verdict: log the event, rewind and skip batches, or give up.

A rewind restores the newest copy of the run from before the spike: a snapshot in host memory, or else the last
checkpoint. The batches of the spike are skipped from then on, and so is the batch before them: a loss is measured
before its own batch is learned, so the update from the batch before has raised it. Without a copy from before the
spike, the spike is logged and training goes on; the guard then learns the new level of the loss.

A rewind leaves the training loop by an exception, ``Rewound``, so no step is ever half undone. All ranks reach the same
verdict (see guard.py), so all of them raise it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.checkpoint import has_before, restore_before
from shardwise.core.errors import NumericsError
from shardwise.data import Data
from shardwise.engine.guard import GuardAction, GuardVerdict, Seen, judge
from shardwise.engine.run import Run
from shardwise.engine.sampling import PositionedBatches
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.engine.train_state import TrainState, merged
from shardwise.trainer.faults.events import EventFile, event_line
from shardwise.trainer.faults.find_non_finite import Finding, first_non_finite
from shardwise.trainer.faults.oom_record import OomRecord

LEAD = 1
"""Batches before a spike that are skipped with it."""


class Rewound(Exception):
    """The run was rewound. ``state`` is its progress now."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(f"rewound to step {state.step}")
        self.state = state


@dataclass(frozen=True)
class ObservedStep:
    """A step's results, read from the device; ``index`` counts from 0."""

    index: int
    loss: float
    norm: float
    skipped: bool
    loss_scale: float


class Recovery:
    """Judges the results of one run, step by step, and rewinds it after a spike."""

    def __init__(
        self,
        run: Run,
        data: Data,
        folder: Path,
        batches: PositionedBatches,
        saved: Callable[[], None],
        warn: Callable[[str], None],
        heard: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._run = run
        self._data = data
        self._folder = folder
        self._batches = batches
        self._saved = saved
        self._warn = warn
        self._heard = heard
        self._spec = run.recipe.guard
        self._snapshots: Snapshots[TrainState] | None = snapshots_of(run)
        self._events: EventFile | None = None

    def begin(self, state: TrainState, oom: OomRecord | None = None) -> None:
        """Open the event file and take the first snapshots. ``oom``: the OOM that this start follows, if any."""
        if dist.get_rank() == 0:
            self._events = EventFile(self._folder, fresh=state.step == 0 and oom is None)
        if oom is not None and oom.step > state.step:
            sizes = {"micro_batch_size": oom.next_micro_batch_size, "to_step": state.step}
            self.log("out of memory", oom.step - 1, [state.position(oom.step - 1)], rank=oom.rank, **sizes)
        if self._snapshots is not None:
            self._snapshots.begin(state)

    def snapshot(self, state: TrainState) -> None:
        """Copy the run after ``state.step`` steps, unless the guard suspects a spike or the update was skipped."""
        if self._snapshots is not None and state.guard.burst is None and not state.guard.skips:
            self._snapshots.take(state)

    def see(self, state: TrainState, seen: ObservedStep) -> TrainState:
        """Judge a step. Returns ``state`` with the guard's updated memory.

        Raises Rewound after a rewind, NumericsError when the guard gives up.
        """
        if not self._run.synchronous:
            # Each stage of PipeDream has its own norm and skips its own updates. Only the loss is equal on all ranks.
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
        if verdict.action is GuardAction.GIVE_UP:
            self._give_up(state, seen.index, f"{memory.skips} updates in a row were not finite", finite=False)
        if verdict.action is GuardAction.REWIND:
            self._rewind(state, verdict, seen.index)
            state = replace(state, guard=memory.forgetting())
        return state

    def _is_overflow(self, seen: ObservedStep) -> bool:
        """Whether fp16's dynamic loss scale explains a skipped update: finite loss, and a scale above its floor."""
        spec = self._run.recipe.loss_scale
        scaled = self._run.loss_scale.active and spec.dynamic
        return scaled and seen.skipped and math.isfinite(seen.loss) and seen.loss_scale > spec.floor

    # ---- rewinding ----------------------------------------------------------------------------------------

    def _rewind(self, state: TrainState, verdict: GuardVerdict, index: int) -> None:
        """Rewind to before the spike and raise Rewound; return if no copy is from before it."""
        self._saved()  # a background save may still be writing the checkpoint to go back to
        # After the last rewind the run stays at the fault, so that the faulty module can be found.
        exhausted = state.rewinds >= self._spec.rewinds
        back = None if exhausted else self._restored(verdict.first, state)
        if exhausted and self._can_go_back(verdict.first):
            event = verdict.event or "spike"
            if state.rewinds:
                why = f"another {event} after {state.rewinds} rewinds"
            else:
                why = f"{event}, and guard.rewinds is 0"
            self._give_up(state, index, why, finite=verdict.event != "torn")
        if back is None:
            self.log("no way back", index, [])
            return
        first = max(back.step, verdict.first - LEAD)
        unit = self._batches.unit  # what belongs together is left out together
        first -= first % unit
        last = verdict.last + unit - 1 - verdict.last % unit
        # By the spans of the abandoned branch: its steps have read the batches at these positions.
        positions = [state.position(step) for step in range(first, last + 1)]
        left_out = merged([*state.left_out, *((position, position + 1) for position in positions)])
        after = replace(back, rewinds=state.rewinds + 1, left_out=left_out)
        self.log("rewind", index, positions, to_step=after.step, rewinds=after.rewinds)
        raise Rewound(after)

    def _can_go_back(self, first: int) -> bool:
        if self._snapshots is not None and self._snapshots.newest(_by(first)) is not None:
            return True
        return has_before(self._checkpoints, first)

    def _restored(self, first: int, state: TrainState) -> TrainState | None:
        """Restore the newest copy from before step ``first``, preferably from LEAD steps earlier.

        Returns None if there is none; the run is then unchanged. ``state``: the progress until now.
        """
        if self._snapshots is not None:
            for latest in (first - LEAD, first):
                if self._snapshots.newest(_by(latest)) is not None:
                    # The best since the snapshot has a checkpoint; that of the snapshot's best may be deleted.
                    return replace(self._snapshots.restore(_by(latest)), best=state.best)
        restored = restore_before(self._run, self._checkpoints, first, self._data.fingerprint, self._warn)
        if restored is not None and self._snapshots is not None:
            self._snapshots.begin(restored)  # the old ones are of the abandoned branch
        return restored

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    # ---- giving up ----------------------------------------------------------------------------------------

    def _give_up(self, state: TrainState, index: int, why: str, finite: bool) -> None:
        """Find the first non-finite module and raise NumericsError."""
        self._saved()
        position = state.position(index)
        finding: Finding | None = None
        if self._run.synchronous:  # else ranks have read ahead, and cannot run one step alone
            with torch.enable_grad():
                finding = first_non_finite(self._run, self._batches.at(position))
        words = _found(finding, finite)
        self.log("gave up", index, [position], why=why, blame=words)
        raise NumericsError(
            f"training does not recover: {why}",
            where=f"step {index + 1}",
            why=words,
            fix="see events.jsonl for the samples; resume with a lower learning rate or a wider precision",
        )

    def log(self, event: str, index: int, positions: Iterable[int], **values: Any) -> None:
        """Append a line to ``events.jsonl``, on rank 0, and call ``heard``. ``index`` counts steps from 0."""
        if self._events is None and self._heard is None:
            return
        line = event_line(self._data, event, index + 1, positions, values)
        if self._events is not None:
            self._events.write(line)
        if self._heard is not None:
            self._heard(line)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _by(step: int) -> Callable[[TrainState], bool]:
    """Whether a copy is of at most ``step`` steps."""
    return lambda state: state.step <= step


def _found(finding: Finding | None, finite: bool) -> str:
    """The finding in words. ``finite``: whether loss and gradients were finite when the guard gave up."""
    if finding is not None:
        return finding.words()
    if finite:
        return "losses and norms rose, but no module went non-finite"
    return "run once more, the batch is finite everywhere: the fault does not repeat"
