"""The tables of docs/reference/accuracy.md from the results of benchmarks/calibrate.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("runs", "median", "90 %", "bias", "groups", "Spearman", "pairs in order", "regret", "worst")


def tables(result: Mapping[str, Any]) -> str:
    """All tables in Markdown, each below its heading."""
    factors = result["factors"]
    missed = [f"- {each}" for each in misses(result["held out"])]
    parts = [
        "### Sources held out",
        _table(result["held out"]),
        "Missed goals:",
        "\n".join(missed),
        "### By stack, with one factor each",
        _table(result["by stack"], factors),
        "### By stack, without a factor",
        _table(result["without a factor"]),
        "### By source",
        _table(result["by source"]),
        "### The playbook by place in its sweeps",
        _table(result["playbook"]),
        f"Without the {result['stalled']} runs that others of the playbook contradict:",
        _table(result["playbook, without stalls"]),
        "### Fitted constants",
        _columns(
            ("constant", "fit"), ((name, f"{value:.3g}") for name, value in result["constants"].items())
        ),
        "### Runs that are left out",
        _columns(("reason", "runs"), ((reason, str(count)) for reason, count in result["left out"].items())),
    ]
    return "\n\n".join(parts)


def misses(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What misses its goal, in words."""
    limits = (
        ("median", "median error", 0.08),
        ("regret", "median regret", 0.05),
        ("worst regret", "worst regret", 0.25),
    )
    found = []
    for name, row in rows.items():
        for key, words, limit in limits:
            if row.get(key, 0.0) > limit:
                found.append(f"{name}: the {words} is {_percent(row[key])}, more than {limit:.0%}")
        if row.get("spearman", 1.0) < 0.85:
            found.append(f"{name}: Spearman's rank correlation is {row['spearman']:.2f}, less than 0.85")
    return found


def _table(rows: Mapping[str, Mapping[str, Any]], factors: Mapping[str, float] | None = None) -> str:
    head = ["", *HEAD, *(["factor"] if factors else [])]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in rows.items():
        cells = [name, str(row["runs"]), _percent(row["median"]), _percent(row["p90"]), f"{row['bias']:+.0%}"]
        if "groups" in row:
            cells += [str(row["groups"]), f"{row['spearman']:.2f}", _percent(row["pairs"])]
            cells += [_percent(row["regret"]), _percent(row["worst regret"])]
        else:
            cells += [""] * 5
        lines.append(cells + ([f"{factors[name]:.2f}"] if factors else []))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns(head: Sequence[str], rows: Any) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.095 else f"{value:.1%}"


MEMORY_GOALS = (("FSDP2", 0.08),)
VERDICT_GOAL = 0.95


def memory_tables(result: Mapping[str, Any]) -> str:
    """The tables of benchmarks/memory.py in Markdown."""
    stacks, fits = result["by stack"], result["fits"]
    head = "| stack | runs | median | 90 % | bias | published / predicted, 5 to 95 % |\n|---|---:|---:|---:|---:|---:|"
    lines = [head]
    for name, row in stacks.items():
        spread = row["published over predicted"]
        lines.append(
            f"| {name} | {row['runs']} | {_percent(row['median'])} | {_percent(row['p90'])} | {row['bias']:+.0%}"
            f" | {spread['p5']:.2f} to {spread['p95']:.2f} |"
        )
    verdicts = ["| stack | runs | out of memory | predicted not to fit | precision | recall |"]
    verdicts.append("|---|---:|---:|---:|---:|---:|")
    for name, row in fits.items():
        if row["failed"] or row["refused"]:
            found = (_share(row["precision"]), _share(row["recall"]))
            verdicts.append(
                f"| {name} | {row['runs']} | {row['failed']} | {row['refused']} | {' | '.join(found)} |"
            )
    missed = [f"- {each}" for each in memory_misses(stacks, fits)] or ["- none"]
    reasons = _columns(("reason", "runs"), ((each, str(count)) for each, count in result["left out"].items()))
    parts = [
        "### Peak",
        "\n".join(lines),
        "### Does not fit",
        "\n".join(verdicts),
        "Missed goals:",
        "\n".join(missed),
    ]
    return "\n\n".join([*parts, "### Rows that are left out", reasons])


def memory_misses(
    stacks: Mapping[str, Mapping[str, Any]], fits: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What misses its goal, in words."""
    found = []
    for name, limit in MEMORY_GOALS:
        if stacks[name]["median"] > limit:
            found.append(
                f"{name}: the median error is {_percent(stacks[name]['median'])}, more than {limit:.0%}"
            )
    for name, row in fits.items():
        for kind in ("precision", "recall"):
            if row[kind] is not None and row[kind] < VERDICT_GOAL:
                found.append(
                    f'{name}: {kind} of "does not fit" is {row[kind]:.1%}, less than {VERDICT_GOAL:.0%}'
                )
    return found


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
