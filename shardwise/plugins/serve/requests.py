"""Requests: a prompt, an adapter and sampling options; and files of requests.

A file has one JSON object per line: ``{"prompt": "...", "adapter": "...", "temperature": 0}``. Only the prompt is
required. Missing options take the values of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.core.errors import DataError, RecipeError
from shardwise.core.json_file import read_text
from shardwise.plugins.serve.sampling import OPTIONS, Sampling


@dataclass(frozen=True)
class Request:
    """A text to continue.

    Attributes:
        adapter: its name; ``base`` for none. None takes the adapter that the run trained, if it trained one.
        where: its position, for error messages.
    """

    prompt: str
    adapter: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    where: str = ""


def read_requests(path: Path, sampling: Sampling) -> list[Request]:
    """The requests of a file. Raises DataError, with the line, if the file is missing or malformed."""
    lines = read_text(path).split(
        "\n"
    )  # str.splitlines also splits at characters that JSON strings may contain
    requests = list(_requests(path, lines, sampling))
    if not requests:
        raise DataError("there are no requests", where=str(path), fix='give lines such as {"prompt": "..."}')
    return requests


def _requests(path: Path, lines: list[str], sampling: Sampling) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError("not a JSON object", where=where, why=str(error)) from error
        yield _request(value, where, sampling)


def _request(value: Any, where: str, sampling: Sampling) -> Request:
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise DataError("a request has no prompt", where=where, fix='give {"prompt": "..."}')
    adapter = value.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise DataError("a request's adapter is not a name", where=where, why=f"it is {adapter!r}")
    options = {key: value[key] for key in value if key not in ("prompt", "adapter")}
    if unknown := options.keys() - set(OPTIONS):
        raise DataError(
            f"unknown key {min(unknown)!r}",
            where=where,
            fix=f"known are prompt, adapter, {', '.join(OPTIONS)}",
        )
    if isinstance(options.get("stop"), str | list):
        stop = options["stop"]
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    try:
        return Request(value["prompt"], adapter, replace(sampling, **options), where)
    except RecipeError as error:
        raise DataError(error.what, where=where, fix=error.fix) from error
