"""Schedules that compiled blocks do not go with."""

from __future__ import annotations

from shardwise.technique.compiling import COMPILE
from shardwise.technique.rules import Case, Rule


def _compiled_under(case: Case, schedule: str) -> bool:
    values = case.strategy.values
    return (values["pipeline_schedule"], case.strategy[COMPILE]) == (schedule, "block") and (
        int(str(values["pipeline_parallel"])) > 1
    )


COMPILED_RULES: tuple[Rule, ...] = (
    Rule(
        key="compile",
        reason="zero_bubble splits the backward pass in two, and that of a compiled block is one",
        broken=lambda case: _compiled_under(case, "zero_bubble"),
        nearest=lambda case: {COMPILE.key: "none"},
    ),
    Rule(
        key="compile",
        reason="pipedream keeps earlier versions of the weights, which compiled blocks were not tested with",
        broken=lambda case: _compiled_under(case, "pipedream"),
        nearest=lambda case: {COMPILE.key: "none"},
    ),
)
