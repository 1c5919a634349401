"""The native blueprint: values, loss, sharded fills."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Blueprint
from shardwise.model.native import NativeModel
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import ModelSpec
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters

# Nothing is divisible by 2, 3, 4 or 5: rows 37, 42, 14, 51.
LLAMA = NativeModel(Dimensions(2, 42, 3, 1, 51, vocab=37, context=29))
GPT2 = NativeModel(Dimensions(2, 42, 3, 1, 51, vocab=37, context=29, family="gpt2", tied=True))
BOTH = pytest.mark.parametrize("blueprint", [LLAMA, GPT2], ids=["llama", "gpt2"])


def _tensor_parallel_too(blueprint: Blueprint, model: nn.Module, mesh: DeviceMesh) -> None:
    column, row = ColwiseParallel, RowwiseParallel
    plan = {
        "q_proj": column,
        "k_proj": column,
        "v_proj": column,
        "o_proj": row,
        "up_proj": column,
        "down_proj": row,
    }
    for unit in blueprint.blocks(model):
        names = {n: plan[n.split(".")[-1]]() for n, _ in unit.named_modules() if n.split(".")[-1] in plan}
        parallelize_module(unit, mesh["tensor"], names)
        fully_shard(unit, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


@BOTH
@pytest.mark.parametrize("degrees", [{"data": 1}, {"data": 2}, {"data": 5}, {"data": 23}])
def test_sharded_fill_is_the_whole_fill(
    blueprint: Blueprint, degrees: dict[str, int], whole: Any, gathered: Any
) -> None:
    expected = dict(named_parameters(whole(blueprint, seed=3)))
    parts = gathered(blueprint, degrees, seed=3)
    for name, parameter in expected.items():
        assert torch.equal(parts[name], parameter), name


@BOTH
def test_fill_under_tensor_parallelism(blueprint: Blueprint, whole: Any, gathered: Any) -> None:
    expected = dict(named_parameters(whole(blueprint)))
    parts = gathered(blueprint, {"data": 4, "tensor": 3}, wrap=_tensor_parallel_too)
    for name, parameter in expected.items():
        assert torch.equal(parts[name], parameter), name


def test_wrappers_do_not_change_values(whole: Any) -> None:
    expected = dict(named_parameters(whole(LLAMA)))
    with torch.device("meta"):
        model = LLAMA.build()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1].mlp = torch.compile(model.layers[1].mlp)
    model.to_empty(device="cpu")
    LLAMA.fill(model, 0)
    found = dict(named_parameters(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_initial_values_are_gpt2s(whole: Any) -> None:
    blueprint = NativeModel(PRESETS["python-6m"])
    values = dict(named_parameters(whole(blueprint)))
    layers = blueprint.dimensions.layers
    for name, parameter in values.items():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * layers) if residual else 0.02
            assert abs(parameter.std().item() / std - 1) < 0.02, name
    biases = [p for name, p in named_parameters(whole(GPT2)) if name.endswith("bias")]
    assert len(biases) == 2 * 8 + 1
    assert all((bias == 0).all() for bias in biases)


def test_tied_weights_stay_tied(whole: Any, rank_of: Any) -> None:
    model = whole(GPT2)
    assert model.lm_head.weight is model.embed_tokens.weight
    with rank_of(1, {"data": 3}) as mesh:
        with torch.device("meta"):
            sharded = GPT2.build()
        fully_shard(sharded, mesh=mesh["data"])
        sharded.to_empty(device="cpu")
        GPT2.fill(sharded, 0)
        assert sharded.lm_head.weight is sharded.embed_tokens.weight
        assert torch.equal(local_part(sharded.lm_head.weight), model.lm_head.weight[13:26])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_is_the_sum_of_cross_entropies(dtype: torch.dtype, whole: Any) -> None:
    model = whole(LLAMA, dtype=dtype)
    ids = torch.randint(0, 37, (3, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    labels[2] = -100
    batch = {"input_ids": ids, "labels": labels}
    total, count = LLAMA.loss(model, batch)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert count.dtype == torch.int64
    assert count.shape == total.shape == ()
    assert count.item() == LLAMA.count(batch).item() == 22
    logits = model(ids).double()
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100
    ).sum()
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    # Almost uniform at the start, so about ln(vocab) per target.
    assert abs(total.item() / 22 - math.log(37)) < 0.05


def test_a_batch_of_padding_has_no_loss_and_no_gradient(whole: Any) -> None:
    model = whole(LLAMA)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    total, count = LLAMA.loss(model, {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    total.backward()
    assert total.item() == 0
    assert count.item() == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_depth_and_counts() -> None:
    assert LLAMA.depth == 2
    with torch.device("meta"):
        model = LLAMA.build(depth=5)
    assert len(LLAMA.blocks(model)) == 5
    assert LLAMA.parameter_count() == LLAMA.dimensions.parameters
    assert LLAMA.parameter_count(3) - LLAMA.parameter_count(2) == LLAMA.dimensions.block_parameters
    assert GPT2.parameter_count() == GPT2.dimensions.parameters
    assert LLAMA.sample_shapes(9) == {"input_ids": ((9,), torch.int64), "labels": ((9,), torch.int64)}


def test_names_and_limits() -> None:
    assert NativeModel.from_spec(ModelSpec(preset="tiny"), 512).name == "tiny"
    assert NativeModel.from_spec(ModelSpec(layers=2, width=64, heads=4), 16).name == "llama-2x64"
    with pytest.raises(RecipeError, match="longer than the model's context"):
        NativeModel.from_spec(ModelSpec(preset="tiny"), 513)


def _train_sharded() -> list[float]:
    """On each of 3 ranks: two SGD steps of the sharded, tied model on the same batch; the losses."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("data",))
    with torch.device("meta"):
        model = GPT2.build()
    for module in [*GPT2.blocks(model), model]:
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    GPT2.fill(model, 0)
    return _losses(model)


def _losses(model: nn.Module) -> list[float]:
    ids = torch.randint(0, 37, (2, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(3):
        total, count = GPT2.loss(model, {"input_ids": ids, "labels": ids})
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses


def test_training_the_sharded_model_is_training_the_model(pool: Any, whole: Any) -> None:
    expected = _losses(whole(GPT2))
    assert expected[-1] < expected[0] - 0.1
    for losses in pool.run(3, _train_sharded):
        assert losses == pytest.approx(expected, rel=1e-5)
