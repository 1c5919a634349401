"""Open the sources of a recipe's ``data:``.

It needs no torch, so the command line checks and shows data before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import DataError
from shardwise.data.completions import open_completions
from shardwise.data.dataset import OpenedSource, Splits, TokenDataset
from shardwise.data.formats import format_of
from shardwise.data.pairs import open_pairs
from shardwise.data.sources import open_source
from shardwise.data.streaming import open_stream
from shardwise.data.text import open_text
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.recipe.sections import DataSpec, Recipe

Opener = Callable[[OpenedSource], Splits[TokenDataset]]

OPENERS: Mapping[tuple[str, str], Opener] = {
    ("causal", "text"): open_text,
    ("masked", "text"): open_text,
    **{("causal", name): open_completions for name in ("messages", "sharegpt", "prompt", "alpaca")},
    **{("seq2seq", name): open_pairs for name in ("prompt", "alpaca")},
}
"""What makes the samples of an objective from records of a format."""

STREAMED: Mapping[tuple[str, str], Opener] = {
    ("causal", "text"): open_stream,
    ("masked", "text"): open_stream,
}
"""The same under ``data.stream_window``."""


def tokenizer_of(spec: DataSpec) -> Tokenizer:
    """The recipe's tokenizer. Raises DataError."""
    return open_tokenizer(spec.tokenizer, spec.begin)


def open_splits(
    spec: DataSpec, tokenizer: Tokenizer, root: Path, verify: bool = False, objective: str = "causal"
) -> Splits[TokenDataset]:
    """The training and held-out samples of a source for the recipe's ``model.objective``.

    Args:
        root: the folder of token caches.
        verify: compare the content of the token cache with its digest.

    Raises:
        DataError: the source is malformed, does not suit the objective, or is shorter than one sequence.
        ResourceError: the cache cannot be written.
    """
    streamed = spec.stream_window is not None
    source = open_source(spec.source, spec.text_key, streamed)
    name = format_of(spec, source)
    opener = (STREAMED if streamed else OPENERS).get((objective, name))
    if opener is None:
        raise _unsuitable(spec, name, objective)
    return opener(OpenedSource(spec, source, name, tokenizer, root, objective, verify))


def _unsuitable(spec: DataSpec, name: str, objective: str) -> DataError:
    """The error for records of a format that an objective, or a stream, has no samples of."""
    if spec.stream_window is not None:
        what = "only plain text is streamed"
        fix = "remove data.stream_window, or write data.format: text"
    elif objective == "masked":
        what = "the masked objective needs plain text"
        fix = "give text, or name the field with it in data.text_key"
    else:
        what = f"the {objective} objective needs prompts and completions"
        fix = "give records with prompt and completion, or instruction and output"
    return DataError(what, where=spec.source, why=f"its records are of the format {name}", fix=fix)


@dataclass(frozen=True)
class OpenedSources:
    """All sources of a recipe.

    Attributes:
        parts: of ``data.source``, or of each item of ``data.mixture``.
        sets: of ``evaluation.sets``, by name: all samples, with nothing held out.
    """

    tokenizer: Tokenizer
    parts: list[Splits[TokenDataset]]
    sets: dict[str, Splits[TokenDataset]]


def open_sources(recipe: Recipe, root: Path, verify: bool = False) -> OpenedSources:
    """Open everything that a recipe reads. Raises as ``open_splits``."""
    tokenizer, objective = tokenizer_of(recipe.data), recipe.model.objective

    def opened(spec: DataSpec) -> Splits[TokenDataset]:
        return open_splits(spec, tokenizer, root, verify, objective)

    parts = [opened(spec) for spec in recipe.data.parts]
    alone = {"mixture": None, "held_out": 0.0, "format": "auto"}
    sets = {
        name: opened(recipe.data.model_copy(update={**alone, "source": source}))
        for name, source in recipe.evaluation.sets.items()
    }
    return OpenedSources(tokenizer, parts, sets)


def check_data(recipe: Recipe) -> list[str]:
    """Check a recipe's data before anything else starts, once per run; the tokens stay in the cache.

    Reads the whole cache, so that its ranks train on the tokens whose digest a checkpoint records.

    Returns a description of records with completions, in sentences. A factory opens its own data later.
    """
    if recipe.model.factory is not None:
        return []
    parts = open_sources(recipe, default_root(), verify=True).parts
    shown = [part for part in parts if part.train.from_records or recipe.data.mixture]
    return [sentence for part in shown for sentence in part.sentences()]
