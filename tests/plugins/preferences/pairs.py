"""Batches of random pairs and labelled answers, padded and packed, without a data source."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100
Documents = list[tuple[list[int], int]]
"""Tokens of each document, and the number of those that are its prompt."""


def documents(count: int, seed: int = 0, vocab: int = 256) -> Documents:
    """``count`` documents of 6 to 11 tokens; two after each other have the same prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    made: Documents = []
    while len(made) < count:
        prompt = [draw(1, vocab) for _ in range(draw(2, 5))]
        made += [(prompt + [draw(1, vocab) for _ in range(draw(4, 8))], len(prompt)) for _ in range(2)]
    return made[:count]


def row(made: Documents, length: int) -> tuple[Tensor, ...]:
    """(input_ids, labels, positions, document, first targets), each [length], of documents after each other."""
    ids, labels = torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORED)
    positions, document, firsts = (torch.zeros(length, dtype=torch.int64) for _ in range(3))
    at = 0
    for number, (tokens, prompt) in enumerate(made):
        until = at + len(tokens) - 1
        assert until <= length
        ids[at:until] = torch.tensor(tokens[:-1])
        labels[at + prompt - 1 : until] = torch.tensor(tokens[prompt:])
        positions[at:until], document[at:until] = torch.arange(until - at), number
        firsts[at + prompt - 1] = 1
        at = until
    positions[at:] = torch.arange(length - at)
    return ids, labels, positions, document, firsts


def padded_pairs(made: Documents, length: int) -> dict[str, Tensor]:
    """Pairs of documents 2k and 2k + 1: [m, 2, s]."""
    rows = [row([one], length) for one in made]
    ids, labels, counted = (torch.stack([r[n] for r in rows]).unflatten(0, (-1, 2)) for n in (0, 1, 4))
    counted[:, 1] = 0
    return {
        "input_ids": ids,
        "labels": labels,
        "counted": counted,
        "present": torch.ones(len(ids), 1, dtype=torch.int64),
    }


def packed(rows: list[Documents], length: int, per_unit: int = 2) -> dict[str, Tensor]:
    """Rows of documents that stay apart: [m, s]. Counted is the first document of every ``per_unit``."""
    made = [row(documents, length) for documents in rows]
    ids, labels, positions, document, firsts = (torch.stack([m[n] for m in made]) for n in range(5))
    units = max(len(documents) for documents in rows) // per_unit
    present = torch.tensor([[int(u < len(d) // per_unit) for u in range(units)] for d in rows])
    begins = [torch.nonzero(p == 0).flatten() for p in positions]
    most = max(map(len, begins))
    starts = torch.stack([torch.cat([b, b.new_full((most - len(b),), length)]) for b in begins]).to(
        torch.int32
    )
    return {
        "input_ids": ids,
        "labels": labels,
        "positions": positions,
        "starts": starts,
        "document": document,
        "counted": firsts * (document % per_unit == 0),
        "present": present,
    }


def padded_answers(made: Documents, length: int) -> dict[str, Tensor]:
    """Labelled answers of the documents, with the next one as the mismatched answer."""
    rows = [row([one], length) for one in made]
    ids, labels, counted = (torch.stack([r[n] for r in rows]) for n in (0, 1, 4))
    return {
        "input_ids": ids,
        "labels": labels,
        "counted": counted,
        "present": torch.ones(len(ids), 1, dtype=torch.int64),
        "desirable": (torch.arange(len(ids)) % 3 != 0).long().unsqueeze(1),
        "kl_input_ids": ids.roll(1, 0),
        "kl_labels": labels.roll(1, 0),
    }
