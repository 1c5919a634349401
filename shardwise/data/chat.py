"""Chats as text: the tokenizer's chat template, and the spans of the assistant's answers.

A chat template is a Jinja program that ships with the tokenizer (`chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`). transformers renders it in a sandbox. The result is text without spans. The spans of the
answers come from one of two methods:

1. The template marks them with `{% generation %}` … `{% endgeneration %}`.
2. Otherwise the chat is rendered twice for each answer: up to the answer with its opening (`add_generation_prompt`),
and
   including the answer. Each rendering must start with the one before. The difference is the answer and its end.

Some templates rewrite earlier turns when later ones follow, for example to drop earlier reasoning. Then neither method
works, and the run ends before the first step. Searching for the answer's words in the text would find the wrong place
if the user wrote the same words first.

`bytes` is Shardwise's own tokenizer and has the plain template below. Any other tokenizer without a template is
refused, because the opening of an answer must be the one that the model will see in use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.core.errors import DataError
from shardwise.data.formats import Turn

Tools = list[object] | None
"""JSON schemas of the functions that a chat may call."""

Part = tuple[str | None, bool]
"""(text, or None for the end-of-text token; whether the loss counts it)."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIX = "mark the assistant's answers with {% generation %} in chat_template.jinja next to the tokenizer"


class ChatTemplate:
    """A Jinja chat template.

    Attributes:
        source: the template's text.
        marked: whether the template marks the assistant's answers.
        special: special tokens that the template can write by name: bos_token, eos_token and so on.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source, self.special = source, dict(special)
        self.marked = bool(_MARKED.search(source))

    @property
    def fingerprint(self) -> str:
        return json.dumps([self.source, self.special])

    @property
    def way(self) -> str:
        """The method that finds the assistant's answers, in words."""
        return "{% generation %}" if self.marked else "comparing prefixes"

    def parts(self, turns: Sequence[Turn], place: str, tools: Tools = None) -> list[Part]:
        """The chat's text, split at the boundaries of the trained spans."""
        find = self._marked_spans if self.marked else self._compared_spans
        text, spans = find(turns, place, tools)
        answers = [turn.text.strip() for turn in turns if turn.role == "assistant"]
        found = [text[start:end] for start, end in spans]
        if len(found) != len(answers) or any(a not in part for a, part in zip(answers, found, strict=True)):
            raise _lost(place, f"{len(found)} spans do not contain the {len(answers)} answers")
        return list(_cut(text, spans))

    def opened(self, turns: Sequence[Turn], place: str) -> str:
        """The text of a chat up to the opening of the next answer."""
        return self._render(turns, place, None, opening=True)[0]

    def _marked_spans(
        self, turns: Sequence[Turn], place: str, tools: Tools
    ) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._render(turns, place, tools, marks=True)
        return text, [(start, end) for start, end in spans if end > start]

    def _compared_spans(
        self, turns: Sequence[Turn], place: str, tools: Tools
    ) -> tuple[str, list[tuple[int, int]]]:
        text, spans = "", []
        for number, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            opened, _ = self._render(turns[:number], place, tools, opening=True)
            closed, _ = self._render(turns[: number + 1], place, tools)
            if not opened.startswith(text) or not closed.startswith(opened):
                raise _lost(place, f"rendering turn {number} changes the text before it")
            text = closed
            spans.append((len(opened), len(closed)))
        return text, spans

    def _render(
        self, turns: Sequence[Turn], place: str, tools: Tools, opening: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        render = _renderer()
        messages = [_message(turn) for turn in turns]
        try:
            texts, spans = render(
                [messages],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=opening,
                return_assistant_tokens_mask=marks,
                **self.special,
            )
        except Exception as error:  # the template is foreign code and may raise anything
            raise DataError(
                "the chat template rejects this chat",
                where=place,
                why=f"{type(error).__name__}: {error}",
                fix="change the chat, or the template",
            ) from None
        return texts[0], spans[0] if marks else []


class PlainTemplate:
    """The template of `bytes`: a line with the role, and the end-of-text token after every answer."""

    fingerprint = "plain 1"
    way = "its own plain words"

    def opened(self, turns: Sequence[Turn], place: str) -> str:
        """The text of a chat up to the opening of the next answer. Ends of earlier answers are not in it."""
        return "".join(text or "" for text, _ in self.parts(turns, place)) + "Assistant:"

    def parts(self, turns: Sequence[Turn], place: str, tools: Tools = None) -> list[Part]:
        found: list[Part] = [(f"Tools: {json.dumps(tools)}\n\n", False)] if tools else []
        for turn in turns:
            if turn.role == "assistant":
                calls = "".join(f" {json.dumps(call['function'])}" for call in turn.calls)
                said = f" {turn.text}" if turn.text else ""
                found += [("Assistant:", False), (f"{said}{calls}", True), (None, True)]
            else:
                found.append((f"{turn.role.title()}: {turn.text}\n\n", False))
        return found


def _message(turn: Turn) -> dict[str, object]:
    """A turn as templates read it."""
    calls = {"tool_calls": list(turn.calls)} if turn.calls else {}
    return {"role": turn.role, "content": turn.text, **calls}


def template_next_to(path: Path) -> ChatTemplate | None:
    """The chat template in the folder of a `tokenizer.json`, or None."""
    settings: Any = {}
    with suppress(OSError, ValueError):  # missing, or without a template
        settings = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings = settings if isinstance(settings, dict) else {}
    special = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    try:
        source: object = (path.parent / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        source = settings.get("chat_template")
    return template_of(source, {key: value for key, value in special.items() if value})


def template_of(source: object, special: Mapping[str, str]) -> ChatTemplate | None:
    """The template in a tokenizer's settings, which hold one text or several by name."""
    if isinstance(source, list):
        source = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
    if isinstance(source, dict):
        source = source.get("default")
    return ChatTemplate(source, special) if isinstance(source, str) and source else None


def _content(token: object) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[Part]:
    """Split `text` into parts; the loss counts the parts within `spans`."""
    done = 0
    for start, end in spans:
        if start > done:
            yield text[done:start], False
        yield text[start:end], True
        done = end
    if done < len(text):
        yield text[done:], False


def _lost(place: str, why: str) -> DataError:
    return DataError(
        "cannot find the assistant's answers in the rendered chat", where=place, why=why, fix=_FIX
    )


def _renderer() -> Any:
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        raise DataError(
            "cannot render a chat template",
            where="data.tokenizer",
            why="the package transformers is not installed",
            fix="pip install 'shardwise[hf]'",
        ) from None
    return render_jinja_template
