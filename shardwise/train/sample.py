"""Sampling text from a model: temperature and top-k, the whole context recomputed for every token.

No key-value cache: it would need one in every kind of model. The price is quadratic time, which matters beyond
a few hundred tokens; the context is cut to what the model can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint


def next_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token id from the logits [vocab] of the last position; temperature 0 takes the most likely."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.float() / temperature
    if top_k is not None and top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))


@torch.no_grad()
def sample(
    blueprint: Blueprint,
    model: nn.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
) -> Iterator[int]:
    """Yield ``tokens`` ids that continue ``prompt``. ``context`` is the longest sequence the model reads."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    model.eval()
    for _ in range(tokens):
        logits = blueprint.logits(model, torch.tensor([ids[-context:]]))[0, -1]
        ids.append(next_token(logits, temperature, top_k, generator))
        yield ids[-1]
