"""Epochs to optimizer steps: a recipe that gives `epochs` gets the steps that its data make of them.

An epoch is a pass over the training sequences; the last step of the run is rounded up. The steps of a run are written
into its folder, so data that change later do not change its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.core.errors import RecipeError
from shardwise.data.opening import open_part, tokenizer_of
from shardwise.recipe.checks import schedule_faults
from shardwise.recipe.sections import Recipe


def steps_of_epochs(epochs: float, sequences: int, batch_size: int) -> int:
    """Optimizer steps of ``epochs`` passes over ``sequences``: ceil(epochs x sequences / batch_size), at least 1."""
    # Rounded first: in binary, 1.1 x 100 is 110.00000000000001, and would be 111 steps.
    return max(1, math.ceil(round(epochs * sequences / batch_size, 6)))


def with_steps(recipe: Recipe) -> Recipe:
    """The recipe with ``steps`` instead of ``epochs``; a recipe with steps as it is.

    Raises:
        DataError: as of ``open_splits``.
        RecipeError: the schedule does not fit into the steps.
    """
    if recipe.epochs is None:
        return recipe
    if recipe.data.stream_window is not None:
        where = f"epochs: {recipe.epochs:g}"
        why = "a stream's length is not known before it is read"
        raise RecipeError("a stream has no epochs", where=where, why=why, fix="give steps")
    tokenizer = tokenizer_of(recipe.data)
    sequences = 0
    for spec in recipe.data.parts:
        splits = open_part(recipe, spec, tokenizer)
        sequences += len(splits.train)
    steps = recipe.unit * steps_of_epochs(recipe.epochs, sequences, recipe.unit_samples)
    counted = recipe.model_copy(update={"steps": steps, "epochs": None})
    for fault in schedule_faults(counted.schedule, steps):
        where = f"epochs: {recipe.epochs:g}"
        raise RecipeError(fault.what, where=where, why=fault.why, fix=fault.fix.replace("steps", "epochs"))
    return counted


def epoch_sentences(asked: Recipe, counted: Recipe) -> Iterator[str]:
    """The steps that the epochs of ``asked`` are, if it gives epochs."""
    if asked.epochs is not None:
        word = "epoch is" if asked.epochs == 1 else "epochs are"
        yield f"{asked.epochs:g} {word} {counted.steps:,} steps of {counted.batch_size:,} {counted.counted_samples}"
