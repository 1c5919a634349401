"""Kashin's greedy expansion: a matrix as the sum of two with small entries, the second one in a rotated basis.

W = U + Q V with ‖u‖∞ = O(‖w‖ / √n) for every row u of U and v of V, for most orthogonal Q (Kashin 1977; Merkulov et al.
2024, arXiv:2404.09737, algorithm 1). One step takes mean|r| · sign(r) from every row r of the residual and adds it to
U; the next does so in the basis of V. A step leaves (1 - 2/π) of the squared norm of a normal row. In Cherniuk et al.
2026 (arXiv:2609.11687) a block is two steps in each basis; the steps of the first block are peaks in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.plugins.quantize.methods.base import NotConverged
from shardwise.runtime.quantization.orthogonal import Basis

EXPANSION_BLOCKS = 10
"""Blocks of a whole expansion; 10 leave 1e-7 of a normal matrix in fp64."""
TRIED = 3
"""Blocks that show whether the residual falls."""
SLOWEST_DECAY = 0.5
"""The largest share that a block may leave. Normal rows: 0.13."""


@dataclass(frozen=True)
class Expansion:
    """W ≈ U + Q V.

    Attributes:
        u, v: [out, in].
        u_steps, v_steps: [out, steps]: the absolute value of every greedy step, first to last.
        residuals: [blocks], ‖W - U - Q V‖ / ‖W‖ after each block.
    """

    u: Tensor
    v: Tensor
    u_steps: Tensor
    v_steps: Tensor
    residuals: Tensor


def expand(
    weight: Tensor,
    basis: Basis,
    blocks: int = EXPANSION_BLOCKS,
    widths: tuple[int, int] = (2, 2),
    turn: int = 1,
) -> Expansion:
    """Expand W [out, in].

    Args:
        basis: the map Q.
        widths: steps per block in U and in V.
        turn: steps in one basis before those in the other. The residual falls fastest with 1; rounded to the peaks of
            its first block, an expansion loses least if all steps of a factor come at once.
    """
    rest = weight.clone()
    norm = weight.norm().clamp(min=1e-30)
    sums = [torch.zeros_like(weight), torch.zeros_like(weight)]  # U and V
    steps: tuple[list[Tensor], list[Tensor]] = ([], [])
    residuals = []
    for _ in range(blocks):
        for start in range(0, max(widths), turn):
            for side in (0, 1):
                # No step where this factor is narrower than the other one: the range is empty then.
                for _ in range(min(turn, widths[side] - start)):
                    size = rest.abs().mean(1, keepdim=True)  # [out, 1]
                    # Not torch.sign, which is 0 at 0: a code has no third value.
                    step = size * torch.where(rest < 0, -1.0, 1.0).to(rest)
                    sums[side] += step
                    rest -= step
                    steps[side].append(size)
                # Q is its own inverse: the residual is in V's basis after side 0, and in U's again after side 1.
                rest = basis(rest)
        residuals.append(rest.norm() / norm)
    return Expansion(sums[0], sums[1], torch.cat(steps[0], 1), torch.cat(steps[1], 1), torch.stack(residuals))


def check_convergence(weight: Tensor, basis: Basis) -> None:
    """Raise NotConverged unless the residual of a few blocks falls geometrically."""
    residuals = expand(weight, basis, TRIED).residuals
    before = torch.cat((torch.ones_like(residuals[:1]), residuals[:-1]))
    if not bool((residuals <= SLOWEST_DECAY * before).all()):
        shares = ", ".join(f"{residual:.2g}" for residual in residuals.tolist())
        raise NotConverged(
            f"blocks of Kashin's expansion leave {shares} of the weight instead of a falling share"
        )
