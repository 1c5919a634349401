"""Sampling text from a model: temperature and top-k, the whole context recomputed for every token.

No key-value cache: it would need one in every kind of model. The price is quadratic time, which matters beyond
a few hundred tokens; the context is cut to what the model can read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.model.blueprint import Blueprint, blueprint_of
from shardwise.model.slices import named_parameters
from shardwise.train.checkpoint import latest, stream_weights
from shardwise.train.data import open_tokenizer
from shardwise.train.folder import read_job
from shardwise.train.reference import reference_model

SAMPLE_FLOPS = 5e11
"""What a report's sample may cost: seconds on a laptop. Larger models write a shorter one, or none."""

SAMPLE_TOKENS = (100, 300)
"""The shortest sample worth reading, and the longest written."""


def next_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token id from the logits [vocab] of the last position; temperature 0 takes the most likely."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.float() / temperature
    if top_k is not None and top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))


@torch.no_grad()
def sample(
    blueprint: Blueprint,
    model: nn.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    context: int,
    vocab: int,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
) -> Iterator[int]:
    """Yield ``tokens`` ids that continue ``prompt``.

    ``context`` is the longest sequence the model reads; ids from ``vocab`` on mean nothing to the tokenizer (a
    model's vocabulary is often padded) and are never taken.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    model.eval()
    for _ in range(tokens):
        logits = blueprint.logits(model, torch.tensor([ids[-context:]]))[0, -1, :vocab]
        ids.append(next_token(logits, temperature, top_k, generator))
        yield ids[-1]


def text_from_run(folder: Path, prompt: str, **options: Any) -> Iterator[str]:
    """Continue ``prompt`` with the newest checkpoint of a run; yields text as soon as it is whole.

    Raises CheckpointError when the folder holds no run or no checkpoint, DataError for an unreadable prompt.
    """
    try:
        recipe, _ = read_job(folder)
    except (RecipeError, OSError) as error:
        raise CheckpointError(
            "not the folder of a run", where=str(folder), why="no recipe.yaml in it"
        ) from error
    checkpoint = latest(folder / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(
            "no checkpoint", where=str(folder), fix="train first: shardwise train --out DIR"
        )
    blueprint, tokenizer = blueprint_of(recipe), open_tokenizer(recipe.data.tokenizer)
    model = model_from(blueprint, checkpoint)
    ids = tokenizer.encode(prompt) or [tokenizer.separator]
    written, text = list(ids), tokenizer.decode(ids)
    context = recipe.data.sequence_length
    for token in sample(blueprint, model, ids, context=context, vocab=tokenizer.vocab, **options):
        written.append(token)
        longer = tokenizer.decode(written)
        if not longer.endswith("\ufffd"):  # the middle of a character of several bytes
            yield longer[len(text) :]
            text = longer


def model_from(blueprint: Blueprint, checkpoint: Path) -> nn.Module:
    """The whole model in this process, with a checkpoint's weights."""
    model = reference_model(blueprint, 0, torch.float32)
    parameters = dict(named_parameters(model))
    with torch.no_grad():
        for name, weights in stream_weights(checkpoint):
            if name in parameters:
                parameters[name].copy_(weights)
    return model


def record_sample(folder: Path) -> None:
    """Put a document that the trained model begins into the run's report.json, if it is a small model of text."""
    path = folder / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    recipe, _ = read_job(folder)
    shortest, longest = SAMPLE_TOKENS
    affordable = int(SAMPLE_FLOPS / (2 * report["parameters"] * recipe.data.sequence_length))
    if affordable < shortest:
        return
    try:
        report["sample"] = "".join(text_from_run(folder, "", tokens=min(affordable, longest)))
    except RecipeError:
        return  # a model that does not write text
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
