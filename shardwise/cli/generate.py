"""``shardwise generate``: sample from what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[Path, typer.Argument(help="folder of a run", metavar="DIR")],
    prompt: Annotated[str, typer.Option(help="text to continue")] = "",
    tokens: Annotated[int, typer.Option(help="how many tokens to sample", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token", min=0.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="sample among so many most likely tokens", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
) -> None:
    """Continue a prompt with a trained model."""
    from shardwise.train.sample import text_from_run

    options = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    typer.echo(prompt, nl=False)
    for piece in text_from_run(model, prompt, **options):
        typer.echo(piece, nl=False)
    typer.echo()
