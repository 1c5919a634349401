"""Text as sequences of tokens, cut and split. No torch: the command line checks data before it is loaded."""

from __future__ import annotations

from pathlib import Path

from shardwise.core.errors import DataError
from shardwise.core.recipe import Recipe
from shardwise.core.sections import DataSpec
from shardwise.train.data.cache import TokenCache, default_root, open_cache
from shardwise.train.data.sources import open_source
from shardwise.train.data.split import Stream, split
from shardwise.train.data.tokenizer import Tokenizer, open_tokenizer


def open_text(spec: DataSpec, tokenizer: Tokenizer, root: Path) -> tuple[TokenCache, Stream, Stream]:
    """The token cache of a source, its training and its held-out sequences.

    Raises DataError when the source is malformed or too little for one sequence, ResourceError when the cache
    cannot be written.
    """
    cache = open_cache(open_source(spec.source, spec.text_key), tokenizer, root)
    train, held_out = split(cache.tokens, cache.documents(), spec.held_out, spec.sequence_length)
    if not train.sequences:
        raise DataError(
            "too little data for one sequence",
            where=spec.source,
            why=f"{cache.header.tokens:,} tokens; a sequence of {spec.sequence_length:,} takes one more",
            fix="give more data or a smaller data.sequence_length",
        )
    return cache, train, held_out


def check_data(recipe: Recipe) -> None:
    """Find what is wrong with a recipe's text before anything else is started; it stays in the token cache.

    A factory's data is its own business and is opened with it.
    """
    if recipe.model.factory is None:
        open_text(recipe.data, open_tokenizer(recipe.data.tokenizer), default_root())
