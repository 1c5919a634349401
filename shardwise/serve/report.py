"""The sample in a run's report: a document that the trained model begins."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.core.errors import RecipeError
from shardwise.core.whole_file import write_whole
from shardwise.serve.requests import Request
from shardwise.serve.sampling import Sampling
from shardwise.serve.serving import load_model
from shardwise.train.folder import REPORT, read_job

SAMPLE_FLOPS = 5e11
"""What a sample may cost: seconds on a laptop. Larger models write a shorter one, or none."""

SAMPLE_TOKENS = (100, 300)
"""The shortest sample worth reading, and the longest written."""


def record_sample(folder: Path) -> None:
    """Put a sample into the run's report.json, if it is a small model of text and the run has come to a report."""
    path = folder / REPORT
    if not path.exists():
        return
    report = json.loads(path.read_text(encoding="utf-8"))
    recipe, _ = read_job(folder)
    shortest, longest = SAMPLE_TOKENS
    affordable = int(SAMPLE_FLOPS / (2 * report["parameters"] * recipe.data.sequence_length))
    if affordable < shortest:
        return
    try:
        sampling = Sampling(tokens=min(affordable, longest), past_end=True)
        [report["sample"]] = load_model(folder).complete([Request("", sampling=sampling)])
    except RecipeError:
        return  # a model that does not write text
    write_whole(path, json.dumps(report, indent=1).encode())
