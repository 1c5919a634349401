"""Completions by a server that speaks OpenAI's ``/completions``, such as that of vLLM.

A prompt is sent as token ids, and an answer must have the ids of its completion: ``token_ids`` (vLLM's
``return_token_ids``), or ``logprobs.tokens`` that read ``token_id:N`` (``return_tokens_as_token_ids``). Text is not
tokenized again. A completion is a request of its own, whose seed follows from (seed, rollout, prompt, sample). So it
does not depend on the number of ranks, as far as the server keeps to seeds.

The server's weights do not follow training. ``RolloutObjective.correction`` weighs tokens for that.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core import heartbeat
from shardwise.core.errors import DataError, shorten
from shardwise.plugins.rollouts.generation import SampledTokens

ANSWER_SECONDS = 600.0
"""After so long without an answer a request has failed."""
AT_ONCE = 64
"""Requests of a rank that the server has at the same time."""
_ID = "token_id:"


@dataclass(frozen=True)
class Endpoint:
    """A server.

    Attributes:
        url: up to ``/completions``, such as http://localhost:8000/v1.
        model: the name of the model there; None for the only one.
    """

    url: str
    model: str | None

    def completions(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[tuple[int, ...]],
        longest: int,
        ends: Collection[int],
        temperature: float,
    ) -> SampledTokens:
        """Completions of at most ``longest`` tokens, on the CPU; log-probabilities are the server's, in fp32.

        Args:
            seeds: what the seed of each completion follows from.
            ends: the tokens that end a completion.

        Raises DataError if the server fails, or if its answer does not have the tokens exactly.
        """
        # All values are given: vLLM takes those that are not from the model's generation_config.json.
        fixed: dict[str, Any] = {"max_tokens": longest, "temperature": temperature, "n": 1, "logprobs": 1}
        fixed |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        fixed |= {
            "stop_token_ids": sorted(ends),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        fixed |= {"model": self.model} if self.model else {}
        tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
        logs = torch.zeros(len(prompts), longest)
        lengths = torch.zeros(len(prompts), dtype=torch.int64)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            asked = {
                pool.submit(self._answer, {**fixed, "prompt": prompt, "seed": _seed(seed)}): row
                for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            }
            for future in as_completed(asked):
                row, (ids, own) = asked[future], self._read(future.result(), longest, ends)
                tokens[row, : len(ids)], logs[row, : len(ids)] = torch.tensor(ids), torch.tensor(own)
                lengths[row], ended[row] = len(ids), ids[-1] in ends
                heartbeat.mark()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return SampledTokens(tokens, logs, lengths, ended)

    def _answer(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            why = f"HTTP {error.code}: {shorten(error.read(1000).decode(errors='replace'), 120)}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
        raise self._error("the endpoint does not answer", why, "start it, then the same command goes on")

    def _read(self, answer: Any, longest: int, ends: Collection[int]) -> tuple[list[int], list[float]]:
        """Ids of a completion up to the one that ended it, and their log-probabilities."""
        try:
            (choice,) = answer["choices"]
            logs, names = choice["logprobs"]["token_logprobs"], choice["logprobs"].get("tokens") or []
            ids = choice.get("token_ids")
            if ids is None and names and all(name.startswith(_ID) for name in names):
                ids = [int(name.removeprefix(_ID)) for name in names]
            if ids is None:
                fix = "serve with vLLM, which has return_token_ids; text is not tokenized again"
                raise self._error("the endpoint returns no token ids", "", fix)
            whole = all(type(token) is int and token >= 0 for token in ids)
            if (
                not whole
                or not all(math.isfinite(log) for log in logs)
                or not 0 < len(ids) == len(logs) <= longest
            ):
                raise ValueError(f"{len(ids)} ids and {len(logs)} log-probabilities of at most {longest}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error("a wrong answer of the endpoint", f"{type(error).__name__}: {error}") from None
        count = next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))
        if count < longest and ids[count - 1] not in ends:
            why = f"it has {count} of {longest} tokens, and none of {sorted(ends)} at its end"
            raise self._error("a completion of the endpoint is cut short", why)
        return ids[:count], logs[:count]

    def _error(self, what: str, why: str, fix: str = "") -> DataError:
        return DataError(what, where=f"objective.endpoint: {self.url}", why=why, fix=fix)


def _seed(parts: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest())
