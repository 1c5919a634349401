"""Fine-tuning a model on data with as few decisions as possible: devices, method and sequences are found, then trained.

    devices ─┐
    data ────┼─▶ draft ──plan of full, LoRA, QLoRA──▶ recipe ──train──▶ adapter or model, card, samples
    model ───┘

The first method whose plan fits is taken: all weights, LoRA, QLoRA. The recipe is written into the run's folder, and
the same command takes it from there, so a run that was stopped goes on with the choices that it began with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.checkpoint.run_folder import RECIPE as RUN_RECIPE
from shardwise.core.cache_folder import default_root
from shardwise.core.errors import RecipeError
from shardwise.core.hub_folder import folder_of
from shardwise.core.paths import STANDARD_LIBRARY, PathBase, is_gone, seen_from
from shardwise.core.plan import Plan
from shardwise.core.progress import Progress, silent
from shardwise.core.units import GiB, format_bytes
from shardwise.data.dataset import Lengths, TokenDataset
from shardwise.data.formats import format_of
from shardwise.data.opening import open_splits, opener_of, tokenizer_of
from shardwise.data.sources import open_source
from shardwise.data.tokenizer import Tokenizer
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.kinds import HOST, accelerator_here
from shardwise.hardware.profiles import PROFILES
from shardwise.hardware.this_gpu import device_here
from shardwise.jobs.planning import make_plan, refuse_unfit
from shardwise.jobs.request import measured_cluster, read_request
from shardwise.plugins.finetune.written_recipe import (
    FINE_TUNING_METHODS,
    PREFERENCE_EPOCHS,
    FineTuning,
    FineTuningMethod,
    Hardware,
    SequenceShape,
)
from shardwise.recipe.load import REPLACES, parse_recipe
from shardwise.recipe.objective import SAMPLES
from shardwise.recipe.overrides import overridden
from shardwise.recipe.paths import with_whole_paths
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import DataSpec, Recipe
from shardwise.recipe.yaml_source import dotted, parse_document, written
from shardwise.technique import SETTINGS

FINETUNE_RECIPE = "finetune.yaml"
EPOCHS = 3.0
LONGEST_SEQUENCE = 2048
"""Tokens of a sequence where the model's context allows more: enough for most conversations."""
PROPOSED = {"preference": "dpo", "unpaired": "kto"}
"""The objective that is proposed for records of a format."""
_LENGTH_MULTIPLE = 64
_BATCH = 16
_STEPS_PER_EPOCH = 10


def hardware_here(asked: str | None = None) -> Hardware:
    """The devices of this machine and their memory; the CPU where there is no GPU.

    Args:
        asked: ``cpu`` leaves GPUs unused.
    """
    import torch

    if asked == HOST.name or accelerator_here().is_host:
        return Hardware()
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    device = device_here()
    precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    memory = round(properties.total_memory / GiB - 0.05, 1)
    note = "" if device in list(PROFILES) else " has no profile: this one has what CUDA reports"
    return Hardware(device, count, memory, precision, f"{properties.name}{note}")


def text_config(model: str) -> dict[str, Any]:
    """The values of the model's config.json, those of its text part included.

    Raises:
        RecipeError: there is no such model, or its config cannot be read.
    """
    if model in PRESETS:
        why = "a preset has dimensions, and no trained weights"
        raise RecipeError(
            f"{model} cannot be fine-tuned", where="MODEL", why=why, fix="give a folder or a Hub id"
        )
    path = folder_of(model, ["config.json"]) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RecipeError("not a model folder", where=str(path.parent), why=str(error)) from error


def context_of(model: str) -> int | None:
    """The longest sequence by the model's config.json; None if it does not say. Raises as ``text_config``."""
    return _context_in(text_config(model))


def _context_in(config: Mapping[str, Any]) -> int | None:
    limits = (config.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((value for value in limits if isinstance(value, int) and value > 0), None)


def _objective_in(config: Mapping[str, Any]) -> str:
    """The objective of the class that saved the weights."""
    if config.get("is_encoder_decoder"):
        return "seq2seq"
    names = config.get("architectures") or [""]
    return "masked" if str(names[0]).endswith("ForMaskedLM") else "causal"


def _context_limit(context: int | None) -> int:
    """The longest sequence that is taken: a multiple of 8, as the positions of RoBERTa, 514, hold 512 tokens."""
    longest = min(context or LONGEST_SEQUENCE, LONGEST_SEQUENCE)
    return longest // 8 * 8 or longest


def shape_of(model: str, source: str, context: int | None, kind: str = "causal") -> tuple[SequenceShape, int]:
    """The sequences of the data, and their number in an epoch. Tokenizes the data, once.

    Records are packed when two of average length fit into a sequence and the model can keep them apart, else each has
    its own.

    Raises:
        DataError: the data cannot be read.
        RecipeError: the model cannot be read.
    """
    limit = _context_limit(context)
    spec = DataSpec(source=source, tokenizer=model, sequence_length=limit)
    tokenizer = tokenizer_of(spec)
    opened = open_source(source, spec.text_key)
    name = format_of(spec, opened, kind)
    if kind == "causal" and name in PROPOSED:
        raise _preferences_without_objective(source, name)
    if kind in SAMPLES.values():
        opener_of(spec, opened, name, kind, ("this --objective", "--objective"))
    if name == "text":
        return _shape_of_text(spec, tokenizer, kind)
    train = open_splits(spec, tokenizer, default_root(), kind=kind).train
    tokens = train.lengths()
    length = _rounded(tokens.longest, limit)
    if kind in ("pairs", "scored"):
        return _shape_of_pairs(model, train, tokens, limit)
    if tokens.completion is not None:
        why = f"prompts have at most {tokens.longest:,} tokens, completions {tokens.completion:,}"
        return SequenceShape(length, False, why, _rounded(tokens.completion, limit)), len(train)
    packing = 2 * tokens.mean <= length and not packing_obstacle(model, length)
    count = max(1, round(len(train) * tokens.mean / length)) if packing else len(train)
    why = f"records have {tokens.mean:.0f} tokens on average, and at most {tokens.longest:,}"
    return SequenceShape(length, packing, why), count


def _shape_of_pairs(
    model: str, train: TokenDataset, documents: Lengths, limit: int
) -> tuple[SequenceShape, int]:
    """Rows that have room for both documents of the longest pair, if that saves half of the padded sequences."""
    row = _rounded(2 * documents.longest, limit)
    pair = 2 * documents.mean
    alone = _rounded(documents.longest, limit)
    padded = pair <= alone and 2 * documents.longest <= row
    packing = (2 * pair <= row or padded) and not packing_obstacle(model, row)
    why = f"answers with their prompt have {documents.mean:.0f} tokens on average, and at most {documents.longest:,}"
    count = max(1, round(len(train) * pair / row)) if packing else len(train)
    return SequenceShape(row if packing else alone, packing, why), count


def _preferences_without_objective(source: str, name: str) -> RecipeError:
    """The error for preferences that no objective was given for."""
    why = f"{seen_from(source, Path.cwd())} has records of the format {name}"
    fix = f"add --objective {PROPOSED[name]}, or name the answers to imitate in a field of their own"
    return RecipeError("these are preferences, and no objective is given", where="DATA", why=why, fix=fix)


def _shape_of_text(spec: DataSpec, tokenizer: Tokenizer, objective: str) -> tuple[SequenceShape, int]:
    """Sequences as long as the limit, and shorter ones if the text is short."""
    shortest = spec.model_copy(update={"sequence_length": 1})  # so that no text is too short to be opened
    train = open_splits(shortest, tokenizer, default_root(), kind=objective).train
    tokens = train.cache.header.tokens
    length = min(
        spec.sequence_length,
        max(_LENGTH_MULTIPLE, tokens // _STEPS_PER_EPOCH // _LENGTH_MULTIPLE * _LENGTH_MULTIPLE),
    )
    length = min(length, max(1, (tokens - 1) // 2))
    return SequenceShape(length, False, "plain text, cut into sequences"), max(1, tokens // length)


def _rounded(tokens: int, limit: int) -> int:
    return min(limit, -(-tokens // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE)


def packing_obstacle(model: str, length: int) -> str:
    """Why the model cannot keep packed records apart; "" if it can. Raises RecipeError."""
    import torch

    from shardwise.model.hf import HuggingFaceModel

    blueprint = HuggingFaceModel(model, length)
    with torch.device("meta"):
        return blueprint.packing_obstacle(blueprint.build())


def draft(
    model: str,
    source: str,
    epochs: float | None,
    *,
    preference: str | None = None,
    missing_ok: bool = False,
) -> FineTuning:
    """A run before its hardware is known and its method is chosen. Imports no torch before the data is read.

    Args:
        epochs: None is the usual number.
        preference: a name of `PREFERENCES`; None trains on the next token.
        missing_ok: go on without a model or data that are not on this machine. A model on the Hub is asked for its
            config alone.

    Raises:
        ShardwiseError: the model or the data cannot be read.
    """
    here = PathBase.here()
    model, source = here.located(model), here.located_source(source)
    passes = epochs or (PREFERENCE_EPOCHS if preference else EPOCHS)
    whole = FineTuning(model, source, passes, preference=preference)
    try:
        config = text_config(model)
    except RecipeError:
        if not missing_ok or model in PRESETS or Path(model).exists():
            raise
        return replace(whole, unread=(model, source))
    context, objective = _context_in(config), _objective_in(config)
    if preference and objective != "causal":
        why = f"{Path(model).name} is of the objective {objective}"
        raise RecipeError(f"{preference} trains a causal language model", where="--objective", why=why)
    kind = SAMPLES[preference] if preference else objective
    if missing_ok and not (Path(model).is_dir() and is_local(source)):
        packing = objective == "causal" and not packing_obstacle(model, _context_limit(context))
        shape = replace(SequenceShape(), sequence_length=_context_limit(context), packing=packing)
        return replace(whole, shape=shape, objective=objective, unread=(source,))
    shape, sequences = shape_of(model, source, context, kind)
    batch = max(1, min(_BATCH, sequences // _STEPS_PER_EPOCH))
    return replace(whole, batch_size=batch, shape=shape, objective=objective)


def is_local(source: str) -> bool:
    """Whether a data source, located, is on this machine."""
    return source == STANDARD_LIBRARY or (os.path.isabs(source) and not is_gone(source))


def with_overrides(text: str, overrides: Sequence[str]) -> str:
    """A recipe's text with overrides, in the form of a recipe. Raises RecipeError."""
    if not overrides:
        return text
    document = with_whole_paths(
        overridden(parse_document(text, FINETUNE_RECIPE), overrides, REPLACES), SETTINGS
    )
    lines = [text.partition("\n")[0]]
    for name, value in document.values.items():
        pairs = value.items() if isinstance(value, dict) else None
        lines += [f"{name}: {written(value)}"] if pairs is None else [f"{name}:"]
        lines += [f"  {key}: {written(inner)}" for key, inner in pairs or ()]
    said = [dotted(path) for path, origin in document.origins.items() if origin.override]
    return "\n".join([*lines, f"# from the command line: {', '.join(said)}"]) + "\n"


class ChosenMethod(NamedTuple):
    """A method's recipe, as text and checked, and its plan, which fits."""

    text: str
    recipe: Recipe
    cluster: Cluster
    plan: Plan


def choose_method(
    asked: FineTuning,
    method: FineTuningMethod | None,
    overrides: Sequence[str] = (),
    progress: Progress = silent,
) -> ChosenMethod:
    """The recipe's text, and its plan: of ``method``, or of the first method that fits.

    Raises:
        ResourceError: no method fits.
        RecipeError: an override is wrong, or the model cannot be trained.
    """
    methods = (method,) if method else FINE_TUNING_METHODS
    why = "asked for" if method else ""
    for candidate in methods:
        text = with_overrides(asked.recipe(candidate, why), overrides)
        recipe = parse_recipe(text, SETTINGS, FINETUNE_RECIPE)
        cluster = measured_cluster(recipe)
        progress(f"does {candidate} fit?")
        plan = make_plan(recipe, cluster, progress=progress)
        if plan.fits:
            return ChosenMethod(text, recipe, cluster, plan)
        most = plan.capacity_bytes - plan.reserve_bytes
        why = f"{candidate} needs {format_bytes(plan.peak.bytes)} of {format_bytes(most)}"
    refuse_unfit(plan)
    raise AssertionError("a plan that does not fit is refused")


@dataclass(frozen=True)
class Options:
    """Options of the command that were given; None for the others."""

    epochs: float | None = None
    method: FineTuningMethod | None = None
    device: str | None = None
    objective: str | None = None


def going_on(
    file: Path, model: str, data: str, given: Options, overrides: Sequence[str] = ()
) -> tuple[Recipe, Cluster]:
    """The recipe of a run that was begun, and its cluster. A model or data that were moved are read where they are now.

    Raises:
        RecipeError: the run trains another model or other data, or has other options than those given.
    """
    here = PathBase.here()
    (recipe, _) = read_request(file, ())
    asked = {"model.hf": here.located(model), "data.source": here.located_source(data)}
    begun = {"model.hf": recipe.model.hf or "", "data.source": recipe.data.source}
    moved = [key for key in asked if asked[key] != begun[key] and is_gone(begun[key])]
    if any(asked[key] != begun[key] and key not in moved for key in asked):
        why = f"it trains {recipe.model.hf} on {recipe.data.source}"
        raise RecipeError("the folder is of another run", where=str(file), why=why, fix="give another --out")
    if recipe.data.tokenizer == recipe.model.hf and "model.hf" in moved:
        asked["data.tokenizer"] = asked["model.hf"]
        moved.append("data.tokenizer")
    _require_same_options(recipe, given, overrides, file)
    recipe, _ = read_request(file, [*(f"{key}={written(asked[key])}" for key in moved), *overrides])
    return recipe, measured_cluster(recipe)


def _require_same_options(recipe: Recipe, given: Options, overrides: Sequence[str], file: Path) -> None:
    """Raise RecipeError for options that the recipe of a run does not have: they would be ignored."""
    adapter = recipe.adapter
    has = Options(
        recipe.epochs,
        "full" if adapter is None else "lora" if adapter.quantize == "none" else "qlora",
        recipe.cluster.device,
        recipe.objective.name if recipe.objective else None,
    )
    decided = {key.partition("=")[0].partition(".")[0] for key in overrides}
    by = {
        "epochs": {"epochs", "steps"},
        "method": {"adapter"},
        "device": {"cluster"},
        "objective": {"objective"},
    }
    other = [
        name
        for name, keys in by.items()
        if getattr(given, name) not in (None, getattr(has, name)) and not keys & decided
    ]
    if other:
        options = " and ".join(f"--{name} {_value_text(getattr(given, name))}" for name in other)
        values = ", ".join(f"{name}: {_value_text(getattr(has, name))}" for name in other)
        why = f"its recipe has {values}"
        fix = "leave them out, or give another --out"
        raise RecipeError(f"{options} would be ignored", where=str(file), why=why, fix=fix)


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "steps instead" if value is None else str(value)


def require_no_run(out: Path) -> None:
    """Raise RecipeError for the folder of a run that another command has begun."""
    if (out / RUN_RECIPE).exists():
        why = f"it has {RUN_RECIPE}, and no {FINETUNE_RECIPE}"
        raise RecipeError("the folder is of another run", where=str(out), why=why, fix="give another --out")


def result_folder(out: Path, recipe: Recipe) -> Path:
    """The folder with the trained adapter or model."""
    return out / ("adapter" if recipe.adapter is not None else "model")
