"""Chats as text: a tokenizer's own chat template, and which parts of what it writes the assistant says.

A template is a program in Jinja's language that ships with the tokenizer (`chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`); transformers renders it, in a sandbox. It yields text, not spans. Two ways lead to them:

1. the template marks them itself, with `{% generation %}` … `{% endgeneration %}`;
2. else the chat is rendered up to each answer, with the opening of that answer (`add_generation_prompt`), and up to and
   with it. Each rendering must begin with the one before; what the second has more is the answer and what ends it.

Where neither holds, as for templates that rewrite earlier turns when later ones come (models that drop their former
thoughts), the span cannot be found, and the run ends before the first step. Refused: searching the answer's words in
the text, which finds the wrong place when the user said them first; and training on the whole chat instead.

`bytes` is Shardwise's own tokenizer and brings the plain template below. Any other tokenizer without one is refused:
which words open an answer is for whoever will use the model to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.core.errors import DataError
from shardwise.train.data.formats import Turn

Part = tuple[str | None, bool]
"""Text, or None for the token that ends a text; and whether it is trained on."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIX = "mark what the assistant says with {% generation %} in chat_template.jinja beside the tokenizer"


class ChatTemplate:
    """A template in Jinja's language.

    Attributes:
        source: its text.
        marked: whether it marks what the assistant says.
        special: what it may write by name: bos_token, eos_token and so on.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source, self.special = source, dict(special)
        self.marked = bool(_MARKED.search(source))

    @property
    def fingerprint(self) -> str:
        return json.dumps([self.source, self.special])

    @property
    def way(self) -> str:
        """How what the assistant says is found, for people."""
        return "{% generation %}" if self.marked else "comparing prefixes"

    def parts(self, turns: Sequence[Turn], place: str) -> list[Part]:
        """The chat's text, cut where what is trained on begins and ends."""
        cuts = self._marked_spans(turns, place) if self.marked else self._compared_spans(turns, place)
        text, spans = cuts
        answers = [turn.text.strip() for turn in turns if turn.role == "assistant"]
        found = [text[start:end] for start, end in spans]
        if len(found) != len(answers) or any(a not in part for a, part in zip(answers, found, strict=True)):
            raise _lost(place, f"{len(answers)} answers, and {len(found)} spans that do not hold them")
        return list(_cut(text, spans))

    def _marked_spans(self, turns: Sequence[Turn], place: str) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._render(turns, place, marks=True)
        return text, [(start, end) for start, end in spans if end > start]

    def _compared_spans(self, turns: Sequence[Turn], place: str) -> tuple[str, list[tuple[int, int]]]:
        text, spans = "", []
        for number, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            opened, _ = self._render(turns[:number], place, opening=True)
            closed, _ = self._render(turns[: number + 1], place)
            if not opened.startswith(text) or not closed.startswith(opened):
                raise _lost(place, f"the text up to turn {number} does not go on as it was before")
            text = closed
            spans.append((len(opened), len(closed)))
        return text, spans

    def _render(
        self, turns: Sequence[Turn], place: str, opening: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        render = _renderer()
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            texts, spans = render(
                [messages],
                chat_template=self.source,
                add_generation_prompt=opening,
                return_assistant_tokens_mask=marks,
                **self.special,
            )
        except Exception as error:  # a program of others: it may raise anything, and says so in its own words
            raise DataError(
                "the chat template does not take this chat",
                where=place,
                why=f"{type(error).__name__}: {error}",
                fix="change the chat, or the template",
            ) from None
        return texts[0], spans[0] if marks else []


class PlainTemplate:
    """What `bytes` has: a line that names who speaks, and the token that ends a text after every answer."""

    fingerprint = "plain 1"
    way = "its own plain words"

    def parts(self, turns: Sequence[Turn], place: str) -> list[Part]:
        found: list[Part] = []
        for turn in turns:
            if turn.role == "assistant":
                found += [("Assistant:", False), (f" {turn.text}", True), (None, True)]
            else:
                found.append((f"{turn.role.title()}: {turn.text}\n\n", False))
        return found


def beside(path: Path) -> ChatTemplate | None:
    """The chat template in the folder of a `tokenizer.json`; None where there is none."""
    settings: Any = {}
    with suppress(OSError, ValueError):  # absent, or not for this
        settings = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings = settings if isinstance(settings, dict) else {}
    special = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    try:
        source: object = (path.parent / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        source = settings.get("chat_template")
    return template_of(source, {key: value for key, value in special.items() if value})


def template_of(source: object, special: Mapping[str, str]) -> ChatTemplate | None:
    """The template among what a tokenizer's settings say: a text, or several by name."""
    if isinstance(source, list):
        source = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
    if isinstance(source, dict):
        source = source.get("default")
    return ChatTemplate(source, special) if isinstance(source, str) and source else None


def _content(token: object) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[Part]:
    """`text` in parts, of which those within `spans` are trained on."""
    done = 0
    for start, end in spans:
        if start > done:
            yield text[done:start], False
        yield text[start:end], True
        done = end
    if done < len(text):
        yield text[done:], False


def _lost(place: str, why: str) -> DataError:
    return DataError("the chat template hides what the assistant says", where=place, why=why, fix=_FIX)


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
