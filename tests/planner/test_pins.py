"""The cost of a recipe's pins: a plan says first which pin to drop, and dropping it saves that time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.core.answer import TELLS, Answer
from shardwise.core.plan import Plan
from shardwise.core.units import GiB, format_change
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import compare
from shardwise.planner.answer import answer_of
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.report.tables import plan_text
from shardwise.technique import SETTINGS

MODEL = {"layers": 5, "width": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "vocab": 4096, "context": 1024}


def planned(devices: int, memory_gib: float | None = None, **pins: Any) -> tuple[Plan, Answer]:
    cluster: dict[str, Any] = {"device": "h100", "devices_per_node": devices}
    values = {
        "model": MODEL,
        "data": {"sequence_length": 1024},
        "steps": 100,
        "batch_size": 8 * devices,
        "cluster": cluster | ({"memory_gib": memory_gib} if memory_gib else {}),
        "strategy": {"precision": "bf16", "compile": False, **pins},
    }
    asked = recipe_of(values, SETTINGS)
    there = cluster_of(asked.cluster)
    found = plan_for(asked, blueprint_of(asked), there)
    return found, answer_of(asked, there, found)


Free = Callable[[int], tuple[Plan, Answer]]


@pytest.fixture(scope="module")
def free() -> Free:
    """The plan without pins, but for the digits, by the number of devices."""
    return functools.cache(planned)


@pytest.fixture
def pins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are compared with strategies without a pin alone: other neighbours take most of the time."""
    monkeypatch.setattr(compare, "_neighbours", lambda *_: iter(()))


@pytest.mark.parametrize(
    ("devices", "key", "value"),
    [
        pytest.param(2, "offload", "optimizer", marks=pytest.mark.long),
        pytest.param(2, "offload", "optimizer+parameters", marks=pytest.mark.long),
        (1, "micro_batch_size", 1),
        pytest.param(2, "activation_checkpointing", "full", marks=pytest.mark.long),
        pytest.param(2, "tensor_parallel", 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("pins_alone")
def test_a_pin_that_costs_time_is_said_first(free: Free, devices: int, key: str, value: object) -> None:
    """The time without it is between the one that is promised and that of the planner without pins."""
    found, answer = planned(devices, **{key: value})
    assert found.strategy.values[key] == value
    [said] = answer.unpin
    assert said.startswith(f"the recipe pins strategy.{key}: without it fits, −") and said.endswith(
        " % step time"
    )
    promised = next(
        each
        for each in found.candidates
        if each.verdict == "fits" and format_change(each.step_seconds / found.step.seconds - 1) in said
    )
    assert promised.strategy.values[key] != value
    assert free(devices)[0].step.seconds <= promised.step_seconds * (1 + TELLS)
    assert promised.step_seconds < found.step.seconds * (1 - TELLS)
    head = plan_text(found, answer=answer, brief=True).splitlines()[:4]
    assert said in head
    [alternative] = [each for each in answer.nearest if each.setting == key]
    assert alternative.candidate is not None and f"the recipe pins {key}" in alternative.reason


@pytest.mark.usefixtures("pins_alone")
def test_a_pin_that_costs_nothing_is_not_mentioned(free: Free) -> None:
    plan, without = free(1)
    found, answer = planned(1, **dict(plan.strategy.values))
    assert found.strategy == plan.strategy and not answer.unpin
    assert not [each for each in without.nearest if "pins" in each.reason and each.setting != "precision"]


@pytest.mark.long
def test_digits_are_not_dropped() -> None:
    found, answer = planned(2, precision="fp32")
    assert any(each.strategy.values["precision"] == "bf16" for each in found.candidates)
    assert not answer.unpin


@pytest.mark.long
@pytest.mark.usefixtures("pins_alone")
def test_states_and_micro_batch_make_room_for_what_is_dropped() -> None:
    """Without recomputation, the strategy fits only with its states divided or with a smaller micro-batch."""
    roomy, _ = planned(4, activation_checkpointing="full")
    found, answer = planned(4, memory_gib=4.0, activation_checkpointing="full")
    assert found.fits and roomy.fits
    dropped = [
        each
        for each in found.candidates
        if each.strategy.values["activation_checkpointing"] == "none" and each.verdict == "fits"
    ]
    assert dropped and all(len(found.strategy.differences(each.strategy)) > 1 for each in dropped)
    assert all(each.peak_bytes <= 4.0 * GiB for each in dropped)
    assert answer.unpin and answer.unpin[0].startswith(
        "the recipe pins strategy.activation_checkpointing: without it fits"
    )


@pytest.mark.long
def test_other_settings_are_compared_with_the_pins_kept() -> None:
    """A strategy without a pin is the alternative of that pin alone."""
    found, answer = planned(2, activation_checkpointing="full", offload="optimizer")
    for each in answer.nearest:
        if each.candidate is not None and each.setting not in (
            "activation_checkpointing",
            "offload",
            "precision",
        ):
            changed = found.strategy.differences(each.candidate.strategy)
            assert not {"activation_checkpointing", "offload", "precision"} & changed.keys(), each.setting


@pytest.mark.long
@pytest.mark.usefixtures("pins_alone")
def test_what_a_dropped_pin_makes_impossible_goes_with_it() -> None:
    """A fraction of the optimizer state is offloaded, or nothing is: the sentence names both keys."""
    _, answer = planned(2, offload="optimizer", offload_fraction=0.5)
    pins = re.fullmatch(r"the recipe pins (\S+), (\S+): without them fits, .*", answer.unpin[0])
    assert pins and {*pins.groups()} == {"strategy.offload", "strategy.offload_fraction"}


@pytest.mark.long
@pytest.mark.usefixtures("pins_alone")
def test_a_plan_for_memory_keeps_its_pins() -> None:
    """Of a space of stages of ZeRO alone."""
    alone = {"tensor_parallel": 1, "sequence_parallel": 1, "pipeline_parallel": 1, "loss": "logits"}
    values = {"objective": "memory"}
    asked = recipe_of(
        {
            "model": MODEL,
            "data": {"sequence_length": 1024},
            "steps": 100,
            "batch_size": 16,
            "cluster": {"device": "h100", "devices_per_node": 2},
            "strategy": {
                **alone,
                "precision": "bf16",
                "offload": "optimizer",
                "activation_checkpointing": "full",
            },
            "plan": values,
        },
        SETTINGS,
    )
    there = cluster_of(asked.cluster)
    assert not answer_of(asked, there, plan_for(asked, blueprint_of(asked), there)).unpin
