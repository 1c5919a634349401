"""The settings of pipeline parallelism."""

from __future__ import annotations

from shardwise.core.strategy import Setting, Strategy
from shardwise.technique.base import MOST_RANKS

PIPELINE_PARALLEL: Setting[int] = Setting(
    "pipeline_parallel",
    default=1,
    doc="pipeline parallelism: number of ranks among which the blocks are divided into stages",
    kind=int,
    minimum=1,
    maximum=MOST_RANKS,
)

PIPELINE_SCHEDULE: Setting[str] = Setting(
    "pipeline_schedule",
    default="1f1b",
    doc="pipeline schedule: one micro-batch at a time (naive); all forward passes first (gpipe); backward passes as"
    " early as possible (1f1b); 1f1b with several stages per rank (interleaved); split backward passes that fill the"
    " bubbles (zero_bubble). pipedream never drains the pipeline and computes gradients with stale weights: another"
    " training than with the others",
    choices=("1f1b", "naive", "gpipe", "interleaved", "zero_bubble", "pipedream"),
)

PIPELINE_VERTICAL_SYNC: Setting[bool] = Setting(
    "pipeline_vertical_sync",
    default=False,
    doc="vertical sync with pipedream: every stage uses the weight version of the first stage for the same micro-batch;"
    " otherwise each stage uses its newest",
    kind=bool,
    choices=(False, True),
)

PIPELINE_STAGES_PER_RANK: Setting[int] = Setting(
    "pipeline_stages_per_rank",
    default=2,
    doc="stages per rank with the interleaved schedule (virtual pipeline stages); other schedules have one",
    kind=int,
    minimum=2,
    maximum=MOST_RANKS,
)


def stages_per_rank(strategy: Strategy) -> int:
    """Stages of one rank."""
    return strategy[PIPELINE_STAGES_PER_RANK] if strategy[PIPELINE_SCHEDULE] == "interleaved" else 1
