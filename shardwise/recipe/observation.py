"""The sections `evaluation:` and `profile:` of a recipe: measurements of a run in addition to its training."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field

from shardwise.recipe.section import Count, ObjectName, RecipeText, Section, words

SetName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


class EvaluationSpec(Section):
    """When the validation loss is measured, on the held-out data and on named sets."""

    every: Count | None = None
    """optimizer steps between evaluations; null evaluates once at the end"""
    sequences: Count = 32
    """validation sequences per evaluation, of each set"""
    sets: Mapping[SetName, RecipeText] = Field(default_factory=dict)
    """further validation sets, each a name with a source as data.source: {code: data/code.jsonl, chat: data/chat}.
    Nothing of them is trained on"""
    metrics: ObjectName | None = None
    """package.module:function of (predictions, batch) that returns a dict of numbers: metrics of a factory's module on
    all held-out samples at once (compute_metrics). predictions is what the module returned, on the CPU"""
    noise_scale: bool = False
    """also measure the gradient noise scale, from which the report advises a batch size: two more passes over a batch
    per evaluation"""


class ProfileSpec(Section):
    """Steps that torch.profiler records."""

    steps: Annotated[tuple[Count, ...], BeforeValidator(words)] = ()
    """optimizer steps to record, from 1: a Chrome trace of each in the run's folder, below profile. The first three
    also give the measured peak of memory, which recording raises"""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0, le=1_000_000)], ...], BeforeValidator(words)] = (0,)
    """ranks that record"""
    memory: bool = True
    """also record every allocation with its stack, as a memory snapshot for PyTorch's memory viewer"""
