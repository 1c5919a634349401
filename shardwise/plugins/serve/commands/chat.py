"""``shardwise chat``: talk with a trained model, line by line."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import ModelFolder
from shardwise.cli.spinner import working
from shardwise.cli.terminal_output import while_read
from shardwise.core.errors import DataError, RecipeError
from shardwise.hardware.kinds import HOST, accelerator_here
from shardwise.plugins.serve.commands.generate import named_adapters

if TYPE_CHECKING:
    from shardwise.plugins.serve.chat import Conversation
    from shardwise.plugins.serve.serving import ServedModel


def command(
    model: ModelFolder,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="folder of an adapter; may be repeated. The first answers", metavar="[NAME=]DIR …"),
    ] = None,
    system: Annotated[str, typer.Option(help="the system's turn")] = "",
    tokens: Annotated[int, typer.Option(help="most tokens of an answer", min=1)] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token", min=0.0)] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="sample from the smallest set of tokens with this total probability")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="seed of the sampling", min=0)] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer to use instead of the model's: bytes, a folder or a Hub id")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: by the device")] = None,
    device: Annotated[str | None, typer.Option(help="such as cpu or cuda:1; default: the first GPU")] = None,
) -> None:
    """Talk with a model through its chat template, with its adapters. /help lists the commands."""
    folders, asked = named_adapters(adapter or [])
    with working(f"reading {model}"):
        from shardwise.plugins.serve.chat import Conversation
        from shardwise.plugins.serve.sampling import Sampling
        from shardwise.plugins.serve.serving import load_model

        device = device or accelerator_here().torch_type
        precision = precision or ("fp32" if device == HOST.torch_type else "bf16")
        served = load_model(model, folders, tokenizer=tokenizer, precision=precision, device=device)
    sampling = Sampling(tokens=tokens, temperature=temperature, top_k=None, top_p=top_p, seed=seed)
    conversation = Conversation(served, sampling, system, asked[0] if asked else None)
    if sys.stdin.isatty():
        typer.echo(f"{model} on {device}. /help lists the commands, /exit leaves")
    for line in _user_lines():
        if not _answer_line(conversation, served, line):
            return


def _user_lines() -> Iterator[str]:
    """What the user writes, until the end of the input. A line that is not UTF-8 is refused, and the next one read."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for number in itertools.count(1):
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
            line.encode("utf-8")
        except EOFError:
            return
        except UnicodeEncodeError:
            where = f"standard input:{number}"
            fix = "write it in UTF-8"
            error = DataError("a line is not text", where=where, why="it is not UTF-8", fix=fix)
            typer.echo(error.line(), err=True)
            continue
        if line:
            yield line


def _answer_line(conversation: Conversation, served: ServedModel, line: str) -> bool:
    """Answer a line, or obey it; False for /exit. A mistake is said, and the conversation goes on."""
    from shardwise.plugins.serve.chat import obeyed

    try:
        if not line.startswith("/"):
            for piece in while_read(conversation.say(line)):
                typer.echo(piece, nl=False)
            typer.echo()
            return True
        if (said := obeyed(conversation, served, line)) is None:
            return False
        typer.echo(said)
    except (DataError, RecipeError) as error:
        typer.echo(error.line(), err=True)
    return True
