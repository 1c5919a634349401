"""``shardwise explain``: the ZeRO paper's 54 cells as it prints them, and its 16 bytes as dry runs count them."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from shardwise.cli.main import run
from shardwise.core.block_times import BlockTimes
from shardwise.plugins.explain.model_state import PAPER_MODELS, RANKS, paper_bytes
from shardwise.recipe.presets import PRESETS
from tests.plugins.explain.test_zero_paper import CELLS, bytes_per_parameter


def test_the_54_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """As the paper prints them, but for the last digit, which it rounds in some cells and cuts in others."""
    assert run(["explain", "zero"]) == 0
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if "N" in line and line.strip()[0].isdigit()
    ]
    shown = {}
    for size, row in zip([size for size in PAPER_MODELS for _ in range(3)], rows, strict=True):
        values = [float(word.replace(",", "")) for word in row[-6:]]
        shown |= {(size, int(row[-6 - _words(row)]), n): v for n, v in zip(RANKS, values, strict=True)}
    assert len(shown) == len(CELLS) == 54
    for parameters, stage, ranks, printed in CELLS:
        last_digit = 10.0 ** Decimal(printed).as_tuple().exponent
        assert abs(shown[parameters, stage, ranks] - float(printed)) <= last_digit * 1.001
        assert paper_bytes(stage, ranks) == float(bytes_per_parameter(stage, ranks))


def _words(row: list[str]) -> int:
    """Words of the formula and the stage before it."""
    return 2 if "+" not in row else 4


def test_a_model_on_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the update every stage above 0 holds 16 bytes per parameter, divided; stage 0 holds 16."""
    assert run(["explain", "zero", "tiny", "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counted = {(row["zero_stage"], row["ranks"]): row for row in found["counted"]}
    assert set(counted) == {(stage, 4) for stage in range(4)}
    for (stage, ranks), row in counted.items():
        divided = ranks if stage else 1
        assert row["counted_bytes"] == pytest.approx(16 * found["parameters"] / divided, rel=0.02)
        assert row["paper_bytes"] == found["parameters"] * paper_bytes(stage, ranks)
    assert counted[0, 4]["paper_bytes"] == 16 * found["parameters"]


def test_memory_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "memory", "tiny", "--tokens", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "16Ψ" in out and "16.00Ψ" in out and "sbh(34 + 5as/h)L" in out and "64 tokens" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["memory"],
        ["zero", "tiny", "--ranks", "1,x"],
        ["zero", "tiny", "--ranks", "0"],
        ["zero", "tiny", "--ranks", "1" * 5000],
        ["zero", "tiny", "--tokens", "64"],
        ["checkpointing", "tiny", "--png", "."],
        ["memory", "tiny", "--ranks", "1,8"],
        ["zero", "tiny", "--depth", "3"],
        ["memory", "tiny", "--png", "blocks.png"],
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.long
def test_checkpointing_is_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A recomputed block keeps its input alone, in bf16 and of the model's width; the rest grows with the tokens."""
    shape = PRESETS["tiny"]
    assert run(["explain", "checkpointing", "tiny", "--tokens", "128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: times["blocks"] for name, times in found.items()} == dict.fromkeys(found, shape.layers)
    # The input of a block that is recomputed is all that it keeps: bf16 and of the width.
    inputs = 2 * 128 * shape.width * shape.layers
    kept = {name: BlockTimes(**times).most_kept for name, times in found.items()}
    assert inputs <= kept["full"] < kept["selective"] < kept["none"]
    assert run(["explain", "checkpointing", "tiny", "--tokens", "256", "--json"]) == 0
    longer = BlockTimes(**json.loads(capsys.readouterr().out)["none"]).most_kept
    assert longer == pytest.approx(2 * kept["none"], rel=0.05)
    assert run(["explain", "checkpointing", "tiny", "--depth", "3"]) == 0
    assert "tiny: 3 blocks, one sequence of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_checkpointing_without_a_model_is_of_a_small_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "checkpointing", "--depth", "4"]) == 0
    assert "a small decoder of 4 blocks" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for subject in ("checkpointing", "memory", "zero"):
        assert run(["explain", subject, str(tmp_path / "no-model")]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_figures_of_a_model_are_in_the_units_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "memory", "tiny"]) == 0
    out = capsys.readouterr().out
    assert " MiB" in out and " MB" not in out


@pytest.mark.long
def test_explain_shows_every_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.plugins.explain.counting.SHOWN_KINDS", ("none", "full"))
    assert run(["explain", "checkpointing", "--depth", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["none", "full"] and found["full"]["blocks"] == 3
    assert run(["explain", "checkpointing", "--depth", "3"]) == 0
    out = capsys.readouterr().out
    assert "a small decoder of 3 blocks" in out and "2.00×" in out
