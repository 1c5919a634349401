"""How a run is divided: settings, the strategy that holds their values, and the mesh layout they imply.

A *setting* is one key of the recipe's ``strategy:`` section. It is declared as data in the file of the
technique that reads it, so the recipe's schema, the planner's search space, the one-line form, the
reference page and the type of every access all come from one place. A *strategy* is nothing but values for
all settings; it is read as ``strategy[ZERO_STAGE]``, which the type checker knows to be an ``int``.

Chosen: a value object keyed by Setting objects. Refused: a dataclass with one field per technique, which
would have to be edited here for each new technique (and was, in every trainer we read); the price is that
``strategy.zero_stage`` does not exist, one writes ``strategy[ZERO_STAGE]``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


N = TypeVar("N", int, float)
_DIGITS = {int: re.compile(r"\d+", re.ASCII), float: re.compile(r"\d+(\.\d+)?|\.\d+", re.ASCII)}


@dataclass(frozen=True)
class Form(Generic[N]):
    """Values of a word and a number, such as ``every:2`` or ``budget:0.4``: an open set in addition to a setting's
    fixed choices.

    Attributes:
        word: what stands before the colon.
        letter: what the number is called in messages and on the reference page.
        minimum: the smallest number.
        example: the number that tests and pages use.
        maximum: the largest number, where there is one.
        kind: int for whole numbers, float for decimals.
    """

    word: str
    letter: str
    minimum: N
    example: N
    maximum: N | None = None
    kind: type[N] = int

    def __str__(self) -> str:
        return f"{self.word}:{self.letter}"

    @property
    def limits(self) -> str:
        """Which numbers are accepted, as a formula."""
        if self.maximum is None:
            return f"{self.letter} ≥ {self.minimum:g}"
        return f"{self.minimum:g} ≤ {self.letter} ≤ {self.maximum:g}"

    def value(self, number: N) -> str:
        """The value with this number."""
        return f"{self.word}:{number if self.kind is int else f'{number:.12g}'}"

    def number(self, value: object) -> N | None:
        """The number of a value of this form; None for any other value."""
        word, colon, digits = str(value).partition(":")
        matches = colon and word == self.word and _DIGITS[self.kind].fullmatch(digits)
        return self.kind(digits) if matches else None

    def parse(self, value: str) -> str | None:
        """The value with its number as it is shown; None where the word is another.

        Raises ValueError for a wrong number.
        """
        if value.partition(":")[0] != self.word:
            return None
        number = self.number(value)
        maximum = math.inf if self.maximum is None else self.maximum
        if number is None or not self.minimum <= number <= maximum:
            what = "whole number" if self.kind is int else "number"
            raise ValueError(f"{value!r} is not {self} with a {what} {self.limits}")
        return self.value(number)


@dataclass(frozen=True)
class FolderForm:
    """Values of a word and the path of a folder, such as ``nvme:/scratch``. Whether it is there is not asked here.

    Attributes:
        word: what stands before the first colon.
        letter: what the path is called in messages and on the reference page.
        example: the path that tests use; every machine has it.
    """

    word: str
    letter: str = "FOLDER"
    example: str = "/tmp"

    def __str__(self) -> str:
        return f"{self.word}:{self.letter}"

    def value(self, folder: str) -> str:
        """The value with this path."""
        return f"{self.word}:{folder}"

    def folder(self, value: object) -> str | None:
        """The path of a value of this form; None for any other value."""
        word, colon, path = str(value).partition(":")
        return path if colon and word == self.word and path else None

    def parse(self, value: str) -> str | None:
        """The value; None where the word is another. Raises ValueError when the path is missing."""
        if value.partition(":")[0] != self.word:
            return None
        if self.folder(value) is None:
            raise ValueError(f"{value!r} is not {self} with the path of a folder")
        return value

    @property
    def limits(self) -> str:
        return f"{self.letter}: a path"


@dataclass(frozen=True, eq=False)
class Setting(Generic[T]):
    """One key of the ``strategy:`` section.

    Attributes:
        key: the name under ``strategy:``.
        default: the value when neither the recipe nor the planner decides.
        doc: one sentence for the reference page.
        kind: the Python type of a value.
        choices: the closed set of values, or () for any value of ``kind``.
        minimum: the smallest acceptable number.
        maximum: the largest.
        candidates: what the planner may try when the recipe leaves the key out, cheapest in time first;
            () means that only the default is used.
        last_resort: values that the planner tries where nothing else fits, or where they may save much; cheapest in
            time first.
        ordered: whether a candidate never makes a step faster than those before it.
        compared: further values whose cost the plan shows but never chooses.
        step: ``plan --limits`` searches the largest value that fits in steps of this size; 0: it does not search.
        alike: values that cost the same; a strategy with one of them is not compared with another.
        once: values that cost seconds once, at the start of a run; the planner chooses one where it saves more.
        note: why a value outside ``choices`` is refused, appended to the error.
        units: values that need a device with units for a dtype, as device profiles call it.
        forms: values with a number or a path in them, accepted in addition to ``choices``, for settings of kind str.
        switch: the values that ``true`` and ``false`` stand for.
    """

    key: str
    default: T
    doc: str
    kind: type = str
    choices: tuple[T, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    candidates: tuple[T, ...] = ()
    last_resort: tuple[T, ...] = ()
    ordered: bool = True
    compared: tuple[T, ...] = ()
    step: float = 0.0
    alike: tuple[T, ...] = ()
    once: Mapping[T, float] = field(default_factory=dict)
    note: str = ""
    units: Mapping[T, str] = field(default_factory=dict)
    forms: tuple[Form[Any] | FolderForm, ...] = ()
    switch: Mapping[bool, T] = field(default_factory=dict)

    @property
    def examples(self) -> tuple[T, ...]:
        """The closed set, and one value of each form: what a test of every value goes through."""
        formed = (form.value(form.example) for form in self.forms)
        return (*self.choices, *(cast("T", value) for value in formed))

    def parse(self, value: object) -> T:
        """Return ``value`` as a T. Raises ValueError with the reason in words."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is bool and value in self.switch:
            value = self.switch[value]
        if type(value) is not self.kind:
            raise ValueError(f"expected {_kind_name(self.kind)}, found {value!r}")
        if self.choices and value not in self.choices:
            for form in self.forms:
                if (formed := form.parse(str(value))) is not None:
                    return cast("T", formed)
            listed = ", ".join(str(choice) for choice in (*self.choices, *self.forms))
            raise ValueError(f"{value!r} is not one of {listed}" + (f" ({self.note})" if self.note else ""))
        if self.minimum is not None and isinstance(value, int | float) and value < self.minimum:
            raise ValueError(f"{value} is less than {self.minimum}")
        if self.maximum is not None and isinstance(value, int | float) and value > self.maximum:
            raise ValueError(f"{value} is more than {self.maximum}")
        return value  # type: ignore[return-value]


def _kind_name(kind: type) -> str:
    return {int: "an integer", str: "a word", bool: "true or false", float: "a number"}.get(
        kind, kind.__name__
    )


@dataclass(frozen=True)
class Strategy:
    """Values for every setting. Immutable, hashable, ordered as the settings are."""

    values: Mapping[str, object]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def __getitem__(self, setting: Setting[T]) -> T:
        return self.values[setting.key]  # type: ignore[return-value]

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    def __reduce__(self) -> tuple[type[Strategy], tuple[dict[str, object]]]:
        return Strategy, (dict(self.values),)

    def with_values(self, **changes: object) -> Strategy:
        """The same strategy with some keys changed. Raises KeyError for a key that no setting has."""
        if unknown := changes.keys() - self.values.keys():
            raise KeyError(f"no such setting: {', '.join(sorted(unknown))}")
        return Strategy({**self.values, **changes})

    def differences(self, other: Strategy) -> dict[str, tuple[object, object]]:
        """The keys on which two strategies differ, as (mine, other's)."""
        return {k: (v, other.values[k]) for k, v in self.values.items() if other.values[k] != v}


def complete(pinned: Mapping[str, object], settings: Iterable[Setting[Any]]) -> Strategy:
    """The strategy with the pinned settings and the defaults of all others."""
    return Strategy({s.key: pinned.get(s.key, s.default) for s in settings})


@dataclass(frozen=True)
class Axis:
    """A mesh axis: what its ranks have in common. A technique declares it; all others ask for its properties.

    Axes of one name are equal: a layout that is read from a file has only their names.

    Attributes:
        position: order in the mesh, outermost first. Ranks of inner axes are neighbours, within a node if possible.
        piece: the name of one rank's share, in pictures of the mesh.
        samples: whether its ranks read different samples.
        tokens: whether its ranks see different tokens: counts of targets, sums of losses and gradients of the
            parameters that its ranks have in common are summed over them.
        copies: whether its ranks have equal parameters and optimizer states.
        stages: whether its ranks hold different blocks. ``apply`` then sets ``EngineOptions.place``.
        redundant: whether its ranks compute some activations redundantly, such as norms. They draw the same random
            numbers, unless ``EngineOptions.random_per_rank`` is set.
        blocking: whether its collectives stand between one operation and the next, so that no computation hides them.
        layers: the one kind of layers that it divides, by its name in tensor plans. Ranks of inner axes that share the
            work of a layer divide these layers, too, and count in the axis' setting.
    """

    name: str
    position: int = field(default=0, compare=False)
    piece: str = field(default="", compare=False)
    samples: bool = field(default=False, compare=False)
    tokens: bool = field(default=False, compare=False)
    copies: bool = field(default=False, compare=False)
    stages: bool = field(default=False, compare=False)
    redundant: bool = field(default=False, compare=False)
    blocking: bool = field(default=False, compare=False)
    layers: str = field(default="", compare=False)

    @property
    def divides_model(self) -> bool:
        """Whether its ranks hold or compute different parts of the model."""
        return bool(self.layers) or not self.samples

    @property
    def within_sample(self) -> bool:
        """Whether its ranks see parts of the same samples."""
        return self.tokens and not self.samples

    @property
    def within_layer(self) -> bool:
        """Whether its ranks share the work of each layer on the same samples."""
        return not self.samples and not self.stages


@dataclass(frozen=True)
class Layout:
    """Named mesh axes and their degrees, slowest-varying first; their product is the world size.

    *axis* always means the mesh, *dim* always means a tensor. Where several axes serve as one, their names are
    joined with "+", slowest-varying first: ``shard+sequence``. Methods take an axis, or such a name.
    """

    axes: tuple[tuple[Axis, int], ...]

    @property
    def world_size(self) -> int:
        return self.ranks(lambda axis: True)

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis, by its name."""
        return {axis.name: degree for axis, degree in self.axes}

    def __contains__(self, axis: str) -> bool:
        return set(axis.split("+")) <= self.degrees.keys()

    def degree(self, axis: Axis | str) -> int:
        return math.prod(self.degrees[part] for part in _axis_name(axis).split("+"))

    def ranks(self, selects: Callable[[Axis], bool]) -> int:
        """The product of the degrees of the axes that ``selects`` names."""
        return math.prod(degree for axis, degree in self.axes if selects(axis))

    @property
    def data_degree(self) -> int:
        """The number of shares into which a batch is divided over ranks."""
        return self.ranks(lambda axis: axis.samples)

    @property
    def state_copies(self) -> int:
        """The number of ranks with equal parameters and optimizer states, along axes that copy them."""
        return self.ranks(lambda axis: axis.copies)

    def stride(self, axis: Axis | str) -> int:
        """Distance in ranks between neighbours along ``axis`` (row-major rank numbering)."""
        stride = 1
        fastest = _axis_name(axis).rpartition("+")[2]
        for other, degree in reversed(self.axes):
            if other.name == fastest:
                return stride
            stride *= degree
        raise KeyError(axis)

    def coordinate(self, rank: int, axis: Axis | str) -> int:
        return rank // self.stride(axis) % self.degree(axis)

    def number(self, rank: int, selects: Callable[[Axis], bool]) -> int:
        """The rank's number among those that differ along the axes that ``selects`` names, outermost first."""
        number = 0
        for axis, degree in self.axes:
            if selects(axis):
                number = number * degree + self.coordinate(rank, axis)
        return number


def _axis_name(axis: Axis | str) -> str:
    return axis.name if isinstance(axis, Axis) else axis
