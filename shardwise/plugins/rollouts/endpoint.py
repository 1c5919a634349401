"""Completions by a server that speaks OpenAI's ``/completions``, such as that of vLLM.

A prompt is sent as token ids, and an answer must have the ids of its completion: ``token_ids`` (vLLM's
``return_token_ids``), or ``logprobs.tokens`` that read ``token_id:N`` (``return_tokens_as_token_ids``). Text is not
tokenized again. A completion is a request of its own, whose seed follows from (seed, rollout, prompt, sample). So it
does not depend on the number of ranks, as far as the server keeps to seeds.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core import heartbeat
from shardwise.core.errors import DataError, shorten
from shardwise.data.tokenizer import Tokenizer
from shardwise.plugins.rollouts.generation import Completion

ANSWER_SECONDS = 600.0
"""After so long without an answer a request has failed."""
AT_ONCE = 64
"""Requests of a rank that the server has at the same time."""
_ID = "token_id:"
_EVERY_REQUEST: dict[str, Any] = {
    "n": 1, "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True,
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
"""vLLM takes other values from the model's generation_config.json."""


@dataclass(frozen=True)
class Endpoint:
    """A server; ``url`` is up to ``/completions``, and ``model`` its name there, or None for the only one."""

    url: str
    model: str | None
    longest: int
    temperature: float

    def completions(
        self, prompts: Sequence[list[int]], seeds: Sequence[tuple[int, ...]], tokenizer: Tokenizer
    ) -> list[Completion]:
        """Completions of at most ``longest`` tokens, on the CPU; log-probabilities are the server's, in fp32.

        Args:
            seeds: what the seed of each completion follows from.

        Raises DataError if the server fails, or if its answer does not have the tokens exactly.
        """
        fixed = {**_EVERY_REQUEST, "max_tokens": self.longest, "temperature": self.temperature}
        fixed |= {"stop_token_ids": sorted(tokenizer.ends), **({"model": self.model} if self.model else {})}
        digests = (hashlib.blake2b(repr(seed).encode(), digest_size=6).digest() for seed in seeds)
        pairs = zip(prompts, map(int.from_bytes, digests), strict=True)
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            bodies = [{**fixed, "prompt": prompt, "seed": seed} for prompt, seed in pairs]
            asked = [pool.submit(self._completion, body, tokenizer) for body in bodies]
            for future in as_completed(asked):
                future.result()  # raises the first error at once
                heartbeat.mark()
            return [future.result() for future in asked]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _completion(self, asked: dict[str, Any], tokenizer: Tokenizer) -> Completion:
        """Up to the token that ended it."""
        answer = self._answer(asked)
        longest = self.longest
        ends = tokenizer.ends
        try:
            (choice,) = answer["choices"]
            logs = choice["logprobs"]["token_logprobs"]
            names = choice["logprobs"].get("tokens") or []
            ids = choice.get("token_ids")
            if ids is None:
                ids = [int(name.removeprefix(_ID)) for name in names if name.startswith(_ID)]
            if not ids:
                fix = "serve with vLLM, which has return_token_ids; text is not tokenized again"
                raise self._error("the endpoint returns no token ids", "", fix)
            exact = all(type(token) is int and 0 <= token < tokenizer.vocab for token in ids)
            if not exact or not all(map(math.isfinite, logs)) or not 0 < len(ids) == len(logs) <= longest:
                raise ValueError(f"{len(ids)} ids and {len(logs)} log-probabilities of at most {longest}")
            if choice.get("prompt_token_ids", asked["prompt"]) not in (None, asked["prompt"]):
                raise ValueError("the prompt has other tokens there")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error("a wrong answer of the endpoint", f"{type(error).__name__}: {error}") from None
        count = next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))
        if count < longest and ids[count - 1] not in ends:
            why = f"it has {count} of {longest} tokens, and none of {sorted(ends)} at its end"
            raise self._error("a completion of the endpoint is cut short", why)
        return Completion(ids[:count], torch.tensor(logs[:count], dtype=torch.float32))

    def _answer(self, asked: dict[str, Any]) -> Any:
        address = f"{self.url.rstrip('/')}/completions"
        body = json.dumps(asked).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            why = f"HTTP {error.code}: {shorten(error.read(1000).decode(errors='replace'), 120)}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
        raise self._error("the endpoint does not answer", why, "start it, then the same command goes on")

    def _error(self, what: str, why: str, fix: str = "") -> DataError:
        return DataError(what, where=f"objective.endpoint: {self.url}", why=why, fix=fix)
