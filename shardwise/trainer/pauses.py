"""After which steps a run pauses: to compute the validation loss, to save a checkpoint, to take a snapshot."""

from __future__ import annotations

from shardwise.recipe.sections import Recipe


class Pauses:
    """The pauses of one run, from its recipe. ``index`` counts steps from 0."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._save_delayed = False

    def after(self, index: int) -> bool:
        """Whether anything happens between step ``index`` and the next."""
        saves = self._save_delayed or self._due(index, self._recipe.checkpoint.every)
        return saves or self.evaluates(index) or self.snapshots(index)

    def evaluates(self, index: int) -> bool:
        return self._due(index, self._recipe.evaluation.every)

    def snapshots(self, index: int) -> bool:
        every = self._recipe.guard.snapshot_every
        return every is not None and (index + 1) % every == 0

    def saves(self, index: int, stop: bool, suspicious: bool) -> bool:
        """Whether to save a checkpoint.

        Args:
            stop: whether the run stops after this step.
            suspicious: whether the guard suspects a spike. A checkpoint then waits until the spike is over.
        """
        due = self._save_delayed or self._due(index, self._recipe.checkpoint.every)
        # A run that stops, or ends, saves in any case: nothing comes after it that could end the spike.
        self._save_delayed = due and suspicious and not stop and index + 1 < self._recipe.steps
        return stop or (due and not self._save_delayed)

    def rewind(self) -> None:
        """Forget a delayed checkpoint: its step was undone."""
        self._save_delayed = False

    def _due(self, index: int, every: int | None) -> bool:
        """Whether ``every`` divides the step's number, or it is the last step."""
        done = index + 1
        return done == self._recipe.steps or (every is not None and done % every == 0)
