"""Preferences on their way to tokens and rows: every form, the same prompt on both sides, and nothing lost.

Tokens are compared with transformers' ``apply_chat_template`` and with the tokenizer's own of the whole text.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.core.errors import DataError
from shardwise.data import open_data
from shardwise.data.batches import batch_of
from shardwise.data.opening import open_splits
from shardwise.data.preference_encoding import PairEncoder
from shardwise.data.preferences import Preferences, sharing
from shardwise.data.readers import Record
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.recipe.sections import DataSpec
from tests.data import chat_templates as templates
from tests.data.test_chat import folder_of
from tests.data.test_completions import jsonl

transformers = pytest.importorskip("transformers")

Turns = list[dict[str, Any]]
Kinds = Callable[..., Any]
SYSTEM = {"role": "system", "content": "Short."}
USER, MORE = {"role": "user", "content": "Which answer?"}, {"role": "user", "content": "Sure?"}
FIRST = {"role": "assistant", "content": "Hm."}
GOOD, BAD = {"role": "assistant", "content": "This one."}, {"role": "assistant", "content": "That one is."}
ANSWERS = {"chosen": GOOD["content"], "rejected": BAD["content"]}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
THEIRS = {"user": "human", "assistant": "gpt", "system": "system"}


def sharegpt(*turns: dict[str, Any]) -> Turns:
    return [{"from": THEIRS[turn["role"]], "value": turn["content"]} for turn in turns]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("tokenizer"), templates.CHATML)


def encoded(folder: str, *records: dict[str, Any], **spec: Any) -> list[list[tuple[list[int], list[int]]]]:
    """Of each record, the tokens and the trained positions of its documents."""
    encoder = PairEncoder(DataSpec(**spec), open_tokenizer(folder))
    parts = encoder.encode_all([Record(record, "here") for record in records])
    return [[(one.tokens, [n for n, on in enumerate(one.trained) if on]) for one in part] for part in parts]


def rendered(folder: str, turns: Turns, **more: Any) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False, **more))


# ---- conversations ----------------------------------------------------------------------------------------

CONVERSATIONS: dict[str, tuple[dict[str, Any], Turns]] = {
    "explicit": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER]),
    "system": ({"system": "Short.", "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, USER]),
    "implicit": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
    "several turns": (
        {"chosen": [SYSTEM, USER, FIRST, MORE, GOOD], "rejected": [SYSTEM, USER, FIRST, MORE, BAD]},
        [SYSTEM, USER, FIRST, MORE],
    ),
    "prompt repeated": ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
    "UltraFeedback": (
        {
            "prompt": USER["content"], "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD],
            "score_chosen": 8.0, "score_rejected": 3.0,
        },
        [USER],
    ),
    "a text before turns": ({"prompt": USER["content"], "chosen": [GOOD], "rejected": [BAD]}, [USER]),
    "texts after turns": (
        {"prompt": [USER], "chosen": GOOD["content"], "rejected": BAD["content"]},
        [USER],
    ),
    "ShareGPT": (
        {
            "conversations": sharegpt(USER, FIRST, MORE), "chosen": sharegpt(GOOD)[0], "rejected": sharegpt(BAD)[0],
        },
        [USER, FIRST, MORE],
    ),
    "messages of chosen": (
        {"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        [USER],
    ),
    "OpenAI": ({"messages": [USER], "chosen": GOOD, "rejected": BAD}, [USER]),
    "Intel/orca_dpo_pairs": ({"system": "Short.", "question": USER["content"], **ANSWERS}, [SYSTEM, USER]),
    "argilla/distilabel-intel-orca-dpo-pairs": ({"system": "", "input": USER["content"], **ANSWERS}, [USER]),
    "a system turn next to a text": ({"system": "Short.", "prompt": USER["content"], **ANSWERS}, [SYSTEM, USER]),
    "LLaMA-Factory": (
        {
            "instruction": "Which", "input": "answer?", "system": "Short.", **ANSWERS,
            "history": [[MORE["content"], FIRST["content"]]],
        },
        [SYSTEM, MORE, FIRST, {"role": "user", "content": "Which\nanswer?"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_conversations_have_the_tokens_of_transformers_rendering(name: str, folder: str) -> None:
    """Trained on is what follows the prompt with the opening of an answer: the completion and its end."""
    record, prompt = CONVERSATIONS[name]
    opened = rendered(folder, prompt, add_generation_prompt=True)
    [documents] = encoded(folder, record)
    assert [tokens for tokens, _ in documents] == [rendered(folder, [*prompt, end]) for end in (GOOD, BAD)]
    for tokens, trained in documents:
        assert tokens[: len(opened)] == opened
        assert trained == list(range(len(opened), len(tokens)))


def test_only_the_assistants_turns_of_the_completion_are_trained_on(folder: str) -> None:
    record = {"prompt": [USER], "chosen": [FIRST, MORE, GOOD], "rejected": [BAD]}
    [[(tokens, trained), _]] = encoded(folder, record)
    shown = open_tokenizer(folder).shown([tokens[n] for n in trained])
    assert shown == "Hm.<|im_end|>\nThis one.<|im_end|>\n"


def test_tools_reasoning_and_template_variables_reach_both_sides(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", templates.THINKING)
    prompt = [USER, CALLS, {"role": "tool", "content": "4"}]
    chosen = {**GOOD, "reasoning_content": "so"}
    record = {
        "prompt": prompt,
        "chosen": [chosen],
        "rejected": [BAD],
        "chat_template_kwargs": {"open_thought": 1},
    }
    [documents] = encoded(folder, record)
    for (tokens, trained), end in zip(documents, (chosen, BAD), strict=True):
        assert tokens == rendered(folder, [*prompt, end])
        opened = rendered(folder, prompt, add_generation_prompt=True, open_thought=1)
        assert tokens[: len(opened)] == opened and trained[0] == len(opened)


def test_a_prompt_that_the_template_writes_in_two_ways_is_refused(tmp_path: Path) -> None:
    """Qwen3's template drops the reasoning before the last question: here of one side alone."""
    folder = folder_of(tmp_path / "t", templates.THINKING)
    prompt = [USER, {**CALLS, "reasoning_content": "why"}, {"role": "tool", "content": "4"}]
    [documents] = encoded(folder, {"prompt": prompt, "chosen": [GOOD], "rejected": [BAD]})
    assert len(documents) == 2
    with pytest.raises(DataError, match="writes the prompt in two ways"):
        encoded(folder, {"prompt": prompt, "chosen": [GOOD], "rejected": [BAD, MORE, FIRST]})


# ---- texts ------------------------------------------------------------------------------------------------

TEXTS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", "4", "5"),
    ({"chosen": "the user is 4", "rejected": "the user is 5"}, "the user is", " 4", " 5"),
    ({"chosen": "Q: a\nA: yes", "rejected": "Q: a\nA: yep"}, "Q: a\nA:", " yes", " yep"),
    ({"chosen": "is it", "rejected": "is it so"}, "is", " it", " it so"),
    ({"chosen": "多少？四", "rejected": "多少？五"}, "多少？", "四", "五"),
    ({"prompt": "", "chosen": "a", "rejected": "b"}, "", "a", "b"),
    ({"chosen": "(say)yes", "rejected": "(say)you"}, "(say)", "yes", "you"),
]


@pytest.mark.parametrize(("record", "prompt", "chosen", "rejected"), TEXTS)
def test_texts_are_tokenized_as_a_whole_and_end_once(
    record: dict[str, Any], prompt: str, chosen: str, rejected: str
) -> None:
    [documents] = encoded("bytes", record)
    for (tokens, trained), completion in zip(documents, (chosen, rejected), strict=True):
        assert bytes(tokens) == (prompt + completion).encode() + b"\0"
        assert trained == list(range(len(prompt.encode()), len(tokens)))


def without_template(path: Path) -> str:
    folder = folder_of(path, templates.CHATML)
    (Path(folder) / "chat_template.jinja").unlink()
    return folder


def test_without_a_template_instructions_have_alpacas_wording(tmp_path: Path) -> None:
    """The history is not trained on. A question has no wording of its own."""
    folder = without_template(tmp_path / "t")
    tokenizer = open_tokenizer(folder)
    record = {
        "instruction": "Add.", "input": "2 2", "chosen": "4", "rejected": "5", "system": "S.",
        "history": [["Hi", "Yes"]],
    }  # fmt: skip
    before = tokenizer.encode("S.\n\n### Instruction:\nHi\n\n### Response:\nYes")
    text = "\n\n### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n"
    [documents] = encoded(folder, record)
    for (tokens, trained), completion in zip(documents, "45", strict=True):
        end = [tokenizer.separator]
        assert tokens == before + end + tokenizer.encode(text + completion) + end
        assert trained == [len(tokens) - 2, len(tokens) - 1]
    with pytest.raises(DataError, match=r"no chat template.*as a text in 'prompt'"):
        encoded(folder, {"question": "2 2", "chosen": "4", "rejected": "5"})


def test_the_token_that_begins_a_document_comes_before_the_prompt(tmp_path: Path) -> None:
    begin = open_tokenizer("bytes")
    assert begin.begin is None
    folder = folder_of(tmp_path / "t", templates.CHATML)
    path = Path(folder) / "tokenizer.json"
    backend = json.loads(path.read_text())
    number = next(t["id"] for t in backend["added_tokens"] if t["content"] == "<s>")
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [number], "tokens": ["<s>"]}},
    }
    path.write_text(json.dumps(backend))
    [documents] = encoded(folder, {"prompt": "is ", "chosen": "it", "rejected": "so"})
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for (tokens, trained), completion in zip(documents, ("it", "so"), strict=True):
        assert tokens == [*theirs(f"is {completion}")["input_ids"], theirs.eos_token_id]
        assert tokens[0] == number and 0 not in trained


# ---- faults of others -------------------------------------------------------------------------------------


def test_of_an_empty_completion_the_end_is_trained_on(
    folder: str, tmp_path: Path, opened_kind: Kinds
) -> None:
    """TRL adds the end of the text to it. A template ends the turn."""
    [[_, (tokens, trained)]] = encoded("bytes", {"prompt": "a", "chosen": "b", "rejected": ""})
    assert (tokens, trained) == ([97, 0], [1])
    nothing = {"role": "assistant", "content": ""}
    opened = rendered(folder, [USER], add_generation_prompt=True)
    for record in (
        {"prompt": [USER], "chosen": [GOOD], "rejected": [nothing]},
        {"prompt": [USER], "chosen": GOOD["content"], "rejected": ""},
    ):
        [[_, (tokens, trained)]] = encoded(folder, record)
        assert tokens == rendered(folder, [USER, nothing])
        assert trained == list(range(len(opened), len(tokens))) and trained
    alpaca = {"instruction": "Add.", "chosen": "", "rejected": "4"}
    [[(tokens, trained), _]] = encoded("bytes", alpaca)
    assert trained == [len(tokens) - 1]
    source = jsonl(tmp_path / "a.jsonl", PAIR, {**PAIR, "rejected": " "}, {**PAIR, "chosen": ""})
    said = opened_kind(source, held_out=0.0).sentences()
    assert "2 completions are empty: their end alone is trained on" in said


def test_no_extra_end_of_text(folder: str) -> None:
    """TRL #4908: a template's or a text's own end was followed by another one."""
    tokenizer = open_tokenizer(folder)
    [chats, texts] = encoded(
        folder,
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "is it ", "chosen": "so</s>", "rejected": "not"},
    )
    assert all(tokens.count(tokenizer.separator) == 0 for tokens, _ in chats)
    for tokens, trained in texts:
        assert tokens.count(tokenizer.separator) == 1 and tokens[-1] == tokenizer.separator
        assert trained[-1] == len(tokens) - 1


@pytest.mark.parametrize("packing", [False, True])
def test_the_end_is_trained_on_where_it_is_also_the_padding(
    packing: bool, opened_kind: Kinds, tmp_path: Path
) -> None:
    """TRL #6357: the label of the end was masked along with the padding."""
    source = jsonl(tmp_path / "a.jsonl", {"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    splits = opened_kind(source, sequence_length=16, held_out=0.0, packing=packing)
    sample = splits.train.sample(0)
    assert splits.train.tokenizer.separator == 0
    labels = sample["labels"][sample["labels"] >= 0].tolist()
    assert labels == [ord("4"), 0, ord("5"), 0]
    assert (sample["input_ids"] == 0).sum() > 2, "padding has the same token"


def test_no_token_is_lost_where_the_completion_changes_the_prompts_tokens(folder: str) -> None:
    """TRL #6433: a prompt that is no prefix of the whole in tokens. Both sides have the same prompt all the same."""
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode("the answer")[: len(tokenizer.encode("the ans"))] != tokenizer.encode("the ans")
    for record in (
        {"prompt": "the ans", "chosen": "wer is", "rejected": "the user"},
        {"prompt": "the ans", "chosen": "the user", "rejected": "wer is"},
    ):
        [documents] = encoded(folder, record)
        prompts = set()
        for (tokens, trained), key in zip(documents, ("chosen", "rejected"), strict=True):
            assert tokens == [*tokenizer.encode(record["prompt"] + record[key]), tokenizer.separator]
            assert trained == list(range(trained[0], len(tokens)))
            assert tokenizer.shown([tokens[n] for n in trained[:-1]]).endswith(record[key])
            prompts.add(tuple(tokens[: trained[0]]))
        assert prompts == {tuple(tokenizer.encode("the"))}


@pytest.mark.parametrize("ends", ["assistant: ", "assistant:"])
def test_both_answers_of_a_chat_follow_the_same_tokens(ends: str, tmp_path: Path) -> None:
    """The blank that opens an answer is a part of the first word of one of them, and a token before the other."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    opening = f"{{% if add_generation_prompt %}}{{{{ '{ends}' }}}}{{% endif %}}"
    folder = folder_of(tmp_path / "t", template + opening)
    answers = [{"role": "assistant", "content": text} for text in ("answer is", "7")]
    [documents] = encoded(folder, {"prompt": [USER], "chosen": answers[:1], "rejected": answers[1:]})
    tokenizer = open_tokenizer(folder)
    before = tokenizer.encode(f"user: {USER['content']}</s>assistant:")
    for (tokens, trained), text in zip(documents, (" answer is", " 7"), strict=True):
        assert tokens == before + tokenizer.encode(text) + [tokenizer.separator]
        assert trained == list(range(len(before), len(tokens)))


# ---- samples ----------------------------------------------------------------------------------------------


def many(path: Path, count: int = 40, **more: Any) -> Path:
    draw = random.Random(2)
    records = (
        {
            "prompt": f"{n}:" * draw.randint(1, 3), "chosen": "y" * draw.randint(1, 12),
            "rejected": "n" * draw.randint(1, 12), **dict.fromkeys(more, n / 4),
        }
        for n in range(count)
    )  # fmt: skip
    return jsonl(path, *records)


def documents_of(sample: dict[str, Any], packed: bool) -> Iterator[tuple[int, bytes, bytes]]:
    """Number in the sample, prompt and trained text of every document."""
    if packed:
        numbers = sorted(set(sample["document"].tolist()))
        filled = np.zeros_like(sample["labels"], bool)
        for start, end in zip(sample["starts"], [*sample["starts"][1:], len(filled)], strict=True):
            filled[start:end] = (sample["labels"][start:end] >= 0).any()
        masks = [(sample["document"] == number) & filled for number in numbers]
        rows = [
            (number, sample["input_ids"][mask], sample["labels"][mask])
            for number, mask in zip(numbers, masks, strict=True)
        ]
    else:
        rows = [(n, sample["input_ids"][n], sample["labels"][n]) for n in (0, 1)]
    for number, inputs, labels in rows:
        first = int(np.argmax(labels >= 0))
        last = len(labels) - int(np.argmax(labels[::-1] >= 0))
        assert inputs[first + 1 : last].tolist() == labels[first : last - 1].tolist()
        yield number, bytes(inputs[: first + 1].tolist()), bytes(labels[first:last].tolist())


@pytest.mark.parametrize("packing", [False, True])
def test_every_pair_is_whole_in_one_sample(packing: bool, tmp_path: Path, opened_kind: Kinds) -> None:
    source = many(tmp_path / "a.jsonl", margin=True)
    train, scored = (
        opened_kind(source, kind=kind, sequence_length=48, held_out=0.0, packing=packing).train
        for kind in ("pairs", "scored")
    )
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    seen = []
    for index in range(len(train)):
        sample = train.sample(index)
        members = train.members(index)
        expected = []
        for k, pair in enumerate(members.tolist()):
            for side, key in enumerate(("chosen", "rejected")):
                line = lines[pair]
                expected.append((2 * k + side, line["prompt"].encode(), line[key].encode() + b"\0"))
        assert list(documents_of(sample, packing)) == expected
        assert sample["present"].tolist() == [1] * len(members) and sample["present"].dtype == np.int64
        assert "margin" not in sample
        scores = scored.sample(index)
        assert scores["margin"].tolist() == [pair / 4 for pair in scored.members(index)]
        assert scores["margin"].dtype == np.float32
        assert sample["counted"].sum() == len(members)
        where = sample["counted"] == 1
        assert sample["labels"][where].tolist() == [ord("y")] * len(members)
        chosen = sample["document"] % 2 == 0 if packing else np.arange(2)[:, None] == 0
        assert not where[np.broadcast_to(~chosen, where.shape)].any()
        own = [lines[pair] for pair in members.tolist()]
        completed = "".join(line["chosen"] + line["rejected"] for line in own)
        assert train.filled(index) == 2 * len("".join(line["prompt"] for line in own)) + len(completed)
        seen += members.tolist()
    assert sorted(seen) == list(range(40))
    assert len(train) == 40 if not packing else len(train) < 30


@pytest.mark.parametrize("packing", [False, True])
def test_batches_have_the_shapes_of_the_contract(
    packing: bool, tmp_path: Path, recipe_of_objective: Kinds
) -> None:
    data = open_data(
        recipe_of_objective(
            many(tmp_path / "a.jsonl", margin=True), "reward", sequence_length=48, packing=packing
        )
    )
    train = data._train
    batch = batch_of(train, [0, 1, len(train) - 1, None])
    names = {"input_ids", "labels", "counted", "present", "margin"}
    most = max(len(train.members(n)) for n in (0, 1, len(train) - 1))
    assert set(batch) == names | ({"positions", "starts", "document"} if packing else set())
    rows = (4, 48) if packing else (4, 2, 48)
    for name in ("input_ids", "labels", "counted", *(("positions", "document") if packing else ())):
        assert batch[name].shape == rows and batch[name].dtype == torch.int64, name
    assert batch["present"].shape == batch["margin"].shape == (4, most)
    assert batch["present"].dtype == torch.int64 and batch["margin"].dtype == torch.float32
    assert batch["counted"].flatten(1).sum(1).tolist() == batch["present"].sum(1).tolist()
    assert batch["present"][-1].sum() == batch["counted"][-1].sum() == 0
    assert set(batch["labels"][-1].flatten().tolist()) == {-100}
    if packing:
        assert batch["starts"].dtype == torch.int32
        unseen = batch["labels"] == -100
        assert (batch["document"][:, -1][unseen[:, -1]] == 0).all()


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_the_same_on_any_number_of_ranks(
    packing: bool, tmp_path: Path, recipe_of_objective: Kinds
) -> None:
    data = open_data(recipe_of_objective(many(tmp_path / "a.jsonl"), sequence_length=48, packing=packing))

    def rows(degree: int, size: int) -> list[Any]:
        batches = [b for rank in range(degree) for b in data.micro_batches(3, rank, degree, size)]
        names = ("input_ids", "labels", "counted")
        joined = [torch.stack([b[name] for name in names], 1).flatten(1) for b in batches]
        return sorted(row for row in torch.cat(joined).tolist() if any(row[-len(row) // 3 :]))

    assert rows(1, 4) == rows(2, 1) == rows(4, 1) == rows(2, 2)
    assert data.held_out_sequences > 0
    assert data.held_out(0, 0, 1, 4)[0]["counted"].sum() > 0
    assert data.filled(0) == [data._train.filled(n) for n in data.samples(0)]


def test_the_longer_document_gets_the_room_that_the_shorter_one_leaves() -> None:
    whole = np.array([[3, 4], [10, 4], [4, 10], [10, 10], [10, 5], [11, 2]])
    assert sharing(whole, 11).tolist() == [[3, 4], [7, 4], [4, 7], [5, 5], [6, 5], [9, 2]]


def test_a_pair_that_differs_after_the_cut_alone_is_dropped(tmp_path: Path, opened_kind: Kinds) -> None:
    """In an odd row too: neither document gets a token more, which the loss would make less likely."""
    long = {"prompt": "a", "chosen": "b" * 30 + "c", "rejected": "b" * 30 + "d"}
    source = jsonl(tmp_path / "a.jsonl", long, PAIR)
    for length in (30, 31):
        splits = opened_kind(source, sequence_length=length, packing=True, held_out=0.0)
        assert splits.train.records == 1
        assert (
            "too long: 1 pairs dropped; chosen and rejected differ after the cut alone" in splits.sentences()
        )


def test_pairs_too_long_are_cut_dropped_and_counted(tmp_path: Path, opened_kind: Kinds) -> None:
    source = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "a", "chosen": "b" * 3, "rejected": "c" * 3},  # 4 inputs each
        {"prompt": "a", "chosen": "b" * 3, "rejected": "c" * 20},
        {"prompt": "a", "chosen": "b" * 8 + "c", "rejected": "b" * 8 + "d"},  # they differ after the cut
        {"prompt": "a" * 20, "chosen": "b", "rejected": "c"},  # nothing is left to train
        {"prompt": "a", "chosen": "b", "rejected": "b"},
    )
    splits = opened_kind(source, sequence_length=8, held_out=0.0)
    assert [splits.train.filled(n) for n in range(len(splits.train))] == [8, 12]
    assert [splits.train.note(n) for n in range(2)] == ["", "cut at its end"]
    said = "\n".join(splits.sentences())
    for sentence in (
        "format preference (detected), 4 pairs",
        "too long: 1 pairs cut",
        "too long: 1 pairs dropped; nothing trained on comes before the cut",
        "too long: 1 pairs dropped; chosen and rejected differ after the cut alone",
        "\n1 pairs dropped: chosen and rejected are the same",
    ):
        assert sentence in said
    packed = opened_kind(source, sequence_length=8, held_out=0.0, packing=True)
    assert [packed.train.filled(n) for n in range(len(packed.train))] == [8, 8]
    dropped = opened_kind(source, sequence_length=8, held_out=0.0, too_long="drop")
    assert (
        len(dropped.train) == 1 and "too long: 3 pairs dropped; data.too_long is drop" in dropped.sentences()
    )
    with pytest.raises(DataError, match="no pair within a sequence"):
        opened_kind(source, sequence_length=1, packing=True)


def test_nothing_to_train_on_says_why_and_what_would_do(tmp_path: Path, opened_kind: Kinds) -> None:
    same = jsonl(tmp_path / "a.jsonl", *({**PAIR, "prompt": str(n), "rejected": "b"} for n in range(3)))
    with pytest.raises(DataError, match="chosen and rejected are the same in all 3 records"):
        opened_kind(same)
    unweighted = {**CHAT, "messages": [USER, {**GOOD, "weight": 0}]}
    with pytest.raises(
        DataError, match="none of the answers of 1 records is trained on; give answers a weight"
    ):
        opened_kind(jsonl(tmp_path / "b.jsonl", unweighted), kind="causal")
    # A document of n characters has n inputs: the next one is predicted after each, at last the end.
    pairs = [{"prompt": "a" * n, "chosen": "b", "rejected": "cc"} for n in (30, 10, 20, 90)]
    labelled = [{"prompt": "a" * n, "completion": "b", "label": n > 20} for n in (30, 10, 20, 90)]
    prompts = [{"prompt": "a" * n} for n in (30, 10, 20, 90)]
    for records, kind, more, needed in (
        (pairs, "pairs", {}, (12, 22, 92)),
        (pairs, "pairs", {"packing": True}, (23, 43, 183)),
        (pairs, "scored", {}, (13, 23, 93)),
        (labelled, "unpaired", {}, (11, 21, 91)),
        (labelled, "causal", {"format": "prompt"}, (11, 21, 91)),
        (labelled, "seq2seq", {"format": "prompt"}, (11, 21, 91)),
        (prompts, "prompts", {}, (11, 21, 91)),
    ):
        source = jsonl(tmp_path / "c.jsonl", *records)
        dropping = {} if kind == "prompts" else {"too_long": "drop"}
        said = "the shortest record needs {}, the median {}, the longest {}$".format(*needed)
        with pytest.raises(DataError, match=said):
            opened_kind(source, kind=kind, sequence_length=needed[0] - 1, held_out=0.0, **dropping, **more)
        assert len(
            opened_kind(source, kind=kind, sequence_length=needed[0], held_out=0.0, **dropping, **more).train
        )


def test_a_pair_without_a_trained_turn_is_left_out(tmp_path: Path, opened_kind: Kinds) -> None:
    pair = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    records = [pair, {**pair, "chosen": [{**GOOD, "weight": 0}]}]
    splits = opened_kind(jsonl(tmp_path / "a.jsonl", *records), held_out=0.0)
    assert len(splits.train) == 1
    assert "1 pairs dropped: a completion has nothing that is trained on" in splits.sentences()


def test_a_pair_is_held_out_by_its_content(tmp_path: Path, opened_kind: Kinds) -> None:
    """Both of its documents count: here the chosen ones are all alike."""
    records = ({"prompt": "a", "chosen": "b", "rejected": f"c{n}"} for n in range(200))
    lines = jsonl(tmp_path / "a.jsonl", *records).read_text().splitlines(keepends=True)
    sides = []
    for name, order in (("b", lines), ("c", lines[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(order))
        splits = opened_kind(tmp_path / f"{name}.jsonl", sequence_length=64, held_out=0.1)
        held_out = splits.held_out
        sides.append(sorted(held_out.text(n) for n in range(len(held_out))))
        assert 10 <= len(held_out) <= 40 and len(splits.train) + len(held_out) == 200
    assert sides[0] == sides[1]


def test_the_cache_serves_other_lengths_and_packing_and_is_known_by_its_content(
    tmp_path: Path, opened_kind: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = many(tmp_path / "a.jsonl")
    prints = [opened_kind(source).fingerprint]
    monkeypatch.setattr(PairEncoder, "encode_all", lambda *_: pytest.fail("tokenized again"))
    ways: list[dict[str, Any]] = [
        {"packing": True},
        {"sequence_length": 40},
        {"too_long": "drop"},
        {"held_out": 0.2},
    ]
    prints += [opened_kind(source, **way).fingerprint for way in ways]
    prints.append(opened_kind(source, kind="unpaired").fingerprint)
    assert len(set(prints)) == len(prints)
    monkeypatch.undo()
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(source.read_bytes())
    assert opened_kind(moved).fingerprint == prints[0]


# ---- kinds, and refusals ----------------------------------------------------------------------------------


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
CHAT = {"messages": [USER, GOOD]}
COMPLETION = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("record", "kind", "says"),
    [
        (
            PAIR,
            "causal",
            "the causal objective needs one text.*these are preferences; set objective: dpo",
        ),
        ({**PAIR, "conversations": sharegpt(USER)}, "causal", "these are preferences; set objective: dpo"),
        (PAIR, "masked", "these are preferences"),
        (CHAT, "pairs", "needs pairs: chosen and rejected.*of the format messages"),
        ({"text": "a"}, "pairs", "needs pairs: chosen and rejected.*of the format text"),
        ({**COMPLETION, "label": True}, "pairs", "needs pairs: chosen and rejected.*of the format prompt"),
        (CHAT, "unpaired", "needs completions with a label"),
        ({"text": "a"}, "prompts", "needs prompts.*of the format text"),
        (
            {"question": "a", "answer": "b"},
            "prompts",
            "needs prompts.*has answer, question; name the prompt's field",
        ),
        ({**COMPLETION, "labl": True}, "unpaired", "did you mean 'label' by 'labl'"),
        ({"prompt": "a", "choosen": "b", "rejected": "c"}, "pairs", "did you mean 'chosen' by 'choosen'"),
        ({"prompt": "a", "completoin": "b"}, "causal", "did you mean 'completion' by 'completoin'"),
        (
            {"prompt": "a", "label": True},
            "unpaired",
            "needs completions with a label.*record has label, prompt",
        ),
    ],
)
def test_records_of_another_kind_are_refused(
    record: Any, kind: str, says: str, tmp_path: Path, opened_kind: Kinds
) -> None:
    with pytest.raises(DataError) as caught:
        opened_kind(jsonl(tmp_path / "a.jsonl", record), kind=kind)
    assert caught.value.exit_code == 3
    assert re.search(says, caught.value.line()), caught.value.line()


def test_a_causal_run_still_reads_the_messages_of_ultrafeedback(tmp_path: Path, opened_kind: Kinds) -> None:
    record = CONVERSATIONS["UltraFeedback"][0]
    splits = opened_kind(
        jsonl(tmp_path / "a.jsonl", record), kind="causal", held_out=0.0, sequence_length=128
    )
    assert "format messages" in splits.sentences()[0]


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b"}, "no 'rejected'"),
    ({"prompt": "a", "choosen": "b", "rejected": "c"}, "did you mean 'chosen' by 'choosen'?"),
    ({"query": "q", "chosen": "a", "rejected": "b"}, "no prompt in common"),
    ({"query": "q", **ANSWERS}, "the record also has query; name the prompt's field 'prompt'"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' is not text"),
    ({"prompt": "a", "chosen": 3, "rejected": "b"}, "'chosen' is neither text nor turns"),
    ({"chosen": [USER, GOOD], "rejected": [MORE, BAD]}, "chosen and rejected have no prompt in common"),
    ({"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "'prompt' is not a turn that chosen"),
    ({"prompt": [USER], "chosen": [MORE], "rejected": [BAD]}, "roles do not alternate"),
    ({"prompt": [USER], "chosen": [{"role": "assistant"}], "rejected": [BAD]}, "no 'chosen[0].content'"),
]
MARGINS: list[tuple[object, str]] = [
    ("much", "'margin' is not a number"),
    *[(more, "'margin' is too large") for more in (10**400, -1e39)],
    (1.0, "a 'margin'"),
]


@pytest.mark.parametrize(("bad", "says"), MALFORMED, ids=[says for _, says in MALFORMED])
def test_a_malformed_pair_is_named_by_file_and_line(
    bad: Any, says: str, tmp_path: Path, opened_kind: Kinds
) -> None:
    with pytest.raises(DataError) as caught:
        opened_kind(jsonl(tmp_path / "a.jsonl", PAIR, bad))
    line = caught.value.line()
    assert says in line and "a.jsonl:2" in line and "\n" not in line, line


@pytest.mark.parametrize(("margin", "says"), MARGINS, ids=[says for _, says in MARGINS])
def test_a_faulty_margin_is_refused_where_it_is_read(
    margin: object, says: str, tmp_path: Path, opened_kind: Kinds
) -> None:
    source = jsonl(tmp_path / "a.jsonl", PAIR, {**PAIR, "margin": margin})
    for kind in ("pairs", "unpaired"):
        assert opened_kind(source, kind=kind, held_out=0.0).train.records > 1
    with pytest.raises(DataError) as caught:
        opened_kind(source, kind="scored")
    line = caught.value.line()
    assert says in line and "a.jsonl:2" in line and "\n" not in line, line


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"train_on": "all"}, "train_on cannot be all"),
        ({"too_long": "split"}, "too_long: split does not apply"),
    ],
)
def test_settings_that_preferences_exclude(asked: Any, says: str, tmp_path: Path, opened_kind: Kinds) -> None:
    with pytest.raises(DataError, match=says):
        opened_kind(jsonl(tmp_path / "a.jsonl", PAIR), **asked)


def test_a_mixture_of_pairs(tmp_path: Path, recipe_of_objective: Kinds) -> None:
    one, two = many(tmp_path / "a.jsonl", 10), many(tmp_path / "b.jsonl", 30)
    asked = recipe_of_objective(
        None,
        mixture=[{"source": str(one)}, {"source": str(two), "weight": 3}],
        sequence_length=48,
        packing=True,
    )
    data = open_data(asked)
    batch = data.micro_batches(0, 0, 1, 4)[0]
    assert batch["counted"].sum() == batch["present"].sum() >= 4
    some = [{"source": str(one)}, {"source": str(many(tmp_path / "c.jsonl", margin=True))}]
    open_data(recipe_of_objective(None, mixture=some))
    with pytest.raises(DataError, match="margin"):
        open_data(recipe_of_objective(None, "reward", mixture=some))


def test_fields_that_nothing_reads_are_listed(tmp_path: Path, opened_kind: Kinds) -> None:
    source = jsonl(tmp_path / "a.jsonl", {**PAIR, "question": "Q", "note": "n", "margin": 1.0})
    said = opened_kind(source, held_out=0.0).sentences()
    assert "not read: note, question" in said and "not read by this objective: margin" in said
    assert "margin" not in " ".join(opened_kind(source, kind="scored", held_out=0.0).sentences())


def test_data_shows_both_documents(tmp_path: Path, opened_kind: Kinds) -> None:
    source = jsonl(tmp_path / "a.jsonl", {**PAIR, "margin": 2})
    train = opened_kind(source, held_out=0.0).train
    assert train.names == ("chosen", "rejected") and train.records == 1 and not train.note(0)
    assert opened_kind(source, kind="scored", held_out=0.0).train.note(0) == "margin 2"
    shown = [[(chr(token), on) for token, on in document] for document in train.documents(0)]
    assert shown == [[("a", False), (c, True), ("\0", True)] for c in "bc"]
    assert train.text(0) == "ab\nac"
    assert isinstance(train, Preferences) and isinstance(train.tokenizer, Tokenizer)


# ---- the page ---------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fine-tune-on-conversations.md"


def test_the_page_shows_what_is_read(
    tmp_path: Path, opened_kind: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Preferences\n")[2].partition("\n## ")[0]
    fences = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    first, second = (text for kind, text in fences if kind == "jsonl")
    [recipe], [shown] = ([text for kind, text in fences if kind == name] for name in ("yaml", "console"))
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(first)
    Path("labels.jsonl").write_text(second)
    Path("pairs.yaml").write_text(recipe)
    ran = CliRunner().invoke(app, ["data", "pairs.yaml", "--samples", "1"])
    assert f"$ shardwise data pairs.yaml --samples 1\n{ran.output}" == shown
    labels = opened_kind(Path("labels.jsonl"), kind="unpaired", held_out=0.0).train
    assert labels.desirable.tolist() == [1, 0]


@pytest.mark.parametrize("packing", [False, True])
def test_a_scored_pair_has_all_tokens_as_inputs_and_one_target_at_the_last(
    packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward model reads the end of the answer, too. The last document of the cache is one of them."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "ab", "chosen": "cd", "rejected": "e"}', encoding="utf-8")
    spec = DataSpec(source=str(path), sequence_length=16, packing=packing, held_out=0.0)
    tokenizer = open_tokenizer("bytes")
    splits = [open_splits(spec, tokenizer, tmp_path / "cache", kind=kind) for kind in ("pairs", "scored")]
    pairs, scored = (split.train.sample(0) for split in splits)
    whole = [[*b"abcd", tokenizer.separator], [*b"abe", tokenizer.separator]]
    if packing:
        assert scored["input_ids"][:9].tolist() == whole[0] + whole[1]
        assert np.flatnonzero(scored["labels"] >= 0).tolist() == [4, 8]
        assert np.flatnonzero(scored["counted"]).tolist() == [4]
    else:
        for row, labels, tokens in zip(scored["input_ids"], scored["labels"], whole, strict=True):
            assert row[: len(tokens)].tolist() == tokens
            assert np.flatnonzero(labels >= 0).tolist() == [len(tokens) - 1]
        assert np.argwhere(scored["counted"]).tolist() == [[0, 4]]
    assert pairs["input_ids"].shape == scored["input_ids"].shape
    assert splits[0].fingerprint != splits[1].fingerprint
