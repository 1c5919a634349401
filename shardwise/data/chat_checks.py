"""Nothing of a chat may vanish: its rendered text has the words of every turn, the calls, and the tools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.core.errors import DataError
from shardwise.data.formats import Chat
from shardwise.data.rendering import Rendered
from shardwise.data.spans import TextSpan
from shardwise.data.turns import Turn, parsed_json

_WORD = re.compile(r"\w+")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_FIX = "mark the assistant's answers with {% generation %} in chat_template.jinja next to the tokenizer"


def require_answer(text: str, spans: Sequence[TextSpan], turn: Turn, where: str) -> None:
    """The spans hold the last words of an answer, and the names of its calls."""
    written = "".join(text[start:end] for start, end in spans)
    if not written.strip() and (turn.text or turn.calls):
        raise lost_text(where, "the template writes no text for it")
    # One word is enough: templates trim and escape texts, and the last word shows that nothing is cut off.
    last = _WORD.findall(turn.text.strip()[-200:])[-1:] or [turn.text.strip()]
    if last[0] not in written:
        raise lost_text(where, f"its text does not contain {last[0]!r}")
    calls = Counter(call["function"]["name"] for call in turn.calls)
    for call in turn.calls:
        name = call["function"]["name"]
        # Parallel calls share their name and often a value. A template that writes one call has its name once.
        if not _writes_call(written, call["function"]) or 0 < written.count(name) < calls[name]:
            raise DataError(
                f"the chat template does not write the call of {name}",
                where=where,
                why="the model would be trained on a turn without it",
                fix="use a template that writes tool_calls, or write the call as content",
            )


def _writes_call(text: str, function: Mapping[str, Any]) -> bool:
    """Whether a text has a call: its name and a value of its arguments, or all of these values without the name."""
    # ASCII alone: a template may write other characters as escapes. The longest word stands for its value.
    words_of_values = map(_ASCII_WORD.findall, _values_in(parsed_json(function["arguments"])))
    values = [max(words, key=len) for words in words_of_values if words]
    written = [value in text for value in values]
    if function["name"] in text:
        return any(written) or not values
    return bool(values) and all(written)


def _values_in(value: object) -> Iterator[str]:
    """The texts and numbers inside a JSON value, without the keys of its objects."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _values_in(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def require_turns(rendered: Rendered, chat: Chat, where: str) -> None:
    """The text holds every other turn and the names of all tools."""
    for number, turn in enumerate(chat.turns):
        # The longest word is the least likely to be in the text by chance.
        words = _WORD.findall(turn.text)
        word = max(words, key=len) if words else turn.text.strip()
        if turn.role != "assistant" and word not in rendered.text:
            why = "the model would not see it"
            fix = "use a template that writes this role, or remove the turn"
            what = f"the chat template does not write the {turn.role} turn"
            raise DataError(what, where=f"{where}: turn {number}", why=why, fix=fix)
    for tool in chat.tools or ():
        name = _tool_name(tool)
        if name is not None and name not in rendered.text:
            raise DataError(
                f"the chat template does not write the tool {name}",
                where=f"{where}: tools",
                why="the model would not see it",
                fix="use a template that writes tools, or remove them from the records",
            )


def _tool_name(tool: object) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def lost_text(where: str, why: str) -> DataError:
    """The error for an answer whose text is not known."""
    return DataError(
        "cannot find the assistant's answer in the rendered chat", where=where, why=why, fix=_FIX
    )
