"""What one change of the chosen strategy would cost: its neighbours, predicted and judged against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardwise.core.answer import pinned_in_words
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Candidate
from shardwise.core.strategy import Layout, Strategy
from shardwise.core.units import format_bytes, format_change, format_more_bytes
from shardwise.planner.pins import MOST_TRIALS, without_pins
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import UNKNOWN, Judgement, Predictor
from shardwise.planner.quick import figures_from, figures_in_proportion
from shardwise.planner.read_ahead import ReadAhead
from shardwise.planner.worst_rank import EVERY_RANK
from shardwise.technique import MICRO_BATCH_SIZE, ORDER, case_of, has_stages, layout_of

_FRAGMENTATION = 1.1
"""Memory with fragmentation, of a quick prediction that has none."""

_Trials = tuple[Strategy, ...]
_Judged = list[tuple[Strategy, Judgement | None]]


@dataclass
class Neighbours:
    """Predictions of every strategy that differs from one in one setting, and of some without one of the recipe's pins
    (planner/pins.py); the predictor records them.

    They begin on free cores as soon as a strategy is expected to be chosen.
    """

    predictor: Predictor
    _of: Strategy | None = None
    _listed: Sequence[_Trials] = ()
    _ahead: ReadAhead[_Trials, _Judged] | None = None

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def expect(self, strategy: Strategy | None) -> None:
        """Begin with a strategy's neighbours, and end those of another; None ends them, so that cores are free.

        With pipeline stages, they are compared with its worst rank. In small worlds only the full prediction knows it.
        """
        if strategy == self._of:
            return
        if strategy is None:
            self._close()
            self._of = None
        elif not has_stages(self._layout(strategy)):
            self._begin(strategy, None)
        elif self.predictor.cluster.world_size > EVERY_RANK:
            self._begin(strategy, self.predictor.worst(strategy, quick=True))

    def record(self, chosen: Prediction) -> None:
        """Record the neighbours of the chosen strategy."""
        if chosen.strategy != self._of:
            self._begin(chosen.strategy, None if chosen.run.place is None else chosen)
        assert self._ahead is not None
        for number in range(len(self._listed)):
            for neighbour, judgement in self._ahead.get(number):
                self.predictor.adopt(neighbour, judgement)

    def _begin(self, strategy: Strategy, staged: Prediction | None) -> None:
        self._close()
        self._of, self._listed = strategy, list(self._trials(strategy))
        run = partial(_until_one_fits, self.predictor, self._layout(strategy), staged)
        self._ahead = ReadAhead(run, self._listed, self.predictor.quiet)

    def _close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _trials(self, strategy: Strategy) -> Iterator[_Trials]:
        """Lists of strategies: a neighbour alone, or several without one pin. The first of a list that fits counts."""
        dropped = [trials for trials in without_pins(self.predictor, strategy) if trials]
        known = {trials[0] for trials in dropped}
        yield from ((neighbour,) for neighbour in self._unknown(strategy) if neighbour not in known)
        yield from dropped

    def _unknown(self, strategy: Strategy) -> list[Strategy]:
        """Neighbours that are possible and have no prediction."""
        predictor, cluster = self.predictor, self.predictor.cluster
        case = case_of(strategy, cluster.world_size, predictor.recipe, cluster.devices_per_node)
        changes: list[Mapping[str, object]] = [
            {s.key: value}
            for technique in ORDER
            for s in technique.settings
            for value in (*(v for v in technique.candidates(s, case) if v in s.candidates), *s.compared)
            if value != strategy[s] and not {value, strategy[s]} <= set(s.alike)
        ]
        size, sizes = strategy[MICRO_BATCH_SIZE], predictor.micro_batch_sizes(strategy)
        changes += [{MICRO_BATCH_SIZE.key: near} for near in sizes if size // 2 <= near <= 2 * size + 1]
        possible = predictor.possible(strategy.with_values(**change) for change in changes)
        return [
            neighbour
            for neighbour in dict.fromkeys(possible)
            if neighbour not in predictor.candidates and neighbour != strategy
        ]

    def _layout(self, strategy: Strategy) -> Layout:
        return layout_of(strategy, self.predictor.cluster.world_size)


def _until_one_fits(
    predictor: Predictor, layout: Layout, staged: Prediction | None, trials: _Trials
) -> _Judged:
    """The judgements of strategies up to the first that surely fits, with room for fragmentation.

    MOST_TRIALS at most are predicted; those of a bound do not count.
    """
    judged: list[tuple[Strategy, Judgement | None]] = []
    predicted = 0
    for trial in trials:
        judgement = _predicted_neighbour(predictor, layout, staged, trial)
        judged.append((trial, judgement))
        predicted += judgement is None or judgement.replayed is not None
        if predicted == MOST_TRIALS or (judgement is not None and _surely_fits(predictor, judgement)):
            break
    return judged


def _surely_fits(predictor: Predictor, judgement: Judgement) -> bool:
    room = 1.0 if judgement.replayed else _FRAGMENTATION
    fits = judgement.candidate.verdict == "fits"
    return fits and judgement.candidate.peak_bytes * room <= predictor.budget_bytes


def _predicted_neighbour(
    predictor: Predictor, layout: Layout, staged: Prediction | None, neighbour: Strategy
) -> Judgement | None:
    """A neighbour's judgement; None for one that cannot be built here because a package is missing.

    Args:
        layout: of the strategy that is compared.
        staged: the prediction of that strategy's worst rank; None where all ranks are alike.
    """
    world_size = predictor.cluster.world_size
    small, same = world_size <= EVERY_RANK, layout_of(neighbour, world_size) == layout
    known = staged and figures_from(predictor, staged)
    try:
        if predictor.may_fit(neighbour) and not (
            known and figures_in_proportion(predictor, neighbour, known)
        ):
            # In a large world another kind of rank may be the worst.
            ranks = [staged.rank] if staged is not None and small and same else None
            predictor.predict(neighbour, quick=True, ranks=ranks, once=True)
    except RecipeError:
        return None
    except Exception as error:  # of the model or a kernel, in a strategy that is only compared
        predictor.record_failure(neighbour, error)
    return predictor.judgement(neighbour)


def compared_candidates(predictor: Predictor, chosen: Prediction) -> tuple[Candidate, ...]:
    """All recorded candidates, compared with the chosen one: the chosen first, then those that fit by step time."""
    candidates = [_final_verdict(predictor, candidate, chosen) for candidate in predictor.candidates.values()]
    order = ("chosen", "fits", "tight", "does not fit", UNKNOWN)
    candidates.sort(key=lambda c: (order.index(c.verdict), c.step_seconds, c.peak_bytes))
    return tuple(candidates)


def _final_verdict(predictor: Predictor, candidate: Candidate, chosen: Prediction) -> Candidate:
    """The candidate with its final verdict and with its difference from the chosen one as the reason.

    A strategy without a pin says which one.
    """
    if candidate.strategy == chosen.strategy:
        return replace(candidate, verdict="chosen" if predictor.fits(chosen) else "does not fit")
    if candidate.verdict == "fits" and not predictor.replayed(candidate.strategy):
        candidate = _with_fragmentation(predictor, candidate, chosen)
    if candidate.verdict not in ("fits", "tight"):
        return candidate
    time = candidate.step_seconds / chosen.step.seconds - 1
    memory = candidate.peak_bytes - chosen.peak.bytes
    about = "" if candidate.peak_is == "counted" else "about "
    reason = f"{format_change(time)} step time, {about}{format_more_bytes(memory)}"
    if candidate.reason:
        reason += f"; {candidate.reason}"
    changed = chosen.strategy.differences(candidate.strategy)
    if pins := [key for key in changed if key in predictor.recipe.strategy]:
        reason += f"; {pinned_in_words(pins)}"
    return replace(candidate, reason=reason)


def _with_fragmentation(predictor: Predictor, candidate: Candidate, chosen: Prediction) -> Candidate:
    """The candidate with the chosen strategy's ratio of fragmentation to memory."""
    whole, tensors = chosen.peak.bytes, chosen.peak.bytes - chosen.peak.ledger.fragmentation
    peak = candidate.peak_bytes * whole // tensors
    over = peak - predictor.budget_bytes
    if over > 0:
        reason = f"{format_bytes(over)} too much, with as much fragmentation as the chosen strategy"
        return replace(candidate, peak_bytes=peak, verdict="does not fit", reason=reason, peak_is="estimated")
    return replace(candidate, peak_bytes=peak, peak_is="estimated")
