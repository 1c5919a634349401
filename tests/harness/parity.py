"""The parity harness: strategies train as one plain process does, several of them in one fork of the pool.

A test is parametrized with ``trial``, a strategy and its recipe, and asks the fixture ``parity`` for its verdict::

    @pytest.mark.parametrize("trial", [...])
    def test_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
        assert parity.verdict(trial).passed

The trials of a test are grouped into batches (conftest.py). The first trial of a batch that runs trains all of it, one
strategy after the other on the same ranks. Each trial then reads its own verdict. A batch that fails trains again,
each trial in a fork of its own, so that an error belongs to one strategy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, precision_of, strategy_from
from shardwise.verifier.verdict import Verdict
from shardwise.verifier.verify import rounds_more, shortened
from tests.harness.corpora import EVEN, FEW_LETTERS, WORDS, write_words
from tests.harness.pool import Pool
from tests.harness.ranks import Job, plain_rank, reference_rank, strategy_rank, verified_rank

BATCH = 8
"""Most strategies that one fork trains: process groups of all of them stay open."""
_SECONDS, _COMPILING = 60.0, 400.0
"""Time limits of one strategy, and of one whose blocks are compiled."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A strategy to train on ``world`` ranks. The recipe's data source is a name of harness/corpora.py."""

    recipe: Recipe
    world: int
    settings: Mapping[str, Any]

    @property
    def reference(self) -> str:
        """The reference's precision."""
        return "fp64" if precision_of(strategy_from(self.settings)) == "fp64" else "fp32"

    @property
    def rounds_more(self) -> bool:
        """Whether it keeps fewer digits than the reference."""
        return rounds_more(self.recipe, strategy_from(self.settings))


def batches(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Trials in the order given, grouped by world size, at most ``BATCH`` in a group."""
    by_world: dict[int, list[Trial]] = {}
    for trial in trials:
        by_world.setdefault(trial.world, []).append(trial)
    return [group[at : at + BATCH] for group in by_world.values() for at in range(0, len(group), BATCH)]


class Parity:
    """Trains trials and their references, each once.

    Args:
        folder: where corpora and references are kept.
        steps: the most optimizer steps of a trial; learning rate schedules are shortened to them.
        together: the batches.
    """

    def __init__(self, pool: Pool, folder: Path, steps: int, together: Iterable[Sequence[Trial]]) -> None:
        self._pool, self._folder, self._steps = pool, folder, steps
        self._batch = {trial: batch for batch in together for trial in batch}
        self._verdicts: dict[Trial, Verdict | Exception] = {}
        self._references: dict[tuple[str, str], Path] = {}
        write_words(folder / WORDS)
        write_words(folder / EVEN, even=True)
        write_words(folder / FEW_LETTERS, even=True, letters="abcdefgh")

    def verdict(self, trial: Trial, *others: Trial) -> Verdict:
        """The verdict on a trial, the same on all ranks. Raises what a rank raised.

        Args:
            others: trials of the same world that train in the same fork, where the trial is in no batch.
        """
        if trial not in self._verdicts:
            self._verdicts |= self._trained(self._batch.get(trial, [trial, *others]))
        found = self._verdicts[trial]
        if isinstance(found, Exception):
            raise found
        return found

    def verified(self, trial: Trial) -> Verdict:
        """The verdict of ``shardwise verify``: rounding noise is measured, and the layout is proved in fp64."""
        folder = self._folder / f"verified-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        jobs = [(self._recipe(trial), dict(trial.settings), folder)]
        self._pool.run(1, plain_rank, jobs, timeout=2 * _SECONDS)
        (verdict,) = self._pool.run(trial.world, verified_rank, jobs, timeout=2 * _SECONDS)[0]
        return verdict

    def all_pass(self, *trials: Trial) -> None:
        """Train trials of the same world in one fork; each has to train as the plain process does."""
        for trial in trials:
            verdict = self.verdict(trial, *(other for other in trials if other is not trial))
            assert verdict.passed, (dict(trial.settings), verdict)

    def _trained(self, trials: Sequence[Trial]) -> dict[Trial, Verdict | Exception]:
        try:
            jobs = self._jobs(trials)
            seconds = sum(_COMPILING if "compile" in trial.settings else _SECONDS for trial in trials)
            ranks = self._pool.run(trials[0].world, strategy_rank, jobs, timeout=seconds)
        except Exception as error:
            if len(trials) == 1:
                return {trials[0]: error}
            return {trial: found for each in trials for trial, found in self._trained([each]).items()}
        return {trial: _agreed(verdicts) for trial, *verdicts in zip(trials, *ranks, strict=True)}

    def _jobs(self, trials: Sequence[Trial]) -> list[Job]:
        """What ranks train, after the references that are still missing."""
        missing: list[Job] = []
        jobs: list[Job] = []
        found: dict[tuple[str, str], Path] = {}
        for trial in trials:
            recipe = self._recipe(trial)
            key = recipe.model_dump_json(exclude={"strategy", "cluster"}), trial.reference
            if key not in self._references | found:
                found[key] = Path(tempfile.mkdtemp(prefix="reference-", dir=self._folder))
                whole = {"precision": trial.reference, MICRO_BATCH_SIZE.key: recipe.batch_size}
                missing.append((recipe, whole, found[key]))
            jobs.append((recipe, dict(trial.settings), (self._references | found)[key]))
        if missing:
            self._pool.run(1, reference_rank, missing, timeout=_SECONDS * len(missing))
        self._references |= found
        return jobs

    def _recipe(self, trial: Trial) -> Recipe:
        data = trial.recipe.data
        recipe, written = trial.recipe, self._folder / data.source
        if written.exists():
            recipe = recipe.model_copy(update={"data": data.model_copy(update={"source": str(written)})})
        return shortened(recipe, min(self._steps, recipe.steps))


def _agreed(verdicts: Sequence[Verdict]) -> Verdict | Exception:
    """The ranks' verdict."""
    if any(verdict != verdicts[0] for verdict in verdicts):
        return AssertionError(f"the ranks disagree: {verdicts}")
    return verdicts[0]
