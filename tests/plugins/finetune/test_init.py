"""``shardwise init``: the recipe that it writes is planned and trained as it is, in the sequences of `finetune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import run
from shardwise.plugins.finetune.choosing import draft
from shardwise.recipe.load import parse_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.harness.commands import Shell
from tests.harness.small_models import write_model

transformers = pytest.importorskip("transformers")

POSITIONS = 100
"""Of the models: fewer than the usual 2,048, and no multiple of 8."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "gpt2": {},
    "bert": {},
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 66},
    "t5": {"decoder_start_token_id": 0, "pad_token_id": 0, "n_positions": POSITIONS},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with chats, completions and texts."""
    monkeypatch.chdir(tmp_path)
    words = ["a few words", "some more words than before " * 20]
    chats = [
        {"messages": [{"role": "user", "content": words[n % 2]}, {"role": "assistant", "content": "yes"}]}
        for n in range(24)
    ]
    pairs = [{"prompt": words[n % 2], "completion": " so it is"} for n in range(24)]
    for name, records in (("chats", chats), ("pairs", pairs), ("short", pairs[::2])):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    Path("text.txt").write_text("Some words of a text. " * 400, encoding="utf-8")
    Path("little.txt").write_text("Few words. " * 4, encoding="utf-8")


def write_base(family: str) -> None:
    values = {"max_position_embeddings": POSITIONS, **FAMILIES[family]}
    if family == "t5":
        del values["max_position_embeddings"]
    write_model(Path("base"), family, **values)
    if family in ("bert", "roberta"):
        tokenizer = transformers.AutoTokenizer.from_pretrained("base")
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        tokenizer.save_pretrained("base")


def written(*words: str) -> Recipe:
    assert run(["init", *words, "--device", "cpu", "--out", "recipe.yaml"]) == 0
    return parse_recipe(Path("recipe.yaml").read_text(encoding="utf-8"), SETTINGS)


@pytest.mark.parametrize(
    ("family", "data", "length", "packing"),
    [
        ("llama", "chats.jsonl", 96, False),
        ("llama", "little.txt", 20, False),
        ("qwen3", "short.jsonl", 64, True),
        ("gemma3_text", "short.jsonl", 64, True),
        ("gpt2", "text.txt", 96, False),
        ("bert", "text.txt", 96, False),
        ("roberta", "text.txt", 64, False),  # its positions begin at 2
        ("t5", "pairs.jsonl", 96, False),
    ],
)
def test_the_recipe_has_the_sequences_of_finetune(
    family: str, data: str, length: int, packing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_base(family)
    recipe = written("base", data)
    said = capsys.readouterr().out
    assert "not read" not in said and "shardwise train recipe.yaml --out runs/recipe" in said
    asked = draft("base", data, 3.0)
    assert recipe.data.sequence_length == asked.shape.sequence_length
    assert recipe.data.sequence_length == length or data == "little.txt"
    assert (recipe.data.packing, recipe.batch_size) == (packing, asked.batch_size)
    objective = {"bert": "masked", "roberta": "masked", "t5": "seq2seq"}.get(family, "causal")
    assert recipe.model.objective == objective


@pytest.mark.parametrize(
    ("family", "data"),
    [
        ("qwen3", "short.jsonl"),
        *(
            pytest.param(family, data, marks=pytest.mark.long)
            for family, data in (
                ("llama", "little.txt"),
                ("bert", "text.txt"),
                ("t5", "pairs.jsonl"),
                ("gemma3_text", "short.jsonl"),
                ("gpt2", "text.txt"),
                ("roberta", "text.txt"),
            )
        ),
    ],
)
def test_the_recipe_is_planned_and_trained_as_it_is(family: str, data: str, shell: Shell) -> None:
    write_base(family)
    written("base", data)
    done = shell.run("train", "recipe.yaml", "steps=2", "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_is_not_here_is_named_and_has_usual_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Data alone is missing: the model's context is kept. No model: the usual length, and nothing is refused."""
    write_base("llama")
    recipe = written("base", "org/chats")
    assert recipe.data.sequence_length == 96 and recipe.data.packing
    assert "not read: org/chats; " in capsys.readouterr().out
    Path("recipe.yaml").unlink()
    recipe = written("nothere", "chats.jsonl")
    assert recipe.data.sequence_length == 2048
    assert f"not read: nothere, {Path.cwd() / 'chats.jsonl'}; " in capsys.readouterr().out


def test_a_model_that_is_here_and_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken").mkdir()
    assert run(["init", "broken", "chats.jsonl"]) == 2
    assert run(["init", "llama-3-8b", "chats.jsonl"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "not a model folder" in said[0] and "llama-3-8b cannot be fine-tuned" in said[1]
    write_base("gpt2")
    Path("base/chat_template.jinja").unlink()
    assert run(["init", "base", "chats.jsonl"]) == 3  # the chats would be refused in training
    assert "no chat template" in capsys.readouterr().err and not Path("recipe.yaml").exists()
