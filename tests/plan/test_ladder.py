"""The ladder: which rung is advised for how much memory, and that a plan of it fits."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.cli.main import run
from shardwise.core.cluster import cluster_of
from shardwise.core.ladder import Ladder
from shardwise.core.recipe import Recipe, load_recipe, recipe_of
from shardwise.core.units import GiB
from shardwise.model.blueprint import blueprint_of
from shardwise.plan.ladder import climb
from shardwise.plan.stages import predict_worst
from shardwise.report.ladder import ladder_table
from shardwise.technique import LADDER, SETTINGS, strategy_from

MODEL = {"layers": 6, "width": 1024, "heads": 8, "ffn": 4096, "vocab": 4096, "context": 1024}
NAMES = [rung.name for rung in LADDER]


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


def climbed(recipe: Recipe) -> Ladder:
    return climb(recipe, cluster_of(recipe.cluster))


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    """What the last try of each rung takes that was tried where everything fits."""
    ladder = climbed(asked(80))
    assert [foothold.rung.name for foothold in ladder.footholds] == NAMES  # the first try of each fits
    assert ladder.advised is ladder.footholds[1]  # divided for throughput
    assert "it fits" in ladder.reasons[0]
    return {foothold.rung.name: foothold.candidate.peak_bytes for foothold in ladder.footholds}


def test_every_rung_takes_less_of_what_it_is_for(peaks: dict[str, int]) -> None:
    full = [peaks[name] for name in NAMES[:5]]
    assert full == sorted(full, reverse=True)
    assert peaks["QLoRA"] < peaks["LoRA"] < peaks[NAMES[1]]


def test_the_first_that_fits_is_advised_and_fits_when_all_of_it_is_run(peaks: dict[str, int]) -> None:
    """With as much memory as lies between two rungs."""
    above, below = 2, 1
    memory = (peaks[NAMES[above]] + peaks[NAMES[below]]) / 2 / GiB / 0.98
    recipe = asked(memory)
    ladder = climbed(recipe)
    assert ladder.advised is not None
    assert ladder.advised.rung.name in NAMES[above:5]
    before = ladder.footholds[: ladder.footholds.index(ladder.advised)]
    assert not any(foothold.fits for foothold in before)
    assert "does not fit" in ladder.reasons[0]
    values = dict(override.removeprefix("strategy.").split("=") for override in ladder.advised.overrides)
    settings = {s.key: s.kind(values[s.key]) for s in SETTINGS if s.key in values}
    strategy = strategy_from({**recipe.strategy, **settings})
    whole = predict_worst(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
    assert whole.peak.bytes <= 0.98 * memory * GiB
    assert whole.peak.bytes == pytest.approx(ladder.advised.candidate.peak_bytes, rel=0.05)


def test_adapters_come_last_and_what_a_rule_forbids_says_so() -> None:
    """Weights that tensor parallelism divides cannot be packed."""
    strategy = {"precision": "bf16", "loss": "logits", "micro_batch_size": 1, "zero_stage": 0}
    pinned = {"strategy": strategy | {"tensor_parallel": 2, "offload": "none"}}
    peaks = {f.rung.name: f.candidate.peak_bytes for f in climbed(asked(80, **pinned)).footholds}
    memory = (peaks["checkpointing"] + peaks["LoRA"]) / 2 / GiB / 0.98
    ladder = climbed(asked(memory, **pinned))
    assert ladder.advised is not None and ladder.advised.rung.name == "LoRA"
    assert ladder.advised.overrides[:2] == ("adapter.name=lora", "adapter.rank=16")
    assert any("train few" in reason for reason in ladder.reasons)
    assert {f.candidate.verdict for f in ladder.footholds if f.rung.name == "QLoRA"} == {"invalid"}
    shown = io.StringIO()
    Console(width=100, file=shown).print(ladder_table(ladder))
    assert "take this" in shown.getvalue() and "rows of bytes" in re.sub(r"\s+", " ", shown.getvalue())


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
    ladder = json.loads(told.out)["ladder"]
    assert ladder["advised"] is None and {rung["verdict"] for rung in ladder["rungs"]} == {"does not fit"}
    assert told.err.count("\n") == 1 and "use more devices" in told.err
