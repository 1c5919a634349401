"""How far each quantity goes: the value that is named fits in a plan of its own, and the next one does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.answer import QuantityLimit
from shardwise.core.plan import Plan
from shardwise.core.progress import silent
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.limits import _LimitSearch, _ranges, limits_of
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.harness.tiers import quick

MODEL = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "vocab": 2048, "context": 512}


def asked(memory_gib: float = 2.2, **changed: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": MODEL,
        "data": {"sequence_length": 512},
        "steps": 1,
        "batch_size": 16,
        "strategy": {
            "precision": "bf16",
            "zero_stage": 2,
            "micro_batch_size": 2,
            "loss": "logits",
            "offload": "none",
            "compile": "none",
            "optimizer_in_backward": False,
            "activation_checkpointing": "none",
            "tensor_parallel": 1,
            "sequence_parallel": 1,
            "pipeline_parallel": 1,
        },
        "cluster": {"device": "h100", "devices_per_node": 4, "memory_gib": memory_gib},
    }
    strategy = {**values["strategy"], **changed.pop("strategy", {})}
    return recipe_of({**values, **changed, "strategy": strategy}, SETTINGS)


def planned(recipe: Recipe, *overrides: str) -> Plan:
    """With all settings pinned, the plan of the strategy alone."""
    changed = recipe_of(recipe.model_dump(exclude_unset=True), SETTINGS, list(overrides))
    return plan_for(changed, blueprint_of(changed), cluster_of(changed.cluster), compare=False)


def limit_of(recipe: Recipe, quantity: str) -> QuantityLimit:
    plan, cluster = planned(recipe), cluster_of(recipe.cluster)
    varied = next(each for each in _ranges(recipe, cluster, plan) if each.quantity == quantity)
    return _LimitSearch(varied, plan, silent).limit()


def overrides_of(quantity: str, value: int) -> list[str]:
    """The overrides that set a quantity, and those that grow with it."""
    return {
        "micro_batch_size": [f"strategy.micro_batch_size={value}", f"batch_size={max(16, 4 * value)}"],
        "sequence_length": [f"data.sequence_length={value}", f"model.context={max(512, value)}"],
        "layers": [f"model.layers={value}"],
        "devices": [f"cluster.devices_per_node={value}"],
    }[quantity]


QUANTITIES = ("micro_batch_size", "sequence_length", "layers", "devices")


@pytest.mark.parametrize("quantity", quick(QUANTITIES, "micro_batch_size", "devices"))
@pytest.mark.parametrize("memory_gib", quick([2.2, 1.86], 2.2))
def test_each_limit_fits_in_full_and_the_next_value_does_not(memory_gib: float, quantity: str) -> None:
    """Of a plan that fits, and of one that does not."""
    recipe = asked(memory_gib)
    plan = planned(recipe)
    assert plan.fits == (memory_gib > 2)
    pinned = recipe.model_copy(update={"strategy": dict(plan.strategy.values)})
    limit = limit_of(pinned, quantity)
    for value, peak in ((limit.fits, limit.peak_bytes), (limit.stops, limit.stop_bytes)):
        if value is not None:
            other = planned(pinned, *overrides_of(quantity, value))
            assert other.peak.bytes == peak, value
            assert (other.fits and not other.tight) == (value == limit.fits), value
    if quantity == "micro_batch_size" and plan.fits:  # the batch grows with the ranks' shares
        assert limit.now == 2 and limit.fits and limit.fits > 4
        assert limit.note == f"batch_size {4 * limit.fits:,}"
    if quantity == "devices" and plan.fits:  # their range ends
        assert limit.now == 4 and limit.sentence() == "devices: 1 fits; one is enough"


def test_every_quantity_is_varied() -> None:
    recipe = asked()
    ranges = _ranges(recipe, cluster_of(recipe.cluster), planned(recipe))
    assert tuple(varied.quantity for varied in ranges) == QUANTITIES


@pytest.mark.long
def test_every_quantity_has_a_limit() -> None:
    recipe = asked()
    found = limits_of(recipe, cluster_of(recipe.cluster), planned(recipe))
    assert tuple(limit.quantity for limit in found) == QUANTITIES


def test_adapters_keep_the_limit_of_the_context() -> None:
    """Without it a sequence was tried that the model refuses, and the whole plan ended with that error."""
    recipe = asked(adapter={"rank": 4})
    assert blueprint_of(recipe).context == 512
    ranges = _ranges(recipe, cluster_of(recipe.cluster), planned(recipe))
    lengths = next(varied for varied in ranges if varied.quantity == "sequence_length")
    predictor, _ = lengths.trial(1024)
    assert predictor.recipe.data.sequence_length == 1024 and blueprint_of(predictor.recipe).context == 1024


def test_what_a_rule_forbids_is_not_possible() -> None:
    """Four tensor-parallel ranks are no strategy of two devices."""
    devices = limit_of(asked(2.6, strategy={"tensor_parallel": 4}), "devices")
    assert (devices.fits, devices.stops, devices.stop_bytes) == (4, 2, 0)
    assert devices.reason.startswith("is not possible: the ranks that share one copy of the model")


@pytest.mark.long
def test_stages_are_varied_together() -> None:
    layers = limit_of(asked(6.2, strategy={"pipeline_parallel": 2, "zero_stage": 0}), "layers")
    assert layers.fits and layers.stops == layers.fits + 2 and layers.fits % 2 == 0


def test_a_value_of_which_none_fits() -> None:
    limit = QuantityLimit("sequence_length", 512, None, 0, 32, 2**30, "needs 1.00 GiB of 0.90 GiB")
    assert limit.sentence() == "sequence_length: no value fits; 32 needs 1.00 GiB of 0.90 GiB"
    assert replace(limit, fits=16).sentence().startswith("sequence_length: 16 fits; 32 needs")


@pytest.mark.long
def test_the_largest_imbalance_of_a_mixture_fits_and_the_next_does_not() -> None:
    """On a device with memory for some of the room. Plans without expert parallelism do not speak of it."""
    model = {**MODEL, "experts": 8, "expert_ffn": 512}

    def recipe(memory_gib: float, capacity: float = 1.5) -> Recipe:
        experts = {"expert_parallel": 4, "expert_capacity": capacity, "micro_batch_size": 4}
        return asked(memory_gib, model=model, strategy=experts)

    roomy = [planned(recipe(8.0, capacity)) for capacity in (1.5, 3.0)]
    needed = sum(plan.peak.bytes + plan.reserve_bytes for plan in roomy) / 2
    tight = recipe(needed / 2**30)
    limit = limit_of(tight, "expert_capacity")
    assert limit.now == 1.5 and limit.fits is not None and limit.stops is not None
    assert 1.5 < limit.fits < 4.0 and limit.stops == pytest.approx(limit.fits + 0.05)
    for value, fits in ((limit.fits, True), (limit.stops, False)):
        other = planned(tight, f"strategy.expert_capacity={value}")
        assert (other.fits and not other.tight) == fits
