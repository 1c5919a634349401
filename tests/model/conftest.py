"""Fixtures for models: being any rank of any world, watching what runs, and Hugging Face folders to load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.model.blueprint import Blueprint
from shardwise.runtime.parallel.shard_slices import local_part, local_slices, named_parameters

# Tensors here are tiny: a second thread only waits for the first.
torch.set_num_threads(1)

Wrap = Callable[[Blueprint, nn.Module, DeviceMesh], None]


@contextmanager
def fake_rank(rank: int, degrees: dict[str, int]) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh, alone."""
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        finally:
            dist.destroy_process_group()
            # DTensor caches what operations return together with the mesh, and a mesh knows its rank.
            _clear_sharding_prop_cache()


def shard_units(blueprint: Blueprint, model: nn.Module, mesh: DeviceMesh) -> None:
    """ZeRO 3 over the axis ``data``."""
    for module in [*blueprint.blocks(model), model]:
        fully_shard(module, mesh=mesh["data"])


@pytest.fixture
def rank_of() -> Any:
    return fake_rank


@pytest.fixture
def whole() -> Callable[..., nn.Module]:
    """Builds and fills a model in one process, without any group."""

    def make(blueprint: Blueprint, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.device("meta"):
            model = blueprint.build().to(dtype)
        model.to_empty(device="cpu")
        blueprint.fill(model, seed)
        return model

    return make


@pytest.fixture
def gathered() -> Callable[..., dict[str, Tensor]]:
    """Fills a model as each rank of a mesh in turn; returns the parameters put together from their parts."""

    def gather(
        blueprint: Blueprint, degrees: dict[str, int], seed: int = 0, wrap: Wrap = shard_units
    ) -> dict[str, Tensor]:
        with torch.device("meta"):
            full = {
                name: torch.full(parameter.shape, float("nan"), device="cpu")
                for name, parameter in named_parameters(blueprint.build())
            }
        ranks = 1
        for degree in degrees.values():
            ranks *= degree
        for rank in range(ranks):
            with fake_rank(rank, degrees) as mesh:
                with torch.device("meta"):
                    model = blueprint.build()
                wrap(blueprint, model, mesh)
                model.to_empty(device="cpu")
                for parameter in model.parameters():
                    local_part(parameter).fill_(float("nan") if parameter.is_floating_point() else 255)
                blueprint.fill(model, seed)
                for name, parameter in named_parameters(model):
                    full[name][local_slices(parameter)] = local_part(parameter)
        return full

    return gather


class Recorder(TorchDispatchMode):
    """The operations that ran, by name; one that waits for the device is an error."""

    WAITS = (
        "aten._local_scalar_dense",
        "aten.is_nonzero",
        "aten.nonzero",
        "aten.equal",
        "aten.masked_select",
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        assert not name.startswith(self.WAITS), f"{name} waits for the device"
        # Views and bookkeeping differ between fake and real tensors, and cost nothing.
        if not name.startswith(("aten.detach.", "aten.alias.", "prim.")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Makes a Hugging Face model with loud weights and saves it."""

    def save(config: Any, **how: Any) -> Path:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2)
        folder = tmp_path / f"{config.model_type}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, **how)
        return folder

    return save
