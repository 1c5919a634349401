"""The calibration and held-out sequences of a pass: from a run's own data, or from text that the caller names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import DataError
from shardwise.data import Data, open_data
from shardwise.plugins.quantize.ranks import Ranks
from shardwise.plugins.quantize.source import SourceModel
from shardwise.plugins.quantize.stream import Batches
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import EvaluationSpec, Recipe
from shardwise.trainer.batches import require_vocabulary

HELD_OUT_SEQUENCES = 32
"""Held-out sequences that the gate reads."""

BATCH_TOKENS = 2048
"""The most tokens of a batch, if a sequence is shorter."""


@dataclass(frozen=True)
class Texts:
    """What to read. None is the default: the run's data, or ``stdlib`` with the model's own tokenizer.

    Attributes:
        calibrate, evaluate: sources as ``data.source`` names them. sequences: calibration sequences; 0 for none.
    """

    calibrate: str | None
    evaluate: str | None
    tokenizer: str | None
    sequences: int


@dataclass(frozen=True)
class Chosen:
    """The batches, text that is equal for the same tokens, and sentences about them."""

    batches: Batches
    identity: str
    notes: tuple[str, ...] = ()

    def of(self, ranks: Ranks) -> Batches:
        """The batches of one rank."""
        return Batches(
            ranks.part(self.batches.calibration),
            ranks.part(self.batches.held_out),
            ranks.part(self.batches.labels),
            ranks.part(self.batches.counted),
        )


def open_batches(source: SourceModel, model: str, texts: Texts, ranks: int = 1) -> Chosen:
    """Open the data and cut it into batches of one shape. Raises DataError, RecipeError."""
    data = _calibration_data(source, model, texts, texts.calibrate)
    # The batch size of this data is 1, so a step is a sequence.
    sequences = min(texts.sequences, data.train_sequences)
    calibration = [data.micro_batches(step, 0, 1, 1)[0] for step in range(sequences)]
    filled = [data.filled(step)[0] for step in range(sequences)]
    identity = data.fingerprint
    if texts.evaluate is not None:
        other = _calibration_data(source, model, texts, texts.evaluate)
        count = min(HELD_OUT_SEQUENCES, other.train_sequences)
        held_out = [other.micro_batches(step, 0, 1, 1)[0] for step in range(count)]
        identity += f" {other.fingerprint}"
    elif data.held_out_sequences:
        count = min(HELD_OUT_SEQUENCES, data.held_out_sequences)
        held_out = [data.held_out(index, 0, 1, 1)[0] for index in range(count)]
    else:
        # No text is held out: take sequences that do not calibrate.
        unused = range(sequences, min(sequences + HELD_OUT_SEQUENCES, data.train_sequences))
        held_out = [data.micro_batches(step, 0, 1, 1)[0] for step in unused]
    if not held_out:
        raise DataError(
            "no text is left to evaluate on",
            where=texts.calibrate or "the calibration data",
            why=f"all of its {data.train_sequences} sequences calibrate",
            fix="give --evaluate, or fewer --sequences",
        )
    smallest = len(held_out)
    if calibration:
        smallest = min(len(calibration), len(held_out))
    if ranks > smallest:
        raise DataError(
            f"{len(calibration)} calibration and {len(held_out)} held-out sequences for {ranks} ranks",
            where=texts.calibrate or "the calibration data",
            fix="give more --sequences, or start fewer ranks",
        )
    size = _calibration_batch_size(len(calibration), len(held_out), source.length, ranks)

    def joined(samples: list[dict[str, Tensor]], name: str) -> list[Tensor]:
        parts = [sample[name] for sample in samples]
        return [torch.cat(parts[start : start + size]) for start in range(0, len(parts), size)]

    batches = Batches(
        joined(calibration, "input_ids"),
        joined(held_out, "input_ids"),
        joined(held_out, "labels"),
        [_token_mask(filled[start : start + size], source.length) for start in range(0, sequences, size)],
    )
    notes: tuple[str, ...] = ()
    if sequences < texts.sequences:
        notes = (
            f"the calibration text has {sequences} sequences of {source.length} tokens, not {texts.sequences}",
        )
    return Chosen(batches, identity, notes)


def _token_mask(filled: list[int | None], length: int) -> Tensor | None:
    """Bool [b, s], false for the padding that follows the ``filled`` tokens of each row; None without padding."""
    if all(number is None or number == length for number in filled):
        return None
    ends = torch.tensor([length if number is None else number for number in filled])
    return torch.arange(length) < ends.unsqueeze(1)


def _calibration_batch_size(calibration: int, held_out: int, length: int, ranks: int) -> int:
    """Sequences in a batch: a divisor of every rank's counts, of at most BATCH_TOKENS tokens or one sequence."""
    common = max(1, math.gcd(calibration, held_out) // ranks)
    divisors = [size for size in range(1, common + 1) if common % size == 0]
    return max(size for size in divisors if size == 1 or size * length <= BATCH_TOKENS)


def _calibration_data(source: SourceModel, model: str, texts: Texts, text: str | None) -> Data:
    recipe = _recipe(source, model, texts)
    changes: dict[str, Any] = {"sequence_length": source.length, "packing": False}
    if text is not None:
        changes["source"] = text
    if texts.tokenizer is not None:
        changes["tokenizer"] = texts.tokenizer
    # The run's own batch size and evaluation would group its sequences.
    recipe = recipe.model_copy(
        update={
            "batch_size": 1,
            "evaluation": EvaluationSpec(every=None, sequences=1),
            "adapter": None,
            "data": recipe.data.model_copy(update=changes),
        }
    )
    data = open_data(recipe)
    fix = "leave out --tokenizer, or give that of the model" if texts.tokenizer else ""
    require_vocabulary(source.blueprint, data, fix)
    return data


def _recipe(source: SourceModel, model: str, texts: Texts) -> Recipe:
    if source.recipe is not None:
        return source.recipe
    has_tokenizer = any(name.startswith("tokenizer") for name in source.contents.extra_files)
    if texts.tokenizer is None and not has_tokenizer:
        raise DataError(
            "the model's folder has no tokenizer", where=model, fix="name one: --tokenizer bytes, or a folder"
        )
    data = {"source": "stdlib", "tokenizer": texts.tokenizer or model}
    return recipe_of({"model": {"hf": model}, "data": data, "steps": 1, "batch_size": 1})
