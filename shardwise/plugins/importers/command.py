"""``shardwise from``: a configuration file of another trainer as a recipe. Imports no torch."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import AsJson, Overrides, path_argument, path_option
from shardwise.cli.plan import ModelOption, WorldOption
from shardwise.core.errors import shorten
from shardwise.plugins.importers.collect import KeyRow
from shardwise.plugins.importers.convert import Imported, imported
from shardwise.recipe.yaml_source import written


def command(
    file: Annotated[
        Path,
        path_argument(
            "DeepSpeed JSON, Accelerate YAML, TrainingArguments JSON, YAML of TRL, LLaMA-Factory, Axolotl or"
            " LitGPT, torchtitan TOML",
            "FILE",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, path_option("write the recipe")] = None,
    model: ModelOption = None,
    world: WorldOption = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="deepspeed, accelerate, trainer, trl, llamafactory, axolotl, litgpt or torchtitan; recognised if"
            " left out",
            metavar="NAME",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="a line for every key, with the reason")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a configuration file of another trainer to a recipe, with what becomes of every key."""
    from shardwise.core.atomic_file import write_whole
    from shardwise.plugins.importers.checked import read_imported

    conversion = imported(file, model=model, world=world, kind=kind, overrides=overrides or ())
    if as_json:
        rows = [
            {"key": r.key, "value": r.value, "status": r.status, "detail": r.detail} for r in conversion.rows
        ]
        values = {
            "format": conversion.format.name,
            "recognised_by": conversion.keys,
            "keys": rows,
            "recipe": conversion.values,
        }
        print(json.dumps(values, indent=1, default=str))
    else:
        _print_import(conversion, every)
    if out is not None:
        write_whole(out, conversion.text(out.parent).encode("utf-8"))
        typer.echo(f"{out}: next, shardwise plan {out}", err=as_json)
        if pins := " ".join(f"{key}=null" for key in conversion.costly_pins):
            typer.echo(f"without its pins that cost time: shardwise plan {out} {pins}", err=as_json)
    elif not as_json:
        typer.echo(f"\n{conversion.text()}", nl=False)
    read_imported(conversion)


_WIDTH = 80
_LONG = 24
"""More mapped keys than these are counted by section of the recipe."""


def _row_groups(conversion: Imported, every: bool) -> Iterator[tuple[str, list[str], str | None]]:
    """(title, lines, colour) of the rows by their weight for the user; assumptions, to act on, come last."""
    lost, mapped = conversion.of("no equivalent", "unknown"), conversion.of("mapped")
    idle, defaults = conversion.of("not needed"), conversion.of("default")
    yield f"no equivalent: {_key_count(lost)}", [_row_text(row) for row in lost], "yellow"
    sections = Counter(row.detail.partition(",")[0].partition(".")[0] for row in mapped)
    counted = [", ".join(f"{name} {count}" for name, count in sections.items()) + "; --all lists them"]
    few = every or len(mapped) <= _LONG
    yield f"{_key_count(mapped)} mapped", [_row_text(row) for row in mapped] if few else counted, None
    lines = [f"{row.key} → {row.detail}" for row in defaults]
    names = [", ".join(row.key.partition(" (")[0] for row in defaults)] * bool(defaults)
    yield (
        f"{_key_count(defaults)} left out, so {conversion.format.title}'s defaults",
        lines if every else names,
        None,
    )
    names = [f"{_first_of([row.key for row in idle])}; --all says why"] * bool(idle)
    yield (
        f"{_key_count(idle)} not needed",
        [_row_text(row) for row in idle] if every else names,
        "bright_black",
    )
    assumed = [f"{row.key}={written(row.value)}: {row.detail}" for row in conversion.of("assumed")]
    yield f"{_key_count(assumed)} assumed; give KEY=VALUE to replace", assumed, "cyan"


def _key_count(rows: Sized) -> str:
    return f"{len(rows)} key" + "s" * (len(rows) != 1)


def _first_of(keys: Sequence[str]) -> str:
    """The keys that fit into a line, and how many others there are."""
    count = len(keys)
    while count > 1 and len(", ".join(keys[:count])) > _WIDTH - 32:
        count -= 1
    return ", ".join(keys[:count]) + f" and {len(keys) - count} more" * (count < len(keys))


def _row_text(row: KeyRow) -> str:
    value = shorten(json.dumps(row.value, default=str, ensure_ascii=False), 40)
    said = f"unknown: {row.detail}" if row.status == "unknown" else row.detail
    return f"{row.key}: {value} → {said}"


def _print_import(conversion: Imported, every: bool) -> None:
    more = f" and {len(conversion.keys) - 3} more" if len(conversion.keys) > 3 else ""
    by = f", recognised by {', '.join(conversion.keys[:3])}{more}" if conversion.keys else ""
    typer.echo("\n".join(textwrap.wrap(f"{conversion.path.name} ({conversion.format.title}{by})", _WIDTH)))
    for title, lines, colour in _row_groups(conversion, every):
        if lines:
            typer.secho(f"\n{title}", bold=True, fg=colour)
        for line in lines:
            wrapped = textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            typer.secho("\n".join(wrapped), fg=colour)
