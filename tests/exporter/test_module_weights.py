"""A user's own module gets the trained weights of any sharding, and a file of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.checkpoint.saver import Saver
from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.engine.train_state import TrainState
from shardwise.exporter.export_run import export_run
from shardwise.exporter.module_weights import load_into
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.runtime.parallel.shard_slices import canonical_name
from shardwise.technique import SETTINGS, strategy_from
from tests.harness import modules
from tests.harness.modules import FACTORIES, Items
from tests.harness.pool import Pool
from tests.harness.tiers import quick


class Tied(nn.Module):
    """Two names for one matrix, a buffer that no state dict has, and one that has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.inner, self.write = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.write.weight = self.read.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.write(self.norm(self.inner(self.read(ids).mean(1))) * self.scale)


def tied() -> Any:
    return Tied(), modules.classes, Items({"ids": ((4,), torch.int64), "labels": ((), torch.int64)})


def frozen() -> Any:
    """A frozen matrix with values that bf16 would round, and a trained one after it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 6), nn.Flatten(), nn.Linear(24, 6), nn.Linear(6, 5))
    net[2].requires_grad_(False)
    return net, modules.classes, Items({"ids": ((4,), torch.int64), "labels": ((), torch.int64)})


def trained(name: str, settings: dict[str, Any], folder: Path, sections: dict[str, Any]) -> dict[str, Tensor]:
    """Train three steps, save, and return the module's state dict, gathered by PyTorch; with an adapter its logits."""
    run = three_steps(name, settings, sections)
    saver = Saver(run, folder, "")
    saver.save(TrainState(3, 24))
    saver.wait()
    (folder / "recipe.yaml").write_text(dump_recipe(run.recipe))
    if run.recipe.adapter is not None:
        run.model.eval()
        return {"logits": run.model(images()).detach()}
    state = run.model.state_dict()
    return {canonical_name(key): whole(value).clone() for key, value in state.items()}


def three_steps(name: str, settings: dict[str, Any], sections: dict[str, Any]) -> Run:
    where = __name__ if name in ("tied", "frozen") else modules.__name__
    values = {
        "model": {"factory": f"{where}:{name}"},
        "steps": 3,
        "batch_size": 8,
        "cluster": {"device": "cpu", "devices_per_node": 2},
    }
    recipe = recipe_of(values | sections, SETTINGS)
    blueprint = blueprint_of(recipe)
    run = build(recipe, blueprint, strategy_from({"micro_batch_size": 2, **settings}), torch.device("cpu"))
    data = open_data(recipe, blueprint.dataset)
    for index in range(3):
        step(run, data.micro_batches(index, run.data_rank, run.data_degree, 2), 0.1)
    return run


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def images() -> Tensor:
    return torch.stack([Items(modules.IMAGE)[index]["x"] for index in range(4)])


def module_of(name: str) -> nn.Module:
    factory = tied if name == "tied" else getattr(modules, name)
    module: nn.Module = factory()[0]
    return module


@pytest.mark.parametrize("name", quick([*FACTORIES, "tied"], "batch_norm", "vit", "functional", "tied"))
@pytest.mark.parametrize(
    "settings",
    quick(
        [{"precision": "bf16", "zero_stage": 3}, {"precision": "fp16", "zero_stage": 0}],
        {"precision": "bf16", "zero_stage": 3},
    ),
    ids=["zero3", "zero0"],
)
def test_a_plain_module_gets_what_two_ranks_trained(
    name: str, settings: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    """Also buffers: running statistics, complex tables; also a file that PyTorch and safetensors read."""
    expected, _ = pool.run(2, trained, name, settings, tmp_path, {})
    module = module_of(name)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    assert load_into(module, tmp_path) == 3
    found = module.state_dict()
    assert found.keys() == expected.keys()
    expected = {key: value.view_as(found[key]) for key, value in expected.items()}  # scalars train as vectors
    torch.testing.assert_close(dict(found), expected, rtol=0, atol=0)
    written, _ = export_run(tmp_path, tmp_path / "out")
    assert [path.name for path in written.folder.iterdir()] == ["model.safetensors"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    if name != "functional":  # complex numbers are stored as pairs
        again = module_of(name)
        assert load_model(again, tmp_path / "out" / "model.safetensors") == (set(), [])
        torch.testing.assert_close(dict(again.state_dict()), expected, rtol=0, atol=0)
    assert {key: value.dtype for key, value in stored.items()}.items() <= {
        key: torch.float32 if value.is_complex() else value.dtype for key, value in expected.items()
    }.items()


@pytest.mark.parametrize("adapter", [{"name": "dora"}, {"quantize": "nf4"}, {"rank": 2}], ids=str)
def test_adapters_are_merged(adapter: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    sections = {"adapter": {"rank": 4, **adapter}}
    expected, _ = pool.run(2, trained, "vit", {"precision": "fp32", "zero_stage": 3}, tmp_path, sections)
    module = module_of("vit")
    load_into(module, tmp_path)
    torch.testing.assert_close(module.eval()(images()), expected["logits"], rtol=1e-5, atol=1e-5)
    module.blocks[0].out = nn.Linear(24, 12)  # type: ignore[index,union-attr]
    with pytest.raises(CheckpointError, match=r"blocks\.0\.out\..* there and .* here"):
        load_into(module, tmp_path)
    with pytest.raises(RecipeError, match="to merge them, the module is needed"):
        export_run(tmp_path, tmp_path / "out")


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("run")
    pool.run(2, trained, "batch_norm", {"precision": "bf16", "zero_stage": 2}, made, {})
    return made


def test_the_dtypes_of_the_module_are_kept(folder: Path) -> None:
    module, exact = module_of("batch_norm").to(torch.bfloat16), module_of("batch_norm")
    load_into(module, folder)
    load_into(exact, folder)
    expected = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in exact.state_dict().items()
    }
    torch.testing.assert_close(dict(module.state_dict()), expected, rtol=0, atol=0)


def test_a_frozen_weight_keeps_the_digits_of_the_module(pool: Pool, tmp_path: Path) -> None:
    """It is stored in the dtype of compute. A module with other values gets the stored ones."""
    state = pool.run(2, trained, "frozen", {"precision": "bf16", "zero_stage": 3}, tmp_path, {})[0]
    stored = state["2.weight"].float()
    other, same = frozen()[0], frozen()[0]
    nn.init.zeros_(other[2].weight)
    more = stored * (1 + 2**-12)  # its rounding is the stored value
    with torch.no_grad():
        same[2].weight.copy_(more)
    load_into(other, tmp_path)
    load_into(same, tmp_path)
    assert torch.equal(other[2].weight, stored) and torch.equal(same[2].weight, more)
    assert torch.equal(same[3].weight, state["3.weight"]) and torch.equal(other[0].weight, state["0.weight"])


def test_a_dtype_rounds_the_file(folder: Path, tmp_path: Path) -> None:
    out = shardwise.export(folder, tmp_path / "narrow", dtype="bf16")
    kinds = {key: value.dtype for key, value in load_file(out / "model.safetensors").items()}
    assert kinds["enter.weight"] == torch.bfloat16
    assert kinds["blocks.0.norm.num_batches_tracked"] == torch.int64


def wider() -> nn.Module:
    module = module_of("batch_norm")
    module.leave = nn.Linear(9, 7)
    return module


def other_names() -> nn.Module:
    module = module_of("batch_norm")
    module.head = module.leave
    del module.leave
    return module


def on_meta() -> nn.Module:
    return module_of("batch_norm").to("meta")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (wider, r"leave\.weight is \[5, 9\] there and \[7, 9\] here \(2 tensors differ\)"),
        (other_names, r"lacks head\.weight, head\.bias; the module lacks leave\.bias, leave\.weight"),
        (lambda: nn.Linear(2, 2), r"lacks weight, bias; the module lacks .* and \d+ more"),
        (on_meta, "the module is on the meta device"),
    ],
)
def test_another_module_is_refused_in_one_line_and_unchanged(folder: Path, make: Any, says: str) -> None:
    module = make()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=says) as caught:
        load_into(module, folder)
    assert "\n" not in caught.value.line()
    for key, value in module.state_dict().items():
        assert value.is_meta or torch.equal(value, before[key])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not the folder of a run.*no recipe\.yaml"):
        load_into(nn.Linear(2, 2), tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        (tmp_path / "recipe.yaml").write_text("model: {factory: 'planted:make'}\nsteps: 1\nbatch_size: 1\n")
        load_into(nn.Linear(2, 2), tmp_path, "best")
    assert "planted" not in sys.modules
