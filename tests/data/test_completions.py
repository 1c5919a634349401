"""Records with completions: detected, cut where the answer begins, packed, and refused by file, line and key."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.core.errors import DataError
from shardwise.data import Data
from shardwise.data.batches import batch_of
from shardwise.data.encoding import Encoder
from shardwise.data.packing import best_fit
from shardwise.data.readers import Record
from shardwise.data.tokenizer import open_tokenizer
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import DataSpec

Opener = Callable[..., Data]

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
"""A call as OpenAI's API writes it: null as content, the arguments as text."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
FORGETTING = (  # of all answers but the last it keeps a dot
    "{% for m in messages %}{{ m['role'] + ':' + (m['content'] if m['role'] == 'user' or loop.last else '.') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
SILENT = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def chat(*said: str) -> dict[str, object]:
    """A record of messages: user and assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]}


def tokenizer_folder(folder: Path, template: str | None, place: str = "chat_template.jinja") -> Path:
    """A byte-level BPE tokenizer that merges words, with ChatML's special tokens, and a template."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the answer is user assistant"] * 10, trainer)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<|endoftext|>"}
    if template is not None and place == "chat_template.jinja":
        (folder / place).write_text(template, encoding="utf-8")
    elif template is not None:
        settings["chat_template"] = [
            {"name": "tools", "template": "no"},
            {"name": "default", "template": template},
        ]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def trained_text(tokenizer: str, name: str, fields: Mapping[str, object], **spec: Any) -> list[str]:
    """What of a record is trained on, by stretches."""
    opened = open_tokenizer(tokenizer)
    encoder = Encoder(DataSpec(tokenizer=tokenizer, **spec), name, opened)
    tokens, trained = encoder.encode(Record(fields, "here"))
    edges = [0, *(i for i in range(1, len(tokens)) if trained[i] != trained[i - 1]), len(tokens)]
    pairs = itertools.pairwise(edges)
    return [opened.shown(tokens[start:end]) for start, end in pairs if trained[start]]


# ---- trained tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("prompt", {"prompt": "2+2=", "completion": "4"}, ["4<end>"]),
        ("alpaca", {"instruction": "Add.", "input": "2 2", "output": "4"}, ["4<end>"]),
        ("alpaca", {"instruction": "Sing.", "output": "La"}, ["La<end>"]),
        ("messages", chat("Hi", "Yes.", "Sure?", "No."), [" Yes.<end>", " No.<end>"]),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]},
            [" Yes.<end>"],
        ),
    ],
)
def test_the_completion_alone_is_trained_on(
    name: str, fields: dict[str, object], expected: list[str]
) -> None:
    assert trained_text("bytes", name, fields) == expected


def test_all_of_a_record_where_that_is_asked_for() -> None:
    fields = {"prompt": "2+2=", "completion": "4"}
    assert trained_text("bytes", "prompt", fields, train_on="all") == ["2+2=4<end>"]


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_the_tokenizers_own_template(template: str, end: str, place: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = str(tokenizer_folder(tmp_path / "t", template, place))
    fields = chat("the answer", "the answer", "is", "user")  # an answer that the user has said before
    assert trained_text(folder, "messages", fields) == [f"the answer{end}", f"user{end}"]


def test_the_tokens_are_those_that_transformers_makes(tmp_path: Path) -> None:
    """Of a template that marks its answers, with its mask."""
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path / "t", MARKED)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs.chat_template = MARKED
    messages = chat("the user is", "the answer is", "assistant?", "No.")["messages"]
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    encoder = Encoder(DataSpec(tokenizer=str(folder)), "messages", open_tokenizer(str(folder)))
    tokens, trained = encoder.encode(Record({"messages": messages}, "here"))
    assert tokens == expected["input_ids"]
    assert [int(each) for each in trained] == expected["assistant_masks"]


def test_prompt_and_completion_have_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    """A token that crosses the border is trained on: it holds a character of the completion."""
    tokenizer = open_tokenizer(str(tokenizer_folder(tmp_path / "t", None)))
    assert tokenizer.encode("the answer") != tokenizer.encode("the ans") + tokenizer.encode("wer")
    encoder = Encoder(DataSpec(), "prompt", tokenizer)
    tokens, trained = encoder.encode(Record({"prompt": "the ans", "completion": "wer"}, "here"))
    assert tokens == [*tokenizer.encode("the answer"), tokenizer.separator]
    assert (
        tokenizer.shown([t for t, chosen in zip(tokens, trained, strict=True) if chosen])
        == " answer<|endoftext|>"
    )


@pytest.mark.parametrize(
    ("template", "says"),
    [(FORGETTING, "cannot find the assistant's answer"), (SILENT, "cannot find the assistant's answer"),
     ("{{ raise_exception('no system') }}", "no system"), ("{% for %}", "TemplateSyntaxError"),
     (None, "has no chat template")],
)  # fmt: skip
def test_a_template_without_an_assistants_span_is_refused(
    template: str | None, says: str, tmp_path: Path, opened: Opener
) -> None:
    pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path / "t", template)
    source = jsonl(tmp_path / "a.jsonl", chat("a", "b"), chat("a", "b", "c", "d"))
    with pytest.raises(DataError) as caught:
        opened(source, tokenizer=str(folder))
    assert says in caught.value.line()
    assert "\n" not in caught.value.line()
    assert "a.jsonl:" in caught.value.line() or "data.tokenizer" in caught.value.line()


# ---- formats ----------------------------------------------------------------------------------------------

RECORDS: dict[str, dict[str, object]] = {
    "messages": chat("Hi", "Yes."),
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]},
    "prompt": {"prompt": "Hi", "completion": "Yes."},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Yes."},
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("name", list(RECORDS))
def test_formats_are_detected_in_every_kind_of_source(
    name: str, kind: str, tmp_path: Path, opened: Opener
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        jsonl(path, *[RECORDS[name]] * 3)
    else:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_list([{**RECORDS[name], "id": i} for i in range(3)])
        rows.to_parquet(path) if kind == "parquet" else rows.save_to_disk(path)
    data = opened(path, held_out=0.0, sequence_length=256)
    assert data.train_sequences == 3
    labels = data.micro_batches(0, 0, 1, 4)[0]["labels"]
    said = bytes(labels[0][labels[0] >= 0].tolist())
    assert said.strip() == b"Yes.\0"


def test_plain_text_stays_what_it_was(tmp_path: Path, opened: Opener) -> None:
    """With any other fields; its fingerprint, which checkpoints hold, does not change."""
    source = jsonl(tmp_path / "a.jsonl", *({"text": f"line {i} of some", **chat("a", "b")} for i in range(9)))
    data = opened(source)
    assert data.fingerprint == "1b002fd81812f1a0e888c271975d7b0b"
    assert set(data.micro_batches(0, 0, 1, 4)[0]) == {"input_ids", "labels"}


WITH_TOOLS = (
    "{% if tools %}{{ '[' + tools[0]['name'] + ']' }}{% endif %}{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function']['arguments']['zone'] }}{% endfor %}"
    "{{ m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.mark.parametrize("name", ["bytes", "template"])
def test_tool_calls_and_content_parts_are_read_as_openais_api_writes_them(
    name: str, tmp_path: Path, opened: Opener
) -> None:
    parts = [{"type": "text", "text": "What time"}, {"type": "text", "text": " is it?"}]
    record = {
        "messages": [{"role": "user", "content": parts}, CALLS, {"role": "tool", "content": "12:00"}, ANSWER],
        "tools": json.dumps([{"name": "now"}]),
    }
    spec = {} if name == "bytes" else {"tokenizer": str(tokenizer_folder(tmp_path / "t", WITH_TOOLS))}
    tokenizer = open_tokenizer(spec.get("tokenizer", "bytes"))
    encoder = Encoder(DataSpec(**spec), "messages", tokenizer)
    tokens, trained = encoder.encode(Record(record, "here"))
    said = tokenizer.shown([token for token, chosen in zip(tokens, trained, strict=True) if chosen])
    whole = tokenizer.shown(tokens)
    if name == "bytes":
        assert "User: What time is it?" in whole and "Tool: 12:00" in whole and '[{"name": "now"}]' in whole
        assert '{"name": "now", "arguments": {"zone": "UTC"}}' in said and " Yes." in said
    else:
        assert whole == "[now]<user>What time is it?\n<assistant>UTC\n<tool>12:00\n<assistant>Yes.\n"
        assert said == "UTC\nYes.\n"


# ---- malformed records ------------------------------------------------------------------------------------


def turns(*items: object) -> dict[str, object]:
    return {"messages": list(items)}


MALFORMED: list[tuple[object, str, str]] = [
    ({"text": "plain"}, "no 'messages'", ""),
    (RECORDS["prompt"], "no 'messages'", ""),
    ({}, "no 'messages'", ""),
    (["a list"], "line is not a JSON object", ""),
    ({"messages": None}, "no 'messages'", ""),
    ({"messages": "Hi"}, "'messages' is not a list of turns", ""),
    ({"messages": []}, "it is empty", ""),
    (turns("Hi"), "'messages[0]' is not an object", ""),
    (turns({"role": "user"}), "no 'messages[0].content'", ""),
    (turns({"content": "Hi"}), "no 'messages[0].role'", ""),
    (turns({"role": "robot", "content": "Hi"}), "unknown role 'robot'", "messages[0].role"),
    (turns({"role": "tool", "content": "Hi"}), "found tool, expected user", "messages[0]"),
    (turns(USER, CALLS, USER), "found user, expected tool", "messages[2]"),
    (turns(USER, {"role": "assistant", "content": None}), "no 'messages[1].content'", ""),
    (turns(USER, {**CALLS, "tool_calls": [{"name": 3}]}), "'messages[1].tool_calls' is not a list", ""),
    (turns({"role": "user", "content": [{"type": "image_url"}]}, ANSWER), "its type is image_url", ""),
    ({**turns(USER, ANSWER), "tools": 3}, "'tools' is not a list", ""),
    (turns({"role": 3, "content": "Hi"}), "unknown role 3", "messages[0].role"),
    (turns(USER, {"role": "assistant", "content": ["Hi"]}), "'messages[1].content' is not text", ""),
    (turns(USER, {"role": "assistant", "content": "  "}), "'messages[1].content' is empty", ""),
    (turns(USER, {"role": "assistant", "content": "a\0"}), "NUL in text", ""),
    (turns(USER, {"role": "assistant", "content": "\ud83d"}), "text is not Unicode", ""),
    (turns(USER, USER, ANSWER), "found user, expected assistant", "messages[1]"),
    (turns(ANSWER), "found assistant, expected user", "messages[0]"),
    (turns({"role": "system", "content": "Be."}, ANSWER), "expected user", "messages[1]"),
    (turns({"role": "system", "content": "Be."}), "nothing to complete", ""),
    (turns(USER), "nothing to complete", ""),
    (turns(USER, ANSWER, USER), "the last turn is user", ""),
]


@pytest.mark.parametrize(("bad", "says", "where"), MALFORMED, ids=[says for _, says, _ in MALFORMED])
def test_a_malformed_record_is_named_by_file_line_and_key(
    bad: object, says: str, where: str, tmp_path: Path, opened: Opener
) -> None:
    with pytest.raises(DataError) as caught:
        opened(jsonl(tmp_path / "a.jsonl", RECORDS["messages"], bad))
    line = caught.value.line()
    assert "a.jsonl:2" in line, line
    assert says in line, line
    assert where in line, line
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("name", "bad", "says"),
    [
        ("prompt", {"prompt": "Hi", "completion": ""}, "'completion' is empty"),
        ("prompt", {"prompt": "Hi"}, "no 'completion'"),
        ("prompt", {"prompt": 3, "completion": "a"}, "'prompt' is not text"),
        ("alpaca", {"instruction": "", "output": "a"}, "'instruction' is empty"),
        ("alpaca", {"instruction": "Hi", "output": "a", "input": 3}, "'input' is not text"),
        ("sharegpt", {"conversations": [{"from": "bot", "value": "a"}]}, "unknown role 'bot'"),
    ],
)
def test_malformed_records_of_other_formats(
    name: str, bad: object, says: str, tmp_path: Path, opened: Opener
) -> None:
    with pytest.raises(DataError, match=says):
        opened(jsonl(tmp_path / "a.jsonl", RECORDS[name], bad))


@pytest.mark.parametrize("asked", [{"train_on": "completion"}, {"format": "prompt"}])
def test_data_without_completions(asked: dict[str, object], tmp_path: Path, opened: Opener) -> None:
    with pytest.raises(DataError) as caught:
        opened(jsonl(tmp_path / "a.jsonl", {"text": "plain text"}), **asked)
    assert "no completions in the data source" in caught.value.line() or "no 'prompt'" in caught.value.line()
    with pytest.raises(DataError, match="no records in a text file"):
        (tmp_path / "a.txt").write_text("plain text")
        opened(tmp_path / "a.txt", format="messages")


def test_no_malformed_file_ends_in_anything_but_one_line(tmp_path: Path, opened: Opener) -> None:
    """Records with a random piece replaced, a key removed or a byte changed: read, or refused in a line."""
    draw = random.Random(0)
    odd: list[Any] = [
        None,
        "",
        0,
        1.5,
        True,
        [],
        {},
        "\0",
        "\ud800",
        [[]],
        {"a": {}},
        "x" * 300,
        {"role": []},
    ]
    refused = 0
    for number in range(100):
        name = draw.choice(list(RECORDS))
        records = [json.loads(json.dumps(RECORDS[name])) for _ in range(3)]
        place: Any = records[draw.randrange(3)]
        while draw.random() < 0.6 and isinstance(place, dict | list) and place:
            key = draw.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
            if isinstance(place[key], dict | list) and draw.random() < 0.7:
                place = place[key]
                continue
            place[key] = draw.choice(odd)
        text = bytearray("".join(json.dumps(record) + "\n" for record in records).encode())
        if draw.random() < 0.3:
            text[draw.randrange(len(text))] = draw.randrange(256)
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(text)
        try:
            opened(path, format=draw.choice(["auto", name]), packing=True, sequence_length=64)
        except DataError as error:
            refused += 1
            assert "\n" not in error.line()
            assert path.name in error.line()
    assert 30 < refused < 100  # some of both


# ---- sequences --------------------------------------------------------------------------------------------


def test_best_fit_places_every_record_once_and_leaves_little_room() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    order, offsets = best_fit(lengths, 128)
    assert sorted(order.tolist()) == list(range(2000))
    sums = [int(lengths[order[a:b]].sum()) for a, b in itertools.pairwise(offsets)]
    assert max(sums) <= 128
    assert lengths.sum() / (128 * len(sums)) > 0.97  # in the order of the source 0.74
    again = best_fit(lengths, 128)
    assert np.array_equal(again[0], order)


def _rows(data: Data) -> list[dict[str, list[int]]]:
    """Every training sequence once."""
    count = data.train_sequences
    batch = batch_of(data._train, range(count))
    return [{key: value[row].tolist() for key, value in batch.items()} for row in range(count)]


def _many(path: Path, count: int = 60) -> Path:
    draw = random.Random(1)
    return jsonl(
        path,
        *(
            {"prompt": f"{i}:" * draw.randint(1, 4), "completion": "z" * draw.randint(1, 20)}
            for i in range(count)
        ),
    )


@pytest.mark.parametrize("packing", [False, True])
def test_sequences_hold_each_record_whole_with_its_labels(
    packing: bool, tmp_path: Path, opened: Opener
) -> None:
    data = opened(_many(tmp_path / "a.jsonl"), held_out=0.0, packing=packing, sequence_length=48)
    found = []
    for row in _rows(data):
        positions = row.get("positions", list(range(48)))
        starts = [i for i, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], 48], strict=True):
            assert positions[start:end] == list(range(end - start))
            inputs, labels = row["input_ids"][start:end], row["labels"][start:end]
            if all(label == -100 for label in labels):
                assert set(inputs) == {0}  # padding
                continue
            first = next(i for i, label in enumerate(labels) if label >= 0)
            last = next(i for i, label in enumerate(labels) if label == 0)
            prompt, said = bytes(inputs[: first + 1]), bytes(labels[first:last])
            assert inputs[first + 1 : last + 1] == labels[first:last]
            assert set(labels[:first]) <= {-100}
            assert set(labels[last + 1 :]) <= {-100}
            found.append((prompt.decode(), said.decode()))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert sorted(found) == sorted((line["prompt"], line["completion"]) for line in lines)
    assert data.train_sequences == 60 if not packing else data.train_sequences < 35


def test_records_too_long_are_cut_and_those_without_a_target_left_out(tmp_path: Path, opened: Opener) -> None:
    records = [("a" * 3, "b" * 3), ("a" * 3, "b" * 30), ("a" * 8, "b" * 3), ("a" * 9, "b" * 3)]
    source = jsonl(tmp_path / "a.jsonl", *({"prompt": p, "completion": c} for p, c in records))
    rows = _rows(opened(source, held_out=0.0))
    assert [sum(label >= 0 for label in row["labels"]) for row in rows] == [4, 6, 1]
    with pytest.raises(DataError, match="no completion within a sequence"):
        opened(jsonl(tmp_path / "b.jsonl", {"prompt": "a" * 9, "completion": "b"}))


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_the_same_on_any_number_of_ranks(packing: bool, tmp_path: Path, opened: Opener) -> None:
    data = opened(_many(tmp_path / "a.jsonl"), packing=packing, sequence_length=48)
    names = {"input_ids", "labels"} | ({"positions"} if packing else set())

    def rows(degree: int, size: int) -> list[list[int]]:
        batches = [b for rank in range(degree) for b in data.micro_batches(3, rank, degree, size)]
        assert all(
            set(batch) - {"starts"} == names and batch["labels"].dtype == torch.int64 for batch in batches
        )
        joined = [torch.cat([b[n] for n in sorted(names)], 1) for b in batches]
        return sorted(row for row in torch.cat(joined).tolist() if any(row))

    assert rows(1, 4) == rows(2, 1) == rows(4, 1) == rows(2, 2)
    assert data.held_out_sequences > 0
    assert data.held_out(0, 0, 1, 4)[0]["labels"].max() >= 0


def test_the_fingerprint_tells_what_a_sample_number_means(tmp_path: Path, opened: Opener) -> None:
    source = _many(tmp_path / "a.jsonl")
    ways: list[dict[str, Any]] = [{}, {"packing": True}, {"train_on": "all"}, {"sequence_length": 40}]
    prints = [opened(source, **way).fingerprint for way in ways]
    assert len(set(prints)) == len(ways)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(source.read_bytes())
    assert opened(moved).fingerprint == prints[0]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"data": {"train_on": "completion"}}, "data.train_on"),
        ({"data": {"source": "stdlib", "format": "alpaca"}}, "data.format"),
        ({"data": {"source": "a.jsonl", "packing": True}, "model": {"factory": "a:b"}}, "data.packing"),
    ],
)
def test_what_contradicts_itself_is_refused_in_the_recipe(changes: dict[str, Any], where: str) -> None:
    from shardwise.core.errors import RecipeError

    with pytest.raises(RecipeError) as caught:
        recipe_of({"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1, **changes})
    assert where in caught.value.line()
