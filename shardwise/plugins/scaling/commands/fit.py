"""``shardwise fit``: fit a scaling law to finished runs, and write it as a file that ``budget`` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.common import AsJson, path_argument, path_option
from shardwise.cli.spinner import working

if TYPE_CHECKING:
    from shardwise.plugins.scaling.fit import Fit


def command(
    runs: Annotated[list[Path], path_argument("folders of finished runs", "RUN...")],
    out: Annotated[
        Path,
        path_option("write the law, and its picture with suffix .png"),
    ] = Path("law.toml"),
    flops: Annotated[
        list[float] | None,
        typer.Option(help="predict the optimum of this many FLOPs; may be repeated", min=1, max=1e40),
    ] = None,
    draws: Annotated[int, typer.Option(help="bootstrap draws for the 95 % intervals", min=20)] = 1000,
    as_json: AsJson = False,
) -> None:
    """Fit L(N, D) = E + A / N^alpha + B / D^beta to the ends of runs.

    Use at least 3 sizes and 3 numbers of tokens; branches of one WSD run give several. A prediction more than two
    orders of magnitude outside of the runs is marked.
    """
    from shardwise.core.atomic_file import write_whole
    from shardwise.plugins.scaling.files import law_text
    from shardwise.plugins.scaling.fit import fit_law
    from shardwise.plugins.scaling.fitting import run_points
    from shardwise.plugins.scaling.report.pictures import scaling_picture
    from shardwise.report.pictures import png

    with working("reading the runs") as progress:
        points = run_points(runs)
        progress(f"fitting {draws:,} bootstrap draws")
        fit = fit_law(points, draws=draws, name=str(out))
    rows = [(point.run, point.parameters, point.tokens, point.loss) for point in points]
    write_whole(out, law_text(fit.law, rows).encode("utf-8"))
    write_whole(out.with_suffix(".png"), png(scaling_picture(points, fit.law)))
    values = _fit_json(fit, flops or [])
    print(json.dumps(values, indent=1) if as_json else _fit_text(values, out))


def _fit_json(fit: Fit, budgets: list[float]) -> dict[str, Any]:
    """The object that --json prints."""
    from shardwise.plugins.scaling.isoflop import envelope, exponent, isoflops
    from shardwise.plugins.scaling.law import extrapolation

    law = fit.law
    points = fit.points
    vertices = [
        (isoflop.flops, isoflop.optimum[0]) for isoflop in isoflops(points) if isoflop.optimum is not None
    ]
    predictions = []
    for budget in budgets:
        best = law.optimum(budget)
        predictions.append(
            {
                "flops": budget,
                "parameters": best.parameters,
                "parameters_interval": fit.optimum_interval(budget),
                "tokens": best.tokens,
                "loss": law.loss(best.parameters, best.tokens),
                "loss_interval": fit.loss_interval(best.parameters, best.tokens),
                "warning": extrapolation(law, best),
            }
        )
    return {
        "points": len(points),
        "coefficients": {key: getattr(law, key) for key in ("E", "A", "B", "alpha", "beta")},
        "intervals": law.intervals,
        "undetermined": fit.undetermined,
        "residual": fit.residual,
        "exponent": law.exponent,
        "exponent_interval": fit.exponent_interval(),
        "exponent_envelope": exponent([(point[0], point[1]) for point in envelope(points)]),
        "exponent_isoflop": exponent(vertices),
        "predictions": predictions,
    }


def _fit_text(values: dict[str, Any], out: Path) -> str:
    from shardwise.core.units import format_count, format_percent

    lines = [f"L(N, D) = E + A / N^alpha + B / D^beta, fitted to {values['points']} points"]
    for key, value in values["coefficients"].items():
        low, high = values["intervals"][key]
        lines.append(f"  {key:6}{value:10.4g}   95 % interval {low:.4g} to {high:.4g}")
    for key in values["undetermined"]:
        lines.append(
            f"  {key} is not determined: its interval reaches a limit of the search; train more runs"
        )
    low, high = values["exponent_interval"]
    lines.append(f"N ~ C^{values['exponent']:.3f} (95 % interval {low:.3f} to {high:.3f})")
    for key, name in (("exponent_envelope", "envelope"), ("exponent_isoflop", "IsoFLOP parabolas")):
        if values[key] is not None:
            lines.append(f"  by the {name}: N ~ C^{values[key]:.3f}")
    lines.append(f"median error of the loss: {format_percent(values['residual'], 2)}")
    for prediction in values["predictions"]:
        least, most = prediction["parameters_interval"]
        lines.append(
            f"{prediction['flops']:.3g} FLOPs: {format_count(prediction['parameters'])} parameters"
            f" ({format_count(least)} to {format_count(most)})"
            f" on {format_count(prediction['tokens'])} tokens, loss {prediction['loss']:.4f}"
            f" ({prediction['loss_interval'][0]:.4f} to {prediction['loss_interval'][1]:.4f})"
        )
        if prediction["warning"]:
            lines.append(f"  {prediction['warning']}")
    return "\n".join([*lines, f"law: {out}, picture: {out.with_suffix('.png')}"])
