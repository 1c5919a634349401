"""The sample in a run's report: the start of a document, written by the trained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardwise.checkpoint.run_folder import read_job, read_outcome, write_outcome
from shardwise.core.errors import RecipeError
from shardwise.serve.requests import Request
from shardwise.serve.sampling import Sampling
from shardwise.serve.serving import load_model

SAMPLE_FLOPS = 5e11
"""Budget of a sample, a few seconds on a laptop. Larger models write a shorter sample, or none."""

SAMPLE_TOKENS = (100, 300)
"""The shortest sample worth reading, and the longest written."""


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
        sampling = Sampling(tokens=min(affordable, longest), past_end=True)
        [sample] = load_model(folder).complete([Request("", sampling=sampling)])
    except RecipeError:
        return  # the model does not generate text
    write_outcome(folder, replace(outcome, sample=sample))
