"""Completions of prompts, sampled from the model that is being trained, as it is divided over the ranks.

The model runs token by token with the readers and caches of ``plugins/serve``. All ranks run the same number of passes:
a sharded model gathers its weights in each of them. So a pass runs while any rank has an unfinished completion; the
ranks agree on that every ``AGREED_EVERY`` tokens.

A token is chosen by inverting the distribution function at one uniform number. The numbers of a completion come from a
counter-based generator (Philox) with the key (seed, step) and the counter (prompt, sample). So a completion depends
neither on the number of ranks nor on the other rows of its batch, except for rounding in the model.

Tokens are sampled from all logits, and log-probabilities are of that distribution. A temperature divides the logits in
training, too (``tempered``). Refused: top-k and top-p, whose log-probabilities training does not compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core import heartbeat
from shardwise.core.errors import RecipeError
from shardwise.engine.forward_backward import in_evaluation
from shardwise.engine.run import LiveModel
from shardwise.engine.sampling import Repeated
from shardwise.model.blueprint import Blueprint
from shardwise.plugins.serve.decoding import Reader, reader_of
from shardwise.plugins.serve.multi_lora import BASE, Bank
from shardwise.technique.tensor import TENSOR_PARALLEL, TENSOR_SEQUENCE_PARALLEL

AGREED_EVERY = 16
"""Tokens after which ranks agree on whether all completions are over. Each time they wait for their devices."""


@dataclass(frozen=True)
class Completions:
    """Sampled tokens of n prompts. c is the longest completion allowed.

    Attributes:
        tokens: int64 [n, c]; the last one of a completion is the token that ended it, if it was not truncated.
        log_probabilities: fp32 [n, c] (fp64 for fp64), of the tokens when they were sampled; 0 after the end.
        lengths: int64 [n], the token that ended it included.
        ended: bool [n]; False for truncated completions.
    """

    tokens: Tensor
    log_probabilities: Tensor
    lengths: Tensor
    ended: Tensor


def require_generation(live: LiveModel) -> None:
    """Raise RecipeError if the layout of the model cannot generate."""
    what = "completions are not generated in this layout"
    if live.options.place is not None:
        raise RecipeError(
            what,
            where="strategy.pipeline_parallel",
            why="every token would wait for all stages, one after the other",
            fix="set it to 1",
        )
    divided = "a token that follows is not divided over ranks"
    if live.layout.ranks(lambda axis: axis.tokens and not axis.samples) > 1:
        raise RecipeError(what, where="strategy.sequence_parallel", why=divided, fix="set it to 1")
    if live.strategy[TENSOR_PARALLEL] > 1 and live.strategy[TENSOR_SEQUENCE_PARALLEL] != "none":
        where = "strategy.tensor_sequence_parallel"
        raise RecipeError(what, where=where, why=divided, fix="set it to none")


def uniforms(seed: int, step: int, rows: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Uniform numbers in [0, 1), fp64 [n, length], for rows (prompt, sample) of a step."""
    streams = (np.random.Philox(key=[seed, step], counter=[0, 0, *row]) for row in rows)
    return torch.from_numpy(np.stack([np.random.Generator(stream).random(length) for stream in streams]))


def sampled(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n], and their log-probabilities [n] in fp32 (fp64 for fp64), of logits [n, v].

    Args:
        uniform: fp64 [n], in [0, 1).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logs = logits.to(wide).log_softmax(-1)
    cumulative = logs.double().exp().cumsum(-1)
    aimed = uniform.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, aimed, right=True).clamp(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logs.gather(1, tokens).squeeze(1)


def generate(
    live: LiveModel,
    prompts: Sequence[list[int]],
    uniform: Tensor,
    ends: Sequence[int],
    temperature: float = 1.0,
) -> Completions:
    """Complete prompts of this rank; all ranks call it together, with as many prompts.

    Args:
        uniform: fp64 [n, c], see ``uniforms``.
        ends: the tokens that end a completion.
    """
    with in_evaluation(live.model), tempered(live.blueprint, live.model, temperature):
        return _completed(live, prompts, uniform, ends)


@contextmanager
def tempered(blueprint: Blueprint, model: nn.Module, temperature: float) -> Iterator[None]:
    """Within it the logits of the model are divided by the temperature, whatever reads them.

    The output layer's input is divided, so that losses in chunks have it too. Raises RecipeError without such a layer.
    """
    if temperature == 1:
        yield
        return
    output = blueprint.output(model)
    if output is None or output._parameters.get("bias") is not None:
        why = "the model has no output layer, or one with a bias"
        raise RecipeError("temperature must be 1", where="objective.temperature", why=why, fix="remove it")
    hook = output.register_forward_pre_hook(lambda _, given: (given[0] / temperature, *given[1:]))
    try:
        yield
    finally:
        hook.remove()


def _completed(
    live: LiveModel, prompts: Sequence[list[int]], uniform: Tensor, ends: Sequence[int]
) -> Completions:
    (n, longest), device = uniform.shape, live.device
    uniform, ending = uniform.to(device), torch.tensor(list(ends), device=device)
    reader = _reader(live)
    logits = reader.begin([list(prompt) for prompt in prompts], [BASE] * n, longest)
    tokens = torch.zeros(n, longest, dtype=torch.int64, device=device)
    logs = torch.zeros(n, longest, dtype=torch.promote_types(logits.dtype, torch.float32), device=device)
    lengths = torch.zeros(n, dtype=torch.int64, device=device)
    ended = torch.zeros(n, dtype=torch.bool, device=device)
    for index in range(longest):
        chosen, log = sampled(logits, uniform[:, index])
        tokens[:, index] = chosen.where(~ended, 0)
        logs[:, index] = log.where(~ended, 0.0)
        lengths += ~ended
        ended |= torch.isin(chosen, ending)
        if index + 1 == longest or (index % AGREED_EVERY == AGREED_EVERY - 1 and _all_ended(ended)):
            break
        heartbeat.mark()
        logits = reader.follow(chosen)
    return Completions(tokens, logs, lengths, ended)


def _reader(live: LiveModel) -> Reader:
    reader = reader_of(live.blueprint, live.model, Bank(live.model, live.options.dtypes.compute))
    reader.device = live.device  # the model's parameters may be in host memory
    return reader


def rehearse(
    live: LiveModel, rows: int, prompt: int, longest: int, temperature: float, each: Repeated
) -> None:
    """What ``generate`` allocates and computes at most, on fake tensors: the prompts, and tokens after them.

    A token costs what one half-way costs; the last one needs most memory.
    """
    require_generation(live)
    uniform = torch.zeros(rows, dtype=torch.float64, device=live.device)
    reader, half = _reader(live), (longest - 1) // 2
    texts = [[0] * max(1, prompt - 1), *([[0] * prompt] * (rows - 1))]  # one is padded
    with in_evaluation(live.model), tempered(live.blueprint, live.model, temperature):
        with each(1):
            tokens, _ = sampled(reader.begin(texts, [BASE] * rows, longest), uniform)
        for skipped, times in ((half, longest - 1), (longest - 3 - half, 0)):
            if skipped >= 0 and longest > 1:
                reader.skip(skipped)
                with each(times):
                    tokens, _ = sampled(reader.follow(tokens), uniform)


def _all_ended(ended: Tensor) -> bool:
    """Whether the completions of all ranks are over. Waits for the device."""
    going_on = (~ended).any().to(torch.int32)
    dist.all_reduce(going_on, dist.ReduceOp.MAX)
    return not int(going_on)
