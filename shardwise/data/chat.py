"""Chats as text: the tokenizer's chat template, and the spans of the assistant's answers.

A chat template is a Jinja program that ships with the tokenizer (`chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`). A chat is rendered once, as a whole (`rendering`). What an assistant's turn wrote begins with
the opening that the model sees in use (`add_generation_prompt`), as far as both agree. The answer is the rest, with
the end of the turn. Where the template marks its answers with ``{% generation %}``, they are those blocks.

Some templates rewrite earlier turns when later ones follow, for example to drop earlier reasoning. An answer is then
trained on as the whole chat has it.

Nothing of a chat may vanish. A chat whose rendered text lacks a turn, a call or a tool is refused. Keys of a turn that
the template never names are listed once (`unread`).

Three conventions are those of transformers (`apply_chat_template`): reasoning is passed as `reasoning_content` and as
`thinking`, whatever its key; a chat with tools takes the template named `tool_use` where there is one; keys with null
are left out.

`bytes` is Shardwise's own tokenizer and has the plain template below. Any other tokenizer without a template is
refused, because the opening of an answer must be the one that the model will see in use.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import TypeVar

import jinja2

from shardwise.core.errors import DataError
from shardwise.data.chat_checks import lost_text, require_answer, require_turns
from shardwise.data.formats import Chat
from shardwise.data.rendering import JinjaTemplate, MarkedTextDiffers, Rendered, TemplateMessage
from shardwise.data.spans import TextSpan, joined
from shardwise.data.template_forms import ANSWER, QUESTION, TemplateForms
from shardwise.data.turns import REASONING, Turn, check_texts

T = TypeVar("T")

_PLAIN_TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n\n{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}Assistant:{% generation %}"
    "{% if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.content %} {{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %} {{ call.function | tojson }}{% endfor %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ message.role | title }}: {{ message.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template of `bytes`: a line with the role, and the end-of-text token after every answer."""

_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class ChatText:
    """The text of a chat.

    Attributes:
        trained: the spans that the loss counts.
        endless: how many of them do not end with a token that ends a turn.
    """

    text: str
    trained: tuple[TextSpan, ...]
    endless: int


class ChatTemplate:
    """The chat templates of a tokenizer.

    Args:
        sources: their texts by name; `default` is the one that transformers takes without a name.
        special: special tokens that they can write by name: bos_token, eos_token and so on.
        control: the text of each added token of the tokenizer.
        ends: the texts of tokens that are known to end a turn.

    Raises:
        DataError: a source is not a template.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special: Mapping[str, str],
        control: Iterable[str] = (),
        ends: Iterable[str] = (),
    ) -> None:
        self.sources = dict(sources)
        self.special = dict(special)
        self._control = tuple(sorted(set(control)))
        self._ends = tuple(sorted(set(ends)))
        self._openings: dict[object, tuple[str, str]] = {}
        self._compiled: dict[str, TemplateForms] = {}

    @property
    def fingerprint(self) -> str:
        return json.dumps([self.sources, self.special, self._ends])

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the templates read from their caller."""
        return frozenset().union(*(self._named(name).jinja.variables for name in self.sources))

    @property
    def dated(self) -> bool:
        """Whether a template writes the date."""
        return any("strftime_now" in source for source in self.sources.values())

    @property
    def way(self) -> str:
        """The method that finds the assistant's answers, in words."""
        return "{% generation %}" if self._for(None).jinja.marked else "the turns of the template"

    @cached_property
    def end(self) -> str | None:
        """The token that ends an answer and is not known as an end; None if there is none.

        gpt-oss ends earlier answers with another token than the last one, so this is that of the last.
        """
        turns = (Turn("user", QUESTION), Turn("assistant", ANSWER))
        try:
            written = self.written(Chat(turns), "the template", date(2000, 1, 1))
        except DataError:
            return None
        if not written.trained:
            return None
        after = written.text[slice(*written.trained[-1])].partition(ANSWER)[2]
        # Of several added tokens behind the answer, the last one ends it; a known end needs no other.
        tokens = [token for token in self._control if token in after]
        if not tokens or any(token in self._ends for token in tokens):
            return None
        return max(tokens, key=after.rfind)

    def opened(self, turns: Sequence[Turn], where: str, today: date | None = None) -> str:
        """The text of a chat up to the opening of the next answer. Raises DataError."""
        return self.text(Chat(tuple(turns)), where, today, opening=True)

    def text(self, chat: Chat, where: str, today: date | None = None, opening: bool = False) -> str:
        """The text of a chat, and with `opening` the start of the next answer. Raises DataError."""
        day = today or date.today()
        variables = {**self._variables(chat), "add_generation_prompt": opening}
        return self._rendered(chat, where, lambda forms, m: forms.jinja.plain(m, variables, day))

    def checked(self, chat: Chat, where: str, today: date) -> str:
        """The text of a chat in which every turn, call and tool is written. Raises DataError."""
        variables = self._variables(chat)

        def render(forms: TemplateForms, messages: list[TemplateMessage]) -> Rendered:
            with suppress(MarkedTextDiffers):
                return forms.jinja.render(messages, variables, today)
            # No span is known, and none is needed: all of the text stands for each message.
            text = forms.jinja.plain(messages, variables, today)
            return Rendered(text, (((0, len(text)),),) * len(messages), ())

        rendered = self._rendered(chat, where, render)
        for number, turn in enumerate(chat.turns):
            if turn.role == "assistant":
                spans = rendered.messages[number] or ((0, len(rendered.text)),)
                require_answer(rendered.text, spans, turn, f"{where}: turn {number}")
        require_turns(rendered, chat, where)
        return rendered.text

    def written(self, chat: Chat, where: str, today: date) -> ChatText:
        """The chat's text and the spans of its trained answers.

        Raises:
            DataError: the template rejects the chat, leaves something of it out, or its answers cannot be told apart.
        """
        variables = self._variables(chat)
        rendered = self._rendered(chat, where, lambda forms, m: forms.jinja.render(m, variables, today))
        trained: list[TextSpan] = []
        for number, turn in enumerate(chat.turns):
            if turn.role == "assistant":
                answer = self._answer(chat, number, rendered, today)
                require_answer(rendered.text, answer, turn, f"{where}: turn {number}")
                trained += answer if turn.trained else ()
        require_turns(rendered, chat, where)
        spans = joined(trained)
        ends = (*self._control, *self._ends)
        endless = sum(not rendered.text[start:end].rstrip().endswith(ends) for start, end in spans)
        return ChatText(rendered.text, spans, endless if ends else 0)

    def unread(self, chat: Chat) -> set[str]:
        """Fields of the record, and keys of its turns as `turn.KEY`, that the template does not name."""
        jinja = self._for(chat.tools).jinja
        words = jinja.words | set(REASONING if jinja.words.intersection(REASONING) else ())
        turns = {f"turn.{key}" for turn in chat.turns for key in turn.keys if key not in words}
        return turns | {key for key in chat.fields if key not in jinja.variables}

    def _answer(self, chat: Chat, number: int, rendered: Rendered, today: date) -> tuple[TextSpan, ...]:
        """The spans of an assistant's turn without the opening that the model sees, and with the token that ends it."""
        if self._for(chat.tools).jinja.marked:
            return _generated(rendered, number)
        text = rendered.text
        spans = list(rendered.messages[number])
        if not spans:
            return ()
        windows = _windows_before(chat.turns, number)
        openings = [text for window in windows for text in self._openings_of(chat, window, today)]
        # The opening is in the text of the turn, but the model does not write it. The longest that fits counts.
        start, end = spans[0]
        spans[0] = (start + max(_opening_length(text[start:end], opening) for opening in openings), end)
        start, end = spans[-1]
        spans[-1] = (start, self._end(text, start, end, openings, number == len(chat.turns) - 1))
        return tuple((start, end) for start, end in spans if start < end)

    def _end(self, text: str, start: int, end: int, openings: Sequence[str], last: bool) -> int:
        """Where an answer ends, whose turn writes the text from `start` to `end`."""
        if last:  # Phi-3 writes its end after the turns; Command R always opens a next answer there
            return end if text[end:] in openings else len(text)
        if text[start:end].rstrip().endswith(self._ends):
            return end
        blank = _BLANKS.match(text, end)
        behind = blank.end() if blank else end  # the first token of GLM's next turn ends an answer
        return next((behind + len(token) for token in self._ends if text.startswith(token, behind)), end)

    def _openings_of(self, chat: Chat, window: tuple[Turn, ...], today: date) -> tuple[str, str]:
        """The text that `add_generation_prompt` writes after the turns of a window. It depends on their roles alone.

        All of the text after the last turn (of DeepSeek's tools, the end of their outputs too), and the part of it that
        is there only with the option.
        """
        forms = self._for(chat.tools)
        variables = self._variables(chat)
        scalars = [(k, v) for k, v in sorted(variables.items()) if isinstance(v, str | int | float | bool)]
        # Templates see roles and options, so one rendering serves all chats of a data set.
        key = (id(forms), str(scalars), tuple((turn.role, bool(turn.calls)) for turn in window))
        if key not in self._openings:
            with_prompt = {**variables, "add_generation_prompt": True}
            try:
                opened = forms.rendered(window, lambda turns: forms.jinja.render(turns, with_prompt, today))
                closed = forms.rendered(window, lambda turns: forms.jinja.plain(turns, variables, today))
            except Exception:  # the template rejects the window alone
                self._openings[key] = ("", "")
            else:
                last = max((end for spans in opened.messages for _, end in spans), default=0)
                self._openings[key] = (opened.text[last:], opened.text[_common_length(opened.text, closed) :])
        return self._openings[key]

    def _variables(self, chat: Chat) -> dict[str, object]:
        """What the template reads from its caller."""
        names = self._for(chat.tools).jinja.variables
        return {**self.special, **{k: v for k, v in chat.fields.items() if k in names}, "tools": chat.tools}

    def _rendered(
        self, chat: Chat, where: str, render: Callable[[TemplateForms, list[TemplateMessage]], T]
    ) -> T:
        forms = self._for(chat.tools)
        for name in chat.fields.keys() & forms.jinja.variables:
            check_texts(chat.fields[name], name, where)
        try:
            return forms.rendered(chat.turns, lambda messages: render(forms, messages))
        except MarkedTextDiffers:
            raise lost_text(where, "the template measures or trims the text of several turns") from None
        except Exception as error:  # the template is foreign code and may raise anything
            why = f"{type(error).__name__}: {error}"
            what = "the chat template rejects this chat"
            raise DataError(what, where=where, why=why, fix="change the chat, or the template") from None

    def _for(self, tools: list[object] | None) -> TemplateForms:
        """The template that transformers takes: `tool_use` for a chat with tools if there is one, else the default."""
        return self._named("tool_use" if tools is not None and "tool_use" in self.sources else "default")

    def _named(self, name: str) -> TemplateForms:
        if name not in self._compiled:
            if name not in self.sources:
                why = f"there are {', '.join(self.sources)}"
                raise DataError(f"no chat template named {name}", where="data.tokenizer", why=why)
            try:
                self._compiled[name] = TemplateForms(JinjaTemplate(self.sources[name]), self.special)
            except jinja2.TemplateError as error:
                why = f"{type(error).__name__}: {error}"
                raise DataError(
                    "not a chat template", where="data.tokenizer", why=why, fix="correct it"
                ) from None
        return self._compiled[name]


def plain_template(end: str) -> ChatTemplate:
    """The template of `bytes`, whose answers end with the text `end`."""
    return ChatTemplate({"default": _PLAIN_TEMPLATE}, {"eos_token": end}, ends=(end,))


# -- where an answer begins


def _generated(rendered: Rendered, number: int) -> tuple[TextSpan, ...]:
    """The marked blocks within a message."""
    blocks = rendered.generated
    inside: list[TextSpan] = []
    for start, end in rendered.messages[number]:
        first = bisect_left(blocks, (start, start))  # blocks are in order
        for block in blocks[first:]:
            if block[0] >= end:
                break
            if block[1] > block[0]:
                inside.append(block)
    return tuple(inside)


def _windows_before(turns: Sequence[Turn], number: int) -> list[tuple[Turn, ...]]:
    """Short chats that an answer can follow: the last user's turn alone, and with the tool turns before the answer."""
    user = next((n for n in range(number - 1, -1, -1) if turns[n].role == "user"), None)
    system = tuple(turn for turn in turns[:2] if turn.role in ("system", "developer"))
    question = system if user is None else (*system, turns[user])
    first = number
    while first > 0 and turns[first - 1].role == "tool":
        first -= 1
    if first == number or first == 0:
        return [question]
    # With the turn before the tools' answers, which made the calls.
    return [question, (*question, *turns[first - 1 : number])]


def _opening_length(answer: str, opening: str) -> int:
    """Length of the opening at the start of an answer's text, up to the first difference and with other blanks."""
    if not opening.strip():
        return _common_length(answer, opening)
    blanks = len(answer) - len(answer.lstrip())
    same = _common_length(answer[blanks:], opening.lstrip())
    return blanks + same if same else _common_length(answer, opening)


def _common_length(a: str, b: str) -> int:
    """Length of the common start of two texts. It does not end inside a tag: <think> and <tool_call> begin alike."""
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tag = a.rfind("<", 0, same)  # the last tag that begins before the difference
    inside = same < min(len(a), len(b)) and tag >= 0 and ">" not in a[tag:same]
    return tag if inside else same
