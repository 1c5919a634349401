"""The memory of serving as a table: the output of ``shardwise plan --serve``."""

from __future__ import annotations

from rich.table import Table

from shardwise.core.units import format_bytes
from shardwise.plugins.serve.planning import MOST_REQUESTS, ServingPlan


def serving_table(plan: ServingPlan) -> Table:
    """One row per kind of memory, the sum, and the most requests that fit."""
    table = Table(
        title=f"{plan.batch} requests of {plan.context:,} tokens on {plan.device}, {plan.precision}",
        title_justify="left",
        box=None,
        show_header=False,
    )
    rows = {
        "weights, as stored": plan.weights,
        "key-value cache": plan.cache,
        f"activations, at most {_WHEN[plan.when].format(prompt=plan.prompt)}": plan.activations,
        "overhead of the device": plan.overhead,
        "together": plan.peak_bytes,
        "capacity": plan.capacity_bytes,
    }
    for name, size in rows.items():
        table.add_row(name, format_bytes(size), style="bold" if name == "together" else None)
    most = f"{plan.most_requests:,}{' or more' if plan.most_requests == MOST_REQUESTS else ''}"
    table.add_row("requests of this context that fit at most", most)
    return table


_WHEN = {
    "prompt": "while prompts of {prompt:,} tokens are read",
    "token": "while the last token is made",
}
