"""The samples that a model makes for itself before a step, within its dry run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from shardwise.dryrun.tally import Tally
from shardwise.dryrun.tracker import Tracker
from shardwise.engine.phase import phase
from shardwise.engine.run import Run
from shardwise.engine.sampling import SamplingObjective
from shardwise.model.blueprint import Batch


def rehearse_rollout(run: Run, batch: Batch, tracker: Tracker) -> None:
    """Count a rollout, if the objective makes any; ``batch`` is a micro-batch of a step."""
    if isinstance(run.objective, SamplingObjective):
        with phase("rollout"):
            run.objective.rehearse(run, run.local_batch(batch), partial(_counted_times, tracker))


@contextmanager
def _counted_times(tracker: Tracker, times: float) -> Iterator[None]:
    """Costs within the block count so many times, and outside of micro-batches."""
    outer = tracker.tallies
    tracker.tallies = {}
    yield
    inner = tracker.tallies
    tracker.tallies = outer
    for tally in inner.values():
        outer.setdefault(None, Tally()).add(tally, times)
