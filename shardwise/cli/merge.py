"""``shardwise merge``: an adapter into the model that it was trained beside, or out of it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.export import Dtype, told_of_merge, told_of_writing


def command(
    base: Annotated[
        str, typer.Argument(help="folder or hub id of a model; with --undo a merged one", metavar="BASE")
    ],
    adapter: Annotated[Path, typer.Argument(help="folder of an adapter in PEFT's format", metavar="ADAPTER")],
    out: Annotated[Path, typer.Argument(help="folder to write", metavar="OUT")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="fp32, bf16 or fp16, of the weights; without, as the base has them")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="take the adapter out of what was merged")] = False,
) -> None:
    """Add an adapter into its base, layer by layer, and write the model as a Hugging Face folder."""
    from shardwise.train.merge import merge, unmerge

    kind = dtype.value if dtype else None
    if undo:
        typer.echo(told_of_writing(unmerge(base, adapter, out, kind)))
        return
    written, merged = merge(base, adapter, out, kind)
    typer.echo(told_of_writing(written))
    typer.echo(told_of_merge(merged))
