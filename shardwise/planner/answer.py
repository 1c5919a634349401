"""The answer that follows from a plan (core/answer.py): no torch, and no prediction beyond those that the plan holds.

- **Nearest**: per setting, the best predicted strategy with another value there. Those that fit come first, then the
  fastest. A strategy may change several settings, and is named for one of them.
- **Binding**: faster strategies that do not fit say what memory costs: how much more there would have to be, and the
  share of the step that it would save. Without such a strategy the step is bound by its longest part.
"""

from __future__ import annotations

import math
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
from shardwise.core.strategy import Setting
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
    SETTINGS,
    Technique,
    broken_rules,
    case_of,
)
from shardwise.technique.base import Dividing

NEGLIGIBLE_TIME = 0.005
"""Relative differences of time that are not worth a price."""

MOST_PRICES = 3

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
        nearest=tuple(_alternatives(recipe, cluster, plan)),
        unpin=(*_slower_by_pins(recipe, cluster, plan), *_slower_by_defaults(recipe, plan)),
        binding=_binding(plan, bool(prices)),
        prices=prices,
        front=front(plan.candidates),
    )
    return replace(answer, origins=tuple(origins(recipe, cluster, answer)))


def front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both memory and time, by memory. Bounds without a time are left out."""
    frontier: list[Candidate] = []
    timed = [candidate for candidate in candidates if candidate.step_seconds and candidate.peak_bytes]
    for candidate in sorted(timed, key=lambda candidate: (candidate.peak_bytes, candidate.step_seconds)):
        if not frontier or candidate.step_seconds < frontier[-1].step_seconds:
            frontier.append(candidate)
    return tuple(frontier)


# -- the alternatives ---------------------------------------------------------------------------------


def _alternatives(recipe: Recipe, cluster: Cluster, plan: Plan) -> Iterator[Alternative]:
    """One for each setting, in the order of techniques."""
    others: dict[str, list[Candidate]] = {}
    for candidate in plan.candidates:
        if candidate.verdict in _FITTING and candidate.strategy != plan.strategy:
            others.setdefault(_changed_setting(recipe, plan, candidate), []).append(candidate)
    if not others:
        return
    for setting, values in _free_settings(recipe, cluster, plan):
        mine = _word(plan.strategy[setting])
        if setting.key in others:
            best = min(others[setting.key], key=lambda candidate: _sort_key(recipe, plan, candidate))
            changed = _changed_settings(plan, best)
            also = tuple(words for key, words in changed.items() if key != setting.key)
            why = _reason(recipe, plan, setting, best)
            yield Alternative(setting.key, mine, _word(best.strategy[setting]), best, why, also)
        elif reason := _why_none(recipe, plan, setting, values):
            yield Alternative(setting.key, mine, "", None, reason)


def _changed_setting(recipe: Recipe, plan: Plan, candidate: Candidate) -> str:
    """The setting that a strategy is an alternative for: a pin that it changes, else the first setting of all.

    Its further changes give memory back, or fill the devices.
    """
    return next(iter(_pins(recipe, plan, candidate) or plan.strategy.differences(candidate.strategy)))


def _sort_key(recipe: Recipe, plan: Plan, candidate: Candidate) -> tuple[int, float, float, int]:
    """What fits first, then by the recipe's objective, then the fewest changes. A bound has no time."""
    seconds = candidate.step_seconds or math.inf
    size = float(candidate.peak_bytes)
    order = (size, seconds) if recipe.plan.objective == "memory" else (seconds, size)
    return _FITTING.index(candidate.verdict), *order, len(plan.strategy.differences(candidate.strategy))


def _pins(recipe: Recipe, plan: Plan, candidate: Candidate) -> list[str]:
    """The keys that a candidate changes although the recipe pins them."""
    return [key for key in plan.strategy.differences(candidate.strategy) if key in recipe.strategy]


def _slower_by_pins(recipe: Recipe, cluster: Cluster, plan: Plan) -> Iterator[str]:
    """Pins without which the run fits and is surely faster, in words; the most time first.

    None of them changes the digits of the training. A plan for the least memory has none. Values that the search tries
    only where nothing else fits are not taken without the pin either.
    """
    last_resorts = _last_resorts(recipe, cluster, plan)
    best: dict[tuple[str, ...], float] = {}
    for candidate in plan.candidates:
        pins = tuple(_pins(recipe, plan, candidate))
        if pins and candidate.verdict == "fits" and not DIGITS & {*pins}:
            if any(candidate.strategy.values[key] in last_resorts[key] for key in pins):
                continue
            best[pins] = min(candidate.step_seconds, best.get(pins, plan.step.seconds))
    if not plan.fits or recipe.plan.objective == "memory":
        return
    for pins, seconds in sorted(best.items(), key=lambda item: item[1]):
        if seconds < plan.step.seconds * (1 - TELLS):
            pinned = pinned_in_words(f"strategy.{key}" for key in pins)
            without = "it" if len(pins) == 1 else "them"
            yield f"{pinned}: without {without} fits, {format_change(seconds / plan.step.seconds - 1)} step time"


def _slower_by_defaults(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Defaults that change the digits of the training, so the planner keeps them, at twice the time or more.

    Of the values that take half the time the first is named, as they are listed: bf16 before fp8.
    """
    half = 0.0 if recipe.plan.objective == "memory" else plan.step.seconds / 2
    best: dict[tuple[str, object], float] = {}
    for candidate in plan.candidates:
        digits = DIGITS & plan.strategy.differences(candidate.strategy).keys()
        if candidate.verdict == "fits" and len(digits) == 1 and not _pins(recipe, plan, candidate):
            [key] = digits
            pair = key, candidate.strategy.values[key]
            best[pair] = min(candidate.step_seconds, best.get(pair, math.inf))
    for setting in (setting for setting in SETTINGS if setting.key in DIGITS):
        faster = (value for value in setting.compared if best.get((setting.key, value), math.inf) <= half)
        if (value := next(faster, None)) is not None:
            change = format_change(best[setting.key, value] / plan.step.seconds - 1)
            default = _word(plan.strategy[setting])
            yield f"strategy.{setting.key} is {default}, the default: {_word(value)} fits, {change} step time"


def _last_resorts(recipe: Recipe, cluster: Cluster, plan: Plan) -> Mapping[str, Sequence[object]]:
    """By setting the values of the last resort."""
    case = case_of(plan.strategy, plan.world_size, recipe, cluster.devices_per_node)
    last: dict[str, Sequence[object]] = {MICRO_BATCH_SIZE.key: ()}
    for technique in ORDER:
        for setting in technique.settings:
            usual = technique.candidates(setting, case)
            last[setting.key] = [value for value in setting.last_resort if value not in usual]
    return last


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
            named = values or setting.key in recipe.strategy or _is_parallel_degree(technique, setting, plan)
            if named and technique.has_effect(setting, case):
                yield setting, tuple(values)
    yield MICRO_BATCH_SIZE, ()


def _is_parallel_degree(technique: Technique, setting: Setting[Any], plan: Plan) -> bool:
    """Whether a setting is the degree of an axis that divides the model or the sequence, on several devices."""
    if not isinstance(technique, Dividing) or not any(axis.divides_model for axis in technique.axes):
        return False
    if setting.kind is not int or plan.world_size == 1:
        return False
    double = plan.strategy.with_values(**{setting.key: 2 * plan.strategy[setting]})
    world = plan.world_size
    return technique.degrees(double, world) != technique.degrees(plan.strategy, world)


def _why_none(recipe: Recipe, plan: Plan, setting: Setting[Any], values: Sequence[object]) -> str:
    """Why no other value of a setting was predicted; "" where there is none, or only with another setting's change."""
    if not values:
        return "" if setting is MICRO_BATCH_SIZE else f"not predicted: strategy.{setting.key}=2 plans it"
    others = [value for value in values if value != plan.strategy[setting]]
    if not others or any(other.strategy[setting] in others for other in plan.candidates):
        return ""
    if plan.fits and {*others} <= {*setting.last_resort}:
        return "others are taken where nothing else fits, or where they save 10 %"
    reasons: list[str] = []
    for value in others:
        changed = plan.strategy.with_values(**{setting.key: value})
        broken = next(broken_rules(changed, plan.world_size, recipe), None)
        if broken is None and value in setting.once:
            cost = f"the {format_seconds(setting.once[value])} that it costs once"
            return f"{_word(value)} is tried only where the steps surely save {SURE:g} times {cost}"
        if broken is None:
            return f"not predicted: strategy.{setting.key}={_word(value)} plans it"
        reasons.append(f"{_word(value)} is not possible: {broken.rule.reason}")
    return reasons[0]


def _changed_settings(plan: Plan, candidate: Candidate) -> Mapping[str, str]:
    """Keys that differ, with the candidate's value and the chosen one in words."""
    differences = plan.strategy.differences(candidate.strategy)
    return {key: f"{key} {_word(theirs)} (now {_word(mine)})" for key, (mine, theirs) in differences.items()}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reason(recipe: Recipe, plan: Plan, setting: Setting[Any], candidate: Candidate) -> str:
    """Why the candidate is not the chosen one: its difference, what it costs once, and whether a pin forbids it."""
    why = _difference(plan, candidate)
    if (pins := _pins(recipe, plan, candidate)) and (pinned := pinned_in_words(pins)) not in why:
        why += f"; {pinned}"
    if once := setting.once.get(candidate.strategy[setting]):
        why += f"; it costs {format_seconds(once)} once"
    return why


def _difference(plan: Plan, candidate: Candidate) -> str:
    """Time and memory of a candidate against the chosen one, in words and numbers."""
    time = candidate.step_seconds / plan.step.seconds - 1 if candidate.step_seconds else 0.0
    if candidate.verdict == "does not fit":
        lacking = candidate.reason or f"{format_bytes(_excess(plan, candidate))} too much"
        return f"{lacking}; {format_change(time)} step time" if candidate.step_seconds else lacking
    memory = candidate.peak_bytes - plan.peak.bytes
    about = "" if candidate.peak_is == "counted" else "about "
    said = f"{format_change(time)} step time, {about}{format_more_bytes(memory)}"
    if part := _most_changed(plan, candidate):
        said += f"; {part}"
    # Its own prediction's reason follows the comparison (planner/compare.py).
    noted = candidate.reason.partition("; ")[2]
    return f"{said}; {noted}" if noted else said


def _most_changed(plan: Plan, candidate: Candidate) -> str:
    """The part of the step that differs most in the direction of the whole."""
    total = candidate.step_seconds - plan.step.seconds
    parts = {*plan.step.split, *candidate.split} if candidate.split else set()
    change = {part: candidate.split.get(part, 0.0) - plan.step.split.get(part, 0.0) for part in parts}
    along = {part: seconds_of_part for part, seconds_of_part in change.items() if seconds_of_part * total > 0}
    if not along or abs(total) < NEGLIGIBLE_TIME * plan.step.seconds:
        return ""
    part = max(sorted(along), key=lambda part: abs(along[part]))
    return f"{format_seconds(abs(along[part]))} {'more' if along[part] > 0 else 'less'} {part}"


# -- what binds ---------------------------------------------------------------------------------------


def _excess(plan: Plan, candidate: Candidate) -> int:
    """Device memory that a candidate lacks."""
    return candidate.peak_bytes + plan.reserve_bytes - plan.capacity_bytes


def _prices(plan: Plan) -> Iterator[MemoryPrice]:
    """Faster strategies that lack device memory alone, the least memory first, each faster than those before it."""
    best = plan.step.seconds * (1 - NEGLIGIBLE_TIME) if plan.fits else 0.0
    refused = [
        candidate
        for candidate in plan.candidates
        if candidate.verdict == "does not fit" and _excess(plan, candidate) > 0
    ]
    for candidate in sorted(refused, key=lambda candidate: _excess(plan, candidate)):
        if 0 < candidate.step_seconds < best:
            best = candidate.step_seconds * (1 - NEGLIGIBLE_TIME)
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
        return "memory binds: faster strategies need more than the device has"
    whole = sum(plan.step.split.values())
    part = max(plan.step.split, key=lambda part: plan.step.split[part], default="")
    longest = f"; most of a step is {part}, {format_percent(plan.step.split[part] / whole)}" if whole else ""
    return f"memory does not bind: no predicted strategy that needs more is faster{longest}"
