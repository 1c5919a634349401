"""Checks across keys of a recipe: each value is valid, but they contradict each other.

One function per check. The document is used only to find which of the keys involved was written last: the error names
that key. These checks need no machine and no data. Checks that depend on the strategy and the number of devices are
rules of techniques; checks that depend on files are in ``data/``.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwise.core.errors import RecipeError
from shardwise.hardware.cluster import cluster_of, parse_preset
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.error_messages import Complaint
from shardwise.recipe.lr_scaling import scaled
from shardwise.recipe.objective_checks import named_objective
from shardwise.recipe.presets import PRESETS, dimensions_of
from shardwise.recipe.sections import ModelSpec, Recipe, ScheduleSpec
from shardwise.recipe.yaml_source import KeyPath, YamlDocument, describe

_BYTES = 256
MOST_TOKENS = 2**32
"""Tokens of a micro-batch on one rank: no machine holds more, and a plan counts them in 64 bits."""


def contradictions(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    """Every contradiction in `recipe`, as a complaint at the key to change."""
    yield from _check_run_length(recipe, document)
    yield from _one_name(recipe.model, document)
    yield from _dropout(recipe.model)
    yield from _arguments(recipe.model)
    yield from _objective(recipe, document)
    yield from named_objective(recipe, document)
    yield from _model_and_data(recipe, document)
    yield from _check_micro_batch(recipe, document)
    yield from _check_records(recipe, document)
    yield from _hardware(recipe, document)
    yield from _check_schedule(recipe, document)
    yield from _scaling(recipe, document)
    yield from _initial_adapter(recipe, document)
    yield from _check_best(recipe, document)
    if recipe.evaluation.metrics and recipe.model.factory is None:
        why = "they are for a module of your own (model.factory)"
        fix = "remove it; shardwise eval scores language models"
        yield Complaint(("evaluation", "metrics"), "evaluation.metrics cannot be set here", why, fix)
    if recipe.evaluation.sets and recipe.model.factory is not None:
        why = "a factory brings a dataset of its own, which a source cannot replace"
        yield Complaint(("evaluation", "sets"), "evaluation.sets cannot be set here", why, "remove it")
    if recipe.evaluation.every is not None and recipe.data.held_out == 0 and not recipe.evaluation.sets:
        path = _last_written(document, ("evaluation", "every"), ("data", "held_out"))
        yield Complaint(
            path,
            "there is no validation data",
            "data.held_out is 0",
            "raise it, name evaluation.sets, or remove evaluation.every",
        )


def _last_written(document: YamlDocument, *paths: KeyPath) -> KeyPath:
    """The one of `paths` written last, the command line after the file; the first if none is written."""
    written = [path for path in paths if path in document.origins]
    return max(written, key=document.origin) if written else paths[0]


def _check_run_length(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    """The length of the run is given once: in steps or in epochs."""
    if not recipe.steps and recipe.epochs is None:
        fix = "add `steps: 100`, or `epochs: 3`"
        yield Complaint(("steps",), "steps is missing", "", fix, absent=True)
    elif recipe.steps and recipe.epochs is not None:
        path = _last_written(document, ("steps",), ("epochs",))
        why = "steps and epochs are both given"
        yield Complaint(path, "the length of the run is given twice", why, "keep one of them")
    elif recipe.epochs is not None and recipe.model.factory is not None:
        why = "a factory may bring a dataset of its own, which is not opened before the run"
        yield Complaint(("epochs",), "epochs cannot be set here", why, "write steps")


def _dimensions_in_recipe(model: ModelSpec) -> list[str]:
    """Names of the dimensions that the recipe gives."""
    names = ("family", *Dimensions.__dataclass_fields__)
    return [name for name in dict.fromkeys(names) if getattr(model, name, None) is not None]


def _one_name(model: ModelSpec, document: YamlDocument) -> Iterator[Complaint]:
    ways = [way for way in ("preset", "hf", "factory") if getattr(model, way) is not None]
    dimensions = _dimensions_in_recipe(model)
    if len(ways) > 1:
        path = _last_written(document, *(("model", way) for way in ways))
        why = f"{' and '.join(ways)} are both given"
        yield Complaint(path, "the model is specified twice", why, "keep one of them")
    elif not ways and not dimensions:
        why = "it has no preset, hf, factory or dimensions"
        yield Complaint(
            ("model",), "the model is missing", why, "for example add `preset: tiny`", absent=True
        )
    elif dimensions and ways and ways[0] != "preset":
        path = _last_written(document, *(("model", name) for name in dimensions))
        why = f"{ways[0]} has its own dimensions"
        yield Complaint(path, f"{path[-1]} cannot be set here", why, "remove it")


def _dropout(model: ModelSpec) -> Iterator[Complaint]:
    if model.dropout and model.hf is None:
        why = "only the config.json of a model of hf asks for dropout"
        yield Complaint(("model", "dropout"), "dropout cannot be set here", why, "remove it")


def _arguments(model: ModelSpec) -> Iterator[Complaint]:
    if model.arguments and model.factory is None:
        why = "only a factory takes arguments"
        yield Complaint(("model", "arguments"), "arguments without a factory", why, "remove them")
    arguments: Mapping[str, object] = model.arguments
    for name, value in arguments.items():
        path: KeyPath = ("model", "arguments", name)
        if not name.isidentifier() or keyword.iskeyword(name):
            yield Complaint(path, "not the name of an argument", "an argument's name is a Python identifier")
        elif not isinstance(value, bool | int | float | str | None):
            what = f"{name} must be text, a number, true, false or null"
            yield Complaint(path, what, f"found {describe(value)}")
        elif isinstance(value, float) and not math.isfinite(value):
            yield Complaint(path, f"{name} must be a finite number", f"found {describe(value)}")


def _objective(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    """Settings that the masked and the seq2seq objective exclude."""
    objective = recipe.model.objective
    data = recipe.data
    if data.completion_length is not None and objective != "seq2seq":
        last = _last_written(document, ("data", "completion_length"), ("model", "objective"))
        why = f"model.objective is {objective}, and only seq2seq has a decoder's sequence of its own"
        yield Complaint(last, "completion_length cannot be set here", why, "remove it")
    if objective == "causal":
        return
    path = ("model", "objective")
    if recipe.model.hf is None:
        why = "presets are causal, and a factory brings its own loss"
        yield Complaint(path, f"objective cannot be {objective} here", why, "remove it, or give model.hf")
    if data.packing:
        last = _last_written(document, path, ("data", "packing"))
        why = "the encoder's attention would cross the borders of packed documents"
        yield Complaint(last, "packing cannot be true here", why, "write packing: false")
    if objective == "masked" and data.format not in ("auto", "text"):
        last = _last_written(document, path, ("data", "format"))
        yield Complaint(
            last, "the masked objective needs plain text", f"format is {data.format}", "write format: text"
        )
    if objective == "seq2seq" and (
        data.format in ("text", "messages", "sharegpt") or data.source == "stdlib"
    ):
        last = _last_written(document, path, ("data", "format"), ("data", "source"))
        why = f"format is {data.format}" if data.source != "stdlib" else "stdlib is plain text"
        what = "the seq2seq objective needs prompts and completions"
        yield Complaint(last, what, why, "give records of the format prompt or alpaca")
    if objective == "seq2seq" and data.train_on == "all":
        last = _last_written(document, path, ("data", "train_on"))
        why = "the decoder is trained on the completion, the encoder only reads the prompt"
        yield Complaint(last, "train_on cannot be all here", why, "remove it")


def _model_and_data(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    model, data = recipe.model, recipe.data
    if (
        model.hf is not None
        or model.factory is not None
        or not (model.preset or _dimensions_in_recipe(model))
    ):
        return
    try:
        dimensions = dimensions_of(model)
    except RecipeError as error:
        path: KeyPath = tuple(error.where.split("."))
        if (
            model.preset in PRESETS
        ):  # then no dimension is missing: one that overrides the preset's is at fault
            path = _last_written(document, path, *(("model", name) for name in _dimensions_in_recipe(model)))
        yield Complaint(path, error.what, error.why, error.fix, absent=path not in document.origins)
        return
    length = data.sequence_length
    if length > dimensions.context:
        path = _last_written(document, ("data", "sequence_length"), ("model", "context"), ("model", "preset"))
        why = f"sequence_length is {length}, the model's context {dimensions.context}"
        yield Complaint(
            path, "sequences are longer than the model's context", why, "shorten them, or raise model.context"
        )
    if data.tokenizer == "bytes" and dimensions.vocab < _BYTES:
        path = _last_written(document, ("model", "vocab"), ("data", "tokenizer"))
        why = f"vocab is {dimensions.vocab}, and a byte has {_BYTES} values"
        yield Complaint(path, "the vocabulary is too small for bytes", why, f"write vocab: {_BYTES}")


def _check_micro_batch(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    size = recipe.strategy.get("micro_batch_size", 1)
    length = recipe.data.sequence_length
    if size * length > MOST_TOKENS:
        path = _last_written(document, ("strategy", "micro_batch_size"), ("data", "sequence_length"))
        why = f"{size:,} sequences of {length:,} tokens are more than {MOST_TOKENS:,}"
        yield Complaint(path, "a micro-batch is too large", why, "lower one of them")


def _check_records(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    """Settings that need records with completions."""
    data = recipe.data
    if data.mixture is not None:
        yield from _mixture(recipe, document)
        return
    plain = data.format == "text" or (data.format == "auto" and data.source == "stdlib")
    because = _last_written(document, ("data", "format"), ("data", "source"))
    if data.source == "stdlib" and data.format not in ("auto", "text"):
        yield Complaint(
            because, "stdlib is plain text", f"format is {data.format}", "use a file of records as source"
        )
    if plain and data.train_on == "completion":
        path = _last_written(document, ("data", "train_on"), because)
        yield Complaint(
            path, "plain text has no completions", "train_on is completion", "write train_on: all"
        )
    if data.packing and recipe.model.factory is not None:
        path = _last_written(document, ("data", "packing"), ("model", "factory"))
        why = "a factory's model might attend across documents"
        yield Complaint(path, "packing cannot be true here", why, "write packing: false")


def _mixture(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    """A mixture takes the place of ``data.source``, and is of one kind of model."""
    data = recipe.data
    path = ("data", "mixture")
    fields = {"source": data.source != "stdlib", "format": data.format != "auto"}
    for key in (key for key, given in fields.items() if given):
        last = _last_written(document, path, ("data", key))
        why = f"mixture and {key} are both given"
        yield Complaint(last, "the data is specified twice", why, f"give {key} in the items of mixture")
    if not data.mixture:
        yield Complaint(path, "the mixture is empty", "", "write [{source: ..., weight: ...}, ...]")
    if recipe.model.objective != "causal" or recipe.model.factory is not None:
        why = (
            "a factory opens its own data"
            if recipe.model.factory
            else f"objective is {recipe.model.objective}"
        )
        yield Complaint(path, "a mixture needs a causal model", why, "give data.source")


def _hardware(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    cluster = recipe.cluster
    try:
        cluster_of(cluster)
    except RecipeError as error:
        path: KeyPath = tuple(error.where.split("."))
        if cluster.preset is not None and _is_preset(cluster.preset):  # then it contradicts another key
            also_given = {
                "device": cluster.device is not None,
                "devices_per_node": cluster.devices_per_node != 1,
            }
            path = _last_written(
                document, path, *(("cluster", key) for key, given in also_given.items() if given)
            )
        yield Complaint(path, error.what, error.why, error.fix)


def _check_schedule(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    schedule = recipe.schedule
    for key in ("decay", "decay_shape"):
        if schedule.name != "wsd" and getattr(schedule, key) is not None:
            path = _last_written(document, ("schedule", key), ("schedule", "name"))
            why = f"schedule.name is {schedule.name}, and only wsd uses {key}"
            yield Complaint(path, f"{key} without wsd", why, f"write name: wsd, or remove {key}")
    if recipe.steps:  # epochs are counted from the data, and the schedule is checked then
        for fault in schedule_faults(schedule, recipe.steps):
            yield replace(fault, path=_last_written(document, fault.path, ("schedule", "warmup"), ("steps",)))


def schedule_faults(schedule: ScheduleSpec, steps: int) -> Iterator[Complaint]:
    """A schedule that is longer than a run of ``steps`` steps, as a complaint."""
    warmup = schedule.warmup_steps(steps)
    if warmup >= max(steps, 2):
        why = f"{warmup} steps of warmup are not fewer than {steps}"
        fix = "shorten it, or raise steps"
        yield Complaint(("schedule", "warmup"), "the warmup leaves no steps at the peak", why, fix)
    elif schedule.name == "wsd" and warmup + (decay := schedule.decay_steps(steps)) > steps:
        why = f"{warmup} steps of warmup and {decay} of decay are more than {steps}"
        fix = "shorten one, or raise steps"
        yield Complaint(("schedule", "decay"), "the schedule is longer than the run", why, fix)


def _scaling(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    try:
        scaled(recipe)
    except RecipeError as error:
        key = ("optimizer", "scale_learning_rate")
        path = _last_written(
            document, key, ("optimizer", "betas"), ("optimizer", "arguments"), ("batch_size",)
        )
        yield Complaint(path, error.what, error.why, error.fix)


def _initial_adapter(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    spec = recipe.adapter
    path = ("adapter", "init")
    if spec is not None and spec.lora_bias and spec.name == "dora":
        last = _last_written(document, ("adapter", "lora_bias"), ("adapter", "name"))
        yield Complaint(last, "dora has no lora_bias", "PEFT has none either", "write lora_bias: false")
    if spec is None or not spec.loftq_iterations:
        return
    if spec.quantize == "none":
        last = _last_written(document, path, ("adapter", "quantize"))
        why = "quantize is none, so nothing is lost that A and B could start from"
        yield Complaint(last, "LoftQ needs a base that is quantized here", why, "write quantize: nf4 or int8")
    if spec.start_from is not None:
        last = _last_written(document, path, ("adapter", "start_from"))
        why = "start_from has other values for A and B"
        yield Complaint(last, "the adapter starts from two places", why, "keep one of init and start_from")


def _check_best(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    """The metric of the best checkpoint is one that is evaluated, and its direction is known."""
    wanted = recipe.checkpoint.best_metric
    path = ("checkpoint", "best")
    if wanted is None:
        return
    own = ["held_out_loss"] if recipe.data.held_out else []
    name = wanted[0]
    losses = [*own, *recipe.evaluation.sets]
    if not losses:
        last = _last_written(document, path, ("data", "held_out"))
        why = "data.held_out is 0, so nothing is evaluated"
        yield Complaint(last, "there is no best checkpoint", why, "raise it, or remove checkpoint.best")
    elif name not in losses and recipe.evaluation.metrics is None:
        why = f"there are {', '.join(losses)}"
        yield Complaint(path, f"{name} is not evaluated", why, "name one of them, or add evaluation.metrics")
    elif name not in losses and ":" not in (recipe.checkpoint.best or ""):
        fix = f"write max:{name} or min:{name}"
        yield Complaint(path, f"whether a greater {name} is better is not known", "it is no loss", fix)


def _is_preset(name: str) -> bool:
    try:
        parse_preset(name)
    except ValueError:
        return False
    return True
