"""A loop of one's own and objects of Python: equal to the plain loop that they were ported from."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Plan
from shardwise.jobs.objects import cluster_named, recipe_from
from shardwise.technique import layout_of, strategy_from
from tests.harness.plans import small_plan
from tests.harness.pool import Pool

STEPS, BATCH, CLASSES = 20, 8, 5


class Net(nn.Module):
    """Odd sizes, a tied pair, a buffer: nothing divides by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(7, 13), nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.norm, self.leave = nn.LayerNorm(13), nn.Linear(13, CLASSES, bias=False)
        self.register_buffer("shift", torch.full((13,), 0.25))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.shift
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.leave(self.norm(x))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, labels = model(batch["x"]), batch["labels"]
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(index)
        return {"x": torch.randn(7, generator=chance), "labels": torch.tensor(index % CLASSES)}


def warmed(step: int) -> float:
    return min(1.0, (step + 1) / 5)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def muon_and_adamw(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """As torch's documentation of Muon has it."""
    matrices = [p for name, p in named if p.ndim == 2 and name.startswith("blocks")]
    others = [p for name, p in named if p.ndim != 2 or not name.startswith("blocks")]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


OPTIMIZERS: dict[str, Any] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    # with its own eps of 1e-8, the first gradients of rounding's size move a parameter by the whole rate
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
    "Muon": muon_and_adamw,
}


def plain_loop(optimizer: Any, order: list[list[int]]) -> tuple[list[float], dict[str, Tensor]]:
    """The loop before it was ported: no library, one process."""
    model, data = net(), Points()
    inner = getattr(optimizer, "func", optimizer)
    whole = isinstance(inner, type)
    made = optimizer(model.parameters() if whole else list(model.named_parameters()))
    optimizers = made if isinstance(made, list) else [made]
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    losses = []
    for step, indices in enumerate(order):
        batch = {key: torch.stack([data[i][key] for i in indices]) for key in ("x", "labels")}
        mean = F.cross_entropy(model(batch["x"]), batch["labels"])
        mean.backward()
        groups = [group for each in optimizers for group in each.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * warmed(step)
        for each in optimizers:
            each.step()
            each.zero_grad()
        losses.append(mean.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def options(optimizer: Any, stage: int) -> dict[str, Any]:
    return {
        "steps": STEPS,
        "batch_size": BATCH,
        "optimizer": optimizer,
        "schedule": warmed,
        "cluster": {"device": "cpu", "devices_per_node": 2},
        "strategy": {"zero_stage": stage, "micro_batch_size": 2, "precision": "fp32"},
        "data": {"held_out": 0.0},
    }


def ported_loop(
    name: str, stage: int, plan: Plan, folder: Path
) -> tuple[list[float], dict[str, Tensor], list[list[int]]]:
    """The same loop as a session; also the samples of each step."""
    losses = []
    given = {"module": net(), "loss": loss, "dataset": Points, **options(OPTIMIZERS[name], stage)}
    with shardwise.session(plan=plan, **given) as run:
        for batch in run.batches():
            mean = run.forward_backward(batch)
            run.step()
            losses.append(float(mean))
            if run.step_number == STEPS // 2:  # what a checkpoint holds is all of the state
                run.save(folder)
        order = [run._data.samples(step) for step in range(STEPS)]
        whole = run.parameters()
        assert run.resume(folder) == STEPS // 2
        again = []
        for batch in run.batches():
            again.append(float(run.forward_backward(batch)))
            run.step()
    assert again == losses[STEPS // 2 :], "resumed from the checkpoint in the middle"
    return losses, whole, order


def test_another_number_of_processes_is_refused_before_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.jobs.session.make_plan", lambda *_: pytest.fail("it was planned"))
    given: dict[str, Any] = {"module": net(), "loss": loss, "dataset": Points, **options("adamw", 0)}
    with pytest.raises(RecipeError, match=r"the plan is for 2 processes.*this is the only one"):
        shardwise.session(**given).__enter__()
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    given["cluster"] = {"device": "cpu"}
    with pytest.raises(RecipeError, match=r"the plan is for 1 process .*this is one of 2"):
        shardwise.session(**given).__enter__()


def plan_of(stage: int, ranks: int) -> Plan:
    strategy = strategy_from({"zero_stage": stage, "micro_batch_size": 2})
    return replace(
        small_plan(),
        strategy=strategy,
        world_size=ranks,
        layout=layout_of(strategy, ranks),
        devices_per_node=ranks,
    )


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param("AdamW", 0, marks=pytest.mark.long),
        pytest.param("AdamW", 2, marks=pytest.mark.long),
        ("AdamW", 3),
        pytest.param("SGD", 3, marks=pytest.mark.long),
        pytest.param("RMSprop", 2, marks=pytest.mark.long),
        pytest.param("Adafactor", 0, marks=pytest.mark.long),
        pytest.param("Adafactor", 3, marks=pytest.mark.long),
        pytest.param("Muon", 3, marks=pytest.mark.long),
    ],
)
def test_a_ported_loop_is_the_plain_loop(name: str, stage: int, pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, ported_loop, name, stage, plan_of(stage, 2), tmp_path)
    assert first[0] == second[0], "ranks see the same loss"
    losses, expected = plain_loop(OPTIMIZERS[name], first[2])
    limit = 1e-6
    assert max(abs(a - b) for a, b in zip(losses, first[0], strict=True)) <= limit
    assert losses[-1] < losses[0]
    for parameter, value in expected.items():
        torch.testing.assert_close(first[1][parameter], value, rtol=0, atol=limit)


def test_an_existing_process_group_needs_a_plan(pool: Pool) -> None:
    assert pool.run(1, without_plan) == ["a dry run has a process group of its own"]


def without_plan() -> str:
    try:
        with shardwise.session(module=net(), loss=loss, dataset=Points, steps=1, batch_size=1):
            return ""
    except RecipeError as error:
        return error.why


def test_sections_of_a_recipe_are_taken_too() -> None:
    sections = {
        "optimizer": {"name": "sgd", "learning_rate": 0.25},
        "schedule": {"name": "linear", "warmup": 2},
    }
    recipe = recipe_from(net(), loss, Points, None, steps=4, batch_size=2, **sections).recipe
    assert (recipe.optimizer.name, recipe.optimizer.learning_rate) == ("sgd", 0.25)
    assert (recipe.schedule.name, recipe.schedule.warmup) == ("linear", 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": 3}, "the optimizer is no class or function"),
        ({"schedule": 3}, "the schedule is no function"),
        ({"cluster": "8xH1000"}, "cluster"),
        ({"strategie": {}}, "did you mean 'strategy'"),
    ],
)
def test_a_wrong_argument_is_one_line(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        shardwise.train_module(
            net(), loss, Points, out=tmp_path / "run", **{"steps": 1, "batch_size": 1, **given}
        )
    assert "\n" not in caught.value.line()


def test_half_a_module_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    model = net()
    model.leave = nn.Linear(13, CLASSES, bias=False, device="meta")
    with pytest.raises(RecipeError, match=r"a part of the module is on the meta device.*leave\.weight"):
        shardwise.train_module(model, loss, Points, out=tmp_path, steps=1, batch_size=1)


def test_auto_is_this_machine() -> None:
    expected = "devices_per_node" if torch.cuda.is_available() else "device"
    assert expected in cluster_named("auto")
    assert cluster_named("2x8xH100-80GB") == {"preset": "2x8xH100-80GB"}


@pytest.mark.long
def test_objects_of_python_are_planned_and_trained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In processes of their own: classes of this module, a closure and a callback object travel."""
    heard = tmp_path / "heard"

    class Listener:
        def on_end(self, end: dict[str, Any]) -> None:
            heard.write_text(str(end["reason"]))

    given = options(OPTIMIZERS["Adafactor"], 0) | {"steps": 3, "cluster": {"device": "cpu"}}
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scale = 1.0

    def scaled(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = loss(module, batch)
        return scale * total, count

    record = shardwise.train_module(
        model, scaled, Points, out=tmp_path / "run", callbacks=[Listener()], checkpoint={"keep": 5}, **given
    )
    assert [step.step for step in record.steps] == [1, 2, 3] and record.outcome is not None
    assert heard.read_text() == "finished"
    order = [[step.loss] for step in record.steps]
    assert record.steps[0].learning_rate == pytest.approx(0.05 / 5), (
        "the schedule and the optimizer's own rate"
    )
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert record.plan.ledger.optimizer_state < 4 * record.plan.parameters, "Adafactor's factors are counted"
    said = capfd.readouterr()
    assert order and said.out == ""
    assert "step 3/3  loss" in said.err and "samples/s" in said.err and "tokens" not in said.err
    written = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "python:model" in written and "keep: 5" in written
