"""What a user's module may do with its weights and buffers: trained as by a plain loop, or refused in a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Plan
from shardwise.core.user_objects import giving
from shardwise.engine.seeding import seed_step
from shardwise.model.object_model import GivenModel
from shardwise.technique import layout_of, strategy_from
from tests.harness.plans import small_plan
from tests.harness.pool import Pool

STEPS, RATE, MICRO = 4, 0.05, 2
RATE_OF = {"name": "sgd", "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def block(self) -> nn.Module:
        return nn.Linear(6, 6)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.leave(x)


class Transposed(Net):
    """Weights in other orders of memory, such as those of channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter.weight = nn.Parameter(self.enter.weight.detach().T.contiguous().T)
        self.blocks[0] = nn.Sequential(
            nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 6, 3, padding=1), nn.Flatten()
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Centred(nn.Module):
    """Subtracts a running mean, and counts."""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.linear, self.replaced = nn.Linear(6, 6), replaced
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.mean: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.replaced:
            self.mean, self.count = 0.9 * self.mean + 0.1 * x.detach().mean(0), self.count + 1
        elif self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean), 0.1)
            self.count += 1
        return self.linear(x - self.mean) / (1 + 0.1 * self.count)


class InPlace(Net):
    def block(self) -> nn.Module:
        return Centred(replaced=False)


class Replaced(Net):
    def block(self) -> nn.Module:
        return Centred(replaced=True)


class Normed(Net):
    """A hook of its own updates the buffers of a block, before other hooks."""

    def block(self) -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(6, 6))


class Late(Net):
    """Its second block is used from the second micro-batch on."""

    calls, used = 0, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = F.gelu(self.blocks[0](self.enter(x)))
        return self.leave(self.blocks[1](x) if self.calls % 2 == self.used else x)


class Early(Late):
    """Its second block is not used in the last micro-batch."""

    used = 1


class Common(Net):
    """Two blocks have the same layer inside."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(layer, nn.GELU(), nn.Linear(6, 6)) for _ in range(2))


class Lent(Net):
    """A layer of a block is used outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Sequential(self.layer, nn.GELU())])


class Clipped(Net):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.leave.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Renormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        return self.leave(self.enter(x) + self.table(x[:, 0].new_zeros(len(x), dtype=torch.int64)))


class Sparse(Renormed):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6, sparse=True)


class Follower(Net):
    """A frozen copy that follows the trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Linear(4, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for old, new in zip(self.copy.parameters(), self.enter.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return super().forward(x) + self.leave(self.copy(x))


class Forces(Net):
    """Returns a derivative."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0][:, :3]


class WholeForces(Forces):
    def units(self) -> list[nn.Module]:
        return []


class Empty(Net):
    """With parameters of no elements, such as those of inputs without features."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.rows @ self.columns[:, 0] + x.new_zeros(len(x), 0) @ self.columns


class Asking(Net):
    """Asks for a value."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if bool((x == x).all()) else self.leave(self.enter(x))


class Borrowing(Net):
    """A list has one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.borrowed = [self.leave.bias]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.borrowed[0]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


def apart(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Does not call the module, but its members."""
    return model.leave(model.enter(batch["x"])).square().sum(), len(batch["x"])


def points() -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=chance), "y": torch.randn(3, generator=chance)} for _ in range(32)]


def decayed(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """With a penalty on all weights."""
    total, count = loss(model, batch)
    return total + count * sum(parameter.square().sum() for parameter in model.parameters()), count


def decayed_head(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """With a penalty on weights of no unit."""
    total, count = loss(model, batch)
    return total + count * model.leave.weight.square().sum(), count


def sloped(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """With a penalty on the gradient of the inputs."""
    with torch.enable_grad():
        x = batch["x"].detach().requires_grad_()
        y = model(x)
        slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return (y - batch["y"]).square().sum() + slope.square().sum(), len(x)


def weighted(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).square().sum(), torch.ones(len(batch["x"])).sum()


def made(kind: type[Net]) -> Net:
    torch.manual_seed(3)
    return kind()


def given(kind: type[Net], function: Any = loss) -> dict[str, Any]:
    return {
        "module": made(kind),
        "loss": function,
        "dataset": points(),
        "steps": STEPS,
        "batch_size": 8,
        "optimizer": RATE_OF,
        "data": {"held_out": 0.125},
    }


def plan_of(settings: dict[str, Any], ranks: int = 2) -> Plan:
    strategy = strategy_from({"precision": "fp64", "micro_batch_size": MICRO, **settings})
    layout = layout_of(strategy, ranks)
    return replace(small_plan(), strategy=strategy, world_size=ranks, layout=layout, devices_per_node=ranks)


def trained(
    kind: type[Net], plan: Plan, folder: Path, saves: bool = False, function: Any = loss
) -> tuple[list[float], dict[str, Tensor], list[list[list[dict[str, Tensor]]]]] | str:
    """Losses, tensors, and the batches of each step and rank; the line of a refusal."""
    try:
        with shardwise.session(
            plan=plan,
            cluster={"device": "cpu", "devices_per_node": 2},
            strategy=dict(plan.strategy.values),
            **given(kind, function),
        ) as run:
            losses = []
            for batch in run.batches():
                losses.append(float(run.forward_backward(batch)))
                run.step()
                if saves:
                    run.save(folder)
                    run.evaluate()
            tensors = run.parameters() | {name: b.clone() for name, b in run.module.named_buffers()}
            reads = [
                [run._data.micro_batches(step, rank, 2, MICRO) for rank in range(2)] for step in range(STEPS)
            ]
            return losses, tensors, reads
    except RecipeError as error:
        return error.line()


def plain(
    kind: type[Net], reads: list[list[list[dict[str, Tensor]]]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Replicas of one process: gradients are summed, and the buffers of the first count."""
    replicas = [made(kind).double() for _ in reads[0]]
    losses = []
    for step, batches in enumerate(reads):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for replica in replicas[1:]:
            for other, buffer in zip(replica.buffers(), replicas[0].buffers(), strict=True):
                other.copy_(buffer)
        for rank, replica in enumerate(replicas):
            seed_step(0, step, rank)
            for batch in batches[rank]:
                part, items = loss(replica, {key: value.double() for key, value in batch.items()})
                part.backward()
                total, count = total + part.detach(), count + items
        with torch.no_grad():
            for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
                gradients = [p.grad for p in copies if p.grad is not None]
                for p in copies:
                    p -= RATE * sum(gradients, torch.zeros_like(p)) / count
                for p in copies:
                    p.grad = None
        losses.append(float(total / count))
    first = replicas[0]
    return losses, {**dict(first.named_parameters()), **dict(first.named_buffers())}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Transposed, {"zero_stage": 3}),
        (Transposed, {"zero_stage": 0}),
        (InPlace, {"zero_stage": 2}),
        (Replaced, {"zero_stage": 3}),
        (Late, {"zero_stage": 1}),
        (Early, {"zero_stage": 3, "optimizer_in_backward": True}),
        (Empty, {"zero_stage": 3}),
        (Empty, {"zero_stage": 2, "offload": "optimizer+parameters"}),
        (Common, {"zero_stage": 0}),
        (Follower, {"zero_stage": 0}),
        (Clipped, {"zero_stage": 0}),
    ],
)
def test_a_module_trains_as_in_a_plain_loop(
    kind: type[Net], settings: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    result, other = pool.run(2, trained, kind, plan_of(settings), tmp_path)
    assert not isinstance(result, str), result
    losses, tensors, reads = result
    assert losses == other[0]
    expected, values = plain(kind, reads)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, value in values.items():
        torch.testing.assert_close(tensors[name].to(value), value.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [InPlace, Replaced])
def test_saves_and_evaluations_change_no_step(kind: type[Net], pool: Pool, tmp_path: Path) -> None:
    """Ranks have the buffers of rank 0 in every step, and not only after a save."""
    plan = plan_of({"zero_stage": 2})
    without, _ = pool.run(2, trained, kind, plan, tmp_path, False)
    saved, _ = pool.run(2, trained, kind, plan, tmp_path, True)
    assert without[0] == saved[0]


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (Clipped, {"zero_stage": 3}, r"writes into a weight \(model: leave\.weight\)"),
        (Follower, {"zero_stage": 2}, r"writes into a weight \(model: copy\.weight\)"),
        (Renormed, {"zero_stage": 3}, r"max_norm trains on one rank only \(model: table\)"),
        (Renormed, {"zero_stage": 0}, r"max_norm trains on one rank only \(model: table\)"),
        (Sparse, {"zero_stage": 0}, "the gradient of table is sparse"),
        (InPlace, {"activation_checkpointing": "full"}, "runs again in the backward pass changes a buffer"),
        (Replaced, {"activation_checkpointing": "every:2"}, r"changes a buffer \(.*Centred: mean\)"),
        (Normed, {"activation_checkpointing": "selective"}, r"changes a buffer \(.*Linear: weight_[uv]\)"),
        (Common, {"zero_stage": 3}, r"block 0 shares blocks\.1\.0\.weight with block 1"),
        (Lent, {"zero_stage": 3}, r"block 0 shares layer\.weight with the rest of the model"),
        (Forces, {"zero_stage": 2}, "torch.autograd.grad through a sharded module"),
        (Asking, {"zero_stage": 0}, r"reads a value of a tensor into Python.* leave out \.item\(\)"),
        (Borrowing, {"zero_stage": 0}, "uses a tensor that is not its own"),
    ],
)
def test_what_a_strategy_cannot_keep_is_refused_by_the_plan(
    kind: type[Net], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        shardwise.plan(
            cluster={"device": "cpu", "devices_per_node": 2},
            strategy={"micro_batch_size": MICRO, **settings},
            **given(kind),
        )
    assert "\n" not in caught.value.line()


def test_layers_that_are_called_without_the_module_are_refused_where_weights_are_sharded(
    pool: Pool, tmp_path: Path
) -> None:
    said = pool.run(2, trained, Net, plan_of({"zero_stage": 3}), tmp_path, False, apart)
    assert all("used outside of the forward() that gathers them" in str(line) for line in said)
    whole = pool.run(2, trained, Net, plan_of({"zero_stage": 0}), tmp_path, False, apart)
    assert not any(isinstance(result, str) for result in whole)


def test_a_penalty_on_weights_is_that_of_whole_weights_or_refused(pool: Pool, tmp_path: Path) -> None:
    """Also in an evaluation."""
    refused = pool.run(2, trained, Net, plan_of({"zero_stage": 3}), tmp_path, False, decayed)
    assert all("used outside of the forward() that gathers them" in str(line) for line in refused)
    for penalty, stages in ((decayed, (2,)), (decayed_head, (2, 3))):
        whole, _ = pool.run(2, trained, Net, plan_of({"zero_stage": 0}), tmp_path, True, penalty)
        for stage in stages:
            sharded, _ = pool.run(2, trained, Net, plan_of({"zero_stage": stage}), tmp_path, True, penalty)
            assert sharded[0] == pytest.approx(whole[0], rel=1e-12)


def test_derivatives_in_the_forward_pass_of_a_module_without_units(pool: Pool, tmp_path: Path) -> None:
    whole, _ = pool.run(2, trained, WholeForces, plan_of({"zero_stage": 0}), tmp_path, True)
    sharded, _ = pool.run(2, trained, WholeForces, plan_of({"zero_stage": 3}), tmp_path, True)
    assert sharded[0] == pytest.approx(whole[0], rel=1e-12)
    said = pool.run(2, trained, WholeForces, plan_of({"zero_stage": 3}), tmp_path, False, sloped)
    assert all("torch.autograd.grad through a sharded module" in str(line) for line in said)


def test_a_count_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"must be one whole number .*one number of float32"):
        shardwise.plan(
            cluster={"device": "cpu", "devices_per_node": 1},
            strategy={"micro_batch_size": MICRO},
            **given(Net, weighted),
        )


def test_a_layer_of_two_modules_is_planned() -> None:
    plan = shardwise.plan(
        cluster={"device": "cpu", "devices_per_node": 1},
        strategy={"micro_batch_size": MICRO, "zero_stage": 0},
        **given(Common),
    )
    assert plan.parameters == sum(p.numel() for p in made(Common).parameters())


def test_a_parametrized_module_is_sent_to_the_processes_of_a_run(tmp_path: Path) -> None:
    """torch's own pickling refuses it."""
    model = made(Net)
    nn.utils.parametrizations.weight_norm(model.leave)
    nn.utils.parametrizations.spectral_norm(model.blocks[0])  # type: ignore[arg-type]
    with giving({"model": GivenModel(model, loss, points(), tmp_path)}) as environment:
        _, sent = cloudpickle.loads(Path(*environment.values()).read_bytes())
        module, *_ = cloudpickle.loads(sent)["model"]()
    module.load_state_dict(model.state_dict(), assign=True)
    x = torch.ones(2, 4)
    assert torch.equal(module.eval()(x), model.eval()(x))


def test_a_lazy_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"a lazy module has no shape yet \(module: 0\.weight\)"):
        GivenModel(nn.Sequential(nn.LazyLinear(3)), loss, points(), tmp_path)


@pytest.mark.parametrize(("path", "named"), [("", "RecursiveScriptModule"), ("blocks.1", r"blocks\.1")])
def test_a_scripted_module_is_refused(path: str, named: str, tmp_path: Path) -> None:
    model = made(Net)
    scripted = torch.jit.script(nn.Linear(6, 6))
    if path:
        model.set_submodule(path, scripted)
    with pytest.raises(RecipeError, match=rf"TorchScript modules cannot be sharded \(module: {named}\)"):
        GivenModel(model if path else scripted, loss, points(), tmp_path)


def test_sync_batch_norm_is_refused(tmp_path: Path) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    with pytest.raises(RecipeError, match=r"SyncBatchNorm cannot be planned \(module: 1\)"):
        GivenModel(model, loss, points(), tmp_path)


def test_hooks_of_parameters_are_refused(tmp_path: Path) -> None:
    model = made(Net)
    model.leave.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(RecipeError, match=r"a hook of a parameter is not kept \(module: leave\.weight\)"):
        GivenModel(model, loss, points(), tmp_path)


def test_a_buffer_of_two_modules_is_refused(tmp_path: Path) -> None:
    model, shared = made(Net), torch.zeros(6)
    for block in model.blocks:
        block.register_buffer("mean", shared)
    with pytest.raises(
        RecipeError, match=r"two buffers are one tensor \(module: blocks\.0\.mean, blocks\.1\.mean\)"
    ):
        GivenModel(model, loss, points(), tmp_path)


def test_a_module_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    model = made(Net)
    model.last = model.enter(torch.ones(1, 4))  # type: ignore[assignment]
    with pytest.raises(
        RecipeError, match=r"cannot be copied \(module: last\): a result of autograd"
    ) as caught:
        GivenModel(model, loss, points(), tmp_path)
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("units", "says"),
    [
        (lambda net: [net.blocks], r"a ModuleList, which has no forward\(\).*: return its members"),
        (lambda net: [net], "a Odd that is not a part of the module"),
        (lambda net: [nn.Linear(1, 1)], "a Linear that is not a part of the module"),
        (lambda net: [net.blocks[0], net.blocks[0]], r"blocks\.0 twice"),
        (lambda net: [net.blocks[0], net.blocks[0][0]], r"blocks\.0\.0 twice, or inside of another unit"),
    ],
)
def test_units_are_modules_apart(units: Any, says: str) -> None:
    class Odd(Net):
        def block(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 6))

        def units(self) -> list[nn.Module]:
            return list(units(self))

    cluster = {"device": "cpu", "devices_per_node": 1}
    with pytest.raises(RecipeError, match=says):
        shardwise.plan(cluster=cluster, strategy={"micro_batch_size": MICRO}, **given(Odd))
