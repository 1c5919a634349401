"""``shardwise from``: a configuration file of another trainer as a recipe. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import AsJson, Overrides

if TYPE_CHECKING:
    from rich.table import Table

    from shardwise.importers.convert import Imported

ModelOption = Annotated[
    str | None,
    typer.Option(help="preset, folder or Hub id of the model, instead of the file's", metavar="MODEL"),
]
WorldOption = Annotated[
    str | None,
    typer.Option(help="devices, instead of the file's: 8, or 8xH100-80GB", metavar="N|CLUSTER"),
]


def command(
    file: Annotated[
        Path,
        typer.Argument(
            help="DeepSpeed JSON, Accelerate YAML, TrainingArguments JSON, Axolotl or LitGPT YAML",
            metavar="FILE",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="write the recipe", metavar="FILE")] = None,
    model: ModelOption = None,
    world: WorldOption = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="deepspeed, accelerate, trainer, axolotl or litgpt; recognised if left out",
            metavar="NAME",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a configuration file of another trainer to a recipe, with a table of every key."""
    from rich.console import Console

    from shardwise.core.atomic_file import write_whole
    from shardwise.importers.convert import imported
    from shardwise.jobs.importing import read_imported

    found = imported(file, model=model, world=world, kind=kind, overrides=overrides or ())
    if as_json:
        rows = [{"key": r.key, "value": r.value, "status": r.status, "detail": r.detail} for r in found.rows]
        print(json.dumps({"format": found.format.name, "keys": rows, "recipe": found.values}, indent=1))
    else:
        Console().print(_table(found))
        typer.echo(found.sentence())
    if out is not None:
        write_whole(out, found.text().encode("utf-8"))
        typer.echo(f"{out}: next, shardwise plan {out}", err=as_json)
    elif not as_json:
        typer.echo(f"\n{found.text()}", nl=False)
    read_imported(found)


_STYLES = {"no equivalent": "yellow", "unknown": "red", "not needed": "dim", "assumed": "cyan"}


def _table(found: Imported) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{found.path.name} ({found.format.title})", title_justify="left", box=None)
    table.add_column("key: value", overflow="fold")
    table.add_column("in the recipe, or why not")
    for row in found.rows:
        said = row.key if row.status == "default" else f"{row.key}: {json.dumps(row.value, default=str)}"
        place = f"→ {row.detail}" if row.status in ("mapped", "default") else f"{row.status}: {row.detail}"
        table.add_row(escape(said), escape(place), style=_STYLES.get(row.status))
    return table
