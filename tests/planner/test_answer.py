"""The answer of a plan: hours and cost, the best alternative of each setting, the price of memory, the front."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.json_file import checked
from shardwise.core.ledger import Ledger
from shardwise.core.plan import Candidate, HostMemory, Plan, StepEstimate
from shardwise.core.strategy import Strategy
from shardwise.core.units import GiB
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.planner.accuracy import spread_of
from shardwise.planner.answer import answer_of, front
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, layout_of, strategy_from, strategy_line
from tests.harness.plans import small_plan

SPLIT = {"matrix products": 1.2, "memory-bound": 0.5, "exposed communication": 0.3}
CHOSEN: dict[str, Any] = {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 2}


def recipe(**changed: Any) -> Recipe:
    values = {
        "model": {"preset": "llama-3-8b"},
        "data": {"sequence_length": 4096},
        "steps": 9000,
        "batch_size": 64,
        "cluster": {"preset": "8xH100-80GB"},
    }
    if "epochs" in changed:
        del values["steps"]
    return recipe_of({**values, **changed}, SETTINGS)


def strategy(**changed: object) -> Strategy:
    return strategy_from({**CHOSEN, **changed})


def candidate(peak_gib: float, seconds: float, verdict: str, **changed: Any) -> Candidate:
    """A strategy that differs from the chosen one by ``changed``; ``split`` may be among them."""
    split = changed.pop("split", {})
    values = strategy(**changed)
    line = strategy_line(values, layout_of(values, 8), 64)
    reasons = {
        "does not fit": "3.00 GiB too much in the backward phase at layers.31.mlp",
        "tight": "+40 % step time, −15.00 GiB; the allocator empties its cache once a step to make room",
    }
    reason = reasons.get(verdict, "")
    return Candidate(values, line, int(peak_gib * GiB), seconds, verdict, reason, "counted", split)


def plan(*candidates: Candidate, seconds: float = 2.0, peak_gib: float = 70) -> Plan:
    chosen = strategy()
    step = StepEstimate(seconds, 64 * 4096, 10**15, {}, 0.4, SPLIT)
    whole = replace(
        small_plan(),
        strategy=chosen,
        line=strategy_line(chosen, layout_of(chosen, 8), 64),
        world_size=8,
        device="H100-80GB",
        capacity_bytes=80 * GiB,
        reserve_bytes=2 * GiB,
        step=step,
        candidates=(candidate(peak_gib, seconds, "chosen"), *candidates),
        layout=layout_of(chosen, 8),
    )
    return replace(whole, peak=replace(whole.peak, bytes=int(peak_gib * GiB)))


def cluster(asked: Recipe) -> Cluster:
    return cluster_of(asked.cluster)


def answered(made: Plan, **changed: Any) -> Any:
    asked = recipe(**changed)
    return answer_of(asked, cluster(asked), made)


def test_hours_tokens_and_cost_are_those_of_the_recipes_steps() -> None:
    """9,000 steps of 2 s are 5 hours, on 8 devices 40 device-hours."""
    made = answered(plan(), cluster={"preset": "8xH100-80GB", "price_per_device_hour": 2.5})
    assert (made.run.hours, made.run.device_hours, made.run.cost) == (5.0, 40.0, 100.0)
    assert made.run.tokens == 9000 * 64 * 4096
    assert answered(plan()).run.cost is None
    written = made.as_dict()
    assert written["run"]["cost"] == 100.0 and written["run"]["hours"] == 5.0


def test_epochs_show_the_hours_of_some_steps() -> None:
    """Their steps are counted from the data, which a plan does not read."""
    made = answered(plan(), epochs=2.0)
    assert (made.run.steps, made.run.epochs) == (1000, 2.0) and made.run.hours == pytest.approx(2000 / 3600)


def test_intervals_are_the_measured_spread_times_the_prediction() -> None:
    made, asked = answered(plan()), recipe()
    for quantity, interval, predicted in (
        ("seconds", made.run.likely_hours, 5.0),
        ("memory", made.peak, 70 * GiB),
    ):
        spread = spread_of(quantity, cluster(asked).device.traits.spread)
        if spread is None:
            assert interval is None
            continue
        assert interval.p50 == pytest.approx(spread.p50 * predicted)
        assert interval.p95 == pytest.approx(spread.p95 * predicted) and interval.p95 > interval.p50
        assert interval.runs == spread.runs and interval.source == spread.source


def test_assumed_speeds_have_no_interval() -> None:
    """No run was compared with the assumed speeds of a CPU."""
    asked = recipe(cluster={"device": "cpu"})
    here = cluster(asked)
    assumed = replace(here, device=replace(here.device, measured=None))
    assert answer_of(asked, assumed, plan()).run.likely_hours is None


def test_each_setting_has_its_best_alternative() -> None:
    split = {**SPLIT, "exposed communication": 0.5}
    made = plan(
        candidate(60, 2.2, "fits", micro_batch_size=1),
        candidate(62, 2.5, "fits", zero_stage=2, split=split),
        candidate(61, 2.2, "fits", zero_stage=1, split=split),
        candidate(83, 1.8, "does not fit", zero_stage=0),
        candidate(50, 2.4, "fits", activation_checkpointing="full", micro_batch_size=4),
        candidate(55, 2.8, "tight", activation_checkpointing="selective"),
        candidate(40, 2.1, "fits", tensor_parallel=2, micro_batch_size=4),
    )
    nearest = {each.setting: each for each in answered(made).nearest}
    stage = nearest["zero_stage"]
    assert (stage.chosen, stage.other) == ("3", "1"), "the fastest that fits, though a larger one is faster"
    assert stage.reason == "+10 % step time, −9.00 GiB; 200.0 ms more exposed communication"
    recomputed = nearest["activation_checkpointing"]
    assert (recomputed.other, recomputed.also) == ("full", ("micro_batch_size 4 (now 2)",))
    tight = {each.setting: each for each in answered(plan(made.candidates[6])).nearest}
    assert tight["activation_checkpointing"].reason.endswith("empties its cache once a step to make room")
    assert nearest["micro_batch_size"].other == "1"
    assert nearest["tensor_parallel"].also == ("micro_batch_size 4 (now 2)",)
    named = [each.candidate.strategy for each in nearest.values() if each.candidate]
    assert len(named) == len(set(named)), "a strategy is named once"


def test_an_alternative_that_does_not_fit_says_where_and_what_it_would_save() -> None:
    others = [candidate(83, 1.8, "does not fit", zero_stage=2), candidate(60, 1.5, "fits", precision="fp8")]
    both = candidate(83, 1.8, "fits", zero_stage=2, loss="chunked")
    made = answered(plan(*others, both), strategy={"precision": "bf16", "loss": "logits"})
    stage = next(each for each in made.nearest if each.setting == "zero_stage")
    assert stage.reason == "3.00 GiB too much in the backward phase at layers.31.mlp; −10 % step time"
    pinned = {each.setting: each for each in made.nearest if each.setting in ("precision", "loss")}
    assert pinned["precision"].reason.endswith("; the recipe pins precision")
    assert pinned["loss"].also == ("zero_stage 2 (now 3)",), (
        "without the pin, other settings give memory back"
    )
    assert pinned["loss"].reason.endswith("; the recipe pins loss")
    assert "micro_batch_size" not in {each.setting for each in made.nearest}, "no value of it was predicted"


def test_a_setting_without_a_prediction_says_why() -> None:
    nearest = {
        each.setting: each for each in answered(plan(candidate(60, 2.2, "fits", zero_stage=2))).nearest
    }
    assert nearest["tensor_parallel"].candidate is None
    assert nearest["tensor_parallel"].reason == "not predicted: strategy.tensor_parallel=2 plans it"
    assert nearest["offload"].reason == "others are taken where nothing else fits, or where they save 10 %"
    assert nearest["compile"].reason == (
        "block is tried only where the steps surely save 3 times the 30.00 s that it costs once"
    )


def test_where_no_degree_is_possible_the_nearest_is_named() -> None:
    one_head = {
        "layers": 4,
        "width": 64,
        "heads": 1,
        "kv_heads": 1,
        "ffn": 128,
        "vocab": 512,
        "context": 4096,
    }
    made = answered(plan(candidate(60, 2.2, "fits", zero_stage=2)), model=one_head)
    reason = next(each.reason for each in made.nearest if each.setting == "tensor_parallel")
    assert reason.startswith("2 is not possible: "), reason


def test_what_costs_seconds_once_says_so() -> None:
    nearest = {
        each.setting: each for each in answered(plan(candidate(60, 1.9, "fits", compile="block"))).nearest
    }
    assert nearest["compile"].reason.startswith("−5.0 % step time")
    assert nearest["compile"].reason.endswith("; it costs 30.00 s once")


def test_memory_has_a_price_where_faster_strategies_lack_it() -> None:
    made = answered(
        plan(
            candidate(84, 1.82, "does not fit", activation_checkpointing="none", micro_batch_size=4),
            candidate(90, 1.9, "does not fit", zero_stage=2),
            candidate(95, 1.6, "does not fit", zero_stage=0),
            candidate(82, 2.3, "does not fit", loss="chunked"),
            candidate(0.1, 0.0, "does not fit", zero_stage=1),
        )
    )
    assert made.binding == "memory binds: faster strategies need more than the device has"
    assert [price.sentence() for price in made.prices] == [
        "micro_batch_size 4 (now 2) would be 9.0 % faster; it needs 6.00 GiB more than the device has",
        "zero_stage 0 (now 3) would be 20 % faster; it needs 17.00 GiB more than the device has",
    ], "a price for more memory and less speed than another is none"


def test_without_a_faster_strategy_memory_does_not_bind() -> None:
    made = answered(plan(candidate(90, 2.0, "does not fit", zero_stage=2)))
    assert not made.prices
    assert made.binding == (
        "memory does not bind: no predicted strategy that needs more is faster; most of a step is matrix products, 60 %"
    )


def test_a_plan_that_does_not_fit_has_no_price() -> None:
    made = answered(plan(candidate(90, 1.0, "does not fit", zero_stage=2), peak_gib=79))
    assert not made.prices and made.binding.startswith(
        "memory binds: the smallest predicted strategy needs 79.00"
    )


def test_host_memory_binds_where_the_device_has_room() -> None:
    short = replace(plan(), host=HostMemory(Ledger(optimizer_state=100 << 30), 64 << 30))
    assert answered(short).binding == (
        "host memory binds: the strategy that needs least of a device takes 100.0 GiB of 64.00 GiB"
    )


def candidates() -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(
        lambda peak, seconds, stage: replace(
            candidate(0, seconds, "fits", zero_stage=stage), peak_bytes=peak
        ),
        st.integers(0, 20),
        st.integers(0, 20).map(float),
        st.integers(0, 3),
    )
    return st.lists(one, max_size=12)


@given(candidates())
def test_nothing_beats_the_front_and_something_of_it_beats_the_rest(found: list[Candidate]) -> None:
    kept = front(found)
    timed = [each for each in found if each.step_seconds and each.peak_bytes]
    for each in timed:
        no_better = [
            k for k in kept if k.peak_bytes <= each.peak_bytes and k.step_seconds <= each.step_seconds
        ]
        assert no_better, "everything is on the front, or behind it"
    for one in kept:
        assert not [
            other
            for other in timed
            if (other.peak_bytes < one.peak_bytes and other.step_seconds <= one.step_seconds)
            or (other.peak_bytes <= one.peak_bytes and other.step_seconds < one.step_seconds)
        ]


def test_files_without_a_split_are_read() -> None:
    """Plans of earlier runs have candidates without one."""
    made = plan(candidate(60, 2.2, "fits", zero_stage=2))
    written = made.as_dict()
    for each in written["candidates"]:
        del each["split"]
    import json

    assert checked(json.dumps(written), Plan).candidates[1].split == {}


def test_a_pin_is_not_blamed_for_a_value_of_the_last_resort() -> None:
    """Without strategy.reference the search takes no precomputed reference while a plan fits."""
    faster = plan(candidate(60, 1.5, "fits", reference="precomputed"))
    pairs = {"objective": "dpo", "data": {"source": "pairs.jsonl", "sequence_length": 4096}}
    made = answered(faster, strategy={"reference": "copy"}, **pairs)
    assert not made.unpin
    assert "reference" in {each.setting for each in made.nearest}


def test_a_default_that_takes_twice_the_time_is_named() -> None:
    """Of values that take half the time the first. A recipe that says fp32 wants it; one for memory wants no speed."""

    def unpin(*others: Candidate, **changed: Any) -> tuple[str, ...]:
        slow = replace(plan(*others), strategy=strategy(precision="fp32"))
        made: tuple[str, ...] = answered(slow, **changed).unpin
        return made

    faster = [candidate(40, 0.2, "fits", precision="fp8"), candidate(60, 0.5, "fits", precision="bf16")]
    assert unpin(*faster) == ("strategy.precision is fp32, the default: bf16 fits, −75 % step time",)
    assert not unpin(candidate(60, 1.5, "fits", precision="bf16"))
    assert not unpin(candidate(60, 0.5, "does not fit", precision="bf16"))
    assert not unpin(*faster, strategy={"precision": "fp32"})
    assert not unpin(*faster, plan={"objective": "memory"})
