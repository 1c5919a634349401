"""Rows that expert parallelism exchanges, and the room they need: ``python benchmarks/expert_exchange.py``.

For each number of experts k of a token and of ranks R: rows that a rank sends for each of its tokens at a capacity of
1.25, one for each expert and one for each rank, and the bytes of a layer and micro-batch with them (width 2048, bf16,
forward and backward pass). Then the capacity that routers need, relative to a balanced one: for rows by expert from a
rank to another one, for rows by rank, and for the pairs of a token and an expert on a rank; 0 where there is always
room. Each of R ranks has 4096 tokens. Scores are normal; skewed ones have a normal term for each expert, which is equal
on all ranks, or one for each rank and expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.runtime.parallel.dispatch import Room, pairs_of, routes

TOKENS, WIDTH, BYTES, FACTOR = 4096, 2048, 2, 1.25
CASES = tuple((chosen, ranks) for chosen in (2, 8) for ranks in (2, 4, 8))
ROUTERS = {"random": (0.0, 0.0), "skewed": (0.5, 0.0), "skewed for each rank": (0.0, 0.5)}


def experts_of(chosen: int) -> int:
    """Of Mixtral-8x7B and of Qwen3-30B-A3B."""
    return 8 if chosen == 2 else 128


def exchanged_bytes(rows: float, numbers: int, number_bytes: int, ranks: int) -> float:
    """Of rows with as many numbers of experts and weights, there and back, and of their gradients."""
    return rows * (4 * WIDTH * BYTES + numbers * (number_bytes + 2 * BYTES)) * (ranks - 1) / ranks


def needed(index: Tensor, ranks: int, experts: int) -> tuple[float, float, float]:
    """The capacity needed for rows by expert, for rows by rank, and for pairs. ``index`` is [R, t, k]."""
    chosen = index.shape[2]
    rows, pairs = Room(1.0).sizes(TOKENS, chosen, ranks, experts)
    most = max(int(routes(own, ranks, experts, TOKENS).most) for own in index)
    first = torch.arange(0, ranks * experts, experts)
    here = [index - start for start in first.tolist()]
    busiest = max(
        int(pairs_of(n.masked_fill((n < 0) | (n >= experts), experts), experts, 1).total) for n in here
    )
    by_expert = max(int((own // experts).flatten().bincount().max()) for own in index)
    full = Room(FACTOR).sizes(TOKENS, chosen, ranks, experts)[0] == TOKENS
    return by_expert * ranks / pairs, 0.0 if full else most / rows, busiest / pairs


def main() -> None:
    print("| k | R | rows by expert | rows by rank | MiB by expert | MiB by rank | saved |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for chosen, ranks in CASES:
        experts = experts_of(chosen) // ranks
        rows = ranks * Room(FACTOR).sizes(TOKENS, chosen, ranks, experts)[0]
        by_expert = exchanged_bytes(FACTOR * TOKENS * chosen, 1, 8, ranks) / 2**20
        by_rank = exchanged_bytes(rows, chosen, 4, ranks) / 2**20
        print(
            f"| {chosen} | {ranks} | {FACTOR * chosen:.2f} | {rows / TOKENS:.2f} | {by_expert:.0f} | {by_rank:.0f} |"
            f" {1 - by_rank / by_expert:.0%} |"
        )
    print("\n| router | k | R | capacity for rows by expert | rows by rank | pairs |")
    print("|---|---|---|---:|---:|---:|")
    for router, (alike, own) in ROUTERS.items():
        for chosen, ranks in CASES:
            draw, experts = torch.Generator().manual_seed(0), experts_of(chosen)
            scores = torch.randn(ranks, TOKENS, experts, generator=draw)
            scores += alike * torch.randn(experts, generator=draw)
            scores += own * torch.randn(ranks, 1, experts, generator=draw)
            capacities = needed(scores.topk(chosen).indices, ranks, experts // ranks)
            print(f"| {router} | {chosen} | {ranks} | {' | '.join(f'{c:.2f}' for c in capacities)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
