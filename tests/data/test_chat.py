"""Chats on their way to tokens: nothing vanishes, and the answers are found as every kind of template writes them.

The text and the tokens are compared with transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import pytest

from shardwise.core.errors import DataError
from shardwise.data import Data
from shardwise.data.chat import ChatTemplate
from shardwise.data.encoding import Encoder
from shardwise.data.formats import Chat
from shardwise.data.opening import open_splits
from shardwise.data.readers import Record
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.data.turns import Turn
from shardwise.recipe.sections import DataSpec
from tests.data import chat_templates as templates
from tests.data.test_completions import jsonl

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

Opener = Callable[..., Data]
Messages = list[dict[str, Any]]

USER, OTHER_USER = {"role": "user", "content": "Q1?"}, {"role": "user", "content": "Q2?"}
ANSWER, OTHER_ANSWER = {"role": "assistant", "content": "B1."}, {"role": "assistant", "content": "B2."}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
OUTPUT = {"role": "tool", "content": "four", "name": "add", "tool_call_id": "c1"}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
TWO = [USER, ANSWER, OTHER_USER, OTHER_ANSWER]
TOOL_CHAT = [USER, CALLS, OUTPUT, ANSWER, OTHER_USER, OTHER_ANSWER]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def folder_of(path: Path, template: str | Mapping[str, str], eos: str = "</s>", **generation: Any) -> str:
    """A byte-level tokenizer that knows the tags of the templates as tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tags = [
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|user|>",
        "<tool_call>",
    ]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=tags,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the answer is user assistant\n\n"] * 10, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    made.chat_template = template
    made.save_pretrained(path)
    if generation:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


def encoded(
    folder: str, record: Mapping[str, Any], name: str = "messages", **spec: Any
) -> tuple[str, list[str]]:
    """The text of a record, and its trained stretches; its tokens are those of transformers' rendering."""
    tokenizer = open_tokenizer(folder)
    tokens, trained = Encoder(DataSpec(**spec), name, tokenizer).encode(Record(record, "here"))
    edges = [0, *(i for i in range(1, len(tokens)) if trained[i] != trained[i - 1]), len(tokens)]
    spans = [tokenizer.shown(tokens[a:b]) for a, b in itertools.pairwise(edges) if trained[a]]
    return tokenizer.shown(tokens), spans


def theirs(folder: str, record: Mapping[str, Any], **more: Any) -> str:
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    given = {"tools": record.get("tools"), "tokenize": False, **more}
    return str(loaded.apply_chat_template(record["messages"], **given))


KINDS: list[tuple[str, Messages, list[str]]] = [
    (templates.CHATML, TWO, ["B1.<|im_end|>\n", "B2.<|im_end|>\n"]),
    (templates.THINKING, TWO, ["B1.<|im_end|>\n", "<think>\n\n</think>\n\nB2.<|im_end|>\n"]),
    (
        templates.THINKING,
        [*TOOL_CHAT[:2], OUTPUT, ANSWER],
        [
            '<think>\n\n</think>\n\n<tool_call>add {"a": 2}</tool_call><|im_end|>\n',
            "<think>\n\n</think>\n\nB1.<|im_end|>\n",
        ],
    ),
    (
        templates.CHANNELS,
        TWO,
        ["<|channel|>final<|message|>B1.<|end|>", "<|channel|>final<|message|>B2.<|return|>"],
    ),
    (
        templates.CHANNELS,
        [*TOOL_CHAT[:3], ANSWER],
        [' to=add<|message|>{"a": 2}<|call|>', "<|channel|>final<|message|>B1.<|return|>"],
    ),
    (templates.TRAILING_END, TWO, ["B1.<|end|>\n", "B2.<|end|>\n</s>"]),
    (templates.TOOL_OUTPUTS, TWO, ["B1.</s>", "B2.</s>"]),
    (templates.ALTERNATING, TWO, ["B1.<end>\n", "B2.<end>\n"]),
    (templates.INSTRUCTIONS, [{"role": "system", "content": "Short."}, *TWO], [" B1. </s>", " B2. </s>"]),
    (templates.BY_INDEX, TWO, ["B1.</s>", "B2.</s>"]),
    (templates.IN_THE_LOOP, TWO, ["B1.</s>\n", "B2.</s>\n"]),
    (
        templates.COUNTING,
        [*TOOL_CHAT[:3], ANSWER],
        ['add{"a": 2}<|end|>', "B1.<|end|>"],
    ),
    (templates.INDENTED, TWO, ["B1.\n", "B2.\n"]),
    (templates.NO_END, TWO, ["\nB1.", "\nB2."]),
]


@pytest.mark.parametrize(("template", "messages", "trained"), KINDS)
def test_answers_of_every_kind_of_template(
    template: str, messages: Messages, trained: list[str], tmp_path: Path
) -> None:
    record = {
        "messages": messages,
        **({"tools": TOOLS} if template == templates.CHANNELS and CALLS in messages else {}),
    }
    folder = folder_of(tmp_path / "t", template)
    text, spans = encoded(folder, record)
    assert spans == trained
    # A template may stumble over a missing content, which OpenAI's API writes as null.
    whole = [{**m, "content": m["content"] or ""} for m in messages]
    assert text == theirs(folder, {**record, "messages": whole})
    assert encoded(folder, record, train_on="all") == (text, [text])


@pytest.mark.parametrize("template", [templates.CHATML, templates.THINKING, templates.CHANNELS])
def test_a_chat_of_any_length_is_rendered_as_often(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the cost is linear in its turns."""
    folder, counts = folder_of(tmp_path / "t", template), list[int]()
    plain = jinja2.Template.render

    def counted(self: jinja2.Template, *args: Any, **kwargs: Any) -> str:
        counts[-1] += 1
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(jinja2.Template, "render", counted)
    for pairs in (2, 4, 40):
        counts.append(0)
        turns = [
            {"role": role, "content": f"{role}{i}"} for i in range(pairs) for role in ("user", "assistant")
        ]
        assert len(encoded(folder, {"messages": turns})[1]) == pairs
    assert counts[0] == counts[1] == counts[2] > 0


def test_single_turns_train_as_several(tmp_path: Path) -> None:
    for number, (template, messages, _) in enumerate(KINDS):
        if CALLS not in messages:
            folder = folder_of(tmp_path / str(number), template)
            text, spans = encoded(folder, {"messages": messages[-2:]})
            assert len(spans) == 1 and "B2." in spans[0] and "Q2" not in spans[0]
            assert text == theirs(folder, {"messages": messages[-2:]})


def test_an_opening_with_an_open_thought(tmp_path: Path) -> None:
    """The opening may be longer than it is in the chat, or begin as the answer does: <think> and <tool_call>."""
    folder = folder_of(tmp_path / "t", templates.THINKING)
    record = {"messages": TWO, "chat_template_kwargs": {"open_thought": True}}
    text, spans = encoded(folder, record)
    assert spans == ["B1.<|im_end|>\n", "\n</think>\n\nB2.<|im_end|>\n"]
    assert text == theirs(folder, record, open_thought=True)
    chat = Chat(
        (Turn("user", "Q"), Turn("assistant", "", (CALL,)), Turn("tool", "4"), Turn("assistant", "B"))
    )
    template = ChatTemplate({"default": templates.THINKING.replace("loop.index0 >= last.user", "false")}, {})
    written = template.written(Chat(chat.turns, fields={"open_thought": True}), "here", date(2026, 1, 2))
    assert written.text[slice(*written.trained[0])].startswith("<tool_call>add")


def test_arguments_as_text_and_as_an_object(tmp_path: Path) -> None:
    """Whichever the record has, a template gets the form that it reads."""
    as_text = {**CALLS, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 2}'}}]}
    folder = folder_of(tmp_path / "t", templates.TOOL_OUTPUTS)
    other = folder_of(tmp_path / "o", templates.THINKING)
    for calls in (CALLS, as_text):
        _, spans = encoded(folder, {"messages": [USER, calls, OUTPUT, ANSWER]})
        assert spans == ['<|call|>add {"a": 2}<|calls|></s>', "B1.</s>"]
        text, _ = encoded(other, {"messages": [USER, calls, OUTPUT, ANSWER]})
        assert '<tool_call>add {"a": 2}</tool_call>' in text


def test_content_as_parts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", templates.PARTS)
    text, spans = encoded(folder, {"messages": TWO})
    assert spans == [" B1.<|end|>\n", " B2.<|end|>\n"]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TWO]
    assert encoded(folder, {"messages": parts}) == (text, spans)
    assert text == theirs(folder, {"messages": parts})
    plain = folder_of(tmp_path / "p", templates.CHATML)
    assert encoded(plain, {"messages": parts}) == encoded(plain, {"messages": TWO})


def test_outputs_of_tools_within_the_turn_that_called_are_not_trained_on(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", templates.RESPONSES_INSIDE)
    text, spans = encoded(
        folder, {"messages": [*TOOL_CHAT[:3], {**OUTPUT, "content": "five"}, *TOOL_CHAT[3:]]}
    )
    assert "<response>four<response>five" in text
    assert spans == ['<call>add{"a": 2}', "B1.<end>\n", "B2.<end>\n"]


def test_the_first_token_of_the_next_turn_ends_an_answer(tmp_path: Path) -> None:
    """Where generation_config.json says so, as GLM's does."""
    probe = open_tokenizer(folder_of(tmp_path / "p", templates.NO_END))
    [user] = probe.encode("<|user|>")
    folder = folder_of(tmp_path / "t", templates.NO_END, eos_token_id=[1, user])
    _, spans = encoded(folder, {"messages": TWO})
    assert spans == ["\nB1.<|user|>", "\nB2."]


# ---- keys of turns and of records ---------------------------------------------------------------------------

EVERYTHING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role }}
    {%- if m.tool_call_id is defined %}{{ ' ' + m.tool_call_id + ' ' + m.name }}{% endif %}{{ '\n' }}
    {%- if m.reasoning_content is defined %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {{- m.content }}
    {%- for c in m.tool_calls or [] %}{{ c.id + c.function | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}{{ mood }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_keys_of_a_turn_and_of_a_record_reach_the_template(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", EVERYTHING)
    reasoned = {**OTHER_ANSWER, "reasoning_content": "Because."}
    record = {
        "messages": [USER, CALLS, OUTPUT, reasoned],
        "mood": "calm",
        "chat_template_kwargs": None,
        "id": 7,
    }
    text, spans = encoded(folder, record)
    assert "tool c1 add\nfour" in text and "calm" in text
    assert spans == [
        'c1{"name": "add", "arguments": {"a": 2}}<|im_end|>\n',
        "<think>Because.</think>B2.<|im_end|>\ncalm",
    ]
    assert text == theirs(
        folder, {"messages": [USER, {**CALLS, "content": ""}, OUTPUT, reasoned]}, mood="calm"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("template", [EVERYTHING, templates.CHANNELS])
def test_reasoning_has_the_aliases_of_transformers(key: str, template: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", template)
    record = {"messages": [USER, {**ANSWER, key: "Because."}]}
    text, [span] = encoded(folder, record)
    assert "Because." in span
    assert text == theirs(folder, record)


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}])
def test_an_answer_of_weight_zero_is_not_trained_on(off: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", templates.CHATML)
    record = {"messages": [USER, {**ANSWER, **off}, OTHER_USER, {**OTHER_ANSWER, "weight": 1}]}
    assert encoded(folder, record) == (encoded(folder, {"messages": TWO})[0], ["B2.<|im_end|>\n"])
    marked = templates.CHATML.replace("m['content']", "''").replace(
        "+ '<|im_end|>\n' }}", "}}{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    )
    assert encoded(folder_of(tmp_path / "m", marked), record)[1] == ["B2.<|im_end|>\n"]


def test_only_zero_and_one_are_weights(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"messages\[1\].weight' is 0.5"):
        encoded(folder_of(tmp_path / "t", templates.CHATML), {"messages": [USER, {**ANSWER, "weight": 0.5}]})


def test_a_records_system_is_its_first_turn(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", templates.CHATML)
    text, _ = encoded(folder, {"messages": [USER, ANSWER], "system": "Short."})
    assert text == theirs(folder, {"messages": [{"role": "system", "content": "Short."}, USER, ANSWER]})
    shared = [{"from": "human", "value": "Q1?"}, {"from": "gpt", "value": "B1."}]
    assert encoded(folder, {"conversations": shared, "system": "Short."}, "sharegpt")[0] == text
    with pytest.raises(DataError, match="two system turns"):
        encoded(
            folder, {"messages": [{"role": "system", "content": "Long."}, USER, ANSWER], "system": "Short."}
        )


def test_turns_of_sharegpt_call_tools_as_llama_factory_writes_them(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", templates.THINKING)
    record = {
        "conversations": [
            {"from": "human", "value": "Q1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "four"},
            {"from": "gpt", "value": "B1."},
        ]
    }
    assert encoded(folder, record, "sharegpt") == encoded(folder, {"messages": [USER, CALLS, OUTPUT, ANSWER]})


def test_function_calls_of_openais_api_before_tools(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", "{{ tools | tojson if tools else '' }}" + templates.THINKING)
    old = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}}
    record = {
        "messages": json.dumps([USER, old, {"role": "function", "name": "add", "content": "four"}, ANSWER]),
        "functions": [TOOLS[0]["function"]],
    }
    assert encoded(folder, record) == encoded(
        folder, {"messages": [USER, CALLS, OUTPUT, ANSWER], "tools": TOOLS}
    )


def test_alpaca_with_system_and_history(tmp_path: Path) -> None:
    """The wording of LLaMA-Factory's template alpaca, which trains on the answers of the history too."""
    record = {
        "instruction": "And of Italy?", "input": "", "output": "Rome.", "system": "Short.",
        "history": [["Capital of France?", "Paris."]],
    }  # fmt: skip
    text, spans = encoded("bytes", record, "alpaca")
    assert text == (
        "Short.\n\n### Instruction:\nCapital of France?\n\n### Response:\nParis.<end>"
        "\n\n### Instruction:\nAnd of Italy?\n\n### Response:\nRome.<end>"
    )
    assert spans == ["Paris.<end>", "Rome.<end>"]
    with pytest.raises(DataError, match="'history' is not a list of pairs"):
        encoded("bytes", {**record, "history": [["only one"]]}, "alpaca")


def test_conversational_prompts_and_completions(tmp_path: Path) -> None:
    """TRL's format: only the completion is trained on."""
    folder = folder_of(tmp_path / "t", templates.CHATML)
    record = {"prompt": TWO[:3], "completion": TWO[3:]}
    assert encoded(folder, record, "prompt") == (encoded(folder, {"messages": TWO})[0], ["B2.<|im_end|>\n"])
    with pytest.raises(DataError, match="'completion' is not text"):
        encoded(folder, {"prompt": "Q", "completion": [ANSWER]}, "prompt")


def test_what_the_template_does_not_read_is_named_once(tmp_path: Path, opened: Opener) -> None:
    folder = folder_of(tmp_path / "t", templates.CHATML)
    record = {
        "messages": [{**USER, "name": "Ann"}, {**ANSWER, "reasoning_content": "R"}],
        "id": 3,
        "source": "web",
    }
    tokenizer = open_tokenizer(folder)
    spec = DataSpec(source=str(jsonl(tmp_path / "a.jsonl", *[record] * 3)), held_out=0.0)
    [sentence] = [s for s in open_splits(spec, tokenizer, tmp_path / "c").sentences() if "not read" in s]
    assert sentence == "not read by the chat template: id, source, turn.name, turn.reasoning_content"


def unread_of(folder: str, record: Mapping[str, Any], name: str, **spec: Any) -> set[str]:
    encoder = Encoder(DataSpec(**spec), name, open_tokenizer(folder))
    encoder.encode(Record(record, "here"))
    return encoder.unread


def test_fields_that_a_prompt_in_one_text_has_no_room_for_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, templates.CHATML)
    record = {"prompt": "P", "completion": "C", "system": "SYS", "tools": TOOLS, "functions": None}
    assert unread_of(folder, record, "prompt") == {"system", "tools"}


def test_weights_that_decide_nothing_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, templates.CHATML)
    off = {"messages": [USER, {**ANSWER, "weight": 0}, OTHER_USER, {**OTHER_ANSWER, "weight": 1}]}
    assert unread_of(folder, off, "messages") == set()
    assert unread_of(folder, off, "messages", train_on="all") == {"turn.weight"}
    asked = {"messages": [{**USER, "train": True}, {**ANSWER, "train": True}]}
    assert unread_of(folder, asked, "messages") == {"turn.train"}
    assert unread_of(folder, {"messages": [{**USER, "train": False}, ANSWER]}, "messages") == set()


def test_an_answer_may_be_reasoning_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, templates.THINKING)
    record = {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": "R"}]}
    assert encoded(folder, record)[1] == ["<think>\nR\n</think>\n\n<|im_end|>\n"]


def test_a_template_that_writes_one_of_several_calls_is_refused(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": b}}} for b in (5, 7)]
    record = {"messages": [USER, {**CALLS, "tool_calls": calls}, OUTPUT, OUTPUT, ANSWER]}
    with pytest.raises(DataError, match="does not write the call of add"):
        encoded(folder_of(tmp_path / "one", templates.CHANNELS), record)
    every = folder_of(tmp_path / "all", templates.THINKING)
    assert encoded(every, record)[1][0].count("<tool_call>") == 2


@pytest.mark.parametrize("text", ["a\ud800", "a\0"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_variables_of_a_template_are_text_too(text: str, inside: bool, train_on: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", "{{ note }}" + templates.CHATML)
    said = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    more = {"chat_template_kwargs": {"note": text}} if inside else {"note": [text]}
    with pytest.raises(DataError, match=r"(not Unicode|NUL in text) \(a.jsonl:7\)"):
        Encoder(DataSpec(train_on=train_on), "messages", open_tokenizer(folder)).encode(
            Record({**said, **more}, "a.jsonl:7")
        )
    unread = Record({**said, "other": text}, "a.jsonl:7")
    Encoder(DataSpec(train_on=train_on), "messages", open_tokenizer(folder)).encode(unread)


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("alpaca", {"instruction": "Halve it.", "input": 0, "output": "0"}),
        ("alpaca", {"instruction": "Halve it.", "system": False, "output": "0"}),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "system": 0}),
    ],
)
def test_zero_is_no_missing_text(name: str, record: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"'(input|system)' is not text"):
        Encoder(DataSpec(), name, open_tokenizer("bytes")).encode(Record(record, "here"))


def test_tools_nested_deeper_than_python_reads_are_one_line() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = Record({"messages": said, "tools": "[" * 9000 + "]" * 9000}, "here")
    with pytest.raises(DataError, match="'tools' is not a list"):
        Encoder(DataSpec(), "messages", open_tokenizer("bytes")).encode(record)


def test_a_history_may_be_json_text(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, templates.CHATML)
    pairs = [["a", "b"]]
    record = {"instruction": "I", "output": "O", "history": pairs}
    assert encoded(folder, {**record, "history": json.dumps(pairs)}, "alpaca") == encoded(
        folder, record, "alpaca"
    )
    assert "a" not in encoded(folder, {**record, "history": "[]"}, "alpaca")[1][0]


# ---- chats that lose something -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": TOOL_CHAT}, "does not write the call of add (here: turn 1)"),
        ({"messages": [USER, ANSWER], "tools": TOOLS}, "does not write the tool add (here: tools)"),
        (
            {"messages": [{"role": "system", "content": "Short."}, USER, ANSWER]},
            "does not write the system turn",
        ),
    ],
)
@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_a_chat_of_which_something_vanishes_is_refused(
    record: dict[str, Any], says: str, train_on: str, tmp_path: Path
) -> None:
    silent = templates.CHATML.replace(
        "{{ '<|im_start|>'", "{% if m.role != 'system' %}{{ '<|im_start|>'", 1
    ).replace("}}{% endfor %}", "}}{% endif %}{% endfor %}")
    with pytest.raises(DataError) as caught:
        encoded(folder_of(tmp_path / "t", silent), record, train_on=train_on)
    assert says in caught.value.line()


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_a_chat_with_tools_takes_the_template_for_them(place: str, tmp_path: Path) -> None:
    tool_use = "{{ 'TOOLS ' + tools | tojson + '\n' }}" + templates.THINKING
    both = {"default": templates.CHATML, "tool_use": tool_use}
    folder = folder_of(tmp_path / "t", both)
    if place == "tokenizer_config.json":
        for file in (tmp_path / "t").rglob("*.jinja"):
            file.unlink()
        path = tmp_path / "t" / place
        named = [{"name": name, "template": template} for name, template in both.items()]
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    else:
        assert (tmp_path / "t" / place / "tool_use.jinja").is_file()
    record = {"messages": [USER, {**CALLS, "content": ""}, OUTPUT, ANSWER], "tools": TOOLS}
    text, spans = encoded(folder, record)
    assert text.startswith("TOOLS [") and text == theirs(folder, record)
    assert "add" in spans[0]
    assert encoded(folder, {"messages": TWO})[0] == theirs(folder, {"messages": TWO})


def test_the_template_of_a_processor_is_that_of_its_chats(tmp_path: Path) -> None:
    """Models of images may have it in ``chat_template.json``, which transformers' tokenizers do not read."""
    folder = folder_of(tmp_path / "t", templates.CHATML)
    expected = encoded(folder, {"messages": TWO})
    template = tmp_path / "t" / "chat_template.jinja"
    (tmp_path / "t" / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    assert encoded(folder, {"messages": TWO}) == expected


def test_nulls_of_arrow_are_no_arguments(tmp_path: Path, opened: Opener) -> None:
    """Parquet gives all structs of a column the same fields."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")

    def record(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
        }

    rows = [record("weather", {"city": "Paris"}), record("add", {"a": 2, "b": [{"c": 1}, {"d": 2}]})]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for source in (jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "a.parquet", tmp_path / "saved"):
        data = opened(source, held_out=0.0, sequence_length=128)
        labels = data.micro_batches(0, 0, 1, 2)[0]["labels"]
        said = sorted(bytes(row[row >= 0].tolist()).decode() for row in labels)
        assert said == [
            ' {"name": "add", "arguments": {"a": 2, "b": [{"c": 1}, {"d": 2}]}}\0',
            ' {"name": "weather", "arguments": {"city": "Paris"}}\0',
        ]


# ---- ends, dates, lengths -----------------------------------------------------------------------------------


def ends_of(tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.shown([token]) for token in tokenizer.ends}


def test_the_ends_of_an_answer(tmp_path: Path) -> None:
    """The end-of-text token, those of the model's files, and the one that ends the template's last answer."""
    assert ends_of(open_tokenizer("bytes")) == {"<end>"}
    assert ends_of(open_tokenizer(folder_of(tmp_path / "1", templates.CHATML))) == {"</s>", "<|im_end|>"}
    assert ends_of(open_tokenizer(folder_of(tmp_path / "2", templates.CHANNELS))) == {"</s>", "<|return|>"}
    assert ends_of(open_tokenizer(folder_of(tmp_path / "3", templates.TRAILING_END))) == {"</s>"}
    named = open_tokenizer(folder_of(tmp_path / "4", templates.CHATML, eos_token_id=[1, 4]))
    assert ends_of(named) == {"</s>", "<|end|>", "<|im_end|>"}
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    assert ends_of(open_tokenizer(folder_of(tmp_path / "5", "{{ broken"))) == {"</s>", "<|return|>"}


def test_answers_that_never_end_are_counted(tmp_path: Path) -> None:
    marked = (
        "{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    for template, count in ((marked, 2), (templates.CHATML, 0), (templates.NO_END, 2)):
        folder = folder_of(tmp_path / str(count) / str(len(template)), template)
        spec = DataSpec(source=str(jsonl(tmp_path / "a.jsonl", {"messages": TWO})), held_out=0.0)
        splits = open_splits(spec, open_tokenizer(folder), tmp_path / "c")
        assert splits.train.cache.header.endless == count
        said = [s for s in splits.sentences() if "never end" in s]
        assert bool(said) == bool(count)


def test_the_date_is_that_of_the_recipe(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", templates.DATED)
    text, _ = encoded(folder, {"messages": TWO}, date="2026-02-03")
    assert text.startswith("Today: 03 Feb 2026\n")
    fingerprints = {
        (template, day): Encoder(
            DataSpec(date=day),
            "messages",
            open_tokenizer(folder_of(tmp_path / f"{day}{len(template)}", template)),
        ).fingerprint
        for template in (templates.DATED, templates.CHATML)
        for day in ("2026-02-03", "2026-02-04")
    }
    assert len(set(fingerprints.values())) == 3  # the date is part of the key where it is written


LONG = [turn for number in range(6) for turn in (
    {"role": "user", "content": f"q{number}" * 5}, {"role": "assistant", "content": f"a{number}" * 5}
)]  # fmt: skip


@pytest.mark.parametrize("too_long", ["cut", "drop", "split"])
def test_records_longer_than_a_sequence(too_long: str, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Short."}, *LONG]
    source = jsonl(tmp_path / "a.jsonl", {"messages": chat}, {"messages": [USER, ANSWER]})
    spec = DataSpec(source=str(source), held_out=0.0, sequence_length=100, too_long=too_long)
    splits = open_splits(spec, open_tokenizer("bytes"), tmp_path / "c")
    records = splits.train
    texts = [
        "".join(records.tokenizer.shown([t]) for t, _ in records.documents(i)[0])
        for i in range(records.records)
    ]
    [said] = [s for s in splits.sentences() if "too long" in s]
    if too_long == "cut":
        assert (
            said.startswith("too long for a sequence: 1 records cut") and records.note(0) == "cut at its end"
        )
        assert len(texts) == 2 and len(texts[0].encode()) > 80
    elif too_long == "drop":
        assert said == "too long for a sequence: 1 records dropped; data.too_long is drop"
        assert texts == ["User: Q1?\n\nAssistant: B1.<end>"]
    else:
        assert said == "too long for a sequence: 1 chats divided between exchanges"
        assert len(texts) == 4
        for number, text in enumerate(texts[:3]):
            first, second = LONG[4 * number], LONG[4 * number + 2]
            assert text.startswith(f"System: Short.\n\nUser: {first['content']}")
            assert f"User: {second['content']}" in text and text.endswith(
                f"{LONG[4 * number + 3]['content']}<end>"
            )
        trained = sum(chosen for i in range(3) for _, chosen in records.documents(i)[0])
        assert trained == 6 * (len(" a0a0a0a0a0") + 1)  # every answer once, with its end


def test_records_of_which_nothing_is_trained_on_are_counted(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"messages": [USER, {**ANSWER, "weight": 0}]}, {"messages": TWO})
    spec = DataSpec(source=str(source), held_out=0.0)
    splits = open_splits(spec, open_tokenizer("bytes"), tmp_path / "c")
    assert "1 records dropped: none of their answers is trained on" in splits.sentences()
    assert splits.train.cache.header.documents == 1


def test_plain_text_has_no_records_to_drop(tmp_path: Path) -> None:
    spec = DataSpec(source=str(jsonl(tmp_path / "a.jsonl", {"text": "plain"})), too_long="drop")
    with pytest.raises(DataError, match="too_long: drop does not apply"):
        open_splits(spec, open_tokenizer("bytes"), tmp_path / "c")


def test_a_leading_blank_is_added_to_a_text_and_not_to_a_completion(tmp_path: Path) -> None:
    """Tokenizers of SentencePiece put a blank before a text."""
    words = {"<unk>": 0, "</s>": 1, "▁A": 2, ":": 3, "▁the": 4, "▁": 5, "the": 6}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={**words, **{c: 7 + i for i, c in enumerate("Ath e")}},
        merges=[], unk_token="<unk>"))  # fmt: skip
    vocab = {token: number for number, token in enumerate(["<unk>", "</s>", *"▁A:the", "▁t", "he", "▁the"])}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>")
    )
    norm = tokenizers.normalizers
    backend.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.save_pretrained(tmp_path / "t")
    tokenizer = open_tokenizer(str(tmp_path / "t"))
    tokens, trained = Encoder(DataSpec(), "prompt", tokenizer).encode(
        Record({"prompt": "A: ", "completion": "the"}, "x")
    )
    assert tokens == [*made.encode("A: the", add_special_tokens=False), 1]
    assert tokens == [vocab[t] for t in ("▁", "A", ":", "▁the", "</s>")]
    assert trained == [False, False, False, True, True]
