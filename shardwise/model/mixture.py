"""Mixtures of experts: a router sends every token to a few of many feed-forward networks.

    logits = W x; scores = softmax or sigmoid of logits, in fp32
    chosen: the k experts of the highest score (+ bias), within the best groups of experts
    weights: the chosen scores, normalised or not, times a scale
    out = sum over chosen e of weight_e down_e(silu(gate_e x) * up_e x), + a shared expert that every token goes to

The experts' matrices are two parameters of three dimensions, in the layout of transformers 5. Rows are sorted by
expert, so one kernel multiplies all groups (runtime/grouped_products.py). The weight of a choice multiplies the inner
activations, which are narrower than the result and are saved for the backward pass anyway. No operation depends on a
value, and sums have a fixed order.

Where that kernel is missing (fp64, odd widths), every expert computes every token: experts / k times the FLOPs, and
5 E m numbers kept per token instead of (h + 5 m) k. Refused: a copy of an expert's weights per token (transformers'
``batched_mm``), which keeps 3 k h m.

Auxiliary losses, each the sum over the mixtures of a model (``Router.losses``):

    balance   E sum_e f_e P_e; f_e, P_e: the mean number of choices and the mean score of an expert (Fedus et al. 2021)
    z         mean of logsumexp(logits)^2 (Zoph et al. 2022, arXiv:2202.08906, equation 5)

Legend: t tokens, k experts per token, n = t k rows, h width, m inner width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime.grouped_products import grouped_product, has_grouped_products, plan_grouped_products
from shardwise.runtime.parallel.vocabulary import IGNORED
from shardwise.runtime.routed_rows import rows_of, sums_of

_noted_logits: ContextVar[list[tuple[Router, Tensor]] | None] = ContextVar("router_logits", default=None)


class MixtureOfExperts(nn.Module):
    """Router, experts, and a shared expert if there is one. [b, s, h] -> [b, s, h]."""

    def __init__(self, dimensions: Dimensions, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = Router(dimensions)
        self.experts = Experts(dimensions)
        self.shared_experts = shared

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        out: Tensor = self.experts(tokens, *self.gate(tokens)).view_as(hidden)
        return out if self.shared_experts is None else out + self.shared_experts(hidden)


class Router(nn.Module):
    """Chooses the experts of each token. [t, h] -> int64 [t, k], and weights [t, k] in the dtype of the tokens.

    The bias balances without a loss: it changes the choice, not the weights (Wang et al. 2024, arXiv:2408.15664).
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        d = self.dimensions = dimensions
        self.weight = nn.Parameter(torch.empty(d.experts, d.width))
        self.register_buffer("e_score_correction_bias", torch.zeros(d.experts) if d.router_bias else None)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        d = self.dimensions
        logits = F.linear(tokens, self.weight)
        noted = _noted_logits.get()
        if noted is not None:
            noted.append((self, logits))
        scores = self._scores(logits)
        index = self._chosen(scores)
        weights = scores.gather(-1, index)  # without the bias, which has no part in the result
        if d.normalized_weights:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return index, (weights * d.router_scale).to(tokens.dtype)

    def _scores(self, logits: Tensor) -> Tensor:
        precise = _precise(logits)
        return precise.softmax(-1) if self.dimensions.router == "softmax" else precise.sigmoid()

    @torch.no_grad()
    def _chosen(self, scores: Tensor) -> Tensor:
        d = self.dimensions
        bias = self.e_score_correction_bias
        ranked = scores if bias is None else scores + bias  # [t, E]
        if d.router_groups > 1:
            # A group's score is the sum of its two best experts' (DeepSeek-AI 2024, arXiv:2412.19437).
            grouped = ranked.unflatten(-1, (d.router_groups, -1))  # [t, groups, E / groups]
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(d.groups_per_token, dim=-1).indices
            excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            ranked = grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
        return ranked.topk(d.experts_per_token, dim=-1).indices

    @property
    def adjusts_bias(self) -> bool:
        return self.e_score_correction_bias is not None and self.dimensions.router_bias_rate > 0

    @torch.no_grad()
    def adjust_bias(self, load: Tensor, left_out: Tensor) -> None:
        """After a step: more bias for experts with fewer tokens than the mean, less for those with more.

        Args:
            load: tokens of every expert, relative to the mean, [E]. left_out: 1 where the step updated nothing.
        """
        if self.e_score_correction_bias is not None:
            # ``left_out`` is a factor, so that a skipped step needs no answer from the device.
            change = self.dimensions.router_bias_rate * (1 - left_out) * (1 - load).sign()
            self.e_score_correction_bias += change.to(self.e_score_correction_bias.dtype)

    def losses(self, logits: Tensor, filled: Tensor) -> Tensor:
        """The auxiliary losses of one forward pass, times their coefficients; a scalar.

        Args:
            logits: [t, E]. filled: 1 for tokens, 0 for padding, [t].
        """
        d = self.dimensions
        precise = _precise(logits)
        scores = self._scores(logits)
        mask = filled.to(scores.dtype)
        # Only ``shares`` has a gradient: the number of choices is a constant of the loss.
        chosen = torch.zeros_like(scores).scatter(-1, self._chosen(scores), 1.0)
        shares = scores if d.router == "softmax" else scores / scores.sum(-1, keepdim=True)
        load = (mask @ chosen) / mask.sum()  # f_e, [E]
        score = (mask @ shares) / mask.sum()  # P_e, [E]
        z = (precise.logsumexp(-1).square() @ mask) / mask.sum()
        return d.balance_loss * d.experts * (load * score).sum() + d.z_loss * z


@contextmanager
def router_logits() -> Iterator[list[tuple[Router, Tensor]]]:
    """The routers that run within the block, with their logits [t, E].

    Blocks that run again for the backward pass do so after it, so their logits are noted once.
    """
    noted: list[tuple[Router, Tensor]] = []
    token = _noted_logits.set(noted)
    try:
        yield noted
    finally:
        _noted_logits.reset(token)


def filled_tokens(labels: Tensor) -> Tensor:
    """1 for the tokens up to a row's last target, else 0, [b, s]; all 1 if there is no target at all."""
    valid = labels != IGNORED
    filled = valid.flip(1).cumsum(1).flip(1) > 0  # whether a target is here or behind
    return (filled | ~valid.any()).to(torch.int64)


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class Experts(nn.Module):
    """Feed-forward networks (SwiGLU), each for the tokens that chose it.

    The contract is that of transformers' experts modules, so tensor and expert parallelism treat both alike: they
    replace the parameters by those of some experts, and set both attributes. Then an index equal to ``num_experts``
    stands for an expert of another rank. Its part of the result is 0, and so are its gradients.
    """

    act_fn = staticmethod(F.silu)

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        d = dimensions
        self.num_experts = d.experts
        self._is_expert_parallel = False
        self.gate_up_proj = nn.Parameter(torch.empty(d.experts, 2 * d.expert_width, d.width))
        self.down_proj = nn.Parameter(torch.empty(d.experts, d.width, d.expert_width))
        plan_grouped_products()

    def forward(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """[t, h] from tokens [t, h], experts int64 [t, k] and weights [t, k]."""
        if not has_grouped_products((self.gate_up_proj, self.down_proj)):
            return self._by_all(tokens, index, weight)
        # Sorted rows: order [n] is the choice that a row is of, row [t, k] the row of a choice.
        by_expert, order = index.flatten().sort(stable=True)
        numbers = torch.arange(self.num_experts, device=index.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        row = order.argsort().view_as(index)
        if self._is_expert_parallel:
            # Choices of other ranks' experts sort last; row n stands for no row (runtime/routed_rows.py).
            row = row.masked_fill(index >= self.num_experts, order.shape[0])
        source = order // index.shape[1]  # the token of each row
        gate_up = grouped_product(rows_of(tokens, source, row), self.gate_up_proj, ends)  # [n, 2 m]
        weights = rows_of(weight.reshape(-1, 1), order, row.view(-1, 1))  # [n, 1]
        gate, up = gate_up.chunk(2, dim=-1)
        out = grouped_product(self.act_fn(gate) * up * weights, self.down_proj, ends)
        return sums_of(out, source, row)

    def _by_all(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Every expert computes every token."""
        numbers = torch.arange(self.num_experts, device=index.device)
        chosen = index.unsqueeze(-1) == numbers  # [t, k, E]
        if self._is_expert_parallel:
            # Tokens without an expert here may have any values, NaN too, which a weight of 0 does not cancel.
            tokens = tokens.masked_fill(~chosen.any(1).any(-1, keepdim=True), 0.0)
        weights = torch.where(chosen, weight.unsqueeze(-1), 0.0).sum(1)  # [t, E]
        gate_up = torch.einsum("th,emh->tem", tokens, self.gate_up_proj)  # [t, E, 2 m]
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.einsum("tem,ehm->th", self.act_fn(gate) * up * weights.unsqueeze(-1), self.down_proj)
