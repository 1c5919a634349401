"""Open data for training: text and records through the token cache, or a factory's own dataset."""

from __future__ import annotations

import json
from collections.abc import Sized
from pathlib import Path
from typing import Any

import xxhash
from torch.utils.data import Dataset

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import DataError
from shardwise.data.batches import Data
from shardwise.data.masking import Masking
from shardwise.data.mixing import MixedOrder, MixedSamples
from shardwise.data.samples import (
    DatasetSamples,
    ExampleSamples,
    PairSamples,
    Samples,
    StreamedSamples,
    TokenSamples,
    fingerprint_of,
)
from shardwise.data.text import (
    Examples,
    Opened,
    PairExamples,
    StreamedText,
    named_sets,
    open_tokens,
    tokenizer_of,
)
from shardwise.data.tokenizer import Tokenizer, mask_token
from shardwise.recipe.sections import DataSpec, Recipe


def open_data(recipe: Recipe, dataset: Dataset[Any] | None = None, cache: Path | None = None) -> Data:
    """The data of a recipe. The first process tokenizes it; other processes wait and share the result.

    Args:
        recipe: `data`, `batch_size`, `seed` and `evaluation` are read.
        dataset: a factory's own map-style dataset, which replaces `data.source`.
        cache: the folder of token caches; by default $SHARDWISE_CACHE, else ~/.cache/shardwise.

    Raises:
        DataError: the source or the tokenizer is missing or malformed, or the data is shorter than one sequence.
        ResourceError: the cache cannot be written.
    """
    tokenizer: Tokenizer | None = None
    masking: Masking | None = None
    order: MixedOrder | None = None
    if dataset is not None:
        train, held_out, fingerprint = _of_dataset(dataset, recipe.data.held_out)
    else:
        tokenizer = tokenizer_of(recipe.data)
        root = cache or default_root()
        sides = [_of_text(recipe, spec, tokenizer, root) for spec in recipe.data.parts]
        train, held_out, fingerprint = sides[0]
        if recipe.data.mixture is not None:
            train = MixedSamples([side[0] for side in sides])
            held_out = MixedSamples([side[1] for side in sides])
            weights = [part.weight for part in recipe.data.mixture]
            order = _mixed_order([side[0] for side in sides], weights, recipe.seed)
            parts = [[side[2] for side in sides], order.counts]
            fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
        if recipe.model.objective == "masked":
            never = (tokenizer.separator, tokenizer.begin)
            masking = Masking(mask_token(tokenizer), never, tokenizer.vocab)
    return Data(
        train,
        held_out,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        evaluation_sequences=recipe.evaluation.sequences,
        masking=masking,
        order=order,
        sets={} if tokenizer is None else _sets(recipe, tokenizer, cache or default_root()),
    )


def _mixed_order(sides: list[Samples], weights: list[float], seed: int) -> MixedOrder:
    streams = {index: side.windows for index, side in enumerate(sides) if isinstance(side, StreamedSamples)}
    sizes = [streams[i].sequences if i in streams else len(side) for i, side in enumerate(sides)]
    return MixedOrder(sizes, weights, seed, streams)


def _sets(recipe: Recipe, tokenizer: Tokenizer, root: Path) -> dict[str, Samples]:
    """All samples of the recipe's named validation sets."""
    found = {}
    for name, spec in named_sets(recipe).items():
        opened = open_tokens(spec, tokenizer, root, objective=recipe.model.objective)
        found[name] = samples_of(opened, tokenizer, spec.packing)[0]
    return found


def _of_text(
    recipe: Recipe, spec: DataSpec, tokenizer: Tokenizer, root: Path
) -> tuple[Samples, Samples, str]:
    opened = open_tokens(spec, tokenizer, root, objective=recipe.model.objective)
    if isinstance(opened, StreamedText) and opened.windows is not None:
        return (*samples_of(opened, tokenizer, spec.packing), opened.windows.fingerprint)
    # The fingerprint leaves out the tokenizer: equal tokens are equal data.
    parts: list[object] = [opened.cache.header.digest, spec.sequence_length, spec.held_out]
    if isinstance(opened, Examples):
        parts += ["packed" if spec.packing else "padded"]
    elif isinstance(opened, PairExamples):
        parts += ["pairs", opened.train.target_length]
    elif spec.packing:
        parts += ["packed"]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
    train, held_out = samples_of(opened, tokenizer, spec.packing)
    return train, held_out, fingerprint


def samples_of(opened: Opened, tokenizer: Tokenizer, packing: bool) -> tuple[Samples, Samples]:
    """Training and held-out samples of opened tokens."""
    if isinstance(opened, PairExamples):
        return PairSamples(opened.train, tokenizer), PairSamples(opened.held_out, tokenizer)
    if isinstance(opened, Examples):
        sides = opened.divided.train, opened.divided.held_out
        both = [ExampleSamples(side, tokenizer, packing) for side in sides]
        return both[0], both[1]
    cache, starts = opened.cache, opened.starts
    if isinstance(opened, StreamedText) and opened.windows is not None:
        held_out = TokenSamples(opened.held_out, cache, tokenizer, starts)
        return StreamedSamples(opened.windows, tokenizer, packing), held_out
    return (
        TokenSamples(opened.train, cache, tokenizer, starts),
        TokenSamples(opened.held_out, cache, tokenizer, starts),
    )


def _of_dataset(dataset: Dataset[Any], fraction: float) -> tuple[Samples, Samples, str]:
    """Hold out the last `fraction` of a user's dataset: at least one item if there are two."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "dataset has no length",
            where=type(dataset).__name__,
            why="a resumable order needs items by number",
            fix="return a map-style dataset, with __len__ and __getitem__, from the factory",
        )
    if not (count := len(dataset)):
        raise DataError("empty dataset", where=type(dataset).__name__, fix="check the factory")
    held = min(max(1, round(fraction * count)), count - 1) if fraction else 0
    train, held_out = DatasetSamples(dataset, 0, count - held), DatasetSamples(dataset, count - held, held)
    parts = [fingerprint_of(dataset, count), held]
    return train, held_out, xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
