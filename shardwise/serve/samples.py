"""The sample in a run's report: text that the trained model writes.

A model of plain text writes the start of a document. A model of records, such as chats, answers held-out prompts, as
the data frames them; with an adapter, the base model answers them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.checkpoint.run_folder import read_job, read_outcome, write_outcome
from shardwise.core.cache_folder import default_root
from shardwise.core.errors import RecipeError
from shardwise.data.text import Examples, open_tokens, tokenizer_of
from shardwise.recipe.sections import Recipe
from shardwise.serve.multi_lora import BASE
from shardwise.serve.requests import Request
from shardwise.serve.sampling import Sampling
from shardwise.serve.serving import load_model

SAMPLE_FLOPS = 5e11
"""Budget of a sample, a few seconds on a laptop. Larger models write a shorter sample, or none."""

SAMPLE_TOKENS = (100, 300)
"""The shortest sample worth reading, and the longest written."""

PROMPTS = 3
"""Most held-out prompts that are answered."""


def record_sample(folder: Path) -> None:
    """Add a sample to the run's report.json, if the run has a report and a small text model."""
    outcome = read_outcome(folder)
    if outcome is None:
        return
    recipe, _ = read_job(folder)
    shortest, longest = SAMPLE_TOKENS
    affordable = int(SAMPLE_FLOPS / (2 * outcome.parameters * recipe.data.sequence_length))
    if affordable < shortest:
        return
    try:
        sample = _written(folder, recipe, min(affordable, longest))
    except RecipeError:
        return  # the model does not generate text
    write_outcome(folder, replace(outcome, sample=sample))


def _written(folder: Path, recipe: Recipe, tokens: int) -> str:
    """The sample. Raises RecipeError if the model does not generate text."""
    model, prompts = load_model(folder), _prompts(recipe)
    if not prompts:
        return model.complete([Request("", sampling=Sampling(tokens=tokens, past_end=True))])[0]
    names = [None, BASE] if len(model.adapters) > 1 else [None]
    wanted = [Request(p, name, Sampling(tokens=tokens // PROMPTS)) for p in prompts for name in names]
    return "\n\n".join(_answered(wanted, model.complete(wanted)))


def _answered(wanted: Sequence[Request], texts: Sequence[str]) -> Iterator[str]:
    for request, text in zip(wanted, texts, strict=True):
        if request.adapter is None:
            yield f"── prompt ──\n{request.prompt}"
        who = "the trained model" if request.adapter is None else "before training"
        yield f"── {who} ──\n{text}"


def _prompts(recipe: Recipe) -> list[str]:
    """Held-out prompts with the names of their special tokens, short enough for an answer; [] for plain text."""
    if recipe.model.factory is not None:
        return []
    tokenizer = tokenizer_of(recipe.data)
    opened = open_tokens(recipe.data, tokenizer, default_root(), objective=recipe.model.objective)
    if not isinstance(opened, Examples):
        return []
    room = recipe.data.sequence_length
    return [tokenizer.shown(ids) for ids in opened.prompts(PROMPTS) if 0 < len(ids) < room]
