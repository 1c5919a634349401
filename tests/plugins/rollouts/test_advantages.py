"""Advantages and losses against plain loops in Python floats (fp64), written from the papers' equations."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from shardwise.plugins.rollouts.advantages import (
    clipped_loss,
    clipped_value_loss,
    generalised_advantages,
    group_advantages,
    kl_divergence,
    policy_loss,
    whitened,
)

GROUP = 4


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def masks(n: int, s: int) -> Tensor:
    """Completions begin and end anywhere; one is a single token."""
    starts, ends = [0, 2, 3, 5, 1][:n], [s, s - 1, 4, s, 6][:n]
    at = torch.arange(s)
    return torch.stack([(at >= a) & (at < b) for a, b in zip(starts, ends, strict=True)])


def test_group_advantages_are_rewards_minus_the_mean_over_the_deviation() -> None:
    rewards = random(12)
    for scaled in (False, True):
        expected = []
        for first in range(0, 12, GROUP):
            own = rewards[first : first + GROUP].tolist()
            divisor = statistics.stdev(own) + 1e-4 if scaled else 1.0
            expected += [(reward - statistics.fmean(own)) / divisor for reward in own]
        assert group_advantages(rewards, GROUP, scaled).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    equal = torch.full((3,), 0.1, dtype=torch.float64)
    assert equal.mean() != 0.1
    assert not group_advantages(equal, 3, True).any()
    assert not group_advantages(equal, 3, leave_one_out=True).any()


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards = random(12, seed=1)
    expected = []
    for first in range(0, 12, GROUP):
        own = rewards[first : first + GROUP].tolist()
        expected += [r - (sum(own) - r) / (GROUP - 1) for r in own]
    given = group_advantages(rewards, GROUP, leave_one_out=True)
    assert given.tolist() == pytest.approx(expected, abs=1e-12)


def plain_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Equation 16 as a double sum over one completion."""
    length = len(rewards)
    deltas = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < length else 0.0) - values[t] for t in range(length)
    ]
    advantages = [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, length)) for t in range(length)
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0)])
def test_generalised_advantages_equal_the_double_sum_of_equation_16(gamma: float, lam: float) -> None:
    rewards, values, valid = random(5, 9), random(5, 9, seed=2), masks(5, 9)
    advantages, returns = generalised_advantages(rewards, values, valid, gamma, lam)
    for row in range(5):
        here = valid[row]
        plain = plain_gae(rewards[row][here].tolist(), values[row][here].tolist(), gamma, lam)
        assert advantages[row][here].tolist() == pytest.approx(plain[0], abs=1e-12)
        assert returns[row][here].tolist() == pytest.approx(plain[1], abs=1e-12)
        assert not advantages[row][~here].any()
        assert not returns[row][~here].any()


def test_with_lambda_1_returns_are_discounted_sums_of_rewards() -> None:
    rewards, values, valid = random(1, 6), random(1, 6, seed=3), torch.ones(1, 6, dtype=torch.bool)
    _, returns = generalised_advantages(rewards, values, valid, 0.9, 1.0)
    expected = [sum(0.9 ** (k - t) * float(rewards[0, k]) for k in range(t, 6)) for t in range(6)]
    assert returns[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_whitening_counts_valid_positions_only() -> None:
    values, valid = random(5, 9, seed=4, scale=3.0) + 2, masks(5, 9)
    here = values[valid].tolist()
    mean, deviation = statistics.fmean(here), statistics.stdev(here)
    result = whitened(values, valid)
    assert result[valid].tolist() == pytest.approx([(v - mean) / deviation for v in here], abs=1e-7)
    assert not result[~valid].any()


def test_kl_sign_pulls_the_policy_to_the_reference() -> None:
    """Forks had the sign wrong (RAGEN #58, ToolRL #52), which pushes the policy away."""
    policy = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    loss = kl_divergence(policy, reference)
    assert loss.tolist() == pytest.approx([math.exp(-1) + 1 - 1, math.exp(1) - 1 - 1])
    loss.sum().backward()
    assert policy.grad is not None
    assert policy.grad[0] > 0  # descent makes the token less likely, which the reference likes less
    assert policy.grad[1] < 0
    assert kl_divergence(reference, reference).abs().max() == 0


def test_kl_estimate_has_the_mean_of_the_exact_kl_divergence() -> None:
    p, r = random(7, seed=5).log_softmax(0), random(7, seed=6).log_softmax(0)
    exact = (p.exp() * (p - r)).sum()
    assert float((p.exp() * kl_divergence(p, r)).sum()) == pytest.approx(float(exact), abs=1e-12)


def test_importance_ratio_is_not_dropped() -> None:
    """The gradient is that of -A log p (TRL #5031: without the ratio it was A's own scale, times 100)."""
    policy = random(3, 4, seed=7).requires_grad_()
    advantages = random(3, 4, seed=8)
    loss = policy_loss(policy, advantages)
    assert torch.equal(loss, -advantages)
    loss.sum().backward()
    assert policy.grad is not None
    assert torch.allclose(policy.grad, -advantages, rtol=0, atol=1e-15)


def plain_clip(policy: float, old: float, advantage: float, epsilon: float) -> float:
    ratio = math.exp(policy - old)
    clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
    return -min(ratio * advantage, clipped * advantage)


def test_clipped_loss_equals_equation_7_and_its_gradient_stops_where_clipped() -> None:
    policy, old, advantages = random(40, seed=9).requires_grad_(), random(40, seed=10), random(40, seed=11)
    loss, share = clipped_loss(policy, old, advantages, 0.2)
    rows = zip(policy.tolist(), old.tolist(), advantages.tolist(), strict=True)
    assert loss.tolist() == pytest.approx([plain_clip(*row, 0.2) for row in rows], abs=1e-12)
    loss.sum().backward()
    assert 0 < share.sum() < 40
    assert policy.grad is not None
    assert torch.equal(share == 1, policy.grad == 0)


def test_clipped_loss_on_the_policy_itself_is_the_policy_loss() -> None:
    advantages = random(6, seed=13)
    gradients = []
    for clipped in (True, False):
        policy = random(6, seed=12).requires_grad_()
        loss = (
            clipped_loss(policy, policy.detach(), advantages, 0.2)[0]
            if clipped
            else policy_loss(policy, advantages)
        )
        loss.sum().backward()
        gradients.append(policy.grad)
    assert torch.equal(*gradients)


def test_clipped_value_loss_takes_the_larger_error() -> None:
    values, old, returns = random(30, seed=14), random(30, seed=15), random(30, seed=16)
    expected = []
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        near = o + max(-0.3, min(0.3, v - o))
        expected.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
    assert clipped_value_loss(values, old, returns, 0.3).tolist() == pytest.approx(expected, abs=1e-12)
