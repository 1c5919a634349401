"""A served model as lm-evaluation-harness asks it: log-likelihoods of continuations, and greedy texts.

The harness has the tasks, their prompts and metrics. This gives it a run or a model folder without an export, with the
adapter that the run trained or another one, and with the tokenizer and chat template of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from shardwise.data.formats import Chat
from shardwise.data.turns import Turn
from shardwise.plugins.serve.by_length import batches_by_length
from shardwise.plugins.serve.chat import template_of
from shardwise.plugins.serve.load import OpenedModel
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import ServedModel

NEW_TOKENS = 256
"""Tokens of an answer where a task does not say."""

Scored = tuple[float, bool]
"""Log-likelihood of a continuation, and whether it is the greedy one."""


class TaskModel(TemplateLM):
    """The model of one evaluation.

    Args:
        adapter: that answers.
        length: tokens that the model reads at most; longer prompts lose their beginning.
        batch: sequences at a time.
    """

    def __init__(
        self, opened: OpenedModel, served: ServedModel, adapter: str, length: int, batch: int
    ) -> None:
        super().__init__()
        self._opened, self._served, self._adapter = opened, served, adapter
        self._length, self._batch = length, batch

    @property
    def eot_token_id(self) -> int:
        return self._opened.tokenizer.separator

    @property
    def prefix_token_id(self) -> int:
        begin = self._opened.tokenizer.begin
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self._opened.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        tokenizer = self._opened.tokenizer
        ids = tokenizer.encode(string)
        if tokenizer.begin is None or add_special_tokens is False or ids[:1] == [tokenizer.begin]:
            return ids
        return [tokenizer.begin, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """What the harness writes down about the template."""
        return "shardwise" if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = template_of(self._opened.tokenizer)
        chat = Chat(tuple(Turn(turn["role"], turn["content"]) for turn in chat_history))
        return template.text(chat, "a task's prompt", opening=add_generation_prompt)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        """The log-likelihood of a text: each token is predicted once, with as many before it as fit.

        As in the harness's own models, a beginning-of-sequence token counts as a token of the text.
        """
        ids = self.tok_encode(text)
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self._length, context_len=1)
        pairs = [make_disjoint_window(window) for window in windows]
        return sum(log_likelihood for log_likelihood, _ in self._scored(pairs))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Scored]:
        return self._scored([(before, after) for _, before, after in requests])

    @torch.no_grad()
    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Each pair of a context and its continuation, in batches of similar length."""
        lengths = [
            min(len(before) + len(after) - 1, self._length) for before, after in pairs
        ]  # that are read
        scores: dict[int, Scored] = {}
        for taken in batches_by_length(lengths, self._batch, self._opened.model):
            scores.update(zip(taken, self._batch_scores([pairs[index] for index in taken]), strict=True))
        return [scores[index] for index in range(len(pairs))]

    def _batch_scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[Scored]:
        rows = [([*before, *after])[-(self._length + 1) :] for before, after in pairs]
        longest = max(len(row) - 1 for row in rows)
        padding = self._opened.tokenizer.separator
        ids = torch.tensor([row[:-1] + [padding] * (longest - len(row) + 1) for row in rows])
        self._served.bank.select([self._adapter] * len(rows))
        try:
            device = next(self._opened.model.parameters()).device
            logits = self._opened.blueprint.logits(self._opened.model, ids.to(device))
        finally:
            self._served.bank.select(())
        for row, (_, after), scores in zip(rows, pairs, logits, strict=True):
            yield _score(scores[: len(row) - 1], row, min(len(after), len(row) - 1))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [self._request(*request.args) for request in requests]
        return self._served.complete(asked, batch=self._batch)

    def _request(self, text: str, options: Mapping[str, Any]) -> Request:
        """A request of the harness: greedy unless the task samples; the prompt loses what does not fit."""
        until = options.get("until") or []
        stop = tuple(sequence for sequence in ([until] if isinstance(until, str) else until) if sequence)
        tokens = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NEW_TOKENS)
        tokens = max(1, min(tokens, self._length // 2))
        sampled = bool(options.get("do_sample")) and float(options.get("temperature") or 0) > 0
        temperature = float(options["temperature"]) if sampled else 0.0
        ids = self.tok_encode(text)
        room = self._length - tokens
        if len(ids) > room:
            text = self._opened.tokenizer.decode(ids[-room:])
        return Request(text, self._adapter, Sampling(tokens, temperature, stop=stop))


def _score(logits: Tensor, row: Sequence[int], count: int) -> Scored:
    """The log-likelihood of the last ``count`` tokens of a row.

    Args:
        logits: of every token of the row but its first, [tokens - 1, vocabulary].
    """
    expected = torch.tensor(row[-count:], device=logits.device)
    logs = torch.log_softmax(logits[-count:].float(), dim=-1)
    greedy = bool((logs.argmax(dim=-1) == expected).all())
    return float(logs.gather(-1, expected.unsqueeze(-1)).sum()), greedy
