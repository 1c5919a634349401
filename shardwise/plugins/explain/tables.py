"""``shardwise explain`` as tables: the ZeRO paper's bytes, and those that dry runs count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from shardwise.core.block_times import BlockTimes
from shardwise.core.units import format_bytes, format_count, format_percent
from shardwise.plugins.explain.model_state import PAPER_BYTES, CountedState, paper_bytes, state_bytes
from shardwise.recipe.dimensions import Dimensions
from shardwise.report.layout import bulleted, columns, text_section

GB = 10**9
"""The paper's unit. Figures of a model are in GiB, as in a plan."""


def paper_table(sizes: Sequence[float], ranks: Sequence[int]) -> Iterator[RenderableType]:
    """GB of model state per rank: a row per model and stage, a column per number of ranks."""
    table = columns("left", "left", *["right"] * (len(ranks) + 1), titles=_titles("parameters", ranks))
    for size in sizes:
        for stage in (1, 2, 3):
            cells = [_number_text(size * paper_bytes(stage, world_size) / GB) for world_size in ranks]
            table.add_row(format_count(size), str(stage), formula(stage), *cells)
    note = "GB of model state per rank in 16-bit training with Adam (arXiv 1910.02054, table 1)"
    yield from text_section("The paper", note, table)


def formula(stage: int) -> str:
    """Bytes per parameter of a stage, such as 4 + 12/N."""
    whole, divided = PAPER_BYTES[stage]
    return " + ".join(([f"{whole}"] if whole else []) + ([f"{divided}/N"] if divided else []))


def zero_table(model: str, parameters: int, states: Sequence[CountedState]) -> Iterator[RenderableType]:
    """A row per stage and number of ranks: the paper's bytes, the counted ones, and those per parameter."""
    titles = ("stage", "ranks", "paper", "counted", "", "at most", "")
    table = columns("left", *["right"] * 6, titles=titles)
    for state in states:
        paper = paper_bytes(state.stage, state.ranks)
        update = state_bytes(state.update)
        row = (format_bytes(paper * parameters), format_bytes(update), _each(update, parameters))
        table.add_row(
            str(state.stage),
            f"{state.ranks:,}",
            *row,
            format_bytes(state.most),
            _each(state.most, parameters),
        )
    note = f"{format_count(parameters)} parameters (Ψ), bf16 with Adam, one micro-batch"
    yield from text_section(model, note, table)
    reasons = (
        "the paper counts fp16 weights and gradients, 2 + 2 bytes, and 12 of fp32 weights and moments",
        "counted before the update: fp32 gradients (4 bytes); bf16 weights exist only while they are all-gathered",
        "at most: with the weights that are all-gathered at that time, which the paper leaves out for stage 3",
    )
    yield from text_section("Differences", "docs/concepts/zero.md", bulleted(reasons, ""))


PAPER_PARTS = (("parameters", 2), ("gradients", 2), ("master_weights", 4), ("optimizer_state", 8))
"""Categories of the ledger, and the paper's bytes per parameter."""


def memory_table(
    model: str, parameters: int, tokens: int, state: CountedState, shape: Dimensions | None
) -> Iterator[RenderableType]:
    """A row per part of model state on one device, and the activations of one sequence."""
    table = columns("left", "right", "right", "right", "right", titles=("", "rule", "", "counted", ""))
    for name, rule in PAPER_PARTS:
        part_bytes = getattr(state.update, name)
        table.add_row(
            name.replace("_", " "),
            f"{rule}Ψ",
            format_bytes(rule * parameters),
            format_bytes(part_bytes),
            _each(part_bytes, parameters),
        )
    total_bytes = state_bytes(state.update)
    table.add_row(
        "model state",
        "16Ψ",
        format_bytes(16 * parameters),
        format_bytes(total_bytes),
        _each(total_bytes, parameters),
    )
    _add_activations(table, tokens, state, shape)
    note = f"{format_count(parameters)} parameters (Ψ), bf16 with Adam, one device, one sequence of {tokens:,} tokens"
    yield from text_section(model, note, table)
    reasons = (
        "counted before the update; master weights are the only stored weights, bf16 copies are made for use",
        "activations by rule: s·h·L·(34 + 5·a·s/h) bytes, without fused attention (arXiv 2205.05198, equation 1)",
        "counted activations keep no scores where attention is fused, and include the logits of the loss",
        f"the whole step peaks at {format_bytes(state.total)}",
    )
    yield from text_section("Differences", "", bulleted(reasons, ""))


def _add_activations(table: Table, tokens: int, state: CountedState, shape: Dimensions | None) -> None:
    rule = "" if shape is None else format_bytes(activation_rule(shape, tokens))
    table.add_row(
        "activations", "sbh(34 + 5as/h)L" if rule else "", rule, format_bytes(state.activations), ""
    )


def activation_rule(shape: Dimensions, tokens: int) -> float:
    """Bytes of one sequence's activations in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198, equation 1)."""
    return tokens * shape.width * shape.layers * (34 + 5 * shape.heads * tokens / shape.width)


def state_json(parameters: int, state: CountedState) -> dict[str, Any]:
    """One object of ``explain --json``."""
    return {
        "zero_stage": state.stage,
        "ranks": state.ranks,
        "paper_bytes": paper_bytes(state.stage, state.ranks) * parameters,
        "counted_bytes": state_bytes(state.update),
        "most_bytes": state.most,
        "ledger": state.update.as_dict(),
        "activation_bytes": state.activations,
        "peak_bytes": state.total,
    }


def checkpointing_table(
    every: Mapping[str, BlockTimes], model: str | None = None, tokens: int = 0
) -> Iterator[RenderableType]:
    """A row for each value of activation_checkpointing: kept activations of the blocks, and runs forward.

    Args:
        model: its name; None for a small decoder.
        tokens: of a sequence.
    """
    table = columns("left", "right", "right", "right", titles=("value", "kept at most", "of none", "forward"))
    whole = every["none"].most_kept
    for name, times in every.items():
        share = f"{format_percent(times.most_kept / whole, 1)}"
        table.add_row(name, format_bytes(times.most_kept), share, f"{times.forward_runs:.2f}×")
    blocks = f"{every['none'].blocks} blocks"
    note = f"a small decoder of {blocks}, one micro-batch, by dry runs"
    if model is not None:
        note = f"{model}: {blocks}, one sequence of {tokens:,} tokens in bf16, by dry runs"
    yield from text_section("activation_checkpointing", note, table)
    reasons = (
        "kept at most: activations that blocks have allocated, at the event with most of them",
        "forward: runs of a block in the forward direction, the first one included, per block",
        "selective runs a block again without its matrix products and attention",
        "recursive:1 keeps the input of the first block alone (memory-poor); docs/concepts/activation-memory.md",
    )
    yield from text_section("Columns", "", bulleted(reasons, ""))


def _titles(first: str, ranks: Sequence[int]) -> tuple[str, ...]:
    return (first, "stage", "bytes", *(f"N = {world_size:,}" for world_size in ranks))


def _number_text(size: float) -> str:
    return f"{size:.3g}" if size < 1000 else f"{size:,.0f}"


def _each(size: int, parameters: int) -> str:
    return f"{size / parameters:.2f}Ψ"
