"""A user's own model: a classifier on its own data, sharded like any other, and mistakes told in a line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import PADDING
from shardwise.model.factory import FactoryModel
from shardwise.runtime.parallel.shard_slices import named_parameters

SOURCE = '''
"""Two spirals in a noisy 8-dimensional space, and a small residual network that tells them apart."""
import math

import numpy
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


class Scale(nn.Module):
    """A module with a parameter and a buffer of its own."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain, 1.0, 0.1)
        nn.init.constant_(self.shift, 0.25)

    def forward(self, x):
        return x * self.gain + self.shift


class Classifier(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.scale = Scale(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 2)

    def units(self):
        return list(self.blocks)

    def forward(self, x):
        x = self.scale(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Spirals(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 2
        turn = torch.rand((), generator=generator) * 3 + label * math.pi
        point = torch.stack([turn.cos(), turn.sin()]) + 0.05 * torch.randn(2, generator=generator)
        noise = torch.randn(6, generator=generator)
        return {"x": torch.cat([point, noise]), "labels": torch.tensor(label)}


def loss(model, batch):
    labels = batch["labels"]
    total = F.cross_entropy(model(batch["x"]).float(), labels, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def classifier(width=10, depth=2):
    return Classifier(width, depth), loss, Spirals


def instance():
    return Classifier(10, 2), loss, Spirals()


def without_data():
    return Classifier(10, 1), loss


def tied():
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    model[1].weight = model[0].weight
    return model, loss


def attention():
    return nn.Sequential(nn.MultiheadAttention(6, 2), nn.LSTM(3, 5)), loss


def silent():
    model = nn.Sequential(nn.Linear(2, 2))
    model.position = nn.Parameter(torch.zeros(2))
    return model, loss


def early_data():
    return Classifier(10, 2), loss, [{"x": torch.zeros(8), "labels": torch.tensor(0)}]


def broken_data():
    return Classifier(10, 2), loss, lambda: 1 / 0


def texts():
    return Classifier(10, 2), loss, lambda: [{"x": torch.zeros(8), "name": "a"}]


def numbers():
    """Labels as torchvision gives them, and an array."""
    samples = [{"x": numpy.zeros(8, dtype="float32"), "labels": index % 2} for index in range(8)]
    return Classifier(10, 2), loss, lambda: samples


def other_names():
    return Classifier(10, 2), loss, lambda: [{"x": torch.zeros(8), "label": torch.tensor(0)}] * 8


def no_dicts():
    return Classifier(10, 2), loss, lambda: [torch.zeros(8)]


def sparse():
    return Classifier(10, 2), loss, lambda: [{"x": torch.zeros(8).to_sparse()}]


def no_items():
    return Classifier(10, 2), loss, []


def endless():
    return Classifier(10, 2), loss, iter([])


def apart(model, batch):
    return model(batch["x"]).detach().sum(), 4


def detached():
    return Classifier(10, 2), apart, Spirals


class Phases(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def complex_weights():
    return Phases(), loss


def half():
    return Classifier(10, 2), lambda model, batch: (loss(model, batch)[0].bfloat16(), 4), Spirals


def complex_sum():
    return Classifier(10, 2), lambda model, batch: (loss(model, batch)[0] * 1j, 4), Spirals


def number():
    return Classifier(10, 2), lambda model, batch: (loss(model, batch)[0], len(batch["labels"])), Spirals


def mean():
    return Classifier(10, 2), lambda model, batch: loss(model, batch)[0] / 4, Spirals


def vector():
    return Classifier(10, 2), lambda model, batch: (model(batch["x"])[:, 0], 4), Spirals


def fraction():
    return Classifier(10, 2), lambda model, batch: (loss(model, batch)[0], 4.0), Spirals


def one():
    return Classifier(10, 2)


def swapped():
    return loss, Classifier(10, 2)


def failing():
    raise ValueError("no such width")


constant = 3
'''


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a blueprint from a function of SOURCE, a module in the working directory."""
    (tmp_path / "spirals.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "spirals", raising=False)
    yield lambda function, **arguments: FactoryModel(f"spirals:{function}", arguments)
    sys.modules.pop("spirals", None)


def test_a_classifier_is_described(make: Any) -> None:
    blueprint = make("classifier", width=12)
    assert blueprint.name == "classifier"
    assert blueprint.vocab is None
    assert blueprint.depth is None
    assert blueprint.sample_shapes(99) == {"x": ((8,), torch.float32), "labels": ((), torch.int64)}
    assert len(blueprint.dataset) == 256
    with torch.device("meta"):
        model = blueprint.build()
    assert all(p.is_meta for p in model.parameters())
    assert blueprint.blocks(model) == list(model.blocks)
    assert blueprint.parameter_count() == sum(p.numel() for p in model.parameters())


def test_a_classifier_learns(make: Any, whole: Any) -> None:
    blueprint = make("classifier", width=32, depth=2)
    model = whole(blueprint)
    samples = [blueprint.dataset[index] for index in range(128)]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch["labels"][-8:] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        total, count = blueprint.loss(model, batch)
        assert count.item() == blueprint.count(batch).item() == 120
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    assert losses[0] > 0.5
    assert losses[-1] < 0.1


@pytest.mark.parametrize("function", ["classifier", "attention", "tied"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_sharded_fill_is_the_whole_fill(
    function: str, ranks: int, make: Any, whole: Any, gathered: Any
) -> None:
    blueprint = make(function)
    expected = dict(named_parameters(whole(blueprint, seed=5)))
    parts = gathered(blueprint, {"data": ranks}, seed=5)
    assert parts.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(parts[name], parameter), name


def test_values_are_those_of_reset_parameters(make: Any, whole: Any) -> None:
    model = whole(make("classifier", width=400))
    assert (model.scale.shift == 0.25).all()
    assert abs(model.scale.gain.mean().item() - 1) < 0.02
    bound = 400**-0.5
    assert model.blocks[0].linear.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert (model.blocks[1].norm.running_var == 1).all()
    assert model.blocks[1].norm.num_batches_tracked.item() == 0
    assert not torch.equal(model.blocks[0].linear.weight, model.blocks[1].linear.weight)
    assert torch.equal(whole(make("classifier", width=400)).leave.weight, model.leave.weight)
    assert not torch.equal(whole(make("classifier", width=400), seed=1).leave.weight, model.leave.weight)


def test_tied_weights_and_random_state(make: Any, whole: Any) -> None:
    before = torch.get_rng_state()
    model = whole(make("tied"))
    assert model[0].weight is model[1].weight
    assert torch.equal(before, torch.get_rng_state())


def test_double_precision_starts_from_the_same_numbers(make: Any, whole: Any) -> None:
    blueprint = make("classifier")
    single, double = whole(blueprint), whole(blueprint, dtype=torch.float64)
    assert torch.equal(single.leave.weight.double(), double.leave.weight)


def test_a_dataset_may_be_an_instance_or_missing(make: Any) -> None:
    assert len(make("instance").dataset) == 256
    language = make("without_data")
    assert language.dataset is None
    assert language.sample_shapes(9)["input_ids"] == ((9,), torch.int64)


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        ("missing", {}, "cannot be imported"),
        ("constant", {}, "not a function"),
        ("classifier", {"widht": 3}, r"classifier\(\) failed .*widht"),
        ("failing", {}, r"failing\(\) failed .*no such width"),
        ("one", {}, r"must return \(module, loss\)"),
        ("swapped", {}, "must return an nn.Module and a function"),
        ("early_data", {}, "'x' of the dataset is on the meta device"),
        ("broken_data", {}, "dataset cannot be made .*division by zero"),
        ("no_dicts", {}, "must be dicts of tensors .*sample 0 is a tensor of shape .*name the values"),
        ("texts", {}, "'name' of the dataset is not a tensor .*it is a str; leave it out"),
        ("sparse", {}, r"'x' of the dataset is no dense tensor .*torch\.sparse_coo; give its \.to_dense"),
        ("no_items", {}, "must be dicts of tensors .*it has no samples"),
        ("endless", {}, r"the dataset has no length .*a list_iterator has none; give a map-style"),
        ("complex_weights", {}, r"the parameter phase is complex .*view_as_real"),
    ],
)
def test_mistakes_are_told_in_a_line(function: str, arguments: dict[str, Any], says: str, make: Any) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        make(function, **arguments)
    assert caught.value.where == f"model.factory: spirals:{function}"
    assert "\n" not in caught.value.line()


def batch_of(blueprint: FactoryModel) -> dict[str, torch.Tensor]:
    samples: list[dict[str, torch.Tensor]] = [blueprint.dataset[index] for index in range(4)]  # type: ignore[index]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def test_a_count_may_be_a_number(make: Any, whole: Any) -> None:
    blueprint = make("number")
    total, count = blueprint.loss(whole(blueprint), batch_of(blueprint))
    assert (count.dtype, count.item(), total.ndim) == (torch.int64, 4, 0)


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        ("mean", "it returned one number"),
        ("vector", r"it returned \(a tensor of shape \[4\], a int\)"),
        ("fraction", r"it returned \(one number, a float\)"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_told_in_a_line(
    function: str, returned: str, make: Any, whole: Any
) -> None:
    blueprint = make(function)
    with pytest.raises(RecipeError, match=rf"must return \(sum.*{returned}.*reduction='sum'"):
        blueprint.loss(whole(blueprint), batch_of(blueprint))


def test_a_loss_without_a_gradient_is_told_in_a_line(make: Any, whole: Any) -> None:
    blueprint = make("detached")
    with torch.no_grad():
        blueprint.loss(whole(blueprint), batch_of(blueprint))
    with pytest.raises(RecipeError, match=r"the loss depends on no trained weight .*without \.detach\(\)"):
        blueprint.loss(whole(blueprint), batch_of(blueprint))


def test_numbers_and_arrays_of_samples_are_tensors_of_the_plan(make: Any) -> None:
    assert make("numbers").sample_shapes(0) == {"x": ((8,), torch.float32), "labels": ((), torch.int64)}


def test_a_key_that_the_batch_lacks_is_told_in_a_line(make: Any, whole: Any) -> None:
    blueprint = make("other_names")
    with pytest.raises(RecipeError, match=r"no 'labels', which the loss reads .*it has x, label$") as caught:
        blueprint.loss(whole(blueprint), batch_of(blueprint))
    assert "\n" not in caught.value.line()


def test_a_loss_of_few_digits_is_refused(make: Any, whole: Any) -> None:
    blueprint = make("half")
    with pytest.raises(RecipeError, match=r"summed in bfloat16 .*more digits; .*\.float\(\)"):
        blueprint.loss(whole(blueprint), batch_of(blueprint))


def test_a_complex_loss_is_refused(make: Any, whole: Any) -> None:
    blueprint = make("complex_sum")
    with pytest.raises(RecipeError, match=r"summed in complex64 .*a real number; sum squares"):
        blueprint.loss(whole(blueprint), batch_of(blueprint))


def test_a_batch_without_items_counts_as_zero_and_teaches_norms_nothing(make: Any, whole: Any) -> None:
    blueprint = make("number")
    model = whole(blueprint)
    total, count = blueprint.loss(model, {**batch_of(blueprint), PADDING: torch.ones(())})
    total.backward()
    assert (total.item(), count.item()) == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert (
        model.blocks[0].norm.num_batches_tracked.item() == 0 and (model.blocks[0].norm.running_var == 1).all()
    )


def test_modules_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_factory.py").write_text("1 / 0")
    for target in ("no_such_module:f", "broken_factory:f"):
        with pytest.raises(RecipeError, match="cannot be imported"):
            FactoryModel(target, {})


def test_a_tensor_without_a_start_is_named(make: Any, whole: Any) -> None:
    with pytest.raises(RecipeError, match=r"'Sequential' does not initialize position.*reset_parameters"):
        whole(make("silent"))


def test_no_module_outlives_its_turn(make: Any, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one module of the reference is real at a time."""
    real: list[int] = []
    original = nn.Module.to_empty

    def to_empty(self: nn.Module, **how: Any) -> nn.Module:
        real.append(sum(p.numel() for p in self.parameters()))
        return original(self, **how)

    blueprint = make("classifier")
    with torch.device("meta"):
        model = blueprint.build()
    model.to_empty(device="cpu")
    monkeypatch.setattr(nn.Module, "to_empty", to_empty)
    blueprint.fill(model, 0)
    assert max(real) == 10 * 10 + 10
