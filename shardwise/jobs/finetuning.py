"""Fine-tuning a model on data with as few decisions as possible: devices, method and sequences are found, then trained.

    devices ─┐
    data ────┼─▶ draft ──plan of full, LoRA, QLoRA──▶ recipe ──train──▶ adapter or model, card, samples
    model ───┘

The first method whose plan fits is taken: all weights, LoRA, QLoRA. The recipe is written into the run's folder, and
the same command takes it from there, so a run that was stopped goes on with the choices that it began with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Plan
from shardwise.core.progress import Progress, silent
from shardwise.core.units import GiB, format_bytes
from shardwise.data.examples import Sequences
from shardwise.data.text import Examples, open_tokens, tokenizer_of
from shardwise.hardware.cluster import Cluster, cluster_of, recognise
from shardwise.jobs.planning import make_plan, refuse_unfit
from shardwise.recipe.fine_tuning import METHODS, FineTuning, Hardware, Method, Shape
from shardwise.recipe.load import REPLACES, parse_recipe
from shardwise.recipe.overrides import overridden
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import DataSpec, Recipe
from shardwise.recipe.yaml_source import dotted, parse_document, written
from shardwise.technique import SETTINGS

RECIPE = "finetune.yaml"
LONGEST = 2048
"""Tokens of a sequence where the model's context allows more: enough for most conversations."""
_STEP = 64
_BATCH = 16
_STEPS_PER_EPOCH = 10


def hardware_here(device: str | None = None) -> Hardware:
    """The devices of this machine and their memory; the CPU where there is no GPU.

    Args:
        device: ``cpu`` leaves GPUs unused.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return Hardware()
    count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
    known = recognise(properties.name)
    precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    memory = round(properties.total_memory / GiB - 0.05, 1)
    if known is None:
        note = f"{properties.name} has no profile: memory is its own, seconds are those of an H100"
        return Hardware("H100-80GB", count, memory, precision, note)
    return Hardware(known.name, count, memory, precision, properties.name)


def context_of(model: str) -> int | None:
    """The longest sequence by the model's config.json; None if it does not say.

    Raises:
        RecipeError: there is no such model, or its config cannot be read.
    """
    from shardwise.model.hf_source import folder_of

    if model in PRESETS:
        why = "a preset has dimensions, and no trained weights"
        raise RecipeError(
            f"{model} cannot be fine-tuned", where="MODEL", why=why, fix="give a folder or a Hub id"
        )
    path = folder_of(model, ["config.json"]) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RecipeError("not a model folder", where=str(path.parent), why=str(error)) from error
    found = (text.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def shape_of(model: str, source: str, context: int | None) -> tuple[Shape, int]:
    """The sequences of the data, and their number in an epoch. Tokenizes the data, once.

    Records are packed when two of average length fit into a sequence, else each has its own.

    Raises:
        DataError: the data cannot be read.
    """
    limit = min(context or LONGEST, LONGEST)
    spec = DataSpec(source=source, tokenizer=model, sequence_length=limit)
    opened = open_tokens(spec, tokenizer_of(spec), default_root())
    if not isinstance(opened, Examples):
        count = opened.train.sequences
        return Shape(limit, False, "plain text, cut into sequences"), count
    lengths = np.diff(opened.cache.documents()["end"].astype(np.int64), prepend=0) - 1
    longest, mean = int(lengths.max()), float(lengths.mean())
    length = min(limit, -(-longest // _STEP) * _STEP)
    packing = 2 * mean <= length
    train: Sequences = opened.train
    count = max(1, round(train.sequences * mean / length)) if packing else train.sequences
    why = f"records have {mean:.0f} tokens on average, and at most {longest:,}"
    return Shape(length, packing, why), count


def draft(
    model: str, source: str, epochs: float, hardware: Hardware, *, read_data: bool = True
) -> FineTuning:
    """A run before its method is chosen; without ``read_data`` for sequences of usual length. Raises ShardwiseError."""
    context = context_of(model) if read_data else None
    if not read_data:
        return FineTuning(model, source, epochs, hardware=hardware)
    shape, sequences = shape_of(model, source, context)
    batch = max(1, min(_BATCH, sequences // _STEPS_PER_EPOCH))
    batch = -(-batch // hardware.count) * hardware.count  # every device has a sequence
    return FineTuning(model, source, epochs, batch, shape, hardware)


def with_overrides(text: str, overrides: Sequence[str]) -> str:
    """A recipe's text with overrides, in the form of a recipe. Raises RecipeError."""
    if not overrides:
        return text
    document = overridden(parse_document(text, RECIPE), overrides, REPLACES)
    lines = [text.partition("\n")[0]]
    for name, value in document.values.items():
        pairs = value.items() if isinstance(value, dict) else None
        lines += [f"{name}: {written(value)}"] if pairs is None else [f"{name}:"]
        lines += [f"  {key}: {written(inner)}" for key, inner in pairs or ()]
    said = [dotted(path) for path, origin in document.origins.items() if origin.override]
    return "\n".join([*lines, f"# from the command line: {', '.join(said)}"]) + "\n"


def choose(
    asked: FineTuning, method: Method | None, overrides: Sequence[str] = (), progress: Progress = silent
) -> tuple[str, Recipe, Cluster, Plan]:
    """The recipe's text, and its plan: of ``method``, or of the first method that fits.

    Raises:
        ResourceError: no method fits.
        RecipeError: an override is wrong, or the model cannot be trained.
    """
    methods = (method,) if method else METHODS
    why = "asked for" if method else ""
    for each in methods:
        text = with_overrides(asked.recipe(each, why), overrides)
        recipe = parse_recipe(text, SETTINGS, RECIPE)
        cluster = cluster_of(recipe.cluster)
        progress(f"does {each} fit?")
        plan = make_plan(recipe, cluster, progress=progress)
        if plan.fits:
            return text, recipe, cluster, plan
        most = plan.capacity_bytes - plan.reserve_bytes
        why = f"{each} needs {format_bytes(plan.peak.bytes)} of {format_bytes(most)}"
    refuse_unfit(plan)
    raise AssertionError("a plan that does not fit is refused")


def result_folder(out: Path, recipe: Recipe) -> Path:
    """The folder with the trained adapter or model."""
    return out / ("adapter" if recipe.adapter is not None else "model")
