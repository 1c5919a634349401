"""Prompts for rollouts: rendered up to the opening of an answer, with the record's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import DataError
from shardwise.data.opening import open_sources
from shardwise.data.tokenizer import open_tokenizer
from tests.data import chat_templates as templates
from tests.data.test_chat import CALLS, OUTPUT, folder_of
from tests.data.test_completions import jsonl
from tests.data.test_preferences import (
    FIRST,
    GOOD,
    MORE,
    SYSTEM,
    USER,
    Kinds,
    rendered,
    sharegpt,
    without_template,
)


@pytest.fixture
def prompts(opened_kind: Kinds) -> Kinds:
    return lambda source, **spec: opened_kind(source, kind="prompts", **spec)


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"prompt": [USER], "answer": 4}, [USER]),
        ({"prompt": [USER, FIRST, MORE]}, [USER, FIRST, MORE]),
        ({"prompt": [USER], "completion": [GOOD]}, [USER]),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [FIRST]}, [USER]),
        ({"messages": [USER, GOOD]}, [USER]),
        ({"instruction": "Which", "input": "one?"}, [{"role": "user", "content": "Which\none?"}]),
        ({"prompt": USER["content"], "system": "Short."}, [SYSTEM, USER]),
        ({"messages": [USER, FIRST, MORE, GOOD]}, [USER, FIRST, MORE]),
        ({"messages": [USER]}, [USER]),
        (
            {"conversations": sharegpt(USER, GOOD), "system": "S."},
            [{"role": "system", "content": "S."}, USER],
        ),
    ],
)
def test_turns_are_rendered_with_the_opening_of_an_answer(
    record: dict[str, Any], turns: Any, tmp_path: Path, prompts: Kinds
) -> None:
    folder = folder_of(tmp_path / "t", templates.CHATML)
    train = prompts(jsonl(tmp_path / "a.jsonl", record), tokenizer=folder, held_out=0.0).train
    assert train.sample(0) == {
        "prompt": rendered(folder, turns, add_generation_prompt=True),
        "closing": open_tokenizer(folder).encode("\n"),
        "fields": record,
    }
    assert train.chats and len(train) == 1


def test_an_answer_can_follow_the_output_of_a_tool(tmp_path: Path, prompts: Kinds) -> None:
    folder = folder_of(tmp_path / "t", templates.THINKING)
    turns = [USER, {**CALLS, "content": ""}, OUTPUT]
    train = prompts(jsonl(tmp_path / "a.jsonl", {"prompt": turns}), tokenizer=folder, held_out=0.0).train
    assert train.sample(0)["prompt"] == rendered(folder, turns, add_generation_prompt=True)


def test_texts_stay_as_they_are(tmp_path: Path, prompts: Kinds) -> None:
    train = prompts(jsonl(tmp_path / "a.jsonl", {"prompt": "2+2=", "answer": "4"}), held_out=0.0).train
    fields = {"prompt": "2+2=", "answer": "4"}
    assert train.sample(0) == {"prompt": list(b"2+2="), "closing": [], "fields": fields}
    assert train.text(0) == "2+2=" and train.filled(0) == 4 and not train.chats
    source = jsonl(tmp_path / "b.jsonl", {"instruction": "Add.", "input": "2 2"})
    alpaca = prompts(source, tokenizer=without_template(tmp_path / "t"), held_out=0.0).train
    assert alpaca.text(0).endswith("### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n")


def test_fields_of_parquet_are_all_there(tmp_path: Path, prompts: Kinds) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(
        [{"prompt": "a", "answer": n, "more": {"x": [n]}} for n in range(3)]
    ).to_parquet(path)
    train = prompts(path, held_out=0.0).train
    assert [train.sample(n)["fields"] for n in range(3)] == [
        {"prompt": "a", "answer": n, "more": {"x": [n]}} for n in range(3)
    ]


def test_prompts_without_room_for_an_answer_are_dropped_and_counted(tmp_path: Path, prompts: Kinds) -> None:
    source = jsonl(tmp_path / "a.jsonl", *({"prompt": "a" * n} for n in (3, 7, 8, 20)))
    splits = prompts(source, sequence_length=8, held_out=0.0)
    assert [len(splits.train.sample(n)["prompt"]) for n in range(len(splits.train))] == [3, 7]
    assert "too long: 2 prompts of more than 7 tokens dropped" in splits.sentences()
    with pytest.raises(DataError, match="no prompt within a sequence"):
        prompts(source, sequence_length=3)


def test_the_objective_says_how_many_tokens_a_completion_takes(
    tmp_path: Path, recipe_of_objective: Kinds
) -> None:
    source = jsonl(tmp_path / "a.jsonl", *({"prompt": "a" * n} for n in (4, 5, 6, 7)))
    for completion, longest in ((None, 4), (2, 6)):
        objective = {"name": "grpo", "completion_length": completion, "group": 4, "rewards": ["a:b"]}
        recipe = recipe_of_objective(source, objective, sequence_length=8, held_out=0)
        [part] = open_sources(recipe, tmp_path / "cache").parts
        assert max(len(part.train.sample(n)["prompt"]) for n in range(len(part.train))) == longest


def test_sides_of_the_split_and_the_fingerprint(tmp_path: Path, prompts: Kinds) -> None:
    records = [{"prompt": f"prompt {n}", "answer": n} for n in range(100)]
    source = jsonl(tmp_path / "a.jsonl", *records)
    splits, again = prompts(source, held_out=0.1), prompts(source, held_out=0.1)
    sides = (splits.train, splits.held_out)
    answers = [[side.sample(n)["fields"]["answer"] for n in range(len(side))] for side in sides]
    assert sorted(answers[0] + answers[1]) == list(range(100)) and answers[0] == sorted(answers[0])
    assert 5 <= len(answers[1]) <= 20
    assert splits.fingerprint == again.fingerprint
    changed = jsonl(tmp_path / "b.jsonl", *records[:-1], {**records[-1], "answer": 0})
    others = [
        prompts(changed, held_out=0.1),
        prompts(source, held_out=0.2),
        prompts(source, sequence_length=20),
    ]
    assert len({splits.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"question": "a"}, "no 'prompt'"),
        ({"prompt": " "}, "'prompt' is empty"),
        ({"prompt": []}, "'prompt' is not a list of turns"),
        ({"prompt": [GOOD]}, "roles do not alternate"),
        ({"prompt": [USER, MORE]}, "roles do not alternate"),
    ],
)
def test_a_malformed_prompt_is_named_by_file_and_line(
    bad: Any, says: str, tmp_path: Path, prompts: Kinds
) -> None:
    with pytest.raises(DataError) as caught:
        prompts(jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, bad))
    line = caught.value.line()
    assert says in line and "a.jsonl:2" in line and "\n" not in line, line


def test_a_turn_that_the_template_does_not_write_is_refused(tmp_path: Path, prompts: Kinds) -> None:
    users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}:"
    folder = folder_of(tmp_path / "t", users)
    with pytest.raises(DataError, match="does not write the system turn"):
        turns = [{"role": "system", "content": "Short."}, USER]
        prompts(jsonl(tmp_path / "a.jsonl", {"prompt": turns}), tokenizer=folder)


def test_chats_need_a_template(tmp_path: Path, prompts: Kinds) -> None:
    folder = folder_of(tmp_path / "t", templates.CHATML)
    (Path(folder) / "chat_template.jinja").unlink()
    assert open_tokenizer(folder).chat is None
    with pytest.raises(DataError, match="has no chat template"):
        prompts(jsonl(tmp_path / "a.jsonl", {"prompt": [USER]}), tokenizer=folder)
