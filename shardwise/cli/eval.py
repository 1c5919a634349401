"""``shardwise eval``: the perplexity of a model on any data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import AsJson


def command(
    model: Annotated[
        Path, typer.Argument(help="folder of a run, or of a model in Hugging Face's format", metavar="DIR")
    ],
    data: Annotated[
        str,
        typer.Argument(help="stdlib, files, a folder or the id of a dataset, as data.source", metavar="DATA"),
    ],
    adapter: Annotated[
        Path | None, typer.Option(help="folder of an adapter to evaluate the model with", metavar="DIR")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="leave out the adapter that the run trained")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer to use instead of the model's: bytes, a folder or a Hub id")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="tokens of a sequence; default: the model's, at most 1024", min=1)
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="number of sequences; default: all", min=1)] = None,
    batch: Annotated[int, typer.Option(help="sequences at a time", min=1)] = 8,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(help="such as cpu, cuda or cuda:1")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Print the loss and the perplexity of a model on any data."""
    from shardwise.jobs.evaluating import EvaluationOptions, perplexity

    named = "adapter" if adapter is not None else "base" if base else None
    folders = (("adapter", adapter),) if adapter is not None else ()
    options = EvaluationOptions(
        named, folders, tokenizer, sequence_length, sequences, batch, precision, device
    )
    found = perplexity(model, data, options, _show)
    if as_json:
        typer.echo(json.dumps({**vars(found), "perplexity": found.perplexity}))
        return
    read = f"{found.targets:,} targets in {found.sequences:,} sequences of {found.sequence_length:,} tokens"
    typer.echo(f"loss {found.loss:.4f} nats per target, perplexity {found.perplexity:.4g}, of {read}")


def _show(done: int, whole: int) -> None:
    """A counter on a terminal."""
    if sys.stderr.isatty():
        print(
            f"\r{done:,} of {whole:,} sequences" + "\n" * (done == whole), end="", file=sys.stderr, flush=True
        )
