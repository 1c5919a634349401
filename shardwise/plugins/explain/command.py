"""``shardwise explain``: ZeRO, training memory and activation checkpointing, by arithmetic and by dry runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.common import AsJson, path_option
from shardwise.cli.spinner import working
from shardwise.core.errors import RecipeError
from shardwise.core.json_file import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.plugins.explain.model_state import CountedState


_TOKENS_OF_ZERO = 128
"""Of the dry runs of ZeRO, whose states do not depend on them."""


class Subject(StrEnum):
    """The subject of an explanation."""

    zero = "zero"
    memory = "memory"
    checkpointing = "checkpointing"


RanksOption = Annotated[
    str | None,
    typer.Option(help="numbers of ranks, for zero; default: 1 to 1,024 as in the paper", metavar="N,N,…"),
]


def command(
    subject: Annotated[
        Subject,
        typer.Argument(
            help="zero: stages and ranks; memory: one device; checkpointing: what each value recomputes and keeps",
            metavar="zero|memory|checkpointing",
        ),
    ],
    model: Annotated[str | None, typer.Argument(help="preset, folder or Hub id", metavar="MODEL")] = None,
    ranks: RanksOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="tokens of a sequence, for memory and checkpointing; default: 2,048", min=1),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(help="blocks, for checkpointing; default: the model's, or 16", min=2, max=512),
    ] = None,
    png: Annotated[
        Path | None,
        path_option("write the picture of blocks over time, for checkpointing"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where training memory goes: the ZeRO paper's 16 bytes per parameter, and a dry run's counts."""
    from rich.console import Console

    _require_of(subject, Subject.zero, **{"--ranks": ranks})
    _require_of(subject, Subject.checkpointing, **{"--depth": depth, "--png": png})
    if subject is Subject.zero:
        _require_of(subject, Subject.memory, **{"--tokens": tokens})
    tokens = tokens or (_TOKENS_OF_ZERO if subject is Subject.zero else 2048)
    if subject is Subject.checkpointing:
        _explain_checkpointing(model, depth, tokens, png, as_json)
        return
    from shardwise.plugins.explain.counting import counted_states, parameter_count, tokens_within
    from shardwise.plugins.explain.model_state import PAPER_MODELS
    from shardwise.plugins.explain.tables import memory_table, paper_table, state_json, zero_table
    from shardwise.recipe.presets import PRESETS

    numbers = _rank_counts(ranks)
    if model is None:
        if subject is Subject.memory or as_json:
            raise RecipeError("no MODEL", where="command line", fix="name a preset, a folder or a Hub id")
        _print_parts(Console(), paper_table(PAPER_MODELS, numbers))
        return
    cells = [(0, 1)]
    if subject is Subject.zero:
        cells = [(0, numbers[-1]), *((stage, number) for stage in (1, 2, 3) for number in numbers)]
    shape, tokens = PRESETS.get(model), tokens_within(model, tokens)
    parameters = parameter_count(model)
    states = _with_progress(counted_states, model, cells, tokens)
    if as_json:
        rows = [state_json(parameters, state) for state in states]
        print(json.dumps({"model": model, "parameters": parameters, "counted": rows}, indent=1))
    elif subject is Subject.zero:
        _print_parts(Console(), paper_table([parameters], numbers))
        _print_parts(Console(), zero_table(model, parameters, states))
    else:
        _print_parts(Console(), memory_table(model, parameters, tokens, states[0], shape))


def _require_of(subject: Subject, owner: Subject, **given: object) -> None:
    """Refuse options of another subject, which would be ignored."""
    for option, value in given.items():
        if value is not None and subject is not owner:
            raise RecipeError(
                f"{option} is for {owner.value}", where="command line", fix=f"shardwise explain {owner.value}"
            )


def _explain_checkpointing(
    model: str | None, depth: int | None, tokens: int, png: Path | None, as_json: bool
) -> None:
    """Dry runs of one model under each value of activation_checkpointing."""
    with working("dry runs") as progress:
        from shardwise.plugins.explain.counting import checkpointed, tokens_within

        if model is not None:
            tokens = tokens_within(model, tokens)
        block_times = dict(checkpointed(model, depth, tokens, progress))
    if png is not None:
        from shardwise.core.atomic_file import write_whole
        from shardwise.report.blocks import blocks_through_time
        from shardwise.report.pictures import png as drawn

        write_whole(png, drawn(blocks_through_time(block_times)))
    if as_json:
        print(json.dumps({name: plain(times) for name, times in block_times.items()}))
        return
    from rich.console import Console

    from shardwise.plugins.explain.tables import checkpointing_table

    _print_parts(Console(), checkpointing_table(block_times, model, tokens))


def _rank_counts(text: str | None) -> list[int]:
    """Numbers of ranks, ascending. Raises RecipeError."""
    from shardwise.plugins.explain.model_state import RANKS

    if text is None:
        return list(RANKS)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 8 and 0 < int(part) <= 10**6 for part in parts):
        raise RecipeError(f"{text!r} is no list of numbers", where="--ranks", fix="write --ranks 1,8,64")
    return sorted({int(part) for part in parts})


def _with_progress(count: Any, *asked: Any) -> list[CountedState]:
    from shardwise.cli.spinner import planning

    with planning() as said:
        return list(count(*asked, progress=said))


def _print_parts(console: Any, parts: Iterator[RenderableType]) -> None:
    for part in parts:
        console.print(part)
