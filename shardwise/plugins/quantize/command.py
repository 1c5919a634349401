"""``shardwise quantize``: a model in few bits, and what that cost."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import AsJson, path_argument
from shardwise.core.errors import NumericsError
from shardwise.core.scheme import scheme_of
from shardwise.launch.placement import launched_by
from shardwise.plugins.quantize.job import quantize_model
from shardwise.plugins.quantize.settings import Settings

if TYPE_CHECKING:
    from shardwise.plugins.quantize.report import Quantized
    from shardwise.plugins.quantize.state import LayerRow


def command(
    model: Annotated[
        str, typer.Argument(help="folder of a run or of a model, or a Hub id", metavar="MODEL|RUN")
    ],
    out: Annotated[Path, path_argument("folder to write", "OUT")],
    scheme: Annotated[
        str,
        typer.Option(help="w8a16, w8a8, w4a16-g128, w4a16-channel (2 to 8 bits), fp8 or nf4", metavar="NAME"),
    ] = "w4a16-g128",
    method: Annotated[str, typer.Option(help="rtn, hqq, gptq, awq or kashin", metavar="NAME")] = "gptq",
    rotate: Annotated[
        str | None,
        typer.Option(
            help="fold a rotation into the weights first, which spreads outliers: hadamard", metavar="NAME"
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="calibration text: stdlib, files or a Hub id; default: the run's data, or stdlib",
            metavar="DATA",
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(help="text to measure the loss on; default: held-out calibration text", metavar="DATA"),
    ] = None,
    sequences: Annotated[int, typer.Option(help="number of calibration sequences", min=0)] = 128,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="tokens per sequence; default: the run's, or the context up to 2048", min=2),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer to use instead of the model's: bytes, a folder or a Hub id")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="write nothing and exit with 6 above this KL divergence, in nats per token", min=0.0
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Quantize the linear layers and experts of a model, and write a folder in compressed-tensors format."""
    settings = Settings(
        model, out, scheme, method, calibrate, evaluate, tokenizer, sequences, sequence_length, max_kl, rotate
    )
    _quantize_and_print(settings, as_json)


def _quantize_and_print(settings: Settings, as_json: bool) -> None:
    """Quantize and print the result, on rank 0. Raises NumericsError above the limit."""
    placement = launched_by()
    if placement is not None and placement.rank != 0:  # rank 0 speaks for all
        if quantize_model(settings).folder is None:
            raise typer.Exit(NumericsError.exit_code)
        return
    quantized = quantize_model(
        settings, say=(lambda _: None) if as_json else typer.echo, watching=_progress_bar
    )
    if as_json:
        typer.echo(json.dumps(quantized.as_dict()))
    else:
        _show_result(quantized)
    if quantized.folder is None:
        raise NumericsError(
            "quantization lost too much",
            where=settings.model,
            why=f"the KL divergence is {quantized.lost.kl:.3g} nats per token, above {settings.max_kl:g}",
            fix="give more bits, smaller groups or another method; the finished blocks are kept for a higher --max-kl",
        )


@contextmanager
def _progress_bar(blocks: int, finished: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("blocks", total=blocks)
        yield lambda index: bar.update(task, completed=index + 1)


def _alike(rows: Sequence[LayerRow]) -> dict[tuple[str, str], list[LayerRow]]:
    """The rows of each line of the table, by name and method: those of a layer's experts share a line."""
    lines: dict[tuple[str, str], list[LayerRow]] = {}
    for row in rows:
        name = row.name
        if row.stack:  # experts.3.up_proj becomes experts.*.up_proj
            name = re.sub(r"\.\d+(\.\w+)$", r".*\1", name)
        lines.setdefault((name, row.method), []).append(row)
    return lines


def _show_result(quantized: Quantized) -> None:
    from rich.console import Console
    from rich.table import Table

    from shardwise.core.units import format_bytes

    table = Table(box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for name in ("shape", "method", "error", "bits"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for (pattern, method), rows in _alike(quantized.layers).items():
        count = f"{len(rows)} of " if rows[0].stack else ""
        shape = count + "×".join(map(str, rows[0].shape))
        bits = f"{sum(row.bits for row in rows) / len(rows):.3f}"
        if rows[0].why:
            table.add_row(pattern, shape, f"kept: {rows[0].why}", "", bits)
        else:
            error = sum(row.error for row in rows) / len(rows)
            table.add_row(pattern, shape, method, f"{error:.4f}", bits)
    Console(highlight=False).print(table)
    for sentence in filter(None, (*quantized.expert_sentences, quantized.kept_sentence)):
        typer.echo(sentence)
    perplexity = quantized.lost.perplexity
    reader = ""
    if scheme_of(quantized.scheme).activation_bits == 8:
        reader = ", with activations in 8 bits as transformers rounds them"
    typer.echo(
        f"{quantized.bits:.3f} bits per weight, {quantized.block_bits:.3f} in the blocks;"
        f" perplexity {perplexity['base']:.4f} → {perplexity['quantized']:.4f},"
        f" KL {quantized.lost.kl:.3g} nats per token, on {quantized.lost.tokens:,} tokens{reader}"
    )
    typer.echo(
        f"peak memory {format_bytes(quantized.measured_peak_bytes)},"
        f" predicted {format_bytes(quantized.predicted_peak_bytes)}"
    )
    if quantized.folder is not None:
        typer.echo(f"{quantized.folder}: {format_bytes(quantized.stored_bytes)}, read back and compared")
