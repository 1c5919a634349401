"""fp16 through the real step: what its range loses, and what scaling the loss brings back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.build import build
from shardwise.engine.optim.norm import local
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.model.blueprint import Blueprint, SampleShapes
from shardwise.recipe.load import recipe_of
from shardwise.technique import strategy_from
from tests.harness.pool import Pool

CPU = torch.device("cpu")


class Small(Blueprint):
    """A blueprint around one module and a loss sum; samples are rows of a float tensor."""

    def __init__(self, module: type[nn.Module], weight: float) -> None:
        self._module, self._weight = module, weight

    def build(self, depth: int | None = None) -> nn.Module:
        return self._module()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return []

    def fill(self, model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=generator) / max(parameter.shape) ** 0.5
            local(parameter.detach()).copy_(value)

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        raise NotImplementedError("its samples are given")

    def count(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["x"]))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        error = (model(batch["x"]).float() - batch["y"]).square().sum()
        return error * self._weight, self.count(batch)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x.to(self.hidden.weight.dtype))))


class Weights(nn.Module):
    """Its output is its weights, so the gradient is whatever the loss makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(200_000))

    def forward(self, x: Tensor) -> Tensor:
        return self.weights * 1  # a copy: the weights are freed after the forward pass


def run_of(module: type[nn.Module], precision: str, weight: float = 1.0, **recipe: Any) -> Run:
    values = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1} | recipe
    strategy = strategy_from({"precision": precision})
    return build(recipe_of(values), Small(module, weight), strategy, CPU)


# ---- gradients that fp16 flushes --------------------------------------------------------------------------


def recovered_each(scales: tuple[float, ...]) -> list[float]:
    return [recovered(scale) for scale in scales]


def recovered(scale: float) -> float:
    """Share of gradients, log-uniform in [2^-27, 2^-24), that the step leaves nonzero."""
    fixed = {"dynamic": False, "initial": scale}
    run = run_of(Weights, "fp16", loss_scale=fixed)
    size = 2.0 ** (-27 + 3 * torch.rand(200_000, generator=torch.Generator().manual_seed(0)))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (model(batch["x"]).float() * size).sum(), torch.tensor(1)

    run.blueprint.loss = loss  # type: ignore[method-assign]
    run.passes.forward_backward([{"x": torch.zeros(1)}])
    [gradient] = [local(p.grad) for p in run.model.parameters() if p.grad is not None]
    return float((gradient / scale != 0).float().mean())


def test_small_gradients_are_recovered(pool: Pool) -> None:
    """Micikevicius et al. 2018, section 3.2: 2^-27 to 2^-24 becomes zero in fp16; a scale of 8 suffices."""
    [(one, eight, many)] = pool.run(1, recovered_each, (1.0, 8.0, 1024.0))
    assert one < 0.4  # those above 2^-25 round up to the smallest fp16 number
    assert eight >= 0.999 and many >= 0.999


def regression(precision: str, loss_scale: dict[str, Any]) -> list[float]:
    """Losses of 120 steps of a small regression whose loss is weighed by 2^-24."""
    weight = 2.0**-24
    run = run_of(
        Perceptron,
        precision,
        weight,
        loss_scale=loss_scale,
        optimizer={"name": "sgd", "clip_norm": None, "weight_decay": 0.0},
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator)
    y = torch.sin(x @ torch.randn(16, 4, generator=generator) / 4)
    return [float(step(run, [{"x": x, "y": y}], 0.02 / weight).loss) / weight for _ in range(120)]


def regressions() -> tuple[list[float], ...]:
    """In fp32; in fp16; in fp16 with a loss scale."""
    unscaled = {"dynamic": False, "initial": 1.0}
    scaled = {"initial": 2.0**24, "growth_interval": 50}
    return regression("fp32", unscaled), regression("fp16", unscaled), regression("fp16", scaled)


def test_a_model_that_stalls_in_fp16_trains_as_in_fp32_when_its_loss_is_scaled(pool: Pool) -> None:
    [(wide, stalled, scaled)] = pool.run(1, regressions)
    assert wide[-1] < 0.1 * wide[0]
    assert stalled[-1] > 0.9 * stalled[0]
    assert abs(scaled[-1] / wide[-1] - 1) < 1e-3


# ---- overflow ---------------------------------------------------------------------------------------------


def overflowing() -> list[tuple[float, float, bool]]:
    """(scale, skipped, whether weights changed) of 8 steps from a scale that is far too large."""
    run = run_of(
        Perceptron,
        "fp16",
        loss_scale={"initial": 2.0**30, "hysteresis": 2, "backoff": 2.0**-10, "growth_interval": 3},
    )
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    seen = []
    for _ in range(8):
        before = snapshot(run.model.parameters())
        result = step(run, [{"x": x, "y": torch.ones(8, 4)}], 1e-2)
        changed = any(
            not torch.equal(b, a) for b, a in zip(before, snapshot(run.model.parameters()), strict=True)
        )
        seen.append((float(result.loss_scale), float(result.skipped), changed))
    return seen


def snapshot(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local(p.detach()).clone() for p in parameters]


def test_an_overflow_changes_nothing_but_the_scale(pool: Pool) -> None:
    """Two overflows (hysteresis) before each reduction; ranks agree; clean steps let it grow again."""
    first, second = pool.run(2, overflowing)
    assert first == second
    assert all(bool(skipped) != changed for _, skipped, changed in first)
    scales = [scale for scale, _, _ in first]
    assert scales[:3] == [2.0**30, 2.0**30, 2.0**20]
    assert not any(skipped for _, skipped, _ in first[-3:])
    assert max(scales[3:]) > min(scales)
