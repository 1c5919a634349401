"""Completions of prompts, sampled from the model that is being trained, as it is divided over the ranks.

The model runs token by token with the readers and caches of ``plugins/serve``. All ranks run the same passes of as
many tokens: a sharded model gathers its weights in each of them, and ranks exchange the tokens of experts. So prompts
are padded to the longest of all ranks, and a pass runs while any rank has an unfinished completion; the ranks agree on
that every ``AGREED_EVERY`` tokens.

A token is chosen by inverting the distribution function at one uniform number. The numbers of a completion come from a
counter-based generator (Philox) with the key (seed, step) and the counter (prompt, sample). So a completion depends
neither on the number of ranks nor on the other rows of its batch, except for rounding in the model.

Tokens are sampled from all logits, and log-probabilities are of that distribution. A temperature divides the logits in
training, too (``tempered``). Refused: top-k and top-p, whose log-probabilities training does not compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core import heartbeat
from shardwise.engine.sampling import Repeated, Sampler
from shardwise.model.plain_passes import in_evaluation
from shardwise.plugins.serve.decoding import Reader, reader_of, rehearse_reading
from shardwise.plugins.serve.multi_lora import BASE, Bank
from shardwise.plugins.serve.sampling import sampled
from shardwise.runtime.language_loss import tempered

AGREED_EVERY = 16
"""Tokens after which ranks agree on whether all completions are over. Each time they wait for their devices."""


class Completion(NamedTuple):
    """Sampled tokens; the last one ended it, unless it was truncated. Log-probabilities are of when it was sampled."""

    tokens: list[int]
    log_probabilities: Tensor


def generate(
    live: Sampler,
    prompts: Sequence[list[int]],
    uniform: Tensor,
    ends: Sequence[int],
    temperature: float = 1.0,
) -> list[Completion]:
    """Complete prompts of this rank; all ranks call it together, with as many prompts.

    Log-probabilities are in fp32 (fp64 for fp64) on the CPU.

    Args:
        uniform: fp64 [n, c], see ``uniforms``; c is the longest completion.
        ends: the tokens that end a completion.
    """
    (n, longest) = uniform.shape
    device = live.device
    texts = [list(prompt) for prompt in prompts]
    uniform = uniform.to(device)
    ending = torch.tensor(list(ends), device=device)
    with _sampling(live, temperature):
        reader = _reader(live)
        tokens = list[Tensor]()
        logs = list[Tensor]()
        logits = reader.begin(texts, [BASE] * n, longest, _largest_of_ranks(max(map(len, texts)), device))
        lengths = torch.zeros(n, dtype=torch.int64, device=device)
        ended = torch.zeros(n, dtype=torch.bool, device=device)
        for index in range(longest):
            if index:
                logits = reader.follow(tokens[-1])
            chosen, log = sampled(logits, uniform[:, index])
            tokens.append(chosen)
            logs.append(log)
            lengths += ~ended
            ended |= torch.isin(chosen, ending)
            heartbeat.mark()
            if index % AGREED_EVERY == AGREED_EVERY - 1 and not _largest_of_ranks(~ended.all(), device):
                break
    rows = zip(torch.stack(tokens, 1).tolist(), torch.stack(logs, 1).cpu(), lengths.tolist(), strict=True)
    return [Completion(own[:length], log[:length]) for own, log, length in rows]


def _largest_of_ranks(number: int | Tensor, device: torch.device) -> int:
    """The largest of all ranks' numbers. Waits for the devices."""
    whole = torch.as_tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    return int(whole)


@contextmanager
def _sampling(live: Sampler, temperature: float) -> Iterator[None]:
    """Within it logits are divided by the temperature."""
    with (
        in_evaluation(live.model),
        live.sampling(),
        tempered(live.blueprint.output(live.model), temperature),
    ):
        yield


def _reader(live: Sampler) -> Reader:
    reader = reader_of(live.blueprint, live.model, Bank(live.model, torch.float32))  # without adapters
    reader.device = live.device  # the model's parameters may be in host memory
    return reader


def rehearse(
    live: Sampler, rows: int, prompt: int, longest: int, temperature: float, repeated: Repeated
) -> None:
    """What ``generate`` allocates and computes at most, on fake tensors."""
    uniform = torch.zeros(rows, dtype=torch.float64, device=live.device)
    with _sampling(live, temperature):
        rehearse_reading(
            _reader(live), (rows, prompt, longest), lambda logits: sampled(logits, uniform)[0], repeated
        )
