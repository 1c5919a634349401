"""The turns of a chat, parsed and checked.

Messages are those of OpenAI's API and of transformers' chat templates: an assistant's turn may call tools
(`tool_calls`, with null as content), whose answers follow as tool turns; content may be a list of text parts.
`function_call` and the role `function` are those of OpenAI's API before tools. ShareGPT and LLaMA-Factory write `from`
and `value`. All further keys of a turn (`name`, `tool_call_id`, `reasoning_content`) go to the template. Three keys say
whether an answer is trained on: `weight` of OpenAI's fine-tuning format (0 or 1), `train` of Axolotl and `loss` of
ms-swift (true or false). Images and audio are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from shardwise.core.errors import DataError
from shardwise.data.readers import checked_text, json_kind

_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "tool": "tool", "function_call": "function_call",
    "observation": "tool", "function_response": "tool", "function": "tool",
}  # fmt: skip
"""Names of roles, those of ShareGPT and LLaMA-Factory among them. A function_call is an assistant's turn."""

TRAINED_KEYS = ("weight", "train", "loss")
"""Keys of a turn that say whether it is trained on."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn's reasoning, in the order of preference of transformers."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat.

    Attributes:
        role: system, developer, user, assistant or tool.
        content: a text, or a list of text parts as OpenAI's API writes them.
        calls: an assistant's tool calls, in OpenAI's form; arguments are an object or its JSON text.
        trained: whether the loss counts this answer; of turns of an assistant.
        weight_key: the key that leaves it out of the loss, if one does.
        keys: further keys of the turn, for the template.
    """

    role: str
    content: str | list[dict[str, Any]]
    calls: tuple[Mapping[str, Any], ...] = ()
    trained: bool = True
    weight_key: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part["text"] for part in self.content)


def turns_of(
    fields: Mapping[str, object], name: str, keys: tuple[str, str], where: str, empty: bool = False
) -> tuple[Turn, ...]:
    """The turns of a list of messages; `keys` name the role and the content where a turn has neither spelling.

    Args:
        empty: whether an answer may be empty.
    """
    value = parsed_json(fields[name])
    if not isinstance(value, list) or not value:
        why = "it is empty" if isinstance(value, list) else f"it is of type {json_kind(value)}"
        fix = f'write [{{"{keys[0]}": ..., "{keys[1]}": ...}}, ...]'
        raise DataError(f"'{name}' is not a list of turns", where=where, why=why, fix=fix)
    return tuple(_turn(item, keys, f"{name}[{number}]", where, empty) for number, item in enumerate(value))


def _turn(item: object, keys: tuple[str, str], path: str, where: str, empty: bool) -> Turn:
    if not isinstance(item, dict):
        why = f"it is of type {json_kind(item)}"
        fix = f'write {{"{keys[0]}": ..., "{keys[1]}": ...}}'
        raise DataError(f"'{path}' is not an object", where=where, why=why, fix=fix)
    spellings = (keys, ("role", "content"), ("from", "value"))
    role_key, text_key = next((pair for pair in spellings if item.get(pair[0]) is not None), keys)
    calls = _calls(item.get("tool_calls"), f"{path}.tool_calls", where)
    calls = calls or _calls(item.get("function_call"), f"{path}.function_call", where)
    for key in (role_key,) if calls else (role_key, text_key):
        if item.get(key) is None:
            why = f"the turn has {', '.join(map(str, item)) or 'nothing'}"
            fix = f"give every turn {role_key} and {text_key}"
            raise DataError(f"no '{path}.{key}'", where=where, why=why, fix=fix)
    name = item[role_key]
    if not isinstance(name, str) or name not in _ROLES:
        where = f"{where}: {path}.{role_key}"
        why = f"known are {', '.join(_ROLES)}"
        raise DataError(f"unknown role {name!r}", where=where, why=why)
    role = _ROLES[name]
    content = _content_of_turn(item.get(text_key), f"{path}.{text_key}", where, calls)
    if role == "function_call":
        role = "assistant"
        calls = _calls(parsed_json(content), f"{path}.{text_key}", where)
        content = ""
    read = (role_key, text_key, "tool_calls", "function_call", *TRAINED_KEYS)
    more = {key: value for key, value in item.items() if key not in read and value is not None}
    for key, value in more.items():
        check_texts(value, f"{path}.{key}", where)
    trained_key, trained = _trained_key(item, path, where)
    if role != "assistant" and trained_key is not None and trained:
        more[trained_key] = item[trained_key]  # Axolotl trains on such a turn; here it is listed as not read
    turn = Turn(role, content, calls, trained, None if trained else trained_key, more)
    needs_words = not empty and role == "assistant" and turn.trained and not calls
    if needs_words and not any(more.get(key) for key in REASONING):
        require_words(turn.text, f"{path}.{text_key}", where)
    return turn


def _trained_key(item: Mapping[str, object], path: str, where: str) -> tuple[str | None, bool]:
    """The key of a turn that says whether it is trained on, and what it says."""
    for key in TRAINED_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            what = f"'{path}.{key}' is {value!r}"
            why = "an answer is trained on or it is not"
            raise DataError(what, where=where, why=why, fix="write 0 or 1")
        return key, bool(value)
    return None, True


def _content_of_turn(
    content: object, path: str, where: str, calls: tuple[Mapping[str, Any], ...]
) -> str | list[dict[str, Any]]:
    """A text, or OpenAI's text parts, checked."""
    if content is None and calls:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return text_in(content, path, where)
    for number, part in enumerate(content):
        if part.get("type") != "text":
            what = f"'{path}[{number}]' is not text"
            why = f"its type is {part.get('type')}"
            raise DataError(what, where=where, why=why, fix="leave it out; only text can be trained on")
        text_in(part.get("text"), f"{path}[{number}].text", where)
    return content


def _calls(value: object, path: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """Tool calls as {"type": "function", "function": {"name": ..., "arguments": ...}}, with all their other keys."""
    if value is None or value == []:
        return ()
    fix = 'write [{"type": "function", "function": {"name": ..., "arguments": {...}}}, ...]'
    calls: list[Mapping[str, Any]] = []
    # ``function_call`` of OpenAI's API before tools is one call, and the function alone.
    for item in value if isinstance(value, list) else [value]:
        call: Mapping[str, Any] = item if isinstance(item, dict) else {}
        wrapped = call if "function" in call else {"function": call}
        function = wrapped["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"'{path}' is not a list of tool calls", where=where, fix=fix)
        check_texts(call, path, where)
        kind = {} if "type" in wrapped else {"type": "function"}
        whole = function if "arguments" in function else {**function, "arguments": {}}
        calls.append({**kind, **wrapped, "function": whole})  # in the order of the record: templates print it
    return tuple(calls)


def parsed_json(value: object) -> object:
    """The JSON value that a text holds; any other value as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def tools_in(tools: object, where: str) -> list[object] | None:
    """The tools that a chat offers, as JSON schemas; None if it has none."""
    tools = parsed_json(tools)
    if tools is None or tools == [] or tools == "":
        return None
    if not isinstance(tools, list):
        fix = "write the list of the functions' JSON schemas"
        raise DataError("'tools' is not a list", where=where, fix=fix)
    check_texts(tools, "tools", where)
    return [parsed_json(tool) for tool in tools]


_AFTER = {"": "user", "system": "user", "developer": "user", "user": "assistant", "assistant": "user",
          "tool": "assistant"}  # fmt: skip


def require_order(turns: Sequence[Turn], name: str, where: str) -> None:
    """Require an optional system turn, then alternating user and assistant turns, the assistant last.

    The answers of tools stand between an assistant's calls and its next turn.
    """
    before = Turn("", "")
    for number, turn in enumerate(turns):
        expected = "tool" if before.calls else _AFTER[before.role]
        if number == 0:
            free = turn.role in ("system", "developer")
        else:
            both_system = number == 1 and before.role == "system" and turn.role == "developer"
            several_tools = turn.role == before.role == "tool"  # one call each
            free = both_system or several_tools
        before = turn
        if turn.role != expected and not free:
            raise DataError(
                "roles do not alternate",
                where=f"{where}: {name}[{number}]",
                why=f"found {turn.role}, expected {expected}",
                fix="write an optional system turn, then alternate user and assistant, with tools after their calls",
            )
    if turns[-1].role != "assistant":
        raise DataError(
            "nothing to complete",
            where=f"{where}: {name}",
            why=f"the last turn is {turns[-1].role}, not assistant",
            fix="end every chat with the assistant's answer",
        )


def said(value: object, key: str, where: str) -> str:
    """A text that must not be empty."""
    text = text_in(value, key, where)
    require_words(text, key, where)
    return text


def require_words(text: str, key: str, where: str) -> None:
    if not text.strip():
        raise DataError(
            f"'{key}' is empty", where=where, why="there is nothing to train on", fix="fill or remove it"
        )


def text_in(value: object, key: str, where: str) -> str:
    checked_text(value, key, where, fix="make it a string")
    return cast(str, value)


def check_texts(value: object, path: str, where: str) -> None:
    """Check every text inside a JSON value."""
    for text in _texts(value):
        text_in(text, path, where)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *_texts(item)) if isinstance(key, str) else _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
