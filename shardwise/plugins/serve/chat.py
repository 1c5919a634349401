"""A conversation with a served model: the turns so far, rendered by the tokenizer's chat template.

The prompt of an answer is the text that training had before it: all turns, and the opening of an answer. When that and
the answer, or a quarter of the context, do not fit into it, the oldest exchange is left out, but not the system's turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.errors import DataError, RecipeError
from shardwise.data.chat import ChatTemplate
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.turns import Turn
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import ServedModel


class Conversation:
    """Turns with one model; every answer may be given by another adapter.

    Attributes:
        adapter: the name of the adapter that answers; None is the one that the run trained, or none.
        turns: the turns so far, that of the system first where there is one.
    """

    def __init__(
        self, served: ServedModel, sampling: Sampling, system: str = "", adapter: str | None = None
    ) -> None:
        """Raises DataError if the tokenizer has no chat template, or if its template rejects a turn of the system."""
        self.adapter = adapter
        self.turns = [Turn("system", system)] if system else []
        self._kept = len(self.turns)
        self._served, self._sampling = served, sampling
        self._template = template_of(served.tokenizer)
        self._template.opened([*self.turns, Turn("user", "Hi")], "the system's turn")

    def use(self, adapter: str) -> None:
        """Let another adapter answer from now on. Raises RecipeError if there is none of this name."""
        self._served.bank.require(adapter, "/adapter")
        self.adapter = adapter

    def clear(self) -> None:
        """Forget all turns but the system's."""
        del self.turns[self._kept :]

    def say(self, text: str) -> Iterator[str]:
        """The answer to the user's next turn, piece by piece. Both become turns when it has ended.

        Raises:
            DataError: the template rejects the chat.
            RecipeError: the turn alone is longer than the model's context.
        """
        before = list(self.turns)
        answer = ""
        self.turns.append(Turn("user", text))
        try:
            for piece in self._served.generate([Request(self.prompt(), self.adapter, self._sampling)]):
                answer += piece.text
                yield piece.text
        except BaseException:  # also where the rest of the answer is not read
            self.turns[:] = before
            raise
        self.turns.append(Turn("assistant", answer.strip()))

    def prompt(self) -> str:
        """The text before the next answer; leaves out exchanges that do not fit into the context."""
        while True:
            text = self._template.opened(self.turns, "the conversation")
            room = self._served.context
            if room is None or len(self.turns) <= self._kept + 1:
                return text
            answer = min(self._sampling.tokens, room // 4)  # a long limit must not leave out every exchange
            if len(self._served.tokenizer.encode(text)) + answer <= room:
                return text
            del self.turns[self._kept : self._kept + 2]


def opening_prompt(tokenizer: Tokenizer, question: str) -> str:
    """The prompt of a chat of one question. Raises DataError if the tokenizer has no chat template."""
    return template_of(tokenizer).opened([Turn("user", question)], "the prompt")


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The template that training rendered chats with. Raises DataError if there is none."""
    if tokenizer.chat is not None:
        return tokenizer.chat
    raise DataError(
        "the tokenizer has no chat template",
        where=tokenizer.name,
        why="a chat is rendered as it was in training",
        fix="put chat_template.jinja next to the tokenizer, or continue a text: shardwise generate",
    )


COMMANDS = {
    "/adapters": "list the adapters",
    "/adapter NAME": "let this adapter answer from now on; base is the model without any",
    "/clear": "forget the conversation, but not the system's turn",
    "/help": "list the commands",
    "/exit": "leave; /quit and Ctrl-D do too",
}
"""The lines that are no turns, and what they do."""


def obeyed(conversation: Conversation, served: ServedModel, line: str) -> str | None:
    """What a line with a command says; None for /exit. Raises RecipeError for an unknown one."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit"):
        return None
    if word == "/help":
        width = max(map(len, COMMANDS))
        return "\n".join(f"{command:{width}}  {what}" for command, what in COMMANDS.items())
    if word == "/clear":
        conversation.clear()
        return "the conversation starts anew"
    if word == "/adapters":
        return ", ".join(served.adapters)
    if word == "/adapter":
        conversation.use(rest.strip())
        return f"{rest.strip()} answers from now on"
    raise RecipeError(f"no command {word}", where="chat", fix=f"there are {', '.join(COMMANDS)}")
