"""``shardwise merge``: merge an adapter into its base, or with ``--undo`` unmerge it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import path_argument
from shardwise.cli.export import Dtype, told_of_merge, told_of_writing
from shardwise.cli.spinner import working


def command(
    base: Annotated[
        str, typer.Argument(help="folder or Hub id of a model; with --undo a merged one", metavar="BASE")
    ],
    adapter: Annotated[
        Path, path_argument("folder of an adapter in PEFT's format, or of a run that trained one", "ADAPTER")
    ],
    out: Annotated[Path, path_argument("folder to write", "OUT")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="dtype of the weights: fp32, bf16 or fp16; default: the base's")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="unmerge: take the adapter out again")] = False,
) -> None:
    """Merge an adapter into its base, layer by layer, and write the model as a Hugging Face folder."""
    from shardwise.plugins.merge.merging import merge_adapter, unmerge

    kind = dtype.value if dtype else None
    if undo:
        with working("taking the adapter out"):
            written = unmerge(base, adapter, out, kind)
        typer.echo(told_of_writing(written))
        return
    with working("merging"):
        written, merged = merge_adapter(base, adapter, out, kind)
    typer.echo(told_of_writing(written))
    typer.echo(told_of_merge(merged))
