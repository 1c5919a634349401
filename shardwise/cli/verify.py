"""``shardwise verify``: compare a strategy with one plain process, step by step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import AsJson, Overrides, RecipeArgument, run_workers
from shardwise.cli.spinner import working
from shardwise.core.errors import DataError, NumericsError
from shardwise.jobs.request import measured_cluster, read_request
from shardwise.verifier.verdict import ComparedCounts

if TYPE_CHECKING:
    from shardwise.verifier.verdict import Verdict


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Train the strategy and a single-process reference on the same data and compare them."""
    asked, _ = read_request(recipe, overrides or [])
    from shardwise.jobs.verifying import verify_plan

    cluster = measured_cluster(asked)
    with working() as progress:
        plan, verdict = verify_plan(asked, cluster, run_workers, steps=steps, progress=progress)
    typer.echo(json.dumps(verdict.as_dict()) if as_json else _verdict_table(plan.line, verdict))
    if verdict.compares_nothing:
        steps = (verdict.proof or verdict).untrained
        raise DataError(
            "nothing to compare: all advantages are zero",
            where="objective.rewards",
            why=f"in {'all' if steps == verdict.steps else 'the first'} {steps} steps every group has equal rewards,"
            " or its completions were cut",
            fix="give rewards that differ within a group, a larger objective.group, or more --steps",
        )
    if not verdict.passed:
        raise NumericsError(
            "the strategy does not train as one process does",
            where=plan.line,
            why=_why(verdict),
            fix="verify on one device, where the model does not depend on the layout"
            if (verdict.proof or verdict).depends_on_layout
            else "compare with another strategy to see which technique differs, and report it",
        )


def _why(verdict: Verdict) -> str:
    """The comparison that failed; the proof first, because noise does not reach it."""
    failed = verdict if verdict.proof is None or verdict.proof.passed else verdict.proof
    if failed.allowed is None:
        worst = f"(worst parameter: {failed.worst_parameter})"
        within = f" in {failed.precision}" if failed is verdict.proof else ""
        return f"a relative difference{within} is above {failed.tolerance:g} {worst}"
    if failed.unskipped:
        return f"{failed.unskipped} of {failed.steps} steps updated with a gradient that is not finite"
    if failed.skips_on:
        return f"it skipped {failed.skipped[0]} updates, the plain process {failed.skipped[1]}"
    above = [name for name, difference, limit in failed.rows if difference > limit]
    worst = {"gradients": failed.worst_gradient, "parameters": failed.worst_parameter}.get(above[0], "")
    where = f" (worst parameter: {worst})" if worst else ""
    return f"a relative difference of the {above[0]} is above what rounding noise explains{where}"


def _verdict_table(line: str, verdict: Verdict) -> str:
    lines = [
        f"{line} against one plain process{_in_precision(verdict)}, {verdict.steps} steps, largest relative difference:"
    ]
    lines += _verdict_rows(verdict)
    if (proof := verdict.proof) is not None:
        lines.append(f"the same layout in {proof.precision} against one plain process in {proof.precision}:")
        lines += _verdict_rows(proof)
    return "\n".join(lines)


def _in_precision(verdict: Verdict) -> str:
    return "" if verdict.allowed is None else f" in {verdict.precision}"


def _verdict_rows(verdict: Verdict) -> list[str]:
    """Quantities with their differences, notes, and whether the comparison passed."""
    said = "nothing compared" if verdict.untrained else "passed" if verdict.agrees else "FAILED"
    if verdict.allowed is None:
        lines = [f"  {name:<14} {difference:.2e}" for name, difference, _ in verdict.rows]
        lines += [f"  {note}" for note in verdict.notes]
        return [*lines, f"  {said} at a tolerance of {verdict.tolerance:g}"]
    counted = verdict.counted or ComparedCounts(*[(1, 1)] * 4)
    lines = [
        f"  {name:<14} {_against_limit(difference, limit, *count)}"
        for (name, difference, limit), count in zip(verdict.rows, vars(counted).values(), strict=True)
    ]
    if any(verdict.skipped):
        ours, theirs = verdict.skipped
        lines.append(f"  skipped updates: {ours}, of the plain process {theirs}; their norms are left out")
    lines += [f"  {note}" for note in verdict.notes]
    return [*lines, f"  {said} within the rounding noise of plain processes"]


def _against_limit(difference: float, limit: float, compared: int, whole: int) -> str:
    """A difference and its limit, and in how many steps or parameters noise leaves it comparable."""
    if not whole:
        return "not compared"
    if not compared:
        return "not compared, because rounding noise would hide an error of 10 %"
    hidden = f", in {compared} of {whole}; noise hides the others" if compared < whole else ""
    return f"{difference:.2e}, allowed {limit:.2e}{hidden}"
