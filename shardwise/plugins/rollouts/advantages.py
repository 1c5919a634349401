"""The mathematics of policy gradients: advantages of groups and of tokens, and losses per token.

Pure functions on tensors. Losses are per token, never means: the engine divides their sum by the number of targets in
the global batch.

Legend: n completions, s positions. A row's valid positions follow each other. ``policy`` and ``old`` are
log-probabilities of the trained policy and of the one that sampled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to the standard deviation of a group: groups of equal rewards have advantages of zero."""

RATIO_CAP = 2.0
"""The largest weight of a token that other weights than the trained ones sampled."""

VARIANCE_FLOOR = 1e-8
"""Added to the variance of whitened values."""


def group_advantages(
    rewards: Tensor, group: int, scaled: bool = False, leave_one_out: bool = False
) -> Tensor:
    """Reward minus the mean of its group (GRPO), divided by the group's standard deviation if ``scaled``.

    Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; unscaled: Liu et al. 2025 (arXiv:2503.20783).

    Args:
        rewards: [n]; completions of one prompt follow each other.
        group: completions per prompt.
        leave_one_out: subtract the mean of the others (RLOO; Ahmadian et al. 2024, arXiv:2402.14740, eq. 8), which
            is ``group / (group - 1)`` times as far.
    """
    grouped = rewards.unflatten(0, (-1, group))
    # The mean of 0.1 three times is not 0.1.
    differ = grouped.amax(1, keepdim=True) != grouped.amin(1, keepdim=True)
    centred = (grouped - grouped.mean(1, keepdim=True)).where(differ, 0)
    if scaled:
        centred = centred / (grouped.std(1, keepdim=True) + STD_FLOOR)
    return centred.flatten() * (group / (group - 1) if leave_one_out else 1)


def generalised_advantages(
    rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    A_t = sum over l of (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t. After the last valid position
    the value is 0.

    Args:
        rewards, values: [n, s].
        valid: bool [n, s].

    Returns (advantages, returns), both [n, s]; 0 where invalid. Returns are advantages + values.
    """
    counted = valid.to(values.dtype)
    values = values * counted
    deltas = (rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values) * counted
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        running = deltas[:, t] + gamma * lam * counted[:, t] * running
        advantages[:, t] = running
    return advantages, advantages + values


def whitened(values: Tensor, valid: Tensor) -> Tensor:
    """Values [n, s] with mean 0 and variance 1 over all valid positions; 0 where invalid."""
    own = values[valid]
    variance = own.var(correction=min(1, len(own) - 1))
    white = (own - own.mean()) * (variance + VARIANCE_FLOOR).rsqrt()
    return torch.zeros_like(values).masked_scatter(valid, white)


def kl_divergence(policy: Tensor, reference: Tensor) -> Tensor:
    """Per token, an unbiased estimate of KL(policy, reference) from tokens that the policy sampled; never negative.

    k3 = exp(r - p) - (r - p) - 1, for log-probabilities p of the policy and r of the reference (Schulman 2020,
    "Approximating KL divergence").
    """
    difference = reference - policy
    return difference.exp() - difference - 1


def truncated_ratio(policy: Tensor, sampled: Tensor) -> Tensor:
    """Per token: its probability by the policy over that by its sampler, at most ``RATIO_CAP``; no gradient.

    Truncated importance sampling (Ionides 2008, "Truncated Importance Sampling").
    """
    return (policy - sampled).exp().clamp(max=RATIO_CAP).detach()


def policy_loss(policy: Tensor, advantages: Tensor) -> Tensor:
    """Per token, on the policy that sampled it: the ratio of the policy to itself times the advantage, negated.

    Its value is -A, and its gradient that of -A log p.
    """
    return -(policy - policy.detach()).exp() * advantages


def clipped_loss(policy: Tensor, old: Tensor, advantages: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Per token: PPO's clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Also 1 for tokens whose gradient it cuts off, else 0.
    """
    ratio = (policy - old).exp()
    free = ratio * advantages
    clamped = ratio.clamp(1 - epsilon, 1 + epsilon) * advantages
    return -torch.minimum(free, clamped), (clamped < free).to(policy)


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, epsilon: float) -> Tensor:
    """Per token: half the squared error of the values, which move by at most ``epsilon`` from the ``old`` ones.

    The larger of both errors counts, as in OpenAI's baselines (Engstrom et al. 2020, arXiv:2005.12729).
    """
    near = old + (values - old).clamp(-epsilon, epsilon)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())
