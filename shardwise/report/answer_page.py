"""The answer of a plan on its page: the run, what binds, the picture of memory against time, alternatives, remedies."""

from __future__ import annotations

from typing import Any

from shardwise.core.answer import Answer
from shardwise.core.fit_advice import FitAdvice
from shardwise.core.plan import Plan
from shardwise.report.answer import change, money, reason, run_sentences
from shardwise.report.front import memory_against_time
from shardwise.report.notation import peak_of, seconds
from shardwise.report.page_parts import Card, picture


def answer_values(plan: Plan, answer: Answer | None, advice: FitAdvice | None) -> dict[str, Any] | None:
    """Values of the template's section; None for a run, whose plan was made without comparing."""
    if answer is None:
        return None
    shown = None
    if len(plan.candidates) > 1:
        shown = picture("Memory against step time", lambda w: memory_against_time(plan, answer.front, w))
    outcomes = advice.outcomes if advice else ()
    return {
        "front": shown,
        "run": list(run_sentences(answer)),
        "binds": list(answer.sentences()),
        "limits": [limit.sentence() for limit in answer.limits],
        "nearest": [
            (change(alternative), alternative.candidate, reason(alternative))
            for alternative in answer.nearest
        ],
        "remedies": [
            (outcome, peak_of(outcome.candidate), seconds(outcome.candidate.step_seconds))
            for outcome in outcomes
        ],
        "advice": advice.reasons if advice else (),
    }


def run_card(answer: Answer | None) -> Card | None:
    """The run's hours and cost."""
    if answer is None:
        return None
    run = answer.run
    cost = "" if run.cost is None else f"\ncosts {money(run.cost)}"
    return Card("The run", seconds(3600 * run.hours), f"{run.steps:,} steps, predicted{cost}")
