"""Law files: TOML with coefficients, sources and the range of the runs behind them. ``laws/`` has published ones.

``kind`` is ``parametric`` (coefficients E, A, B, alpha, beta), ``table`` (rows of parameters, FLOPs and tokens, to
which a power of the FLOPs is fitted) or ``ratio`` (tokens_per_parameter). ``loss`` names the published parametric law
whose loss a table or a ratio predicts. ``shardwise fit`` writes a parametric file, with its points and intervals.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.json_file import read_text
from shardwise.core.paths import path_of
from shardwise.plugins.scaling.law import (
    FLOPS_PER_PARAMETER,
    FittedRange,
    Law,
    ParametricLaw,
    PowerLaw,
    log_log_fit,
)

LAWS_FOLDER = Path(__file__).with_name("laws")
DEFAULT_LAW = "besiroglu"
COEFFICIENTS = ("E", "A", "B", "alpha", "beta")


def names() -> list[str]:
    """The published laws."""
    return sorted(path.stem for path in LAWS_FOLDER.glob("*.toml"))


def read_law(name: str) -> Law:
    """The law of a name, or of a file.

    Raises:
        RecipeError: there is no such law, or the file is not one; the error names the key.
    """
    known = LAWS_FOLDER / f"{name}.toml"
    path = known if name in names() else path_of(name)
    if path is not known and not path.is_file():
        choices = ", ".join(names())
        why = f"the laws are {choices}, or a file that shardwise fit wrote"
        raise RecipeError(f"unknown law '{name}'", where="law", why=why)
    try:
        values = tomllib.loads(read_text(path))
        return _law_from(path.stem if path is known else name, values)
    except (KeyError, TypeError, ValueError, RecursionError) as fault:
        why = f"{fault.args[0]} is missing" if isinstance(fault, KeyError) else str(fault)
        raise RecipeError(
            f"{path.name} is not a law file", where=str(path), why=why, fix="write one with shardwise fit"
        ) from None


def law_text(law: ParametricLaw, points: Sequence[tuple[str, float, float, float]]) -> str:
    """The file of a fitted law.

    Args:
        points: run, parameters, tokens and loss of the runs that it fits.
    """
    # JSON's strings and numbers are TOML's.
    lines = ['kind = "parametric"', f"source = {json.dumps(law.source)}", "", "[coefficients]"]
    lines += [f"{key} = {getattr(law, key)!r}" for key in COEFFICIENTS]
    if law.intervals:
        lines += ["", "[intervals] # 95 %, bootstrap"]
        lines += [f"{key} = [{low!r}, {high!r}]" for key, (low, high) in law.intervals.items()]
    if law.fitted is not None:
        lines += ["", "[range]"]
        ranges = ((key, getattr(law.fitted, key)) for key in ("parameters", "tokens", "flops"))
        lines += [f"{key} = [{low!r}, {high!r}]" for key, (low, high) in ranges]
    for run, parameters, tokens, loss in points:
        lines += ["", "[[points]]", f"run = {json.dumps(run)}"]
        lines += [f"parameters = {parameters!r}", f"tokens = {tokens!r}", f"loss = {loss!r}"]
    return "\n".join(lines) + "\n"


def _law_from(name: str, values: Mapping[str, Any]) -> Law:
    """The law in a file's values. Raises KeyError, TypeError or ValueError."""
    source = values["source"]
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"source must be text that says where the figures are from, found {source!r:.40}")
    fitted = _fitted_range(values["range"]) if "range" in values else None
    match values["kind"]:
        case "parametric":
            return _parametric_law(name, values)
        case "table":
            return _power_law(name, source, values, fitted)
        case "ratio":
            ratio = _positive(values["tokens_per_parameter"], "tokens_per_parameter")
            # C = 6 N D = 6 ratio N², so N is a power of C with the exponent 1/2.
            scale = (FLOPS_PER_PARAMETER * ratio) ** -0.5
            return PowerLaw(name, source, scale, 0.5, _loss_law(values), fitted)
        case other:
            raise ValueError(f"kind must be parametric, table or ratio, found {other!r}")


def _parametric_law(name: str, values: Mapping[str, Any]) -> ParametricLaw:
    fitted = _fitted_range(values["range"]) if "range" in values else None
    numbers = {key: _positive(values["coefficients"][key], key) for key in COEFFICIENTS}
    intervals = {key: _low_and_high(pair, key) for key, pair in dict(values.get("intervals", {})).items()}
    return ParametricLaw(name, values["source"], **numbers, fitted=fitted, intervals=intervals)


def _power_law(name: str, source: str, values: Mapping[str, Any], fitted: FittedRange | None) -> PowerLaw:
    rows = []
    for number, row in enumerate(values["rows"], 1):
        parameters, flops, tokens = (_positive(value, f"rows[{number}]") for value in row)
        rows.append((parameters, flops, tokens))
    if len({flops for _, flops, _ in rows}) < 2:
        raise ValueError("rows must have at least two numbers of FLOPs")
    scale, exponent = log_log_fit([flops for _, flops, _ in rows], [parameters for parameters, _, _ in rows])
    if not 0 < exponent < 1:
        raise ValueError(f"rows must grow: parameters ~ FLOPs^{exponent:.3g}")
    return PowerLaw(name, source, scale, exponent, _loss_law(values), fitted, tuple(rows))


def _loss_law(values: Mapping[str, Any]) -> ParametricLaw:
    """The parametric law that predicts an allocation's loss."""
    name = values["loss"]
    if name in names():
        table = tomllib.loads(read_text(LAWS_FOLDER / f"{name}.toml"))
        if table["kind"] == "parametric":
            return _parametric_law(name, table)
    raise ValueError(f"loss must name a parametric law, found {name!r}")


def _fitted_range(table: Mapping[str, Any]) -> FittedRange:
    return FittedRange(
        *(_low_and_high(table[key], f"range.{key}") for key in ("parameters", "tokens", "flops"))
    )


def _low_and_high(value: Any, key: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{key} must be two numbers, found {value!r}")
    low, high = (_positive(bound, key) for bound in value)
    return low, high


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{key} must be a positive number, found {value!r:.40}")
    return float(value)
