"""Settings without bounds: every integer of a recipe, however large, is answered at once and in one line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from ruamel.yaml import YAML
from ruamel.yaml.events import StreamEndEvent

from shardwise.core.errors import RecipeError
from shardwise.jobs.request import read_request
from shardwise.recipe.load import SECTIONS
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.torture.cases import uncollected

GOOD = "model: {preset: tiny}\nsteps: 2\nbatch_size: 4\n"
MOST_SECONDS = 1.0


def integers() -> Iterator[str]:
    """Every key of a recipe that holds a whole number."""
    yield from ("steps", "batch_size", "seed")
    for name, section in SECTIONS.items():
        for key, field in section.model_fields.items():
            if "int" in str(field.annotation):
                yield f"{name}.{key}"
    yield from (f"strategy.{setting.key}" for setting in SETTINGS if setting.kind is int)


def answered(file: Path, *overrides: str, seconds: float = MOST_SECONDS) -> str:
    """The error line, or ""; fails when it takes more processor time than `seconds`.

    A slow answer is repeated: a shared machine once charged 2.7 s to an answer of 2 ms.
    """
    line, spent = timed(file, overrides)
    if spent >= seconds:
        line, spent = timed(file, overrides)
    assert spent < seconds, overrides
    return line


def timed(file: Path, overrides: tuple[str, ...]) -> tuple[str, float]:
    """The error line, or "", and the processor time that it takes."""
    began, line = time.process_time(), ""
    try:
        with uncollected():
            read_request(file, overrides)
    except RecipeError as error:
        line = error.line()
    return line, time.process_time() - began


def scan_seconds(text: str) -> float:
    """Processor time that the YAML library alone needs on this machine: it is most of the time of a long file."""
    began = time.process_time()
    with uncollected():
        assert any(isinstance(event, StreamEndEvent) for event in YAML().parse(text))
    return time.process_time() - began


def test_all_integers_are_found() -> None:
    assert {"model.layers", "cluster.nodes", "strategy.tensor_parallel", "checkpoint.every"} <= set(
        integers()
    )
    assert "int" in str(get_args(Recipe.model_fields["steps"].annotation) or Recipe.model_fields["steps"])


@pytest.mark.parametrize("devices", [1, 1_000_000])
def test_an_integer_of_any_size_is_answered_in_a_second(tmp_path: Path, devices: int) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(GOOD)
    cluster = ("cluster.nodes=1000", "cluster.devices_per_node=1000") if devices > 1 else ()
    for key in integers():
        for value in (-1, 0, 999_983, 1_000_000, 10**10, 99_999_999_999, 10**25, 10**4000):
            answered(file, *cluster, f"{key}={value}")


@pytest.mark.parametrize("section", ["", "data", "strategy", "model"])
def test_thousands_of_unknown_keys_are_answered_in_a_second(tmp_path: Path, section: str) -> None:
    file = tmp_path / "recipe.yaml"
    indent = "  " if section else ""
    head = GOOD if section != "model" else GOOD.partition("\n")[2]
    lines = "".join(f"{indent}k{number}: 1\n" for number in range(6000))
    file.write_text(head + (f"{section}:\n" if section else "") + lines)
    if file.stat().st_size > 1 << 16:
        file.write_text(file.read_text()[: 1 << 16].rpartition("\n")[0] + "\n")
    # A second, unless the machine is so slow that the library alone takes a good part of it.
    seconds = max(MOST_SECONDS, 4 * scan_seconds(file.read_text()))
    assert "unknown key 'k0'" in answered(file, seconds=seconds)


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(GOOD)
    for overrides in (
        ("cluster.nodes=1000000", "cluster.devices_per_node=1000000"),
        ("cluster.preset=999999x999999xH100-80GB",),
    ):
        assert "more than 1,000,000 devices" in answered(file, *overrides)


def test_a_micro_batch_that_no_machine_holds(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(GOOD)
    sizes = (
        "model.context=100000000",
        "data.sequence_length=100000000",
        "strategy.micro_batch_size=1000000000",
    )
    assert "a micro-batch is too large" in answered(file, *sizes)
