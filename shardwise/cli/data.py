"""``shardwise data``: the training data as the model sees it. Needs neither torch nor the model.

A sample is one record, or one sequence of plain text. It shows the tokens that the loss counts in colour. Without
colour, as in a file, they are between ``[[`` and ``]]``. The marked token is the one that is predicted, not the
position that predicts it. Each document of a packed sequence begins on its own line, and those of a pair of preferences
have a heading.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import Overrides, RecipeArgument
from shardwise.cli.spinner import working
from shardwise.jobs.request import read_request

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text as Shown

    from shardwise.data.dataset import MaskedTokens, Splits, TokenDataset
    from shardwise.data.tokenizer import Tokenizer


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option(help="number of records to show, of plain text of sequences", min=0)
    ] = 3,
) -> None:
    """Show the training data: the format found, counts, and samples with trained tokens coloured."""
    from rich.console import Console

    from shardwise.core.errors import RecipeError
    from shardwise.data.opening import open_part, tokenizer_of
    from shardwise.data.tokenizer_probe import tokenizer_differences

    asked, _ = read_request(recipe, overrides or [])
    if asked.model.factory is not None:
        what, why = "a factory's data cannot be shown", "it may bring its own, in tensors of its own"
        raise RecipeError(what, where="model.factory", why=why)
    with working("reading the data"):
        tokenizer = tokenizer_of(asked.data)
    console = Console(highlight=False)
    for part in asked.data.parts:
        with working(f"reading {part.source}"):
            splits = open_part(asked, part, tokenizer)
        _show_source(console, splits, tokenizer, samples)
    with working("comparing with transformers' tokenizer"):
        differences = list(tokenizer_differences(tokenizer, asked.data.tokenizer))
    for sentence in differences:
        console.print(sentence, markup=False, soft_wrap=True, style="yellow")


def _show_source(console: Console, splits: Splits[TokenDataset], tokenizer: Tokenizer, samples: int) -> None:
    """The description of one source, and its first samples."""
    # A terminal shows no colour where it is dumb, or where NO_COLOR forbids it.
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    train = splits.train
    for sentence in splits.sentences():
        console.print(sentence, markup=False, soft_wrap=True)
    if tokenizer.begin is not None and not train.chats:
        first = tokenizer.shown([tokenizer.begin])
        console.print(f"every document begins with {first}, as the tokenizer asks", markup=False)
    for sample in range(min(samples, train.records)):
        note = f", {train.note(sample)}" if train.note(sample) else ""
        console.print(f"\nsample {sample}{note}", style="bold", markup=False)
        for number, document in enumerate(train.documents(sample)):
            if train.names:
                console.print(f"{train.names[number]}:", style="bold", markup=False)
            console.print(_document_runs(document, tokenizer, coloured), soft_wrap=True)


def _document_runs(document: MaskedTokens, tokenizer: Tokenizer, coloured: bool) -> Shown:
    """One document, in runs of tokens that are trained on and that are not."""
    from rich.text import Text as Shown

    shown = Shown()
    for trained, pairs in groupby(document, key=lambda pair: pair[1]):
        text = tokenizer.shown([token for token, _ in pairs])
        shown.append(f"[[{text}]]" if trained and not coloured else text, style="green" if trained else "")
    return shown
