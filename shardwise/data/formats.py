"""Formats of records: plain text, or a prompt and its completion.

    format     fields                                  becomes
    text       data.text_key                           plain text (see `split`)
    messages   messages: role and content              turns of a chat
    sharegpt   conversations: from and value           turns of a chat
    prompt     prompt, completion                      a prompt and its completion
    alpaca     instruction, output, perhaps input      a prompt of Stanford Alpaca's wording, and its completion

`auto` checks the fields of the source's first record in this order. A record with the text key is text. Every record
must have this format; the first one that differs ends the run with its position. A chat has an optional system turn,
then user and assistant turns that alternate, and ends with the assistant. Messages are those of OpenAI's API: an
assistant's turn may call tools (`tool_calls`, with null as content), whose answers follow as tool turns; content may be
a list of text parts; a record may list its `tools`. Images and audio are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from shardwise.core.errors import DataError
from shardwise.data.readers import Record, checked, kind_of
from shardwise.data.source import Source
from shardwise.recipe.sections import DataSpec

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
KEYS = tuple(dict.fromkeys(key for keys in (*_NEEDED.values(), ("input", "tools")) for key in keys))
"""All fields that some format reads."""

_SHAREGPT = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant",
}  # fmt: skip
_MESSAGES = {role: role for role in ("system", "user", "assistant", "tool")}

_ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the"
    " request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat; `role` is system, user, assistant or tool. `calls` are the tool calls of an assistant."""

    role: str
    text: str
    calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """A prompt, which may be empty, and its completion, which must not be empty."""

    prompt: str
    completion: str


Example = Completed | tuple[Turn, ...]


def format_of(spec: DataSpec, source: Source) -> str:
    """The format of a source's records: the one in the recipe, or the detected one.

    Raises:
        DataError: the recipe asks for completions, and the source is plain text.
    """
    name = spec.format if spec.format != "auto" else _detected(source.fields(), spec.text_key)
    if name == "text" and spec.train_on == "completion":
        raise DataError(
            "no completions in the data source",
            where=spec.source,
            why="its records are plain text, and data.train_on is completion",
            fix=f"give records of {', '.join(_NEEDED)}, or leave that key out",
        )
    return name


def _detected(fields: frozenset[str], text_key: str) -> str:
    if text_key in fields:
        return "text"
    return next((name for name, needed in _NEEDED.items() if fields.issuperset(needed)), "text")


def example_of(record: Record, name: str) -> Example:
    """Parse a record of the format `name`.

    Raises:
        DataError: the record does not have this format, or has nothing to complete.
    """
    fields, place = record.fields, record.place
    missing = [key for key in _NEEDED[name] if fields.get(key) is None]
    if missing:
        raise DataError(
            f"no '{missing[0]}'",
            where=place,
            why=f"data.format is {name}, and the record has {', '.join(fields) or 'nothing'}",
            fix=f"give every record {' and '.join(_NEEDED[name])}, or name its data.format",
        )
    if name == "messages":
        return _chat(fields["messages"], ("messages", "role", "content"), _MESSAGES, place)
    if name == "sharegpt":
        return _chat(fields["conversations"], ("conversations", "from", "value"), _SHAREGPT, place)
    if name == "alpaca":
        return _alpaca(fields, place)
    return Completed(
        _text(fields["prompt"], "prompt", place), _said(fields["completion"], "completion", place)
    )


def _alpaca(fields: Mapping[str, object], place: str) -> Completed:
    extra = _text(fields.get("input") or "", "input", place)
    prompt = _ALPACA.format(
        with_input=", paired with an input that provides further context" if extra else "",
        instruction=_said(fields["instruction"], "instruction", place),
        input=f"### Input:\n{extra}\n\n" if extra else "",
    )
    return Completed(prompt, _said(fields["output"], "output", place))


def _chat(
    value: object, keys: tuple[str, str, str], roles: Mapping[str, str], place: str
) -> tuple[Turn, ...]:
    """Check a list of messages and return its turns."""
    name, role_key, text_key = keys
    if not isinstance(value, list) or not value:
        why = "it is empty" if isinstance(value, list) else f"it is of type {kind_of(value)}"
        fix = f'write [{{"{role_key}": ..., "{text_key}": ...}}, ...]'
        raise DataError(f"'{name}' is not a list of turns", where=place, why=why, fix=fix)
    turns = tuple(
        _turn(item, (role_key, text_key), roles, f"{name}[{number}]", place)
        for number, item in enumerate(value)
    )
    _check_order(turns, name, place)
    return turns


def _turn(item: object, keys: tuple[str, str], roles: Mapping[str, str], path: str, place: str) -> Turn:
    role_key, text_key = keys
    if not isinstance(item, dict):
        why, fix = f"it is of type {kind_of(item)}", f'write {{"{role_key}": ..., "{text_key}": ...}}'
        raise DataError(f"'{path}' is not an object", where=place, why=why, fix=fix)
    said: dict[str, object] = item
    calls = _calls(said.get("tool_calls"), f"{path}.tool_calls", place) if text_key == "content" else ()
    for key in keys[: 1 if calls else 2]:
        if said.get(key) is None:
            why = f"the turn has {', '.join(map(str, said)) or 'nothing'}"
            raise DataError(
                f"no '{path}.{key}'", where=place, why=why, fix=f"give every turn {' and '.join(keys)}"
            )
    role = said[role_key]
    if not isinstance(role, str) or role not in roles:
        known = ", ".join(roles)
        raise DataError(
            f"unknown role {role!r}", where=f"{place}: {path}.{role_key}", why=f"known are {known}"
        )
    needed = _said if roles[role] == "assistant" and not calls else _text
    content = _joined(said.get(text_key), f"{path}.{text_key}", place)
    text = "" if calls and content is None else needed(content, f"{path}.{text_key}", place)
    return Turn(roles[role], text, calls)


def _joined(content: object, path: str, place: str) -> object:
    """A list of OpenAI's text parts as one text; other content as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    for number, part in enumerate(content):
        if part.get("type") != "text":
            what, why = f"'{path}[{number}]' is not text", f"its type is {part.get('type')}"
            raise DataError(what, where=place, why=why, fix="leave it out; only text can be trained on")
    return "".join(_text(part.get("text"), f"{path}[{n}].text", place) for n, part in enumerate(content))


def _calls(value: object, path: str, place: str) -> tuple[Mapping[str, Any], ...]:
    """Tool calls as chat templates read them: {"type": "function", "function": {"name": ..., "arguments": {...}}}."""
    if value is None or value == []:
        return ()
    fix = 'write [{"type": "function", "function": {"name": ..., "arguments": {...}}}, ...]'
    found: list[Mapping[str, Any]] = []
    for item in value if isinstance(value, list) else [value]:
        call: Mapping[str, Any] = item if isinstance(item, dict) else {}
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"'{path}' is not a list of tool calls", where=place, fix=fix)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):  # as OpenAI's API writes them
            with suppress(ValueError):
                arguments = json.loads(arguments)
        named = {key: call[key] for key in ("id",) if key in call}
        found.append({**named, "type": "function", "function": {**function, "arguments": arguments}})
    return tuple(found)


def tools_of(record: Record) -> list[object] | None:
    """The tools that a record of messages offers, as JSON schemas; None if it has none. Raises DataError."""
    tools = record.fields.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        fix = "write the list of the functions' JSON schemas"
        raise DataError("'tools' is not a list", where=record.place, fix=fix)
    return tools


_AFTER = {"": "user", "system": "user", "user": "assistant", "assistant": "user", "tool": "assistant"}


def _check_order(turns: tuple[Turn, ...], name: str, place: str) -> None:
    """Require an optional system turn, then alternating user and assistant turns, the assistant last.

    The answers of tools stand between an assistant's calls and its next turn.
    """
    before = Turn("", "")
    for number, turn in enumerate(turns):
        expected = "tool" if before.calls else _AFTER[before.role]
        free = turn.role == "system" if number == 0 else turn.role == before.role == "tool"
        before = turn
        if turn.role != expected and not free:
            raise DataError(
                "roles do not alternate",
                where=f"{place}: {name}[{number}]",
                why=f"found {turn.role}, expected {expected}",
                fix="write an optional system turn, then alternate user and assistant, with tools after their calls",
            )
    if turns[-1].role != "assistant":
        raise DataError(
            "nothing to complete",
            where=f"{place}: {name}",
            why=f"the last turn is {turns[-1].role}, not assistant",
            fix="end every chat with the assistant's answer",
        )


def _said(value: object, key: str, place: str) -> str:
    """A text that must not be empty."""
    text = _text(value, key, place)
    if not text.strip():
        raise DataError(
            f"'{key}' is empty", where=place, why="there is nothing to train on", fix="fill or remove it"
        )
    return text


def _text(value: object, key: str, place: str) -> str:
    checked(value, key, place, fix="make it a string")
    return cast(str, value)
