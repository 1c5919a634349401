"""Counts of the tokens of experts, against plain counts of the routers' choices."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.model.mixture import MixtureOfExperts, Router
from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime.parallel.expert_load import FILLED_ROWS, ExpertLoad, experts_by_name

DIMENSIONS = Dimensions(
    layers=2,
    width=16,
    heads=2,
    kv_heads=2,
    ffn=24,
    vocab=64,
    experts=6,
    experts_per_token=2,
    router_bias=True,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MixtureOfExperts(DIMENSIONS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for module in model.modules():
        if isinstance(module, Router) and module.e_score_correction_bias is not None:
            module.e_score_correction_bias.zero_()
            module.e_score_correction_bias[4] = -1e3  # no token chooses it
    return model


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recomputed", [False, True])
def test_counts_are_those_of_the_routers(recomputed: bool, model: nn.Sequential) -> None:
    """Passes without gradients, and those that run again for the backward pass, are not counted."""
    load = ExpertLoad(experts_by_name(model), [(model, list(model))])
    chosen: list[Counter[int]] = [Counter(), Counter()]
    for number, block in enumerate(model):
        block.mlp.gate.register_forward_hook(  # type: ignore[union-attr]
            lambda module, args, result, number=number: chosen[number].update(result[0].flatten().tolist())
        )
    for seed in range(3):
        x = torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(seed))
        if recomputed:
            seen = [Counter(each) for each in chosen]
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            now = [Counter(each) for each in chosen]
            x.sum().backward()
            for each, before, after in zip(chosen, seen, now, strict=True):
                assert each != after, "it was recomputed"
                each.clear()
                each.update(after)
                assert sum(after.values()) - sum(before.values()) == 5 * 7 * 2
        else:
            model(x).sum().backward()
    expected = torch.tensor([[each[e] / (3 * 5 * 7 * 2 / 6) for e in range(6)] for each in chosen])
    with torch.no_grad():
        model(torch.randn(2, 3, 16))
    assert load.names == ("0.mlp.experts", "1.mlp.experts")
    measured = load.relative(torch.device("cpu"))
    assert torch.allclose(measured, expected, rtol=1e-6)
    assert (measured[:, 4] == 0).all() and (measured[:, :4] > 0).all()
    assert not load.relative(torch.device("cpu")).any(), "a step begins without counts"


@pytest.mark.usefixtures("alone")
def test_rows_without_a_target_are_not_counted(model: nn.Sequential) -> None:
    """A row counts as in a batch of its own, whatever fills up the batch."""
    load = ExpertLoad(experts_by_name(model), [(model, list(model))])
    x = torch.randn(5, 7, 16)
    model(x[1:2]).sum().backward()
    alone = load.relative(torch.device("cpu"))
    load.begin({FILLED_ROWS: torch.tensor([False, True, False, False, False])})
    model(x).sum().backward()
    assert torch.equal(load.relative(torch.device("cpu")), alone)
    load.begin({})
    model(x).sum().backward()
    assert not torch.equal(load.relative(torch.device("cpu")), alone), "all rows count again"


@pytest.mark.usefixtures("alone")
def test_biases_move_by_one_rate_unless_the_update_was_left_out(model: nn.Sequential) -> None:
    load = ExpertLoad(experts_by_name(model), [(model, list(model))])
    biases = [block.mlp.gate.e_score_correction_bias for block in model]  # type: ignore[union-attr]
    before = [bias.clone() for bias in biases]
    table = torch.tensor([[0.0, 1.0, 1.5, 2.5, 0.5, 0.5], [1.0] * 6])
    load.adjust_biases(table, torch.ones(()))
    assert all(torch.equal(bias, old) for bias, old in zip(biases, before, strict=True))
    load.adjust_biases(table, torch.zeros(()))
    rate = DIMENSIONS.router_bias_rate
    assert rate == 0.001, "that of DeepSeek-V3 (arXiv:2412.19437, section 4.2)"
    moved = torch.tensor([rate, 0.0, -rate, -rate, rate, rate])
    assert torch.allclose(biases[0], before[0] + moved) and torch.equal(biases[1], before[1])


def test_models_without_experts_have_no_names() -> None:
    assert experts_by_name(nn.Sequential(nn.Linear(2, 2))) == {}


@pytest.mark.usefixtures("alone")
def test_no_step_after_the_first_copies_a_list_to_the_device(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would wait for the device."""
    load = ExpertLoad(experts_by_name(model), [(model, list(model))])
    model(torch.randn(2, 3, 16)).sum().backward()
    first = load.relative(torch.device("cpu"))
    monkeypatch.setattr(torch, "tensor", lambda *args, **named: pytest.fail("a list is copied"))
    model(torch.randn(2, 3, 16)).sum().backward()
    assert first.any() and load.relative(torch.device("cpu")).any()


@pytest.mark.usefixtures("alone")
def test_experts_that_are_called_otherwise_have_no_load(model: nn.Sequential) -> None:
    """Not what the buffer happened to have."""
    load = ExpertLoad(experts_by_name(model), [(model, list(model))])
    for block in model:
        block.mlp.experts.tokens_per_expert.fill_(77)  # type: ignore[union-attr]
        block.mlp.experts.forward = lambda tokens, **named: tokens  # type: ignore[union-attr]
        block.forward = lambda x, block=block: block.mlp.experts(x, top_k_index=None)  # type: ignore[method-assign, misc]
    model(torch.randn(2, 3, 16, requires_grad=True)).sum().backward()
    assert not load.relative(torch.device("cpu")).any()
