"""What goes with what: every pair of ways to train, judged by the rules.

docs/generate.py writes docs/reference/combinations.md from it; tests/test_combinations.py compares it with the rows
that tests train. A *way* is a value of a setting, or of the recipe, that a user may want: ZeRO 2, a ring, fp16, a tied
table. Of two ways the rules alone say whether they go together: there is some strategy on eight ranks that has both and
breaks no rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from shardwise.core.strategy import Strategy
from shardwise.recipe.load import recipe_of
from shardwise.recipe.presets import dimensions_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    AXES,
    RULES,
    SETTINGS,
    broken_rules,
    layout_of,
    micro_batches,
    strategy_from,
)
from shardwise.technique.offload import OFFLOAD
from shardwise.technique.offload import parts as offloaded
from shardwise.technique.rules import Case, Rule

WORLD = 8
UNTRAINED = [("hybrid", "pipedream")]
"""Pairs that go together and that no row of a test trains; a test dry-runs them.

Hybrid sharding of an asynchronous pipeline needs eight processes, and its test has four.
"""


@dataclass(frozen=True)
class Example:
    """A strategy for a recipe on so many ranks."""

    settings: Mapping[str, Any]
    world: int
    recipe: Recipe

    @functools.cached_property
    def strategy(self) -> Strategy:
        return strategy_from(self.settings)

    def degree(self, *axes: str) -> int:
        layout = layout_of(self.strategy, self.world)
        return max(layout.degree(axis) for axis in axes)

    def value(self, key: str) -> Any:
        return self.strategy.values[key]


@dataclass(frozen=True)
class Way:
    """One setting or model that a user may want.

    Attributes:
        pins: settings that have to be so; ``moved`` are the parts that ``offload`` has to name.
        sections: the same of the recipe's sections.
        holds: whether an example has it, where that is more than its pins; of degrees it is enough to be above 1.
    """

    name: str
    group: str
    pins: Mapping[str, Any] = field(default_factory=dict)
    moved: frozenset[str] = frozenset()
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    holds: Callable[[Example], bool] = lambda example: True

    def within(self, example: Example) -> bool:
        """Whether an example has this."""
        pinned = all(
            example.value(key) == value
            for key, value in self.pins.items()
            if key not in (*DEGREES, "activation_checkpointing")
        )
        divided = all(example.value(key) > 1 for key in self.pins if key in DEGREES)
        moved = self.moved <= offloaded(example.strategy)
        return pinned and divided and moved and self.holds(example)


DEGREES = ("pipeline_parallel", "tensor_parallel", "sequence_parallel", "replicate")
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream")


def _model(**changes: Any) -> Mapping[str, Mapping[str, Any]]:
    return {"model": changes}


def _optimizer(**changes: Any) -> Mapping[str, Mapping[str, Any]]:
    return {"optimizer": changes}


def _of_model(holds: Callable[[Any], bool]) -> Callable[[Example], bool]:
    def asked(example: Example) -> bool:
        spec = example.recipe.model
        return spec.hf is None and spec.factory is None and holds(dimensions_of(spec))

    return asked


def _recomputing(kind: str) -> Way:
    """One kind of activation checkpointing, with whatever number."""
    word, key = kind.partition(":")[0], "activation_checkpointing"

    def asked(example: Example) -> bool:
        return str(example.value(key)).partition(":")[0] == word

    return Way(f"recompute {word}", "memory", {key: kind}, holds=asked)


def _ways() -> Iterator[Way]:
    def setting(group: str, key: str, **names: str) -> Iterator[Way]:
        yield from (Way(name, group, {key: value}) for value, name in names.items())

    yield Way("ZeRO 0", "data", {"zero_stage": 0})
    for stage in (1, 2, 3):
        sharded = lambda example: example.degree("shard", "sequence") > 1  # noqa: E731
        yield Way(f"ZeRO {stage}", "data", {"zero_stage": stage}, holds=sharded)
    hybrid = lambda e: e.value("replicate") > 1 and e.value("zero_stage") > 0 and e.degree("shard") > 1  # noqa: E731
    yield Way("hybrid", "data", {"replicate": 2}, holds=hybrid)
    accumulates = lambda e: (  # noqa: E731
        micro_batches(e.strategy, layout_of(e.strategy, e.world), e.recipe.batch_size) > 1
    )
    yield Way("accumulation", "data", holds=accumulates)
    for shares in ("none", "gathered", "regathered"):
        name = "tensor" if shares == "none" else f"tensor, {shares} shares"
        yield Way(name, "model", {"tensor_parallel": 2, "tensor_sequence_parallel": shares})
    for method in ("ulysses", "ring"):
        yield Way(method, "model", {"sequence_parallel": 2, "sequence_method": method})
    for schedule in SCHEDULES:
        yield Way(schedule, "pipeline", {"pipeline_parallel": 2, "pipeline_schedule": schedule})
    yield from setting("precision", "precision", **{p: p for p in ("fp64", "fp32", "bf16", "fp16", "fp8")})
    yield Way("bf16 weights alone", "precision", {"master_weights": False})
    yield Way("16-bit reduction", "precision", {"reduce_dtype": "compute"})
    yield Way("16-bit buffers", "precision", {"buffer_dtype": "compute"})
    for kind in ("selective", "every:2", "full", "sqrt", "budget:0.4"):
        yield _recomputing(kind)
    for part in ("activations", "optimizer", "parameters", "nvme"):
        name = "optimizer on disk" if part == "nvme" else f"{part} offloaded"
        yield Way(name, "memory", moved=frozenset({part}))
    yield Way("half of it offloaded", "memory", {"offload_fraction": 0.5})
    yield Way("chunked loss", "memory", {"loss": "chunked"})
    yield Way("update in backward", "memory", {"optimizer_in_backward": True})
    for name in ("adamw", "sgd", "adamw_8bit"):
        named = lambda e, name=name: e.recipe.optimizer.name == name  # noqa: E731
        yield Way(name, "rest", sections=_optimizer(name=name), holds=named)
    clips = lambda e: e.recipe.optimizer.clip_norm is not None  # noqa: E731
    yield Way("clipping", "rest", sections=_optimizer(clip_norm=1.0), holds=clips)
    yield Way("tied table", "rest", sections=_model(tied=True), holds=_of_model(lambda d: d.tied))
    grouped = _of_model(lambda d: d.kv_heads < d.heads)
    yield Way("grouped heads", "rest", sections=_model(kv_heads=4), holds=grouped)
    learned = _of_model(lambda d: d.family == "gpt2")
    yield Way("GPT-2 family", "rest", sections=_model(family="gpt2"), holds=learned)


UNNAMED = ("pipeline_vertical_sync", "pipeline_stages_per_rank", "micro_batch_size")
"""Settings that say how one way of the list is done, or how much of it."""


def _further(named: Sequence[Way]) -> Iterator[Way]:
    """Values that are no default, of settings that no way above names: a new setting appears here."""
    known = {key for way in named for key in way.pins} | {OFFLOAD.key, *UNNAMED}
    for setting in SETTINGS:
        if setting.key not in known:
            values = [value for value in setting.examples if value != setting.default]
            yield from (Way(f"{setting.key} {value}", "further", {setting.key: value}) for value in values)


def _every() -> tuple[Way, ...]:
    named = tuple(_ways())
    return (*named, *_further(named))


WAYS: tuple[Way, ...] = _every()
GROUPS: Mapping[str, str] = {
    "data": "Data and its state",
    "model": "Tensor and sequence",
    "pipeline": "Pipeline schedules",
    "precision": "Precision",
    "memory": "Memory",
    "rest": "Optimizer and model",
    "further": "Further settings",
}


# -- what the rules say -----------------------------------------------------------------------------------

MODEL = {"layers": 8, "width": 512, "heads": 8, "ffn": 1024, "vocab": 512, "context": 64}
FREE: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 3, 1, 2),
    "precision": ("fp32", "bf16", "fp8"),
    "offload": ("none", "optimizer"),
    "optimizer.clip_norm": (1.0, None),
    "guard.rewinds": (1, 0),
    "model.tied": (False,),
}
"""Settings that may be chosen so that two ways combine."""


@dataclass(frozen=True)
class Verdict:
    """Whether two ways go together: with an example, or with the rules that forbid it; neither where one is the
    other's opposite, such as two values of one setting."""

    example: Example | None = None
    rules: tuple[Rule, ...] = ()
    refused: Example | None = None


def verdict_of(one: Way, other: Way) -> Verdict:
    """By the rules alone: the first example on eight ranks that has both and breaks none."""
    fewest: tuple[list[Rule], Example] | None = None
    for example in _examples(one, other):
        if not (one.within(example) and other.within(example)):
            continue
        broken = [v.rule for v in broken_rules(example.strategy, example.world, example.recipe)]
        if not broken:
            return Verdict(example)
        if fewest is None or len(broken) < len(fewest[0]):
            fewest = broken, example
    return Verdict() if fewest is None else Verdict(rules=tuple(fewest[0]), refused=fewest[1])


def _examples(one: Way, other: Way) -> Iterator[Example]:
    """Everything that is pinned by two ways, and every choice of the rest; nothing where they pin unlike values."""
    pins, sections = dict(one.pins), {name: dict(values) for name, values in one.sections.items()}
    for key, value in other.pins.items():
        if pins.setdefault(key, value) != value:
            return
    for name, values in other.sections.items():
        mine = sections.setdefault(name, {})
        if any(mine.setdefault(key, value) != value for key, value in values.items()):
            return
    pinned = {*pins, *(f"{name}.{key}" for name, values in sections.items() for key in values)}
    free = {key: values for key, values in FREE.items() if key not in pinned}
    if moved := one.moved | other.moved:
        free["offload"] = tuple(
            value for value in OFFLOAD.examples if moved <= offloaded(strategy_from({"offload": value}))
        )
    for chosen in product(*free.values()):
        values = dict(zip(free, chosen, strict=True))
        of_recipe = {key: value for key, value in values.items() if "." in key}
        settings = pins | {key: value for key, value in values.items() if "." not in key}
        yield Example(settings, WORLD, _recipe(_frozen(sections), tuple(of_recipe.items())))


def case_of(example: Example) -> Case:
    """What a rule looks at."""
    layout = layout_of(example.strategy, example.world)
    degrees = {axis: layout.degree(axis) for axis in AXES if not axis.samples}
    return Case(example.strategy, example.world, example.recipe, degrees)


def nearest(example: Example) -> Example | None:
    """What the rules lead to from an example that breaks some, key by key; None where only the recipe can change."""
    for _ in SETTINGS:
        found = next(broken_rules(example.strategy, example.world, example.recipe), None)
        if found is None:
            return example
        if not found.nearest:
            assert found.rule.fix, found.rule
            return None
        example = Example({**example.settings, **found.nearest}, example.world, example.recipe)
    raise AssertionError(f"the rules lead nowhere from {example.settings}")


def _frozen(sections: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    return tuple((name, tuple(values.items())) for name, values in sections.items())


@functools.cache
def _recipe(
    sections: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...], more: tuple[tuple[str, Any], ...]
) -> Recipe:
    values: dict[str, Any] = {
        "model": dict(MODEL),
        "data": {"sequence_length": 64},
        "steps": 1,
        "batch_size": 64,
        "optimizer": {},
        "guard": {},
    }
    for name, changes in sections:
        values[name] = {**values[name], **dict(changes)}
    for key, value in more:
        name, _, inner = key.partition(".")
        values[name] = {**values[name], inner: value}
    return recipe_of(values, SETTINGS)


@functools.cache
def verdicts() -> dict[tuple[str, str], Verdict]:
    """Of every two ways, by their names in the order of ``WAYS``."""
    return {
        (one.name, other.name): verdict_of(one, other)
        for index, one in enumerate(WAYS)
        for other in WAYS[index + 1 :]
    }


def noted() -> list[Rule]:
    """The rules that forbid pairs, in the order in which the techniques are applied."""
    found = {id(rule) for verdict in verdicts().values() for rule in verdict.rules}
    return [rule for rule in RULES if id(rule) in found]


def other_rules() -> list[Rule]:
    """The rules that no pair needs: they concern numbers, or settings without a way in this list."""
    return [rule for rule in RULES if rule not in noted()]
