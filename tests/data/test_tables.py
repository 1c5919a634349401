"""JSON lists, CSV, tool calls and content parts; names that look like paths are no ids on the Hub."""

from __future__ import annotations

import csv
import gzip
import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import DataError, RecipeError
from shardwise.core.hub_folder import folder_of
from shardwise.data.chat import ChatTemplate, plain_template
from shardwise.data.formats import Chat, example_of
from shardwise.data.readers import Record, read_file, read_records
from shardwise.data.sources import open_source

ALPACA = ("instruction", "input", "output")
ROWS = [{"instruction": f"add {n}", "input": "", "output": f'it, is\n"{n}" é'} for n in range(5)]


def write(path: Path, kind: str) -> Path:
    if kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "lines":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    else:
        path.write_text(json.dumps(ROWS, indent=2 if kind == "indented" else None, ensure_ascii=False))
    return path


@pytest.mark.parametrize(
    ("name", "kind"), [("a.json", "list"), ("a.json", "indented"), ("a.json", "lines"), ("a.csv", "csv")]
)
def test_records_are_those_that_were_written(name: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, kind)
    read = list(read_records(path, ALPACA))
    assert [dict(record.fields) for record in read] == ROWS
    assert len({record.where for record in read}) == 5 and all(str(path) in record.where for record in read)
    packed = tmp_path / f"b.{name.partition('.')[2]}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [dict(record.fields) for record in read_records(packed, ALPACA)] == ROWS
    texts = b"".join(piece.data for piece in read_file(path, "output"))
    assert texts.decode() == "".join(row["output"] for row in ROWS)
    assert open_source(str(path), "text").fields() == {"instruction", "input", "output"}


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.json", '[{"text": "x"}, {"text": }]', "a.json:1: item 2"),
        ("a.json", '[{"text": "x"}\n{"text": "y"}]', "a.json:2: item 1"),
        ("a.json", '[{"text": "x"}', "a.json:1: item 1"),
        ("a.json", '[{"text": "x"}] more', "a.json:1: item 1"),
        ("a.json", '[{"text": "x"}, 3]', "item 2"),
        ("a.csv", 'text,b\n"x",1\n"y\n', "a.csv:3"),
        ("a.csv", "text,b\nx,1,2\n", "a.csv:2"),
        ("a.csv", "text,text\nx,1\n", "a.csv:1"),
        ("a.csv", "other,b\nx,1\n", "a.csv:2"),
    ],
)
def test_a_malformed_table_is_refused_with_its_place(
    name: str, text: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        list(read_file(tmp_path / name, "text"))
    assert place in caught.value.where


def test_json_files_of_a_folder_are_settings(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "csv")
    (tmp_path / "config.json").write_text("{}")
    assert len(list(open_source(str(tmp_path), "output").records(ALPACA))) == 5
    write(tmp_path / "b.json", "list")
    assert len(list(open_source(str(tmp_path / "b*.json"), "output").records(ALPACA))) == 5


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Compute "}, {"type": "text", "text": "1 + 1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_tool_calls_and_content_parts_reach_the_template() -> None:
    chat = example_of(Record({"messages": CHAT}, "a.jsonl:1"), "messages")
    assert isinstance(chat, Chat) and chat.turns[0].text == "Compute 1 + 1?"
    written = ChatTemplate({"default": TEMPLATE}, {}).written(chat, "a.jsonl:1", date(2026, 1, 2))
    assert written.text == "<user>Compute 1 + 1?<assistant>[add 1]</s><tool>2<tool>two<assistant>2</s>"
    assert [written.text[start:end] for start, end in written.trained] == ["[add 1]</s>", "2</s>"]
    plain = plain_template("\0").written(chat, "", date(2026, 1, 2))
    assert '"add"' in plain.text[slice(*plain.trained[0])]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {0: {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}},
            "its type is image_url",
        ),
        ({1: {"role": "assistant", "content": None}}, r"no 'messages\[1\].content'"),
        ({1: {"role": "assistant", "content": "hm"}}, "found tool, expected user"),
        ({1: {"role": "assistant", "content": None, "tool_calls": "add"}}, "is not a list of tool calls"),
    ],
)
def test_other_parts_and_orders_are_refused(changed: dict[int, dict[str, Any]], said: str) -> None:
    chat = [changed.get(number, turn) for number, turn in enumerate(CHAT)]
    with pytest.raises(DataError) as caught:
        example_of(Record({"messages": chat}, "a.jsonl:1"), "messages")
    assert re.search(said, caught.value.line())


def test_a_misspelled_path_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, five retries of half a minute; a folder that exists says that a path is meant."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such data source") as caught:
        open_source("data/trian", "text")
    assert "did you mean data/train?" in caught.value.line()
    with pytest.raises(RecipeError, match="no such folder") as refused:
        folder_of("data/trian", ["config.json"])
    assert "did you mean data/train?" in refused.value.line()
