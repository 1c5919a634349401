"""A model and its adapters that answer requests in batches.

A batch takes the next requests in order, with any mix of adapters. Finished requests leave the batch, and the next
batch starts when it is empty. The answer to a request depends only on the request, except for rounding in the model:
each request has its own seed and its own context window. When the context is full, the window restarts with the last
half of the context, and the texts of the batch are read again.

Continuous batching, where a new request joins as soon as one leaves, would need a paged KV cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwise.core.errors import DataError, NumericsError, RecipeError, one_of
from shardwise.core.paths import path_of
from shardwise.data.tokenizer import Tokenizer
from shardwise.plugins.serve.adapters import open_adapter
from shardwise.plugins.serve.by_length import ByLength, limit_of_angles
from shardwise.plugins.serve.decoding import Reader, Transformers, reader_of
from shardwise.plugins.serve.detokenize import Writer
from shardwise.plugins.serve.load import OWN_ADAPTER, OpenedModel, open_model, require_same_base
from shardwise.plugins.serve.multi_lora import BASE, Bank
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling, choose_token

SERVED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LENGTH_END, STOP_END, TEXT_END = "length", "stop", "end of text"
"""Why an answer ended: the token limit, a stop text, or a token that ends an answer."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer's text. ``end`` is the reason for the end, or empty if more may follow."""

    request: int
    text: str
    end: str = ""


class ServedModel:
    """A base model and its adapters in memory.

    ``adapters`` lists their names. The name ``base`` means no adapter, ``own`` the adapter that the run trained.
    """

    def __init__(self, opened: OpenedModel, adapters: Mapping[str, str | Path] | None = None) -> None:
        """Load the adapters.

        Raises:
            CheckpointError: an adapter is damaged or for another base model.
            RecipeError: an adapter's name is taken.
        """
        served_adapters = [open_adapter(name, path_of(folder)) for name, folder in (adapters or {}).items()]
        if served_adapters and opened.trained:
            raise RecipeError(
                "this run takes no other adapter",
                where=served_adapters[0].where,
                why=f"it has trained {', '.join(opened.trained)} in full, and lacks the base's",
                fix="give the folder of the base model, and the run's adapter with --adapter",
            )
        require_same_base(opened.model, served_adapters)
        self._opened = opened
        self.bank = Bank(opened.model, opened.dtype, [*opened.own, *served_adapters])
        self._as_it_is = OWN_ADAPTER if opened.own else BASE
        if opened.trained:
            self.bank.has_base = False

    @property
    def model(self) -> nn.Module:
        """The base model."""
        return self._opened.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._opened.tokenizer

    @property
    def context(self) -> int | None:
        """The longest sequence that the model reads, in tokens; None for no limit."""
        return self._opened.context

    @property
    def adapters(self) -> list[str]:
        return self.bank.known

    @property
    def nbytes(self) -> int:
        """Bytes of the base model and of all adapters."""
        tensors = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        return sum(tensor.nbytes for tensor in tensors.values()) + self.bank.nbytes

    def generate(
        self, requests: Sequence[Request], *, batch: int = 8, cached: bool = True
    ) -> Iterator[Piece]:
        """Answer requests in batches of ``batch``; yield text as it is generated, the last part with its ``end``.

        All requests are checked before the first answer. ``cached=False`` decodes without a KV cache.

        Raises:
            RecipeError: an adapter is unknown, or a prompt is longer than the context.
            DataError: a prompt cannot be tokenized.
            NumericsError: the logits are not finite, while the answers are iterated.
        """
        answers = [self._answer(index, request) for index, request in enumerate(requests)]
        return self._pieces(answers, batch, cached)

    def complete(self, requests: Sequence[Request], *, batch: int = 8) -> list[str]:
        """The complete answers."""
        texts = [""] * len(requests)
        for piece in self.generate(requests, batch=batch):
            texts[piece.request] += piece.text
        return texts

    def _pieces(self, answers: list[_Answer], batch: int, cached: bool) -> Iterator[Piece]:
        vocab = self._opened.tokenizer.vocab
        try:
            for first in range(0, len(answers), batch):
                yield from _answer_batch(answers[first : first + batch], self._reader(cached), vocab)
        finally:
            self.bank.select(())

    def _reader(self, cached: bool) -> Reader:
        def reader() -> Reader:
            return reader_of(self._opened.blueprint, self.model, self.bank, cached)

        first = reader()
        limit = limit_of_angles(self.model) if isinstance(first, Transformers) else None
        return first if limit is None else ByLength(self.model, self.bank, limit, reader)

    def _answer(self, index: int, request: Request) -> _Answer:
        where = request.where or f"request {index + 1}"
        adapter = self._as_it_is if request.adapter is None else request.adapter
        self.bank.require(adapter, where)
        tokenizer, context = self._opened.tokenizer, self._opened.context
        try:
            ids = _prompted(tokenizer, request.prompt)
        except DataError as error:
            error.where = f"{where}: {error.where}"
            raise
        if context is not None and len(ids) > context:
            raise RecipeError(
                "the prompt is longer than the model's context",
                where=where,
                why=f"it has {len(ids)} tokens, and the context has {context}",
                fix="shorten it",
            )
        return _Answer(index, request.sampling, adapter, ids, self._opened)


def _prompted(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt as training would begin it; a prompt that has the token already gets no second one.

    An empty prompt starts a document.
    """
    ids = tokenizer.encode(prompt)
    if tokenizer.begin is None:
        return ids or [tokenizer.separator]
    return ids if ids[:1] == [tokenizer.begin] else [tokenizer.begin, *ids]


class _Answer:
    """One request in progress."""

    def __init__(self, place: int, how: Sampling, adapter: str, ids: list[int], opened: OpenedModel) -> None:
        self.place, self.how, self.adapter = place, how, adapter
        self._ids = ids
        self._context = opened.context
        self._ends = opened.ends
        self._writer = Writer(opened.tokenizer, ids, how.stop)
        self._begin = 0
        self._left = self.how.tokens
        self._generator = torch.Generator().manual_seed(self.how.seed)

    @property
    def read(self) -> list[int]:
        """The part of the text in the context window."""
        return self._ids[self._begin :]

    @property
    def left(self) -> int:
        """Number of tokens before the context window must move."""
        return min(self._left, self.room)

    @property
    def room(self) -> int:
        """Number of tokens that the context window can still take."""
        return sys.maxsize if self._context is None else self._context - len(self.read)

    def move(self) -> None:
        """If the context is full, keep its last half."""
        if self._context is not None and len(self.read) > self._context:
            self._begin = len(self._ids) - max(1, self._context // 2)

    def take(self, logits: torch.Tensor) -> tuple[int, Piece]:
        """Choose a token and append it."""
        token = choose_token(logits, self._ids, self.how, self._generator)
        self._left -= 1
        self._ids.append(token)
        ended = token in self._ends and not self.how.past_end
        text = "" if ended else self._writer.push(token)
        over = TEXT_END if ended else LENGTH_END if self._left == 0 else ""
        if over and not self._writer.stopped:
            text += self._writer.rest()
        return token, Piece(self.place, text, STOP_END if self._writer.stopped else over)


def _answer_batch(answers: list[_Answer], reader: Reader, vocab: int) -> Iterator[Piece]:
    """Answer one batch. Ids from ``vocab`` on are padding of the model's vocabulary and are never chosen."""
    logits, room = _begun(answers, reader)
    while True:
        rows = _require_finite(logits[:, :vocab].float().cpu())
        left = []
        tokens = []
        for row, answer in enumerate(answers):
            token, piece = answer.take(rows[row])
            if not piece.end:
                left.append(row)
                tokens.append(token)
            if piece.text or piece.end:
                yield piece
        if not left:
            return
        if len(left) < len(answers):
            answers = [answers[row] for row in left]
            reader.keep(left)
        if room > 0:
            logits = _followed(reader, tokens)
            room -= 1
            continue
        # Rows are as long as the longest text, and stay so when it has left: only reading again makes them shorter.
        for answer in answers:
            answer.move()
        logits, room = _begun(answers, reader)


def _require_finite(rows: torch.Tensor) -> torch.Tensor:
    """The logits. Raises NumericsError for NaN and for infinitely likely tokens."""
    if bool((rows < torch.inf).all()):
        return rows
    raise NumericsError(
        "the model's logits are not finite",
        where="generate",
        why="its activations exceed the range of the precision, or its weights are damaged",
        fix="use fp32, or bf16 for a GPU",
    )


@torch.no_grad()
def _begun(answers: list[_Answer], reader: Reader) -> tuple[torch.Tensor, int]:
    """The first logits, and the number of tokens that the context can take after the longest text."""
    texts = [answer.read for answer in answers]
    room = min(answer.room for answer in answers)
    more = min(room, max(answer.left for answer in answers))
    return reader.begin(texts, [answer.adapter for answer in answers], more), room


@torch.no_grad()
def _followed(reader: Reader, tokens: list[int]) -> torch.Tensor:
    return reader.follow(tokens)


def load_model(
    folder: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    tokenizer: str | None = None,
    precision: str = "fp32",
    device: str = "cpu",
) -> ServedModel:
    """Load the folder of a run, or a Hugging Face folder, and adapters by name.

    Raises:
        CheckpointError: a file is missing or damaged, or an adapter is for another base model.
        DataError: the tokenizer is missing or unreadable.
        RecipeError: an option is invalid.
    """
    if precision not in SERVED_DTYPES:
        raise RecipeError(
            f"precision is {precision!r}", where="precision", fix=one_of(precision, SERVED_DTYPES)
        )
    torch_device = serving_device(device)
    return ServedModel(
        open_model(path_of(folder), tokenizer, SERVED_DTYPES[precision], torch_device), adapters
    )


def serving_device(name: str) -> torch.device:
    """The device. Raises RecipeError if there is none of this name here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # "meta" has no values
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"no device {name!r}", where="device", why=str(error).splitlines()[0]) from error
    return device
