"""The sections `objective:` and `plan:` of a recipe: what training makes small, and what the planner does."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SkipValidation

from shardwise.recipe.section import ObjectName, Scalar, Section, words


class ObjectiveSpec(Section):
    """An objective that a user's function makes."""

    factory: ObjectName
    """package.module:function that takes the recipe and the arguments, and returns a TrainingObjective
    (docs/how-to/add-an-objective.md)"""
    arguments: Mapping[str, Annotated[Scalar, SkipValidation]] = Field(default_factory=dict)
    """keyword arguments of the factory"""


class PlanSpec(Section):
    """What the planner chooses by."""

    objective: Literal["seconds", "memory"] = "seconds"
    """what the planner makes small among strategies that fit: the seconds of a step, or the memory of a device;
    shardwise plan --for sets it too"""
    allow: Annotated[tuple[Literal["fp8", "pipedream"], ...], BeforeValidator(words)] = ()
    """what the planner may choose although it changes the mathematics: fp8 (8-bit products, where precision is not
    pinned to another), pipedream (stale weights)"""
