"""``shardwise data``: the format found, counts that add up, and trained tokens marked, or coloured on a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import run

RECIPE = """
model: {preset: tiny}
data: {source: SOURCE, sequence_length: 64, held_out: 0}
steps: 2
batch_size: 2
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def recipe(folder: Path, *records: object, name: str = "a.jsonl") -> str:
    source = folder / name
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("SOURCE", str(source)), encoding="utf-8")
    return str(path)


def pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def test_what_is_trained_on_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(tmp_path, pair("2+2=", "4"), pair("[b]3+3=", "6"))
    assert run(["data", file, "--samples", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # 2+2=4∎ and [b]3+3=6∎ are 6 and 9 tokens, 5 and 8 of which are targets: 4 of 13 are trained on.
    assert lines[0].endswith(
        "format prompt (detected), 2 records, 15 tokens, 30.8 % of the targets trained on"
    )
    assert lines[1] == "2 sequences of 64 tokens to train on and 0 held out, one record each: 10.2 % filled"
    assert lines[2].startswith("padding takes 90 % of the computation: data.packing=true puts")
    assert lines[3:] == ["", "sample 0", "2+2=[[4<end>]]", "", "sample 1", "[b]3+3=[[6<end>]]"]


def test_each_sample_is_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of packed sequences; a record that is cut says so."""
    file = recipe(tmp_path, pair("2+2=", "4"), pair("3+3=", "6" * 80))
    assert run(["data", file, "data.packing=true", "data.sequence_length=70", "data.format=prompt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "(as data.format says)" in lines[0]
    assert "packed" in lines[1]
    assert lines[2].startswith(
        "too long for a sequence: 1 records cut, so the model does not see how they end"
    )
    assert lines[lines.index("sample 1, cut at its end") + 1] == f"3+3=[[{'6' * 67}]]"
    assert lines[lines.index("sample 0") + 1] == "2+2=[[4<end>]]"


def test_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(tmp_path, {"text": "a" * 80})
    assert run(["data", file, "--samples", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "plain text, 1 documents, 81 tokens" in lines[0]
    assert lines[-1] == f"a[[{'a' * 64}]]"


def on_a_terminal(file: str, **environment: str) -> str:
    code = f"import sys; from shardwise.cli.main import run; code = run(['data', {file!r}]);"
    code += " sys.exit(code or 9 * ('torch' in sys.modules))"  # and needs no torch
    inherited = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, "FORCE_COLOR": "1", "TERM": "xterm", **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_terminal_gets_colour(tmp_path: Path) -> None:
    shown = on_a_terminal(recipe(tmp_path, pair("2+2=", "4")))
    assert "2+2=\x1b[32m4<end>\x1b[0m" in shown
    assert "[[" not in shown


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_a_terminal_without_colour_gets_marks(environment: dict[str, str], tmp_path: Path) -> None:
    shown = on_a_terminal(recipe(tmp_path, pair("2+2=", "4")), **environment)
    assert "2+2=[[4<end>]]" in shown
    assert "\x1b[32m" not in shown


@pytest.mark.parametrize(
    ("records", "overrides", "code", "says"),
    [
        ([{"text": "plain"}], ["data.train_on=completion"], 3, "no completions in the data source"),
        ([{"text": "plain"}], ["data.format=alpaca"], 3, "no 'instruction'"),
        ([pair("a", "b"), pair("a", " ")], [], 3, "'completion' is empty"),
        ([pair("a", "b"), {"messages": []}], [], 3, "no 'prompt'"),
        ([{"question": "a"}], [], 3, "no 'text'"),
        ([pair("a" * 99, "b")], [], 3, "no completion within a sequence"),
        ([pair("a", "b")], ["data.format=chat"], 2, "data.format"),
        ([pair("a", "b")], ["strategy.sequence_parallel=2", "strategy.sequence_method=ring",
                             "cluster.devices_per_node=2", "data.packing=true"], 2, "strategy.sequence_method"),
        ([pair("a", "b")], ["data.tokenizer=./nowhere"], 3, "no tokenizer"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["data", "train"])
def test_one_line_and_the_right_code(
    verb: str, records: list[object], overrides: list[str], code: int, says: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments = [verb, recipe(tmp_path, *records), *overrides]
    assert run(arguments + (["--out", str(tmp_path / "run")] if verb == "train" else [])) == code
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1, error
    assert says in error[0], error
