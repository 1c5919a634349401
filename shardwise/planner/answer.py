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

from shardwise.core.answer import SAMPLE_STEPS, SURE, Alternative, Answer, MemoryPrice, RunCost, percent
from shardwise.core.plan import Candidate, Plan
from shardwise.core.strategy import Setting, Strategy
from shardwise.core.units import format_bytes, format_seconds
from shardwise.hardware.cluster import Cluster
from shardwise.planner.accuracy import spread_of
from shardwise.planner.origins import origins
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, ORDER, broken_rules, case_of

ALIKE = 0.005
"""Relative differences of time that are not worth a price."""

MOST_PRICES = 3

_FITTING = ("fits", "tight", "does not fit")
"""Verdicts of predicted strategies, the nearest to the chosen one first."""


def answer_of(recipe: Recipe, cluster: Cluster, plan: Plan) -> Answer:
    """What a plan answers, on the cluster that it is for."""
    device = cluster.device
    known = (
        device.kind != "cpu" or device.measured is not None
    )  # assumed speeds of a CPU were compared with no run
    spread = spread_of("seconds", device.kind) if known else None
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
    held = spread_of("memory", device.kind)
    prices = tuple(_prices(plan))[:MOST_PRICES]
    answer = Answer(
        run=run,
        peak=None if held is None else held.of(plan.peak.bytes),
        nearest=tuple(_nearest(recipe, cluster, plan)),
        binding=_binding(plan, bool(prices)),
        prices=prices,
        front=front(plan.candidates),
    )
    return replace(answer, origins=tuple(origins(recipe, cluster, answer)))


def front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both memory and time, by memory. Bounds without a time are left out."""
    found: list[Candidate] = []
    timed = [each for each in candidates if each.step_seconds and each.peak_bytes]
    for each in sorted(timed, key=lambda each: (each.peak_bytes, each.step_seconds)):
        if not found or each.step_seconds < found[-1].step_seconds:
            found.append(each)
    return tuple(found)


# -- the nearest alternatives -------------------------------------------------------------------------


def _nearest(recipe: Recipe, cluster: Cluster, plan: Plan) -> Iterator[Alternative]:
    """One per setting, in the order of techniques; of those that the recipe pins, if that alone was changed."""
    others = [each for each in plan.candidates if each.verdict in _FITTING and each.strategy != plan.strategy]
    if not others:
        return
    named: set[Strategy] = set()
    for setting, values in _free(recipe, cluster, plan):
        mine = plan.strategy[setting]
        pinned = setting.key in recipe.strategy
        here = [
            each
            for each in others
            if each.strategy[setting] != mine
            and each.strategy not in named
            and not (pinned and len(plan.strategy.differences(each.strategy)) > 1)
        ]
        if not here:
            if not pinned and (reason := _why_none(recipe, plan, setting, values)):
                yield Alternative(setting.key, _word(mine), "", None, reason)
            continue
        nearest = min(here, key=lambda each: _distance(plan, each))
        named.add(nearest.strategy)
        changed = _changes(plan, nearest)
        theirs = nearest.strategy[setting]
        also = tuple(words for key, words in changed.items() if key != setting.key)
        why = _reason(plan, nearest) + ("; the recipe pins it" if pinned else "")
        if theirs in setting.once:
            why += f"; it costs {format_seconds(setting.once[theirs])} once"
        yield Alternative(setting.key, _word(mine), _word(theirs), nearest, why, also)


def _free(recipe: Recipe, cluster: Cluster, plan: Plan) -> Iterator[tuple[Setting[Any], Sequence[object]]]:
    """Settings with the values that the search or the comparison may take here."""
    case = case_of(plan.strategy, plan.world_size, recipe, cluster.devices_per_node)
    for technique in ORDER:
        for setting in technique.settings:
            values = dict.fromkeys(
                (*technique.candidates(setting, case), *setting.last_resort, *setting.compared, *setting.once)
            )
            if values or setting.key in recipe.strategy:
                yield setting, tuple(values)
    yield MICRO_BATCH_SIZE, ()


def _why_none(recipe: Recipe, plan: Plan, setting: Setting[Any], values: Sequence[object]) -> str:
    """Why no other value of a setting was predicted; "" where there is none, or its strategy is named elsewhere."""
    if set(values) <= {plan.strategy[setting], *setting.last_resort}:
        return "others are tried only where nothing else fits" if plan.fits and setting.last_resort else ""
    named = any(each.strategy[setting] != plan.strategy[setting] for each in plan.candidates)
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
            return "not predicted: the search left it out by a bound"
        reasons.append(f"{_word(value)} is not possible: {broken.rule.reason}")
    return reasons[0]


def _distance(plan: Plan, candidate: Candidate) -> tuple[int, int, float, int]:
    """Fewer changes first, then what fits, then by time and memory."""
    changes = len(plan.strategy.differences(candidate.strategy))
    verdict = _FITTING.index(candidate.verdict)
    return changes, verdict, candidate.step_seconds, candidate.peak_bytes


def _changes(plan: Plan, candidate: Candidate) -> Mapping[str, str]:
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
        return f"{lacking}; {percent(time)} step time" if candidate.step_seconds else lacking
    memory = candidate.peak_bytes - plan.peak.bytes
    sign, about = "+" if memory >= 0 else "−", "" if candidate.peak_is == "counted" else "about "
    said = f"{percent(time)} step time, {about}{sign}{format_bytes(abs(memory))}"
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
    along = {part: each for part, each in change.items() if each * total > 0}
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
    refused = [each for each in plan.candidates if each.verdict == "does not fit" and _excess(plan, each) > 0]
    for each in sorted(refused, key=lambda each: _excess(plan, each)):
        if 0 < each.step_seconds < best:
            best = each.step_seconds * (1 - ALIKE)
            change = ", ".join(_changes(plan, each).values())
            yield MemoryPrice(_excess(plan, each), change, each.step_seconds / plan.step.seconds - 1, each)


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
        return f"memory binds: {format_bytes(free)} of the budget are left, and faster strategies need more"
    whole = sum(plan.step.split.values())
    part = max(plan.step.split, key=lambda part: plan.step.split[part], default="")
    longest = f"; most of a step is {part}, {plan.step.split[part] / whole:.0%}" if whole else ""
    return f"memory does not bind: no predicted strategy that needs more is faster{longest}"
