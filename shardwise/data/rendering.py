"""Render a Jinja chat template, and find which message wrote which part of the text.

A chat template is a program that ships with a tokenizer. It writes one text and no positions. Shardwise compiles the
template with one addition: each pass of a loop over messages first writes a mark, one private-use character that
names the message. So does the first ``{% set message = messages[i] %}`` in a loop over numbers. Taking the marks out
gives the text, and their positions are the boundaries of the messages. So a chat is rendered as a whole, in a time
linear in its turns, also by templates that render a turn differently when others follow. The blocks
``{% generation %}`` of transformers are marked the same way.

The marked and the plain rendering must agree. They differ where a template measures or trims captured text; such a
chat is refused.

The environment is that of transformers (`utils/chat_template_utils.py`): a sandbox, `tojson` without escapes of HTML,
`raise_exception`, `strftime_now`. Only the date differs: it is an argument, so that a run renders alike on every day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.data.spans import TextSpan

TemplateMessage = Mapping[str, Any]
"""A message as templates read it: role, content and any further keys."""

# Functions that the compiled template calls.
_ENTER = "shardwise_enter"
_SET = "shardwise_set"
_LEAVE = "shardwise_leave"
_GENERATED = "shardwise_generated"

_PLANES = (0x100000, 0xF0000)
"""Private-use planes of Unicode. The marks come from the first one that the chat itself does not use."""

# Offsets in a plane: text of no message, the start and the end of a generation block. Lower ones are messages.
_OUTSIDE = 0xFFFB
_OPENED = 0xFFFC
_CLOSED = 0xFFFD


class MarkedTextDiffers(Exception):
    """The template writes another text when it is marked."""


@dataclass(frozen=True)
class Rendered:
    """A rendered chat.

    Attributes:
        text: as transformers' ``apply_chat_template`` renders it.
        messages: the spans that each message wrote, in order, without empty ones.
        generated: the spans of the template's ``{% generation %}`` blocks.
    """

    text: str
    messages: tuple[tuple[TextSpan, ...], ...]
    generated: tuple[TextSpan, ...]


class JinjaTemplate:
    """A compiled chat template.

    Attributes:
        variables: names of further values that the template reads from its caller.
        words: the names of attributes and the string constants in the template: any key that it reads is in it.
        marked: whether the template has ``{% generation %}`` blocks.

    Raises:
        jinja2.TemplateError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = _template_environment()
        tree = environment.parse(source)
        names = frozenset(meta.find_undeclared_variables(tree)) - {_GENERATED, *environment.globals}
        self.variables = names - {"messages", "tools", "add_generation_prompt", "strftime_now"}
        self.words = frozenset(_words_in(tree))
        self.marked = any(
            isinstance(call, nodes.CallBlock)
            and isinstance(call.call.node, nodes.Name)
            and call.call.node.name == _GENERATED
            for call in tree.find_all(nodes.CallBlock)
        )
        _mark_loops(tree)  # after the variables were listed: the calls added here are none of the caller's
        self._template = environment.from_string(tree)

    def plain(self, messages: Sequence[TemplateMessage], variables: Mapping[str, object], today: date) -> str:
        """The text. Raises what the template raises."""

        def nothing(*_: object) -> str:
            return ""

        functions = {_ENTER: nothing, _SET: nothing, _LEAVE: nothing, _GENERATED: lambda caller: caller()}
        return self._template.render(**self._context(messages, variables, today), **functions)

    def render(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, object], today: date
    ) -> Rendered:
        """The text and the spans of its messages.

        Raises:
            MarkedTextDiffers: the marks change the text.
            Exception: whatever the template raises.
        """
        text = self.plain(messages, variables, today)
        # A chat may have characters of a private-use plane itself. Then the other plane has the marks.
        plane = next((plane for plane in _PLANES if not _marks_of(plane).search(text)), None)
        if plane is None or len(messages) >= _OUTSIDE:
            raise MarkedTextDiffers
        marks = _Marks(messages, plane)  # it knows messages by identity: two may have equal texts
        marked = self._template.render(**self._context(messages, variables, today), **marks.functions)
        rendered = _unmarked(marked, plane, len(messages))
        if rendered.text != text:
            raise MarkedTextDiffers
        return rendered

    def _context(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, object], today: date
    ) -> dict[str, object]:
        now = datetime.combine(today, time())
        defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
        return {**defaults, **variables, "messages": list(messages), "strftime_now": now.strftime}


class _Marks:
    """The functions that write marks during one rendering."""

    def __init__(self, messages: Sequence[TemplateMessage], plane: int) -> None:
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._messages = messages
        self._plane = plane
        self._open: list[tuple[int, int]] = []  # (loop, message) of each open loop that writes messages
        self._over_messages: set[int] = set()

    @property
    def functions(self) -> dict[str, Callable[..., str]]:
        return {_ENTER: self._enter, _SET: self._set, _LEAVE: self._leave, _GENERATED: self._generated}

    def _enter(self, loop: int, item: object) -> str:
        """A pass of a loop begins. Loops over tools, parts or numbers write no mark."""
        if id(item) in self._numbers:
            self._over_messages.add(loop)
        return self._mark(loop, item)

    def _set(self, loop: int, item: object) -> str:
        """A loop has set its first variable from a list: in a loop over numbers, the message of this pass."""
        return "" if loop in self._over_messages else self._mark(loop, item)

    def _mark(self, loop: int, item: object) -> str:
        number = self._numbers.get(id(item))
        if number is None:
            return ""
        if self._open and self._open[-1][0] == loop:
            self._open.pop()  # the pass before
        # A loop inside the pass of another message may write the outputs of tools (Gemma 4). It writes no answers:
        # Command R counts the calls of all messages there.
        if self._open and self._messages[number].get("role") == "assistant":
            return chr(self._plane + self._open[-1][1])
        self._open.append((loop, number))
        return chr(self._plane + number)

    def _leave(self, loop: int) -> str:
        """A loop has ended: the text that follows belongs to the loop around it."""
        if not self._open or self._open[-1][0] != loop:
            return ""
        self._open.pop()
        return chr(self._plane + (self._open[-1][1] if self._open else _OUTSIDE))

    def _generated(self, caller: Callable[[], str]) -> str:
        return f"{chr(self._plane + _OPENED)}{caller()}{chr(self._plane + _CLOSED)}"


def _unmarked(marked: str, plane: int, count: int) -> Rendered:
    """Take the marks out of a text of `count` messages."""
    parts = _marks_of(plane).split(marked)  # text, mark, text, mark, ..., text
    spans: list[list[TextSpan]] = [[] for _ in range(count)]
    generated: list[TextSpan] = []
    owner = _OUTSIDE
    opened = 0
    end = len(parts[0])
    for mark, text in zip(parts[1::2], parts[2::2], strict=True):
        code = ord(mark) - plane
        start = end
        end += len(text)
        if code == _OPENED:
            opened = start
        elif code == _CLOSED:
            generated.append((opened, start))
        else:
            owner = code
        if owner != _OUTSIDE and text:
            owned = spans[owner]
            if (
                owned and owned[-1][1] == start
            ):  # the mark of a generation block, or of a loop inside the message
                start = owned.pop()[0]
            owned.append((start, end))
    return Rendered("".join(parts[::2]), tuple(map(tuple, spans)), tuple(generated))


def _marks_of(plane: int) -> re.Pattern[str]:
    return re.compile(f"([{chr(plane)}-{chr(plane + _CLOSED)}])")


def _mark_loops(tree: nodes.Template) -> None:
    """Add calls to each loop with one variable: at the start of its body, after its first `set`, and after the loop."""
    loops = [(loop, body) for body in _bodies(tree) for loop in body if isinstance(loop, nodes.For)]
    for number, (loop, around) in enumerate(loops):
        if not isinstance(loop.target, nodes.Name):
            continue
        assigned = next(_assignments(loop), None)
        if assigned is not None:
            assign, body = assigned
            _insert_after(assign, body, _call_node(_SET, number, _target_name(assign.target), assign.lineno))
        loop.body.insert(0, _call_node(_ENTER, number, _target_name(loop.target), loop.lineno))
        _insert_after(loop, around, _call_node(_LEAVE, number, None, loop.lineno))


def _insert_after(node: nodes.Node, body: list[nodes.Node], added: nodes.Node) -> None:
    # Not `body.index`: nodes are equal where their content is, and a body may have the same loop twice.
    body.insert(next(n for n, other in enumerate(body) if other is node) + 1, added)


def _assignments(loop: nodes.For) -> Iterator[tuple[nodes.Assign, list[nodes.Node]]]:
    """Each ``set name = list[index]`` of a loop, with the list of nodes that holds it; not those of inner loops."""
    for body in _bodies(loop, through_loops=False):
        for node in body:
            if (
                isinstance(node, nodes.Assign)
                and isinstance(node.target, nodes.Name)
                and isinstance(node.node, nodes.Getitem)
            ):
                yield node, body


def _bodies(node: nodes.Node, through_loops: bool = True) -> list[list[nodes.Node]]:
    """All lists of statements below a node."""
    bodies = []
    for _, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        if isinstance(value, list):
            bodies.append(value)
        for child in children:
            if isinstance(child, nodes.Node) and (through_loops or not isinstance(child, nodes.For)):
                bodies += _bodies(child, through_loops)
    return bodies


def _target_name(target: nodes.Node) -> str:
    assert isinstance(target, nodes.Name)
    return str(target.name)


def _call_node(function: str, loop: int, variable: str | None, line: int) -> nodes.Output:
    arguments: list[nodes.Expr] = [nodes.Const(loop)]
    if variable is not None:
        arguments.append(nodes.Name(variable, "load"))
    call = nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)
    output = nodes.Output([call])
    output.set_lineno(line)
    return output


def _all_nodes(tree: nodes.Node) -> Iterator[nodes.Node]:
    yield tree
    for child in tree.iter_child_nodes():
        yield from _all_nodes(child)


def _words_in(tree: nodes.Template) -> Iterator[str]:
    for node in _all_nodes(tree):
        if isinstance(node, nodes.Getattr):
            yield node.attr
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield node.value


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` of transformers: a block of its own scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name(_GENERATED, "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


def _template_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_in_template
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_in_template(message: str) -> None:
    raise jinja2.TemplateError(message)
