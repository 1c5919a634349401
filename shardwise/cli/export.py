"""``shardwise export``: a trained model as a folder that transformers loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import path_argument, path_option
from shardwise.cli.spinner import working
from shardwise.core.plugins import require_plugin

if TYPE_CHECKING:
    from shardwise.core.run_files import Which
    from shardwise.exporter.export_run import Merge
    from shardwise.exporter.hf_writer import Written


class Dtype(StrEnum):
    """The dtypes of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class GgufType(StrEnum):
    """The types of matrices in a GGUF file."""

    fp32 = "fp32"
    fp16 = "fp16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


def command(
    run: Annotated[Path, path_argument("folder of a run, or of a quantized model", "RUN")],
    out: Annotated[Path | None, path_argument("folder to write", "OUT")] = None,
    to: Annotated[Path | None, path_option("another way to give OUT", "OUT")] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="dtype of the weights: fp32, bf16 or fp16; default: the run's precision"),
    ] = None,
    base: Annotated[
        bool,
        typer.Option("--base", help="write the frozen base of the run's adapters, dequantized, without them"),
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="the best checkpoint (checkpoint.best) instead of the newest")
    ] = False,
    gguf: Annotated[
        GgufType | None,
        typer.Option(
            help="write one GGUF file for llama.cpp with matrices of this type: fp32, fp16, q8_0 or q4_0"
        ),
    ] = None,
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face folder, with its adapters merged where it has some.

    Of a module of your own (model.factory), OUT has model.safetensors alone, in the dtypes of the checkpoint.

    The model of a folder is written with dequantized weights. OUT.gguf, or --gguf, writes a file for llama.cpp.
    """
    from shardwise.core.errors import RecipeError

    if (out is not None and to is not None) or (target := out or to) is None:
        raise RecipeError("give one folder to write", where="command line", fix="shardwise export RUN OUT")
    from shardwise.exporter.export_run import export_model, export_run

    which: Which = "best" if best else "latest"
    for option, is_set in {"--base": base, "--best": best}.items():
        if is_set and (run / "config.json").is_file():
            fix = f"leave out {option}"
            raise RecipeError(f"{option} is for runs", where=str(run), why="it is a model", fix=fix)
    if gguf is not None or target.suffix == ".gguf":
        writer = require_plugin("gguf.export", "--gguf")
        with working("writing the model"):
            file = writer.export_gguf(run, target, (gguf or GgufType.fp16).value, base, which)
        for sentence in file.sentences():
            typer.echo(sentence)
        return
    if (run / "config.json").is_file():
        with working("writing the model"):
            copied = export_model(run, target, dtype.value if dtype else None)
        typer.echo(told_of_writing(copied))
        return
    with working("writing the model"):
        written, merged = export_run(run, target, dtype.value if dtype else None, base, which)
    typer.echo(told_of_writing(written))
    if merged is not None:
        typer.echo(told_of_merge(merged))
    if (target / "tokenizer.json").is_file():
        compare_tokenizer(target)


def compare_tokenizer(folder: Path) -> None:
    from shardwise.data import open_tokenizer
    from shardwise.data.tokenizer_probe import tokenizer_differences

    for sentence in tokenizer_differences(open_tokenizer(str(folder)), str(folder)):
        typer.echo(sentence)


def told_of_writing(written: Written) -> str:
    from shardwise.core.units import format_bytes

    files = f"{written.files} files" if written.files > 1 else "1 file"
    size = f"{written.tensors} tensors, {format_bytes(written.bytes)}"
    return f"{written.folder}: {size} in {files}, read back and compared"


def told_of_merge(merge: Merge) -> str:
    packed = f", {' and '.join(merge.unpacked)} weights unpacked for good" if merge.unpacked else ""
    return (
        f"{merge.layers} layers merged{packed}: the greatest difference between the logits of the adapted and of the"
        f" merged model is {merge.difference:.2e}, the greatest logit {merge.logit:.3g}"
    )
