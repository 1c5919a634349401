"""One quantization from its settings to the folder: open, predict, pass, gate, write."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.errors import NumericsError, RecipeError, ResourceError
from shardwise.core.progress import Say
from shardwise.core.scheme import Scheme, scheme_of
from shardwise.core.units import format_bytes
from shardwise.hardware.this_machine import memory_left, usable_memory
from shardwise.model.files.compressed_tensors import METHOD, quantization_config
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import linear_layers
from shardwise.model.native import NativeModel
from shardwise.model.unreached import percent
from shardwise.plugins.quantize.calibration import Chosen, Texts, open_batches
from shardwise.plugins.quantize.experts import ExpertLayer, expert_layers
from shardwise.plugins.quantize.folder import ignored, other_rows, require_packable, write_quantized
from shardwise.plugins.quantize.gate import lost
from shardwise.plugins.quantize.methods import method_of
from shardwise.plugins.quantize.methods.base import InputStatistics, NotConverged
from shardwise.plugins.quantize.prediction import predicted_peak
from shardwise.plugins.quantize.quantizer import Quantizer
from shardwise.plugins.quantize.ranks import Ranks
from shardwise.plugins.quantize.readers import reading_notes
from shardwise.plugins.quantize.report import Quantized
from shardwise.plugins.quantize.rotated_source import require_same_logits, rotated_source
from shardwise.plugins.quantize.settings import Settings, Watching
from shardwise.plugins.quantize.source import SourceModel, open_source_model
from shardwise.plugins.quantize.state import UNQUANTIZED, PassState
from shardwise.plugins.quantize.stream import kept_matrices, quantize_blocks
from shardwise.plugins.quantize.walk import Walk
from shardwise.plugins.quantize.walk_check import require_walk, walking
from shardwise.recipe.presets import dimensions_of
from shardwise.recipe.sections import ModelSpec
from shardwise.runtime.quantization.weights import ZERO
from shardwise.trainer.meter import MemoryMeter, frees_returned

COMPUTE_DTYPE = torch.float32
"""Dtype of activations and of the weights while they are used."""


@frees_returned()
def run_pass(settings: Settings, say: Say, watching: Watching) -> Quantized:
    """Quantize and write; see ``jobs.quantizing.quantize``."""
    source = plain = open_source_model(settings.model, settings.length)
    if settings.rotate is not None:
        source = rotated_source(plain)
    original = None if source is plain else plain
    require_packable(source.blueprint, source.contents)
    quantizer = Quantizer(method_of(settings.method), scheme_of(settings.scheme), source.contents.dtypes)
    with torch.device("meta"):
        experts = expert_layers(source.blueprint.build(), source.contents.layout.groups)
    notes = _result_notes(source, quantizer, experts)
    require_walk(plain.blueprint, plain.over(plain.lowest), plain.length, COMPUTE_DTYPE)
    texts = Texts(settings.calibrate, settings.evaluate, settings.tokenizer, settings.sequences)
    ranks = Ranks.joined()
    chosen = open_batches(source, settings.model, texts, ranks.size)
    batches = chosen.of(ranks)
    notes += chosen.notes
    with walking(plain.blueprint):
        predicted = predicted_peak(source, quantizer, experts, batches, COMPUTE_DTYPE, original)
        predicted = ranks.largest(predicted)
    say(f"{settings.scheme} by {settings.method}: {format_bytes(predicted)} at the peak, predicted")
    _require_memory(predicted)
    for note in notes:
        say(note)
    if settings.rotate is not None:  # runs both models, so only after memory is known to suffice
        require_same_logits(plain)
    state = PassState(settings.out, _pass_identity(settings, source, chosen))
    _warm(quantizer)
    gc.collect()  # garbage that the pass would free lowers its measured peak
    meter = MemoryMeter(torch.device("cpu"), exact=True)
    walk = _walk(source)
    base = None if original is None else _walk(original)
    if state.done:
        say(f"going on after block {state.done} of {walk.depth}")
    with watching(walk.depth, state.done) as done:
        sums = quantize_blocks(walk, quantizer, batches, state, done, None, ranks, experts, base)
    meter.sample()
    rows = state.rows()  # of all blocks, also those of an interrupted pass
    measured = ranks.largest(meter.peak.allocated)
    quantized = Quantized(
        settings.scheme,
        settings.method,
        rows,
        lost(sums),
        predicted,
        measured,
        other_rows(source.contents, rows),
        notes,
    )
    _require_result(quantized, settings.model, state if ranks.rank == 0 else None)
    # The losses are sums over all ranks, so all of them decide alike.
    if settings.max_kl is not None and not quantized.lost.kl <= settings.max_kl:
        return quantized
    if ranks.rank != 0:  # rank 0 writes the folder
        return replace(quantized, folder=settings.out)
    of_experts = quantizer.of_experts().scheme if experts else None
    config = _quantization_config(source, quantizer, quantized, of_experts)
    written = write_quantized(settings.out, source.contents, state, config, quantized.result())
    state.remove()
    return replace(quantized, folder=settings.out, stored_bytes=written.bytes)


def _quantization_config(
    source: SourceModel, quantizer: Quantizer, quantized: Quantized, of_experts: Scheme | None
) -> dict[str, Any]:
    excluded = ignored(source.blueprint, source.contents, quantized.layers)
    symmetric = not any(ZERO in row.tensors for row in quantized.layers)
    return quantization_config(quantizer.scheme, excluded, quantized.method, symmetric, of_experts)


def _walk(source: SourceModel) -> Walk:
    return Walk(source.blueprint, source.over(source.lowest), COMPUTE_DTYPE)


def _result_notes(
    source: SourceModel, quantizer: Quantizer, experts: Sequence[ExpertLayer]
) -> tuple[str, ...]:
    """What the command will not reach, and what a reader of its folder has to know. Raises as ``reading_notes``."""
    blueprint = source.blueprint
    with torch.device("meta"):
        model = blueprint.build()
    blocks = blueprint.blocks(model)
    linear = list(linear_layers(model, blocks))
    kept = sum(row.numel for row in kept_matrices(model, blocks, quantizer.dtypes, experts))
    packed = [model.get_parameter(stack) for layer in experts for stack in layer.stacks]
    packed += [model.get_submodule(path).get_parameter("weight") for path in linear]
    whole = kept + sum(parameter.numel() for parameter in packed)
    sentences: tuple[str, ...] = ()
    if kept:
        sentences = (
            f"{percent(kept / whole)} of the blocks' weights stay as they are: they are not in linear layers",
        )
    if experts and quantizer.scheme.activation_bits == 8:
        sentences += ("experts keep activations in 16 bits: transformers dequantizes them while it loads",)
    method = quantization_config(quantizer.scheme, [], quantizer.method.name)["quant_method"]
    if method == METHOD and isinstance(blueprint, HuggingFaceModel):
        sentences += reading_notes(model, linear, quantizer.scheme)
    return sentences


def _pass_identity(settings: Settings, source: SourceModel, chosen: Chosen) -> dict[str, Any]:
    """All that the result depends on, to compare with those of an interrupted pass."""
    return {
        "model": source.identity,
        "scheme": settings.scheme,
        "method": settings.method,
        "rotate": settings.rotate,
        "data": chosen.identity,
        "sequences": settings.sequences,
        "sequence_length": source.length,
    }


def _require_memory(predicted: int) -> None:
    """Raise ResourceError if the pass needs more memory than this machine has left."""
    free = min(usable_memory(), memory_left() or usable_memory())
    if predicted > free:
        raise ResourceError(
            "the pass does not fit this machine",
            why=f"{format_bytes(predicted)} needed, {format_bytes(free)} free",
            fix="give fewer --sequences or a smaller --sequence-length",
        )


def _require_result(quantized: Quantized, model: str, state: PassState | None) -> None:
    """Raise NumericsError for losses that are not finite, RecipeError if no weight is quantized.

    In both cases ``state``, if given, is removed: the same pass would end so again.
    """
    unquantized = all(row.method == UNQUANTIZED for row in quantized.layers)
    if state is not None and (unquantized or not math.isfinite(quantized.lost.kl)):
        state.remove()
    if not math.isfinite(quantized.lost.kl):
        raise NumericsError(
            "the model's logits are not finite, before or after quantization",
            where=model,
            why="; ".join(_reasons(quantized)),
            fix="give a model whose weights are finite",
        )
    if unquantized:
        raise RecipeError(
            "no weight was quantized",
            where=model,
            why="; ".join(_reasons(quantized)),
            fix="give another --scheme or --method, or more --sequences",
        )


def _reasons(quantized: Quantized) -> list[str]:
    """Why weights stay as they are."""
    return list(dict.fromkeys(row.why for row in quantized.layers if row.why))


@torch.no_grad()
def _warm(quantizer: Quantizer) -> None:
    """Run every kind of kernel once, before the level from which the peak is measured (trainer/warm_up.py)."""
    torch.ones(1024, 1024) @ torch.ones(1024, 2048)
    spec = ModelSpec(layers=1, width=64, heads=2, ffn=128, vocab=256)
    tiny = NativeModel(dimensions_of(spec))
    model = tiny.build()
    tiny.fill(model, 0)
    tiny.logits(model, torch.zeros((1, 64), dtype=torch.int64))
    # 256 channels: a multiple of the usual groups, and more than one block of GPTQ.
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    statistics = InputStatistics(torch.eye(256), torch.ones(256), 256)
    with suppress(NotConverged):
        quantizer.method.quantize(weight, quantizer.scheme, statistics).dequantize()
