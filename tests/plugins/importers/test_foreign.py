"""Lines of keys in YAML and JSON files of other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.plugins.importers.foreign import line_of

YAML = """\
# learning_rate: of nothing
base_model: x
datasets:
  - path: a
    weight: 1
  - {path: b, 'weight': 2}
fsdp_config:
  weight: 3
learning_rate: 1
"""
JSON = (
    '{\n "zero_optimization": {\n  "stage": 3,\n  "offload_optimizer": {"device": "cpu"}\n },\n "stage": 1\n}'
)


@pytest.mark.parametrize(
    ("name", "text", "key", "line"),
    [
        ("a.yaml", YAML, "learning_rate", 9),
        ("a.yaml", YAML, "datasets[0].weight", 5),
        ("a.yaml", YAML, "fsdp_config.weight", 8),
        ("a.yaml", YAML, "rate", None),
        ("a.json", JSON, "zero_optimization.offload_optimizer.device", 4),
        ("a.json", JSON, "zero_optimization.stage", 3),
        ("a.json", JSON, "stage", 6),
        ("a.json", JSON, "stage.stage", None),
        ("a.yaml", YAML, "datasets[1].weight", 6),
        ("a.yaml", YAML, "datasets[2].weight", None),
        ("a.toml", "[a]\nsteps = 3\n", "a.steps", None),
    ],
)
def test_the_line_of_a_key(tmp_path: Path, name: str, text: str, key: str, line: int | None) -> None:
    (tmp_path / name).write_text(text)
    assert line_of(tmp_path / name, key) == line


def test_a_file_that_is_gone_has_no_lines(tmp_path: Path) -> None:
    assert line_of(tmp_path / "a.yaml", "a") is None
