"""``shardwise generate``: sample text from a trained model, with any of several adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import ModelFolder, path_option
from shardwise.cli.spinner import working
from shardwise.cli.terminal_output import while_read
from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.core.paths import no_folder, path_of

if TYPE_CHECKING:
    from shardwise.plugins.serve.requests import Request
    from shardwise.plugins.serve.serving import ServedModel

_RESERVED = {"base": "base is the model without any", "own": "own is the adapter that the run trained"}
"""Names that are no folders, with what they mean."""

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


def command(
    model: ModelFolder,
    prompt: Annotated[list[str] | None, typer.Option(help="text to continue; may be repeated")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="folder of an adapter, or of a run that trained one; may be repeated. Every prompt is continued"
            " with each adapter; base is the model without adapters, own the adapter that the run trained",
            metavar="[NAME=]DIR …",
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        path_option("JSON lines with prompt, adapter and options, instead of prompts"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="number of tokens to sample", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token", min=0.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="sample from the K most likely tokens", min=1)] = 40,
    top_p: Annotated[
        float, typer.Option(help="sample from the smallest set of tokens with this total probability")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="divide the logits of tokens that have occurred", min=0.0)
    ] = 1.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="ask every prompt as a user's turn, through the chat template")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    past_end: Annotated[bool, typer.Option("--past-end", help="continue after an end-of-text token")] = False,
    seed: Annotated[int, typer.Option(help="seed of the sampling", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="number of requests in one batch", min=1)] = 8,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer to use instead of the model's: bytes, a folder or a Hub id")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(help="such as cpu, cuda or cuda:1")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per request")] = False,
) -> None:
    """Continue prompts with a trained model, and with adapters on it."""
    if requests is not None and prompt:
        raise RecipeError("prompts and a file of requests", where="command line", fix="give one of the two")
    folders, asked = named_adapters(adapter or [])
    from shardwise.plugins.serve.requests import Request, read_requests
    from shardwise.plugins.serve.sampling import Sampling

    options = (tokens, temperature, top_k, top_p, repetition_penalty, tuple(stop or ()), past_end, seed)
    sampling = Sampling(*options)
    names: Sequence[str | None] = asked or [None]
    wanted = [Request(text, name, sampling) for text in prompt or [""] for name in names]
    if requests is not None:
        wanted = read_requests(requests, sampling)
    with working(f"reading {model}"):
        from shardwise.plugins.serve.serving import load_model

        served = load_model(model, folders, tokenizer=tokenizer, precision=precision, device=device)
        if prompt and not (chat or as_json):
            _hint(model, served, prompt)
    _show_answers(served, wanted, batch, as_json, chat)


def _hint(model: Path, served: ServedModel, prompts: Sequence[str]) -> None:
    """Say that a model of chats continues prompts that no chat template has written."""
    if _talks(model, served) and not _has_tags(served, prompts):
        hint = (
            "prompts are continued as they are; --chat asks them as turns of a chat, as shardwise chat does"
        )
        typer.echo(f"{model}: {hint}", err=True)


def _talks(model: Path, served: ServedModel) -> bool:
    """Whether a run was trained on chats; of a folder, whether its tokenizer has a chat template."""
    from shardwise.checkpoint.run_folder import RECIPE, load_run_recipe
    from shardwise.core.errors import ShardwiseError
    from shardwise.jobs.next_commands import trained_on_chats

    if not (model / RECIPE).is_file():
        return served.tokenizer.name != "bytes" and served.tokenizer.chat is not None
    try:
        return trained_on_chats(load_run_recipe(model))
    except ShardwiseError:  # its data is not here
        return False


def _has_tags(served: ServedModel, prompts: Sequence[str]) -> bool:
    """Whether a prompt has special tokens, as one that a chat template wrote."""
    tokenizer = served.tokenizer
    return any(not tokenizer.special.isdisjoint(tokenizer.encode(prompt)) for prompt in prompts)


def _show_answers(served: ServedModel, wanted: list[Request], batch: int, as_json: bool, chat: bool) -> None:
    asked = [request.prompt for request in wanted]
    if chat:
        from shardwise.plugins.serve.chat import opening_prompt

        wanted = [
            replace(request, prompt=opening_prompt(served.tokenizer, request.prompt)) for request in wanted
        ]
    if as_json:
        _print_json(served, wanted, asked, batch)
        return
    shown = [f"{prompt}\n" for prompt in asked] if chat else asked
    if len(wanted) == 1:
        _stream(served, wanted, shown[0])
    else:
        _print_answers(served, wanted, shown, batch)


def named_adapters(given: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """The adapter folders by name, and the names in the order in which prompts use them.

    Raises CheckpointError for a folder that is not there, before the model is read, which may take minutes.
    """
    folders: dict[str, Path] = {}
    asked = []
    for value in given:
        match = _NAMED.fullmatch(value)
        name, folder = (
            (match[1], path_of(match[2])) if match else (_adapter_name(path_of(value)), path_of(value))
        )
        if value not in _RESERVED:
            if name in folders or name in _RESERVED:
                raise RecipeError(
                    f"two adapters are named {name!r}" if name in folders else _RESERVED[name],
                    where=f"--adapter {value}",
                    fix="name it: NAME=FOLDER",
                )
            if not folder.is_dir():
                raise CheckpointError("no such adapter", where=f"--adapter {value}", why=no_folder(folder))
            folders[name] = folder
        asked.append(name)
    return folders, asked


def _adapter_name(folder: Path) -> str:
    """The last part of its path; the run's name for a folder ``RUN/adapter``."""
    path = folder.resolve()
    return path.parent.name if path.name == "adapter" else path.name


def _stream(served: ServedModel, wanted: list[Request], asked: str) -> None:
    pieces = served.generate(wanted)  # refuses what it cannot answer before anything is written
    typer.echo(asked, nl=False)
    for piece in while_read(pieces):
        typer.echo(piece.text, nl=False)
    typer.echo()


def _print_answers(served: ServedModel, wanted: list[Request], asked: Sequence[str], batch: int) -> None:
    for index, text, _ in _whole_answers(served, wanted, batch):
        request = wanted[index]
        name = "" if request.adapter is None else f" · {request.adapter}"
        typer.echo(f"── {index + 1}{name} ──\n{asked[index]}{text}\n")


def _print_json(served: ServedModel, wanted: list[Request], asked: Sequence[str], batch: int) -> None:
    for index, text, end in _whole_answers(served, wanted, batch):
        request = wanted[index]
        said = {"request": index + 1, "adapter": request.adapter, "prompt": asked[index]}
        typer.echo(json.dumps({**said, "text": text, "end": end}, ensure_ascii=False))


def _whole_answers(served: ServedModel, wanted: list[Request], batch: int) -> Iterator[tuple[int, str, str]]:
    """(index of the request, its text, why it ended), as each request completes."""
    texts = [""] * len(wanted)
    for piece in while_read(served.generate(wanted, batch=batch)):
        texts[piece.request] += piece.text
        if piece.end:
            yield piece.request, texts[piece.request], piece.end
