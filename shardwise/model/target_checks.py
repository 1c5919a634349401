"""Keys of ``adapter`` that name no layer of the model, or that its layers cannot have, are refused."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.model.expert_lora import expert_stacks
from shardwise.model.lora import is_targeted, linear_layers, target_layers
from shardwise.recipe.sections import AdapterSpec, by_pattern
from shardwise.runtime.parallel.shard_slices import shared_names


def require_targets(model: nn.Module, blocks: Sequence[nn.Module], spec: AdapterSpec) -> None:
    """Raise RecipeError for a key of the recipe that names no layer of the model. ``model`` is not adapted yet."""
    # A list of names stays a list: a lone string is a keyword or a regular expression.
    choices: list[tuple[str, str | tuple[str, ...]]]
    if isinstance(spec.targets, tuple):
        choices = [(name, (name,)) for name in spec.targets]
    else:
        choices = [(spec.targets, spec.targets)]
    for target, targets in choices:
        one = spec.model_copy(update={"targets": targets})
        if not target_layers(model, blocks, one):
            raise _no_target(model, blocks, target, one)
    _require_saved(model, spec)
    adapted = target_layers(model, blocks, spec)
    _require_plain_experts(model, adapted, spec)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(spec, key):
            if not any(by_pattern({pattern: True}, path, False) for path in adapted):
                raise RecipeError(
                    f"no adapted layer is {pattern!r}",
                    where=f"adapter.{key}",
                    why=f"the first is {adapted[0]}",
                    fix="give a regular expression for the end of a path",
                )


def _require_plain_experts(model: nn.Module, adapted: Sequence[str], spec: AdapterSpec) -> None:
    """Raise RecipeError for a kind of adapter that experts cannot have."""
    stacks = set(expert_stacks(model, []))
    if stacks.isdisjoint(adapted):
        return
    for key, value, why in (
        ("lora_bias", True, "PEFT's format has no biases of B of experts"),
        ("init", "loftq", "it would decompose the matrices of all experts one by one"),
    ):
        if getattr(spec, key) == value or (key == "init" and spec.loftq_iterations):
            raise RecipeError(
                f"experts have no {key if value is True else value}",
                where=f"adapter.{key}",
                why=why,
                fix=f"leave the experts out (targets: attention), or remove {key}",
            )


def _no_target(model: nn.Module, blocks: Sequence[nn.Module], target: str, spec: AdapterSpec) -> RecipeError:
    """The error for a target without a layer: it is shared, left out by another key, or unknown."""
    paths = [*linear_layers(model, blocks), *expert_stacks(model, blocks)]
    why = f"their names are {', '.join(sorted({path.rpartition('.')[2] for path in paths}))}"
    fix = "choose some of these names, or attention, mlp, experts or all"
    aliases = shared_names(model)
    shared = [path for path, _ in model.named_modules() if f"{path}.weight" in aliases]
    if any(is_targeted(path, spec.targets) for path in shared):
        why = "it shares its weight with the embedding"
        fix = "leave it out, or give a base that is not tied"
    elif target_layers(model, blocks, spec.model_copy(update={"layers_to_transform": None})):
        why = f"layers_to_transform is {list(spec.layers_to_transform or ())}, and it is in none of these blocks"
        fix = "number blocks from 0, and leave out layers outside of blocks"
    elif not paths:
        why = "there is no linear layer"
    return RecipeError(
        f"no linear layer of the model's blocks is {target!r}", where="adapter.targets", why=why, fix=fix
    )


def _require_saved(model: nn.Module, spec: AdapterSpec) -> None:
    """Raise RecipeError for a module to save that the model lacks, that is tied, or that has adapters inside."""
    aliases = shared_names(model)
    paths = [path for path, _ in model.named_modules()]
    shared = aliases.keys() | aliases.values()
    for name in spec.modules_to_save:
        matches = [path for path in paths if path.endswith(name)]
        module = model.get_submodule(matches[0]) if matches else nn.Module()
        tensors = {
            f"{path}.{key}" for path in matches for key, _ in model.get_submodule(path).named_parameters()
        }
        why = ""
        fix = "give the end of a module's path, such as lm_head"
        if not matches or next(module.parameters(), None) is None:
            why = "no module with weights has a path that ends so"
        elif tensors & shared:
            why = "it shares its weight, and a copy that is trained alone would untie the model"
            fix = "save the base with tie_word_embeddings false and two weights first"
        elif next(module.buffers(), None) is not None:
            why = "it has buffers, which change without being trained"
            fix = "train its parts"
        if why:
            raise RecipeError(
                f"{name!r} cannot be trained in full", where="adapter.modules_to_save", why=why, fix=fix
            )
