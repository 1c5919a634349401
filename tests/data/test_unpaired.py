"""Labelled completions: labels, mismatched records and the same records from pairs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.core.errors import DataError
from shardwise.data import open_data
from shardwise.data.batches import batch_of
from shardwise.data.preference_encoding import LabelEncoder
from shardwise.data.readers import Record
from shardwise.data.tokenizer import open_tokenizer
from shardwise.recipe.sections import DataSpec
from tests.data import chat_templates as templates
from tests.data.test_chat import folder_of
from tests.data.test_completions import jsonl
from tests.data.test_preferences import (
    BAD,
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
def unpaired(opened_kind: Kinds) -> Kinds:
    return lambda source, **spec: opened_kind(source, kind="unpaired", **spec)


def many(path: Path, count: int = 40) -> Path:
    draw = random.Random(4)
    return jsonl(
        path,
        *(
            {"prompt": f"{n}:" * draw.randint(1, 3), "completion": "ab"[n % 2] * draw.randint(1, 9), "label": n % 3 < 1}
            for n in range(count)
        ),
    )  # fmt: skip


FORMS: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    ({"prompt": [USER], "completion": [GOOD], "label": True}, [USER], [GOOD]),
    ({"prompt": [USER], "completion": [FIRST, MORE, GOOD], "label": 1}, [USER], [FIRST, MORE, GOOD]),
    ({"messages": [USER, FIRST, MORE, GOOD], "label": "True"}, [USER, FIRST, MORE], [GOOD]),
    ({"messages": [USER, FIRST, MORE, GOOD], "label": 1.0}, [USER, FIRST, MORE], [GOOD]),
    ({"conversations": sharegpt(USER, FIRST, MORE, GOOD), "kto_tag": True}, [USER, FIRST, MORE], [GOOD]),
    (
        {
            "instruction": "Which",
            "input": "answer?",
            "output": GOOD["content"],
            "history": [["Sure?", "Hm."]],
            "kto_tag": 1,
        },
        [MORE, FIRST, {"role": "user", "content": "Which\nanswer?"}],
        [GOOD],
    ),
    (  # argilla/distilabel-intel-orca-kto
        {"system": "Short.", "prompt": USER["content"], "completion": GOOD["content"], "label": True},
        [SYSTEM, USER],
        [GOOD],
    ),
]


@pytest.mark.parametrize(("record", "prompt", "completion"), FORMS)
def test_conversations_have_the_tokens_of_transformers_rendering(
    record: dict[str, Any], prompt: Any, completion: Any, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "t", templates.CHATML)
    [[one]] = LabelEncoder(DataSpec(), open_tokenizer(folder)).encode_all([Record(record, "here")])
    opened = rendered(folder, prompt, add_generation_prompt=True)
    assert one.tokens == rendered(folder, [*prompt, *completion]) and one.value == 1
    assert one.trained.index(True) == len(opened) and one.tokens[: len(opened)] == opened
    answers = sum(turn["role"] == "assistant" for turn in completion)
    shown = open_tokenizer(folder).shown([t for t, on in zip(one.tokens, one.trained, strict=True) if on])
    assert shown.count("<|im_end|>") == answers and "Sure?" not in shown


@pytest.mark.parametrize(
    ("record", "text", "value"),
    [
        ({"prompt": "a=", "completion": "b", "label": False}, "b", 0),
        ({"prompt": "a=", "completion": "", "label": False}, "", 0),
        ({"instruction": "Add.", "output": "4", "kto_tag": "true"}, " 4", 1),
        ({"instruction": "Add.", "output": "", "kto_tag": False}, "", 0),
        ({"instruction": "Add.", "output": "4", "history": [["Hi", "Yes"]], "label": 0}, " 4", 0),
    ],
)
def test_texts(record: dict[str, Any], text: str, value: float) -> None:
    encoder = LabelEncoder(DataSpec(), open_tokenizer("bytes"))
    [[one]] = encoder.encode_all([Record(record, "here")])
    trained = [t for t, on in zip(one.tokens, one.trained, strict=True) if on]
    assert bytes(trained) == text.encode() + b"\0" and one.value == value and not encoder.unread


def test_without_a_template_instructions_have_alpacas_wording(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(without_template(tmp_path / "t"))
    [[one]] = LabelEncoder(DataSpec(), tokenizer).encode_all(
        [Record({"instruction": "Add.", "output": "4", "history": [["Hi", "Yes"]], "kto_tag": True}, "here")]
    )
    trained = [t for t, on in zip(one.tokens, one.trained, strict=True) if on]
    assert trained == [*tokenizer.encode("4"), tokenizer.separator]
    assert one.tokens[:4] == tokenizer.encode("Below is an instruction")[:4]


def rows_of(sample: dict[str, Any], prefix: str, packed: bool) -> list[tuple[bytes, bytes]]:
    """Prompt and trained text of every document of a sample."""
    inputs, labels = sample[f"{prefix}input_ids"], sample[f"{prefix}labels"]
    if not packed:
        spans = [(0, len(inputs))]
    else:
        starts = sample[f"{prefix}starts"].tolist()
        spans = list(zip(starts, [*starts[1:], len(inputs)], strict=True))
    documents = []
    for number, (start, end) in enumerate(spans):
        own = labels[start:end]
        if not (own >= 0).any():
            continue
        first, last = int(np.argmax(own >= 0)), len(own) - int(np.argmax(own[::-1] >= 0))
        documents.append((bytes(inputs[start : start + first + 1].tolist()), bytes(own[first:last].tolist())))
        if packed:
            assert set(sample[f"{prefix}document"][start : start + last].tolist()) == {number}
            assert sample[f"{prefix}positions"][start:end].tolist() == list(range(end - start))
    return documents


@pytest.mark.parametrize("packing", [False, True])
def test_records_and_their_mismatched_ones(packing: bool, tmp_path: Path, unpaired: Kinds) -> None:
    source = many(tmp_path / "a.jsonl")
    train = unpaired(source, sequence_length=48, held_out=0.0, packing=packing).train
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    seen = []
    for index in range(len(train)):
        sample, members = train.sample(index), train.members(index).tolist()
        own = [(lines[n]["prompt"].encode(), lines[n]["completion"].encode() + b"\0") for n in members]
        other = [
            (lines[n]["prompt"].encode(), lines[(n + 1) % 40]["completion"].encode() + b"\0") for n in members
        ]
        assert rows_of(sample, "", packing) == own
        assert rows_of(sample, "kl_", packing) == other
        assert sample["desirable"].tolist() == [int(n % 3 == 0) for n in members]
        assert sample["present"].tolist() == [1] * len(members)
        firsts = [completion[0] for _, completion in own]
        assert sample["labels"][sample["counted"] == 1].tolist() == firsts
        assert train.filled(index) == sum(len(prompt + completion) - 1 for prompt, completion in own)
        seen += members
    assert sorted(seen) == list(range(40))
    assert len(train) == 40 if not packing else len(train) < 30


def test_the_mismatched_record_is_of_the_same_side_of_the_split(tmp_path: Path, unpaired: Kinds) -> None:
    splits = unpaired(many(tmp_path / "a.jsonl"), sequence_length=48, held_out=0.2)
    for side in (splits.train, splits.held_out):
        count = len(side)
        assert count > 1
        for index in range(count):
            [(_, completion)] = rows_of(side.sample((index + 1) % count), "", False)
            assert rows_of(side.sample(index), "kl_", False)[0][1] == completion


ANSWERED = [("one:", 3), ("two:", 2), ("other:", 1), ("many:", 3)]
"""Prompts, and the number of answers to each, which follow each other."""


def test_mismatched_completions_are_never_those_of_the_own_prompt(tmp_path: Path, unpaired: Kinds) -> None:
    """Labelled answers to a prompt usually follow each other; pairs of a prompt, too."""
    asked = [(prompt, f"{prompt[0]}{n}") for prompt, count in ANSWERED for n in range(count)]
    records = [
        {"prompt": prompt, "completion": text, "label": n % 2} for n, (prompt, text) in enumerate(asked)
    ]
    pairs = [{"prompt": prompt, "chosen": f"{text}+", "rejected": f"{text}-"} for prompt, text in asked]
    expected = ["t0", "t1", "t0", "o0", "o0", "m0", "o0", "o1", "o2"]
    of_pairs = [text + side for text in expected for side in "+-"]
    for given, others in ((records, expected), (pairs, of_pairs)):
        train = unpaired(
            jsonl(tmp_path / f"{len(others)}.jsonl", *given), sequence_length=48, held_out=0.0
        ).train
        found = [rows_of(train.sample(n), "kl_", False)[0][1] for n in range(len(train))]
        assert found == [text.encode() + b"\0" for text in others]


@pytest.mark.parametrize("packing", [False, True])
def test_batches_have_the_shapes_of_the_contract(
    packing: bool, tmp_path: Path, recipe_of_objective: Kinds
) -> None:
    source = many(tmp_path / "a.jsonl")
    data = open_data(recipe_of_objective(source, "kto", sequence_length=48, packing=packing))
    train = data._train
    batch = batch_of(train, [0, len(train) - 1, None])
    names = {"input_ids", "labels", "counted", "present", "desirable", "kl_input_ids", "kl_labels"}
    packed = {"positions", "starts", "document", "kl_positions", "kl_starts", "kl_document"}
    assert set(batch) == names | (packed if packing else set())
    per_record = {"present", "desirable", "starts", "kl_starts"}
    for name in set(batch) - per_record:
        assert batch[name].shape == (3, 48) and batch[name].dtype == torch.int64, name
    assert batch["present"].shape == batch["desirable"].shape
    assert batch["counted"].sum(1).tolist() == batch["present"].sum(1).tolist()
    assert batch["present"][-1].sum() == batch["counted"][-1].sum() == batch["desirable"][-1].sum() == 0
    assert set(batch["labels"][-1].tolist()) == set(batch["kl_labels"][-1].tolist()) == {-100}


def test_without_a_second_prompt_nothing_is_mismatched_and_that_is_said(
    tmp_path: Path, unpaired: Kinds
) -> None:
    for prompts, one in (("aaa", True), ("a", True), ("aab", False)):
        records = [{"prompt": p, "completion": "yes" * n, "label": n > 1} for n, p in enumerate(prompts, 1)]
        splits = unpaired(jsonl(tmp_path / f"{prompts}.jsonl", *records), held_out=0.0)
        assert sum("no answer is mismatched" in line for line in splits.sentences()) == one
    pairs = jsonl(tmp_path / "pairs.jsonl", *[{"prompt": "a", "chosen": "b", "rejected": c} for c in "cd"])
    assert "no answer is mismatched" in " ".join(unpaired(pairs, held_out=0.0).sentences())


def test_the_last_prompt_takes_the_first_that_is_another(tmp_path: Path, unpaired: Kinds) -> None:
    records = [{"prompt": p, "completion": f"{n}", "label": True} for n, p in enumerate("abba")]
    train = unpaired(jsonl(tmp_path / "around.jsonl", *records), held_out=0.0).train
    assert train.others.tolist() == [1, 3, 3, 1]


def test_records_that_are_all_desirable_or_all_not_are_said(tmp_path: Path, unpaired: Kinds) -> None:
    for label, said in (
        (True, "are desirable: nothing in it is made less"),
        (False, "undesirable: nothing in it is made more"),
    ):
        records = ({"prompt": str(n), "completion": "b", "label": label} for n in range(9))
        sentences = unpaired(jsonl(tmp_path / "a.jsonl", *records)).sentences()
        assert sum(said in sentence for sentence in sentences) == 1
    assert not any("nothing in it" in said for said in unpaired(many(tmp_path / "b.jsonl")).sentences())


@pytest.mark.parametrize("packing", [False, True])
def test_pairs_give_two_records_each(packing: bool, tmp_path: Path, unpaired: Kinds) -> None:
    """The next record is one of the next pair: the other completion of the same prompt would be no mismatch."""
    records = [
        {"prompt": f"{n}=", "chosen": f"y{n}" * (n % 7 + 1), "rejected": f"no{n}" * (n % 2 + 1), "label": 1}
        for n in range(12)
    ]
    splits = unpaired(
        jsonl(tmp_path / "a.jsonl", *records), sequence_length=32, held_out=0.2, packing=packing
    )
    train, held_out = splits.train, splits.held_out
    assert (train.records + held_out.records, train.records % 2, held_out.records % 2) == (24, 0, 0)
    found = []
    for index in range(len(train)):
        sample = train.sample(index)
        for (prompt, said), (asked, other), label in zip(
            rows_of(sample, "", packing),
            rows_of(sample, "kl_", packing),
            sample["desirable"].tolist(),
            strict=True,
        ):
            assert said[:1] == other[:1] == (b"y" if label else b"n")
            assert prompt == asked and said != other
            found.append((prompt, said))
    assert len(found) == train.records
    assert "12 records are desirable, 12 are not" in splits.sentences()


def test_records_too_long_are_cut_dropped_and_counted(tmp_path: Path, unpaired: Kinds) -> None:
    texts = [("a", "b"), ("a", "b" * 20), ("a" * 20, "b"), ("", "bb")]
    source = jsonl(tmp_path / "a.jsonl", *({"prompt": p, "completion": c, "label": True} for p, c in texts))
    splits = unpaired(source, sequence_length=8, held_out=0.0)
    assert [splits.train.note(n) for n in range(3)] == ["desirable", "desirable, cut at its end", "desirable"]
    assert "too long: 1 records dropped; nothing trained on comes before the cut" in splits.sentences()
    # a record without prompt takes no token of a prompt, and its own completion has no target at its first token
    assert rows_of(splits.train.sample(1), "kl_", False) == [(b"a", b"bb\0")]
    assert rows_of(splits.train.sample(2), "kl_", False) == [(b"b", b"\0")]
    dropped = unpaired(source, sequence_length=8, held_out=0.0, too_long="drop")
    assert (
        dropped.train.records == 2
        and "too long: 2 records dropped; data.too_long is drop" in dropped.sentences()
    )


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prompt": "a", "completion": "b"}, "no 'label'"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "'label' is 'good'"),
        ({"prompt": "a", "completion": "b", "label": 0.5}, "'label' is 0.5"),
        ({"prompt": "a", "label": True}, "no 'completion'"),
        ({"messages": [USER], "label": True}, "nothing to complete"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(
    bad: Any, says: str, tmp_path: Path, unpaired: Kinds
) -> None:
    with pytest.raises(DataError) as caught:
        unpaired(jsonl(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "label": True}, bad))
    line = caught.value.line()
    assert says in line and "a.jsonl:2" in line and "\n" not in line, line


def test_data_shows_the_label(tmp_path: Path, unpaired: Kinds) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"prompt": [USER], "completion": [BAD], "label": False})
    train = unpaired(source, held_out=0.0).train
    assert train.note(0) == "not desirable" and train.chats
    [document] = train.documents(0)
    assert bytes(token for token, on in document if on) == b" That one is.\0"
