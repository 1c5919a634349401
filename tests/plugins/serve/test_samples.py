"""Samples of a run: one readable turn of a record, and the answer of that turn alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.data.encoding import Encoder
from shardwise.data.readers import Record
from shardwise.data.tokenizer import open_tokenizer
from shardwise.plugins.serve.samples import Question, _question
from shardwise.recipe.sections import DataSpec
from tests.data import chat_templates as templates
from tests.data.test_chat import folder_of

TURNS = [
    ("system", "Be brief."),
    ("user", "the answer?\n\nGo on."),
    ("assistant", "assistant"),
    ("user", "again?"),
    ("assistant", "the answer"),
]
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nA default.<|im_end|>\n{% endif %}"
    + templates.CHATML
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    + ("{% if add_generation_prompt %}assistant: {% endif %}")
)
TEMPLATES = {
    "ChatML": templates.CHATML,
    "a default system": DEFAULT_SYSTEM,
    "Qwen3": templates.THINKING,
    "Phi-3": templates.TRAILING_END,
    "no tags": PLAIN,
}


def asked(
    tokenizer: str, record: dict[str, Any], name: str = "messages", tokens: int = 60, **spec: Any
) -> Question:
    opened = open_tokenizer(tokenizer)
    encoder = Encoder(DataSpec(**spec), name, opened)
    ids, trained = encoder.encode(Record(record, "here"))
    return _question(ids, trained, opened, opened.chat if encoder.chats else None, tokens)


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("train_on", ["completion", "all"])
@pytest.mark.parametrize("name", [*TEMPLATES, "bytes"])
@pytest.mark.parametrize("system", [True, False])
def test_a_sample_is_the_first_question_and_its_answer(
    name: str, train_on: str, system: bool, tmp_path: Path
) -> None:
    tokenizer = "bytes" if name == "bytes" else folder_of(tmp_path, TEMPLATES[name])
    found = asked(tokenizer, chat(*TURNS[not system :]), train_on=train_on)
    assert found.asked == "the answer?\n\nGo on."
    assert found.expected.replace("<think>", "").replace("</think>", "").strip() == "assistant"
    opening = {"Phi-3": "<|assistant|>\n", "no tags": "assistant:", "bytes": "Assistant:"}
    assert found.prompt.endswith(opening.get(name, "<|im_start|>assistant\n"))


def test_an_answer_that_is_not_trained_on_is_part_of_the_prompt(tmp_path: Path) -> None:
    record = chat(*TURNS)
    record["messages"][2]["weight"] = 0
    found = asked(folder_of(tmp_path, templates.CHATML), record)
    assert (found.asked, found.expected) == ("again?", "the answer")
    assert "assistant<|im_end|>" in found.prompt


def test_long_answers_are_cut_where_the_model_s_is(tmp_path: Path) -> None:
    tokenizer = folder_of(tmp_path, templates.CHATML)
    found = asked(tokenizer, chat(("user", "the answer?"), ("assistant", "the answer " * 20)), tokens=4)
    assert found.expected.endswith(" …") and len(open_tokenizer(tokenizer).encode(found.expected[:-2])) <= 4


def test_a_completion_is_that_of_its_prompt() -> None:
    found = asked("bytes", {"prompt": "One and one\nis", "completion": " two."}, "prompt")
    assert found == Question("One and one\nis", "One and one\nis", "two.")
