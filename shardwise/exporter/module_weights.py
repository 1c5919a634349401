"""The trained weights of a user's own module: into a module in Python, or into one safetensors file.

A checkpoint is read tensor by tensor, however it was sharded. No code of the run's folder is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.chosen import chosen_checkpoint, recipe_in
from shardwise.checkpoint.run_folder import RECIPE
from shardwise.checkpoint.saved_weights import SavedWeights
from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.core.paths import path_of
from shardwise.core.run_files import Which
from shardwise.exporter.hf_writer import Contents, Written, write_model
from shardwise.model.files.folder_layout import HFFolder, unchanged_tensor
from shardwise.model.lora import adapt
from shardwise.model.merging import Merged
from shardwise.model.object_model import on_meta, real_pairs
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import canonical_name, local_part, local_slices, named_parameters
from shardwise.runtime.scalar_parameters import store_as_vectors
from shardwise.runtime.torch_private import non_persistent_buffers

MOST_NAMED = 3
"""Names in an error."""


@torch.no_grad()
def load_into(module: nn.Module, run: str | Path, checkpoint: Which = "latest") -> int:
    """Write the trained weights and buffers of a run into a module like the one that was trained; returns the step.

    Any sharding and number of ranks is read, and adapters are merged. The module keeps its dtypes and devices. Buffers
    that a state dict leaves out are unchanged, and so are frozen weights that only differ by the rounding of compute.

    Args:
        run: the folder of the run.
        checkpoint: latest, or best with ``checkpoint.best``.

    Raises:
        CheckpointError: there is no such checkpoint, or names or shapes are not those of the module; it is unchanged.
    """
    folder = path_of(run)
    recipe = recipe_in(folder)
    chosen = chosen_checkpoint(folder, checkpoint)
    weights, targets = SavedWeights(chosen), stored_tensors(module)
    if absent := [name for name, tensor in targets.items() if tensor.is_meta]:
        fix = "give a module with values, such as module.to_empty(device='cpu')"
        raise CheckpointError("the module is on the meta device", where=absent[0], fix=fix)
    adapter = recipe.adapter
    adapted = on_meta(module)
    if adapter is not None:
        units = getattr(adapted, "units", list)
        adapt(adapted, list(units()), adapter)
    store_as_vectors(adapted)
    _require_equal_shapes(weights, stored_tensors(adapted), chosen)
    merged = Merged(adapted, weights.read)
    for name, target in targets.items():
        value = merged.read(name)
        own = local_part(target)
        stored = value[local_slices(target)] if target.ndim else value.reshape(())
        # A frozen weight is stored in the dtype of compute. A module that has it with more digits keeps them.
        if not torch.equal(own.to(stored.dtype), stored.to(own.device)):
            own.copy_(stored)
    return manifests.step_of(chosen) or 0


def write_weights(recipe: Recipe, checkpoint: Path, target: Path, dtype: torch.dtype | None) -> Written:
    """Write the tensors of a checkpoint as the folder of one ``model.safetensors``, under their names in the module.

    A shared tensor has its first name, and complex buffers are pairs of real numbers.

    Args:
        dtype: of floating-point tensors; None keeps those of the checkpoint.

    Raises:
        RecipeError: the run has adapters, which cannot be merged without the module.
    """
    if recipe.adapter is not None:
        raise RecipeError(
            "adapters of a module of your own are not exported",
            where=f"{checkpoint.parent.parent / RECIPE}: adapter",
            why="to merge them, the module is needed, and that would run your code",
            fix="shardwise.load_into(module, DIR) merges them",
        )
    weights = SavedWeights(checkpoint)
    groups = [unchanged_tensor(name, name, shape) for name, shape in weights.shapes.items()]
    dtypes = {n: dtype if dtype and kind.is_floating_point else kind for n, kind in weights.dtypes.items()}
    return write_model(target, Contents(HFFolder({}, groups), dtypes, weights.read, {}))


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as a checkpoint names them; complex ones as pairs of real numbers."""
    tensors: dict[str, Tensor] = dict(named_parameters(module))
    for path, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if name not in non_persistent_buffers(submodule):
                tensors[canonical_name(f"{path}.{name}" if path else name)] = buffer
    return {name: real_pairs(tensor) for name, tensor in tensors.items()}


def _require_equal_shapes(weights: SavedWeights, module: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Raise CheckpointError unless names and shapes are equal; ``module`` has the adapters of the run."""
    stored = weights.shapes
    faults = []
    if missing := [name for name in module if name not in stored]:
        faults.append(f"the checkpoint lacks {_names_in_words(missing)}")
    if unknown := [name for name in stored if name not in module]:
        faults.append(f"the module lacks {_names_in_words(unknown)}")
    if other := [name for name, tensor in module.items() if stored.get(name, tensor.shape) != tensor.shape]:
        name = other[0]
        rest = f" ({len(other)} tensors differ)" if len(other) > 1 else ""
        faults.append(f"{name} is {list(stored[name])} there and {list(module[name].shape)} here{rest}")
    if faults:
        raise CheckpointError(
            "the module is not that of the run",
            where=str(checkpoint),
            why="; ".join(faults),
            fix="give a module like the one that was trained",
        )


def _names_in_words(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{rest}"
