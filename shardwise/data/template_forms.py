"""A compiled chat template, with the forms of content and of arguments that it reads.

Templates differ in two forms. Content is a text for most, and a list of parts for some of vision models. The arguments
of a call are an object for most, and JSON text for some (DeepSeek). Both are found out by rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any, TypeVar

import jinja2

from shardwise.data.rendering import JinjaTemplate, TemplateMessage
from shardwise.data.turns import REASONING, Turn

T = TypeVar("T")

# Words of the chat that a template is tried with.
QUESTION = "Xquestionx"
ANSWER = "Xanswerx"

_AS_JSON = re.compile(rf"({QUESTION}|{ANSWER})['\"]\s*}}")
"""A word as the last value of a printed object: the template has printed the parts instead of reading them."""


class TemplateForms:
    """A template and the forms of content and arguments that it reads."""

    def __init__(self, jinja: JinjaTemplate, special: Mapping[str, str]) -> None:
        self.jinja = jinja
        self._arguments_as_text = False
        self._reads_text = self._writes(special, QUESTION, ANSWER)
        parts_of_question = [{"type": "text", "text": QUESTION}]
        parts_of_answer = [{"type": "text", "text": ANSWER}]
        self._reads_parts = self._writes(special, parts_of_question, parts_of_answer)

    def _writes(self, special: Mapping[str, str], question: object, answer: object) -> bool:
        """Whether the template writes both turns of a chat, and not the JSON around them."""
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            text = self.jinja.plain(chat, special, date(2000, 1, 1))
        except Exception:  # it rejects this form
            return False
        return QUESTION in text and ANSWER in text and not _AS_JSON.search(text)

    def rendered(self, turns: Sequence[Turn], render: Callable[[list[TemplateMessage]], T]) -> T:
        """Render turns; if the template rejects them, with the calls' arguments in the other form.

        Raises what the template raises.
        """
        try:
            return render(self.messages(turns))
        except (TypeError, jinja2.TemplateError) as error:
            if not any(turn.calls for turn in turns):
                raise
            # The other form stays if it works: the next chat with calls is likely the same.
            self._arguments_as_text = not self._arguments_as_text
            try:
                return render(self.messages(turns))
            except Exception:
                self._arguments_as_text = not self._arguments_as_text
                raise error from None

    def messages(self, turns: Sequence[Turn]) -> list[TemplateMessage]:
        return [self._message(turn) for turn in turns]

    def _message(self, turn: Turn) -> dict[str, object]:
        """A turn as this template reads it."""
        content: object = turn.content
        if isinstance(content, list) and not self._reads_parts:
            content = turn.text
        elif isinstance(content, str) and self._reads_parts and not self._reads_text:
            content = [{"type": "text", "text": content}]
        message: dict[str, object] = {"role": turn.role, "content": content, **turn.keys}
        reasoning = next((turn.keys[key] for key in REASONING if key in turn.keys), None)
        if reasoning is not None:
            # Templates read one key or the other; a ``thinking`` of the turn itself stays.
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if turn.calls:
            message["tool_calls"] = [self._call(call) for call in turn.calls]
        return message

    def _call(self, call: Mapping[str, Any]) -> dict[str, object]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and not self._arguments_as_text:
            with suppress(ValueError):
                arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and self._arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}
