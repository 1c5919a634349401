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
from shardwise.planner.ranks import predict_worst
from shardwise.planner.search import plan_for
from shardwise.recipe.load import load_recipe, recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.report.fit_advice import advice_table
from shardwise.technique import REMEDIES, SETTINGS, strategy_from

MODEL = {"layers": 2, "width": 1024, "heads": 8, "ffn": 4096, "vocab": 4096, "context": 1024}
DEEP: dict[str, Any] = {
    "model": MODEL | {"layers": 4, "width": 2048, "ffn": 8192},
    "data": {"sequence_length": 1024},
    "batch_size": 8,
}
"""So large that fragmentation and overhead matter little."""
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


@pytest.fixture(scope="module")
def roomy() -> FitAdvice:
    """With memory enough for all remedies."""
    return advice_for(asked(80))


@pytest.fixture(scope="module")
def peaks(roomy: FitAdvice) -> dict[str, int]:
    """Peak bytes of the last try of each remedy."""
    advice = roomy
    assert [outcome.remedy.name for outcome in advice.outcomes] == NAMES  # the first try of each fits
    assert advice.advised is advice.outcomes[1]  # sharded for throughput
    assert "it fits" in advice.reasons[0]
    return {outcome.remedy.name: outcome.candidate.peak_bytes for outcome in advice.outcomes}


def test_each_remedy_needs_less_memory(peaks: dict[str, int]) -> None:
    full = [peaks[name] for name in NAMES[:5]]
    assert full == sorted(full, reverse=True), dict(zip(NAMES, full, strict=False))
    assert peaks["8-bit AdamW"] < peaks["ZeRO-3 (FSDP)"]
    assert peaks["QLoRA"] < peaks["LoRA"] < peaks[NAMES[1]]


def test_the_first_remedy_that_fits_is_advised_and_fits_in_full(peaks: dict[str, int]) -> None:
    """With an amount of memory between those of two remedies."""
    above, below = 2, 1
    memory = (peaks[NAMES[above]] + peaks[NAMES[below]]) / 2 / GiB / 0.98
    recipe = asked(memory)
    advice = advice_for(recipe)
    assert advice.advised is not None
    assert advice.advised.remedy.name in NAMES[above:6]
    before = advice.outcomes[: advice.outcomes.index(advice.advised)]
    assert not any(outcome.fits for outcome in before)
    assert "does not fit" in advice.reasons[0]
    values = dict(override.removeprefix("strategy.").split("=") for override in advice.advised.overrides)
    settings = {s.key: s.kind(values[s.key]) for s in SETTINGS if s.key in values}
    strategy = strategy_from({**recipe.strategy, **settings})
    whole = predict_worst(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
    assert whole.peak.bytes <= 0.98 * memory * GiB
    assert whole.peak.bytes == pytest.approx(advice.advised.candidate.peak_bytes, rel=0.05)


@pytest.mark.long
def test_adapters_come_last_and_invalid_remedies_have_their_rule() -> None:
    """Weights sharded by tensor parallelism cannot be quantized."""
    free = {"precision": "bf16"}
    peaks = {f.remedy.name: f.candidate.peak_bytes for f in advice_for(asked(0.7, strategy=free)).outcomes}
    memory = (peaks["CPU offload"] + peaks["LoRA"]) / 2 / GiB / 0.98
    advice = advice_for(asked(memory, strategy=free))
    assert advice.advised is not None and advice.advised.remedy.name == "LoRA"
    assert advice.advised.overrides[:2] == ("adapter.name=lora", "adapter.rank=16")
    assert any("train an adapter" in reason for reason in advice.reasons)
    advice = advice_for(asked(80, strategy=free | {"tensor_parallel": 2}))
    assert {f.candidate.verdict for f in advice.outcomes if f.remedy.name == "QLoRA"} == {"invalid"}
    shown = io.StringIO()
    Console(width=100, file=shown).print(advice_table(advice))
    assert "advised" in shown.getvalue() and "rows of bytes" in re.sub(r"\s+", " ", shown.getvalue())


def peak_of(**strategy: Any) -> int:
    """The peak of one strategy of DEEP, with fragmentation."""
    recipe = asked(80, **DEEP)
    values = {"precision": "bf16", "micro_batch_size": 1} | strategy
    cluster = cluster_of(recipe.cluster)
    return predict_worst(recipe, blueprint_of(recipe), strategy_from(values), cluster).peak.bytes


SMALLEST = {"zero_stage": 3, "activation_checkpointing": "full", "offload": "optimizer+parameters"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("pins", "freed", "drop"),
    [
        ({"zero_stage": 0, "offload": "none"}, {"offload": "none"}, ("zero_stage",)),
        pytest.param(
            {"zero_stage": 0, "activation_checkpointing": "none", "offload": "none"},
            {},
            ("zero_stage", "activation_checkpointing", "offload"),
            marks=pytest.mark.long,
        ),
        *(
            pytest.param(pins, {}, drop, marks=pytest.mark.long)
            for pins, drop in (
                ({"offload": "none"}, ("offload",)),
                ({"activation_checkpointing": "none"}, ("activation_checkpointing",)),
                ({"loss": "logits", "offload": "none"}, ("offload",)),
            )
        ),
    ],
)
def test_a_pin_that_keeps_it_from_fitting_is_named_before_an_adapter(
    pins: dict[str, Any], freed: dict[str, Any], drop: tuple[str, ...]
) -> None:
    """With memory for the smallest strategy without those pins, and not for the smallest with them."""
    free = {"precision": "bf16"}
    with_pins, without = peak_of(**SMALLEST | pins), peak_of(**SMALLEST | freed)
    if len(drop) > 1:  # no single pin is enough
        with_pins = min(peak_of(**SMALLEST | {k: v for k, v in pins.items() if k != key}) for key in pins)
    memory = (0.2 * with_pins + 0.8 * without) / GiB / 0.98
    recipe = asked(memory, strategy=free | pins, **DEEP)
    advice = advice_for(recipe)
    assert advice.advised is not None and advice.advised.remedy.adapter is None
    dropped = advice.advised.unpinned
    assert set(dropped) == set(drop)
    assert not any("train an adapter" in reason for reason in advice.reasons)
    said = advice.reasons[-1]
    assert said.startswith("unpin " + " and ".join(f"strategy.{key}" for key in dropped) + ": fits with ")
    overrides = said.partition(": fits with ")[2].split()
    changed = recipe_of(recipe.model_dump(exclude_unset=True), SETTINGS, overrides)
    candidate = advice.advised.candidate
    whole = predict_worst(changed, blueprint_of(changed), candidate.strategy, cluster_of(changed.cluster))
    assert whole.peak.bytes <= 0.98 * memory * GiB


@pytest.mark.long
def test_a_micro_batch_that_is_too_large_is_a_pin() -> None:
    large, small = (peak_of(**SMALLEST | {"micro_batch_size": size}) for size in (8, 1))
    pins = {"precision": "bf16", "micro_batch_size": 8}
    advice = advice_for(asked((large + small) / 2 / GiB / 0.98, strategy=pins, **(DEEP | {"batch_size": 32})))
    assert advice.advised is not None and advice.advised.unpinned == ("micro_batch_size",)
    assert advice.advised.candidate.strategy.values["micro_batch_size"] in (1, 2, 4)
    said = "unpin strategy.micro_batch_size: fits with strategy.micro_batch_size=null"
    assert advice.reasons[-1] == said


@pytest.mark.long
def test_one_device_has_nothing_to_shard() -> None:
    """No stage of ZeRO is proposed that the planner does not choose there, and no sharding is spoken of."""
    cluster = {"device": "h100", "devices_per_node": 1}
    roomy = advice_for(asked(80, cluster=cluster | {"memory_gib": 80}))
    assert "ZeRO-3 (FSDP)" not in [each.remedy.name for each in roomy.outcomes]
    assert {each.candidate.strategy.values["zero_stage"] for each in roomy.outcomes} <= {0, 1}
    peaks = [each.candidate.peak_bytes for each in roomy.outcomes if each.remedy.adapter is None]
    memory = (min(peaks) + max(peaks)) / 2 / GiB / 0.98
    advice = advice_for(asked(80, cluster=cluster | {"memory_gib": memory}))
    assert advice.advised is not None
    assert not any("zero_stage=3" in o or "zero_stage=2" in o for o in advice.advised.overrides)
    assert advice.reasons[0].endswith("it does not fit")


@pytest.mark.long
def test_where_the_plan_fits_it_is_the_advice() -> None:
    recipe = asked(80, strategy={"precision": "bf16"})
    cluster = cluster_of(recipe.cluster)
    plan = plan_for(recipe, blueprint_of(recipe), cluster, compare=False)
    advice = advise(recipe, cluster, plan)
    assert plan.fits and advice.planned and advice.advised is None
    assert advice.reasons[-1].startswith("the plan fits") and plan.line in advice.reasons[-1]
    assert advice.as_dict()["advised"] == []


@pytest.mark.long
def test_a_faster_optimizer_is_named_where_the_plan_offloads() -> None:
    """Without it, the plan fits only with the optimizer on the host."""
    pins = {"precision": "bf16", "micro_batch_size": 1, "loss": "logits", "activation_checkpointing": "full"}
    axes = dict.fromkeys(("tensor_parallel", "sequence_parallel", "pipeline_parallel"), 1)
    recipe = asked(3.4, strategy=pins | axes, **DEEP)
    cluster = cluster_of(recipe.cluster)
    plan = plan_for(recipe, blueprint_of(recipe), cluster, compare=False)
    assert plan.fits and plan.strategy.values["offload"] == "optimizer"
    said = advise(recipe, cluster, plan).reasons[-1]
    assert re.fullmatch(
        r"8-bit AdamW fits too, −\d+ % step time: optimizer\.name=adamw_8bit .*zero_stage=3", said
    )


@pytest.mark.long
def test_eight_bit_moments_are_a_remedy_of_adamw_alone(roomy: FitAdvice) -> None:
    by_name = {each.remedy.name: each for each in roomy.outcomes}
    assert by_name["8-bit AdamW"].overrides[0] == "optimizer.name=adamw_8bit"
    sgd = advice_for(asked(80, optimizer={"name": "sgd"}))
    adapter = advice_for(asked(80, adapter={"name": "lora"}))
    for other in (sgd, adapter):
        assert "8-bit AdamW" not in [each.remedy.name for each in other.outcomes]


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
