"""Fit advice: which remedy is advised for how much memory, and that a plan with it fits."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.cli.main import run
from shardwise.core.fit_advice import FitAdvice
from shardwise.core.units import GiB
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.fit_advice import advise
from shardwise.planner.worst_rank import predict_worst
from shardwise.recipe.load import load_recipe, recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.report.fit_advice import advice_table
from shardwise.technique import REMEDIES, SETTINGS, strategy_from

MODEL = {"layers": 2, "width": 1024, "heads": 8, "ffn": 4096, "vocab": 4096, "context": 1024}
NAMES = [remedy.name for remedy in REMEDIES]


def asked(memory_gib: float, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": MODEL,
        "data": {"sequence_length": 512},
        "steps": 1,
        "batch_size": 4,
        "strategy": {"precision": "bf16", "loss": "logits", "micro_batch_size": 1},
        "cluster": {"device": "h100", "devices_per_node": 4, "memory_gib": memory_gib},
    }
    return recipe_of(values | sections, SETTINGS)


def advice_for(recipe: Recipe) -> FitAdvice:
    return advise(recipe, cluster_of(recipe.cluster))


@pytest.fixture
def peaks() -> dict[str, int]:
    """Peak bytes of the last try of each remedy, with memory enough for all."""
    advice = advice_for(asked(80))
    assert [outcome.remedy.name for outcome in advice.outcomes] == NAMES  # the first try of each fits
    assert advice.advised is advice.outcomes[1]  # sharded for throughput
    assert "it fits" in advice.reasons[0]
    return {outcome.remedy.name: outcome.candidate.peak_bytes for outcome in advice.outcomes}


def test_each_remedy_needs_less_memory(peaks: dict[str, int]) -> None:
    full = [peaks[name] for name in NAMES[:5]]
    assert full == sorted(full, reverse=True)
    assert peaks["QLoRA"] < peaks["LoRA"] < peaks[NAMES[1]]


def test_the_first_remedy_that_fits_is_advised_and_fits_in_full(peaks: dict[str, int]) -> None:
    """With an amount of memory between those of two remedies."""
    above, below = 2, 1
    memory = (peaks[NAMES[above]] + peaks[NAMES[below]]) / 2 / GiB / 0.98
    recipe = asked(memory)
    advice = advice_for(recipe)
    assert advice.advised is not None
    assert advice.advised.remedy.name in NAMES[above:5]
    before = advice.outcomes[: advice.outcomes.index(advice.advised)]
    assert not any(outcome.fits for outcome in before)
    assert "does not fit" in advice.reasons[0]
    values = dict(override.removeprefix("strategy.").split("=") for override in advice.advised.overrides)
    settings = {s.key: s.kind(values[s.key]) for s in SETTINGS if s.key in values}
    strategy = strategy_from({**recipe.strategy, **settings})
    whole = predict_worst(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
    assert whole.peak.bytes <= 0.98 * memory * GiB
    assert whole.peak.bytes == pytest.approx(advice.advised.candidate.peak_bytes, rel=0.05)


def test_adapters_come_last_and_invalid_remedies_have_their_rule() -> None:
    """Weights sharded by tensor parallelism cannot be quantized."""
    strategy = {"precision": "bf16", "loss": "logits", "micro_batch_size": 1, "zero_stage": 0}
    pinned = {"strategy": strategy | {"tensor_parallel": 2, "offload": "none"}}
    peaks = {f.remedy.name: f.candidate.peak_bytes for f in advice_for(asked(80, **pinned)).outcomes}
    memory = (peaks["activation checkpointing"] + peaks["LoRA"]) / 2 / GiB / 0.98
    advice = advice_for(asked(memory, **pinned))
    assert advice.advised is not None and advice.advised.remedy.name == "LoRA"
    assert advice.advised.overrides[:2] == ("adapter.name=lora", "adapter.rank=16")
    assert any("train an adapter" in reason for reason in advice.reasons)
    assert {f.candidate.verdict for f in advice.outcomes if f.remedy.name == "QLoRA"} == {"invalid"}
    shown = io.StringIO()
    Console(width=100, file=shown).print(advice_table(advice))
    assert "advised" in shown.getvalue() and "rows of bytes" in re.sub(r"\s+", " ", shown.getvalue())


def test_the_command_explains_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {layers: 2, width: 256, heads: 4, vocab: 512}\n"
        "steps: 1\nbatch_size: 1\n"
        "strategy: {zero_stage: 0, micro_batch_size: 1, loss: logits, activation_checkpointing: none, offload: none}\n"
        "cluster: {device: h100, memory_gib: 0.5}\n"
    )
    load_recipe(recipe, [], SETTINGS)
    assert run(["plan", str(recipe), "--json"]) == 7
    told = capsys.readouterr()
    advice = json.loads(told.out)["ladder"]
    assert advice["advised"] is None and {rung["verdict"] for rung in advice["rungs"]} == {"does not fit"}
    assert told.err.count("\n") == 1 and told.err.startswith("error: does not fit")
    assert "add devices" in told.err
