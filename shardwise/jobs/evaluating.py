"""Perplexity of a model on any data: ``shardwise eval`` and ``shardwise.evaluate``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import RecipeError
from shardwise.data.opening import samples_of
from shardwise.data.text import open_tokens
from shardwise.recipe.sections import DataSpec
from shardwise.serve.load import OWN, open_model
from shardwise.serve.multi_lora import BASE
from shardwise.serve.serving import DTYPES, ServedModel, device_named

LONGEST = 1024
"""Tokens of a sequence where neither the caller nor the model's context says less."""


@dataclass(frozen=True)
class Perplexity:
    """Loss of a model on some data.

    Attributes:
        loss: mean over the targets, in nats.
        targets: tokens that count: all of a text, the completions of records.
        sequences: number of sequences that were read.
        sequence_length: tokens of a sequence.
    """

    loss: float
    targets: int
    sequences: int
    sequence_length: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class EvaluationOptions:
    """How a model is evaluated.

    Attributes:
        adapter: a name of ``adapters``, own or base; None is the model as it was trained.
        adapters: folders by name.
        sequence_length: tokens of a sequence; None for the model's, at most LONGEST.
        sequences: how many to read, from the first; None for all.
        batch: sequences at a time.
    """

    adapter: str | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    tokenizer: str | None = None
    sequence_length: int | None = None
    sequences: int | None = None
    batch: int = 8
    precision: str = "fp32"
    device: str = "cpu"


@torch.no_grad()
def perplexity(
    model: Path, source: str, options: EvaluationOptions, progress: Callable[[int, int], None]
) -> Perplexity:
    """The loss of a run's newest checkpoint, or of a Hugging Face folder, on a data source.

    Args:
        source: as ``data.source`` of a recipe; all of it counts, and nothing is held out.
        progress: called with the sequences done and all.

    Raises:
        CheckpointError, DataError, RecipeError: the model, the data or an option cannot be used.
    """
    if options.precision not in DTYPES:
        fix = f"take one of {', '.join(DTYPES)}"
        raise RecipeError(f"precision is {options.precision!r}", where="precision", fix=fix)
    opened = open_model(model, options.tokenizer, DTYPES[options.precision], device_named(options.device))
    served = ServedModel(opened, dict(options.adapters))
    length = options.sequence_length or min(opened.context or LONGEST, LONGEST)
    if opened.context is not None and length > opened.context:
        why = f"the model's context is {opened.context}"
        raise RecipeError(f"sequences of {length} tokens are too long", where="sequence_length", why=why)
    spec = DataSpec(source=source, sequence_length=length, held_out=0.0)
    tokens = open_tokens(spec, opened.tokenizer, default_root())
    samples, _ = samples_of(tokens, opened.tokenizer, packing=False)
    count = min(len(samples), options.sequences or len(samples))
    served.bank.select([options.adapter or (OWN if opened.own else BASE)] * options.batch)
    place, total, targets = next(opened.model.parameters()).device, 0.0, 0
    for first in range(0, count, options.batch):
        rows = [n if n < count else None for n in range(first, first + options.batch)]
        batch = {name: tensor.to(place) for name, tensor in samples.batch(rows).items()}
        loss, valid = opened.blueprint.loss(opened.model, batch)
        total, targets = total + float(loss), targets + int(valid)
        progress(min(first + options.batch, count), count)
    return Perplexity(total / max(1, targets), targets, count, length)
