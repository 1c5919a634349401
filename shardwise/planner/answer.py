"""The answer that follows from a plan (core/answer.py): no torch, and no prediction beyond those that the plan holds.

- **Nearest**: per setting, the predicted strategy with another value there that differs least from the chosen one. Of
  equally near ones, those that fit come first, then the fastest. A strategy is named once.
- **Binding**: faster strategies that do not fit say what memory costs: how much more there would have to be, and the
  share of the step that it would save. Without such a strategy the step is bound by its longest part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.core.answer import (
    SAMPLE_STEPS,
    SURE,
    TELLS,
    Alternative,
    Answer,
    MemoryPrice,
    RunCost,
    pinned_in_words,
)
from shardwise.core.plan import Candidate, Plan
from shardwise.core.strategy import Setting, Strategy
from shardwise.core.units import (
    format_bytes,
    format_change,
    format_more_bytes,
    format_percent,
    format_seconds,
)
from shardwise.hardware.cluster import Cluster
from shardwise.planner.accuracy import spread_of
from shardwise.planner.origins import origins
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    DIGITS,
    MICRO_BATCH_SIZE,
    ORDER,
    Technique,
    broken_rules,
    case_of,
    layout_of,
)
from shardwise.technique.base import Dividing

ALIKE = 0.005
"""Relative differences of time that are not worth a price."""

MOST_PRICES = 3

COMPUTING = ("matrix products", "memory-bound")
"""Parts of a step that a division over devices shares out, and does not hide."""

_FITTING = ("fits", "tight", "does not fit")
"""Verdicts of predicted strategies, the nearest to the chosen one first."""


def answer_of(recipe: Recipe, cluster: Cluster, plan: Plan) -> Answer:
    """What a plan answers, on the cluster that it is for."""
    device = cluster.device
    known = (
        not device.traits.is_host or device.measured is not None
    )  # assumed speeds of a CPU were compared with no run
    spread = spread_of("seconds", device.traits.spread) if known else None
    steps = recipe.steps or SAMPLE_STEPS
    hours = steps * plan.step.seconds / 3600
    run = RunCost(
        steps=steps,
        tokens=steps * plan.step.tokens,
        devices=plan.world_size,
        hours=hours,
        price=recipe.cluster.price_per_device_hour,
        likely_hours=None if spread is None else spread.of(hours),
        epochs=recipe.epochs,
        unit=plan.step.unit,
    )
    memory_spread = spread_of("memory", device.traits.spread)
    prices = tuple(_prices(plan))[:MOST_PRICES]
    answer = Answer(
        run=run,
        peak=None if memory_spread is None else memory_spread.of(plan.peak.bytes),
        nearest=tuple(_nearest_alternatives(recipe, cluster, plan)),
        unpin=tuple(_slower_by_pins(recipe, plan)),
        binding=_binding(plan, bool(prices)),
        prices=prices,
        front=front(plan.candidates),
    )
    return replace(answer, origins=tuple(origins(recipe, cluster, answer)))


def front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both memory and time, by memory. Bounds without a time are left out."""
    found: list[Candidate] = []
    timed = [candidate for candidate in candidates if candidate.step_seconds and candidate.peak_bytes]
    for candidate in sorted(timed, key=lambda candidate: (candidate.peak_bytes, candidate.step_seconds)):
        if not found or candidate.step_seconds < found[-1].step_seconds:
            found.append(candidate)
    return tuple(found)


# -- the nearest alternatives -------------------------------------------------------------------------


def _nearest_alternatives(recipe: Recipe, cluster: Cluster, plan: Plan) -> Iterator[Alternative]:
    """One per setting, in the order of techniques.

    Without a pin, the nearest that fits comes first: what gives memory back elsewhere is named after it.
    """
    others = [
        candidate
        for candidate in plan.candidates
        if candidate.verdict in _FITTING and candidate.strategy != plan.strategy
    ]
    if not others:
        return
    named: set[Strategy] = set()
    for setting, values in _free_settings(recipe, cluster, plan):
        mine = plan.strategy[setting]
        pinned = setting.key in recipe.strategy
        here = [
            other
            for other in others
            if other.strategy[setting] != mine
            and other.strategy not in named
            and (_pins(recipe, plan, other) or [setting.key])[0] == setting.key
            and pinned == bool(_pins(recipe, plan, other))
        ]
        if not here:
            if not pinned and (reason := _why_none(recipe, plan, setting, values)):
                yield Alternative(setting.key, _word(mine), "", None, reason)
            continue
        nearest = min(here, key=lambda candidate: _change_distance(plan, candidate, pinned))
        named.add(nearest.strategy)
        changed = _changed_settings(plan, nearest)
        theirs = nearest.strategy[setting]
        also = tuple(words for key, words in changed.items() if key != setting.key)
        why, pins = _reason(plan, nearest), pinned_in_words(_pins(recipe, plan, nearest))
        if pinned and pins not in why:
            why += f"; {pins}"
        if theirs in setting.once:
            why += f"; it costs {format_seconds(setting.once[theirs])} once"
        yield Alternative(setting.key, _word(mine), _word(theirs), nearest, why, also)


def _pins(recipe: Recipe, plan: Plan, candidate: Candidate) -> list[str]:
    """The keys that a candidate changes although the recipe pins them."""
    return [key for key in plan.strategy.differences(candidate.strategy) if key in recipe.strategy]


def _slower_by_pins(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Pins without which the run fits and is surely faster, in words; the most time first.

    None of them changes the digits of the training. A plan for the least memory has none.
    """
    best: dict[tuple[str, ...], float] = {}
    for candidate in plan.candidates:
        pins = tuple(_pins(recipe, plan, candidate))
        if pins and candidate.verdict == "fits" and not DIGITS & {*pins}:
            best[pins] = min(candidate.step_seconds, best.get(pins, plan.step.seconds))
    if not plan.fits or recipe.plan.objective == "memory":
        return
    for pins, seconds in sorted(best.items(), key=lambda item: item[1]):
        if seconds < plan.step.seconds * (1 - TELLS):
            keys = " and ".join(f"strategy.{key}" for key in pins)
            yield f"drop {keys}: fits, {format_change(seconds / plan.step.seconds - 1)} step time"


def _free_settings(
    recipe: Recipe, cluster: Cluster, plan: Plan
) -> Iterator[tuple[Setting[Any], Sequence[object]]]:
    """Settings with the values that the search or the comparison may take here."""
    case = case_of(plan.strategy, plan.world_size, recipe, cluster.devices_per_node)
    for technique in ORDER:
        for setting in technique.settings:
            values = dict.fromkeys(
                (*technique.candidates(setting, case), *setting.last_resort, *setting.compared, *setting.once)
            )
            if values or setting.key in recipe.strategy or _divides(technique, setting, plan):
                yield setting, tuple(values)
    yield MICRO_BATCH_SIZE, ()


def _divides(technique: Technique, setting: Setting[Any], plan: Plan) -> bool:
    """Whether a setting is the degree of an axis that divides the model or the sequence, on several devices."""
    if not isinstance(technique, Dividing) or any(axis.samples for axis in technique.axes):
        return False
    if setting.kind is not int or plan.world_size == 1:
        return False
    double, world = plan.strategy.with_values(**{setting.key: 2 * plan.strategy[setting]}), plan.world_size
    return technique.degrees(double, world) != technique.degrees(plan.strategy, world)


def _why_none(recipe: Recipe, plan: Plan, setting: Setting[Any], values: Sequence[object]) -> str:
    """Why no other value of a setting was predicted; "" where there is none, or its strategy is named elsewhere."""
    if not values and setting is not MICRO_BATCH_SIZE:
        return f"not tried for this model: strategy.{setting.key}=2 plans it"
    if set(values) <= {plan.strategy[setting], *setting.last_resort}:
        return "others are tried only where nothing else fits" if plan.fits and setting.last_resort else ""
    named = any(candidate.strategy[setting] != plan.strategy[setting] for candidate in plan.candidates)
    others = [value for value in values if value != plan.strategy[setting]]
    if named or not others:
        return ""
    reasons: list[str] = []
    for value in others:
        changed = plan.strategy.with_values(**{setting.key: value})
        broken = next(broken_rules(changed, plan.world_size, recipe), None)
        if broken is None and value in setting.once:
            cost = f"the {format_seconds(setting.once[value])} that it costs once"
            return f"{_word(value)} is tried only where the steps surely save {SURE:g} times {cost}"
        if broken is None:
            return _bound(recipe, plan, changed)
        reasons.append(f"{_word(value)} is not possible: {broken.rule.reason}")
    return reasons[0]


def _bound(recipe: Recipe, plan: Plan, other: Strategy) -> str:
    """What another division of the step takes at least: the computation alone, without communication.

    Recomputation is left out of it in proportion to its FLOPs.
    """
    split, flops = plan.step.split, plan.world_size * plan.step.flops
    needed = min(1.0, plan.step.model_flops / flops) if plan.step.model_flops else 1.0
    share = _sequences(recipe, plan, other) / _sequences(recipe, plan, plan.strategy)
    least = sum(split.get(part, 0.0) for part in COMPUTING) * needed * share
    mine = format_seconds(plan.step.seconds)
    return f"not predicted: even without communication not faster than {format_seconds(least)} (this one: {mine})"


def _sequences(recipe: Recipe, plan: Plan, strategy: Strategy) -> float:
    """Sequences of a step for each device, were each divided over the ranks that compute it."""
    data = layout_of(strategy, plan.world_size).data_degree
    return -(-recipe.batch_size // data) * data / plan.world_size


def _change_distance(plan: Plan, candidate: Candidate, pinned: bool) -> tuple[tuple[int, int], float, int]:
    """Fewer changes first, then what fits, then by time and memory; of pins, what fits first."""
    changes = len(plan.strategy.differences(candidate.strategy))
    verdict = _FITTING.index(candidate.verdict)
    nearness = (verdict, changes) if pinned else (changes, verdict)
    return nearness, candidate.step_seconds, candidate.peak_bytes


def _changed_settings(plan: Plan, candidate: Candidate) -> Mapping[str, str]:
    """Keys that differ, with the candidate's value and the chosen one in words."""
    differences = plan.strategy.differences(candidate.strategy)
    return {key: f"{key} {_word(theirs)} (now {_word(mine)})" for key, (mine, theirs) in differences.items()}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reason(plan: Plan, candidate: Candidate) -> str:
    """Why the candidate is not the chosen one, in words and numbers."""
    time = candidate.step_seconds / plan.step.seconds - 1 if candidate.step_seconds else 0.0
    if candidate.verdict == "does not fit":
        lacking = candidate.reason or f"{format_bytes(_excess(plan, candidate))} too much"
        return f"{lacking}; {format_change(time)} step time" if candidate.step_seconds else lacking
    memory = candidate.peak_bytes - plan.peak.bytes
    about = "" if candidate.peak_is == "counted" else "about "
    said = f"{format_change(time)} step time, {about}{format_more_bytes(memory)}"
    if part := _most_changed(plan, candidate):
        said += f"; {part}"
    noted = candidate.reason.partition("; ")[
        2
    ]  # of its own prediction, after the comparison (planner/compare.py)
    return f"{said}; {noted}" if noted else said


def _most_changed(plan: Plan, candidate: Candidate) -> str:
    """The part of the step that differs most in the direction of the whole."""
    total = candidate.step_seconds - plan.step.seconds
    parts = {*plan.step.split, *candidate.split} if candidate.split else set()
    change = {part: candidate.split.get(part, 0.0) - plan.step.split.get(part, 0.0) for part in parts}
    along = {part: seconds_of_part for part, seconds_of_part in change.items() if seconds_of_part * total > 0}
    if not along or abs(total) < ALIKE * plan.step.seconds:
        return ""
    part = max(sorted(along), key=lambda part: abs(along[part]))
    return f"{format_seconds(abs(along[part]))} {'more' if along[part] > 0 else 'less'} {part}"


# -- what binds ---------------------------------------------------------------------------------------


def _excess(plan: Plan, candidate: Candidate) -> int:
    """Device memory that a candidate lacks."""
    return candidate.peak_bytes + plan.reserve_bytes - plan.capacity_bytes


def _prices(plan: Plan) -> Iterator[MemoryPrice]:
    """Faster strategies that lack device memory alone, the least memory first, each faster than those before it."""
    best = plan.step.seconds * (1 - ALIKE) if plan.fits else 0.0
    refused = [
        candidate
        for candidate in plan.candidates
        if candidate.verdict == "does not fit" and _excess(plan, candidate) > 0
    ]
    for candidate in sorted(refused, key=lambda candidate: _excess(plan, candidate)):
        if 0 < candidate.step_seconds < best:
            best = candidate.step_seconds * (1 - ALIKE)
            change = ", ".join(_changed_settings(plan, candidate).values())
            yield MemoryPrice(
                _excess(plan, candidate), change, candidate.step_seconds / plan.step.seconds - 1, candidate
            )


def _binding(plan: Plan, priced: bool) -> str:
    """What keeps the step from being faster, in a sentence."""
    free = plan.capacity_bytes - plan.reserve_bytes - plan.peak.bytes
    if not plan.fits and free >= 0:
        needed, there = format_bytes(plan.host.bytes), format_bytes(plan.host.capacity_bytes)
        return f"host memory binds: the strategy that needs least of a device takes {needed} of {there}"
    if not plan.fits:
        return (
            f"memory binds: the smallest predicted strategy needs {format_bytes(plan.peak.bytes)} of a device"
        )
    if priced:
        return (
            "memory binds: faster strategies need more than the device has;"
            f" this one leaves {format_bytes(free)} above the reserve"
        )
    whole = sum(plan.step.split.values())
    part = max(plan.step.split, key=lambda part: plan.step.split[part], default="")
    longest = f"; most of a step is {part}, {format_percent(plan.step.split[part] / whole)}" if whole else ""
    return f"memory does not bind: no predicted strategy that needs more is faster{longest}"
