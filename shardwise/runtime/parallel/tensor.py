"""Tensor parallelism: Megatron's sharded layers, from a plan of module names (Shoeybi et al. 2019).

    column      shards the outputs of a linear layer: some rows of the weight, the whole input
    row         shards the inputs of a linear layer: some columns of the weight, outputs are partial sums
    vocabulary  shards the rows of an embedding: other ids give zero, outputs are partial sums
    logits      column for the output layer: the loss takes sharded logits, other callers get all logits
    positions   a replicated embedding that looks up this rank's part of the sequence
    summed      replicated weights applied to sharded activations: gradients are all-reduced
    rows        shards the rows of a layer inside a sharded layer (an adapter)
    columns     shards its columns
    gathered    column whose outputs are all-gathered: what follows computes on all of them, on every rank
    split       row after such a computation: takes this rank's part of the input
    own         shards the first dim of a module's own weights, such as a bias per head
    experts     whole experts of a mixture on each rank (experts.py)
    tail        replicated; the gradients of its last outputs are all-reduced (experts.py)
    values      replicated, for numbers per token: outputs of a part of the sequence are all-gathered for a loss that is
                equal on all ranks

Between a column layer and the next row layer each rank computes with its heads or its part of the inner width. With
Megatron's sequence parallelism (Korthikanti et al. 2022), the other layers compute on a part of the sequence, and
unnamed layers count as ``summed``.

A sharded layer stays the same module. Its weights become DTensors, so FSDP2 and checkpoints know the shards. While it
runs, hooks replace them by plain local tensors and add the collectives (tp_collectives.py). Sibling layers with the
same input share one collective.

Refused: torch's ``parallelize_module``. Its layers compute on DTensors, which 8-bit products, chunked losses and
recording modes would have to support; q, k and v would all-reduce three gradients instead of one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.core.errors import RecipeError
from shardwise.runtime.parallel.experts import DividedExperts, SummedTail
from shardwise.runtime.parallel.regathering import RegatheringLinear
from shardwise.runtime.parallel.tensor_hooks import (
    ColumnInput,
    GatheredOutput,
    GatheredSequence,
    InputPart,
    LocalWeights,
    PositionsPart,
    RowOutput,
    VocabularyRows,
    WholeLogits,
)
from shardwise.runtime.parallel.tp_collectives import TPGroup
from shardwise.runtime.parallel.vocabulary import Vocabulary, set_vocabulary

_CUT = {
    "column": 0, "row": 1, "vocabulary": 0, "logits": 0, "rows": 0, "columns": 1,
    "gathered": 0, "split": 1, "own": 0, "experts": 0,
}  # fmt: skip
"""The sharded dim of the weight."""
HOW = (*_CUT, "positions", "summed", "tail", "values")
_ENTERED = ("column", "logits", "gathered")
"""Layers with a collective on their input."""
_REDUCED = ("row", "split")
"""Layers with a collective on their output."""
_WHOLE_SEQUENCE = ("gathered", "split", "own", "tail")
"""Layers that need whole sequences."""


@dataclass(frozen=True)
class Split:
    """How a layer is sharded; ``pieces`` (named ``of``) is the number that the ranks must divide, such as heads.

    ``last``: the number of last outputs, of a ``tail``.
    """

    how: str
    pieces: int = 0
    of: str = ""
    last: int = 0

    @classmethod
    def parsed(cls, text: str) -> Split:
        """Parse ``column`` or ``column:12``. Raises ValueError for anything else."""
        how, _, pieces = str(text).partition(":")
        if how not in HOW or not (pieces or "1").isdecimal():
            raise ValueError(f"{text!r} is not one of {', '.join(HOW)}, or one of them, a colon and a number")
        return cls(how, int(pieces or 0))


TensorPlan = Mapping[str, Split]
"""Splits by module name; ``*`` matches one part between dots."""


def shard_layers(
    model: nn.Module,
    plan: TensorPlan,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    regather: bool,
    without: Collection[nn.Module] = (),
) -> None:
    """Shard a model on the meta device over a 1-D mesh.

    Args:
        sequence_parallel: use Megatron's sequence parallelism for the layers that are not sharded.
        regather: all-gather the inputs of column layers again in the backward pass instead of saving them.
        without: modules that another axis divides.

    Raises RecipeError if the ranks do not divide the pieces.
    """
    ranks = TPGroup.of(mesh.get_group())
    modules = ((path, module) for path, module in model.named_modules() if module not in without)
    # A stage of a model of transformers has an identity in the place of an embedding or head of another stage.
    named = {path: module for path, module in modules if type(module) is not nn.Identity}
    chosen = {path: how for path in named if (how := matching(path, plan)) is not None}
    _require_pieces(chosen.values(), ranks.size)
    if sequence_parallel:
        _require_shares(chosen)
    cut: dict[nn.Parameter, nn.Parameter] = {}
    siblings = Counter(_parent(path) for path, how in chosen.items() if how.how in _ENTERED)
    column_inputs = {
        parent: ColumnInput(ranks, count, sequence_parallel) for parent, count in siblings.items()
    }
    for path, how in chosen.items():
        layer = named[path]
        _shard_weights(path, layer, how.how, mesh, cut)
        if regather and how.how == "column" and type(layer) is nn.Linear:
            layer = RegatheringLinear(layer)
            model.set_submodule(path, layer)
        if how.how == "logits":
            set_vocabulary(model, Vocabulary(layer.weight.shape[0], ranks))
        _register_hooks(model, layer, how, ranks, sequence_parallel, column_inputs.get(_parent(path)))
    if sequence_parallel:
        for path, module in named.items():
            if path not in chosen and next(module.parameters(recurse=False), None) is not None:
                _register_hooks(model, module, Split("summed"), ranks, sequence_parallel, None)


def matching(path: str, plan: TensorPlan) -> Split | None:
    """The plan's split for the module at a path, or None."""
    for pattern, how in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path):
            return how
    return None


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _require_pieces(chosen: Iterable[Split], size: int) -> None:
    limits = [how for how in chosen if how.pieces]
    broken = next((how for how in limits if how.pieces % size), None)
    if broken is not None:
        fitting = max(d for d in range(1, size) if all(how.pieces % d == 0 for how in limits))
        raise RecipeError(
            f"tensor_parallel cannot be {size}",
            where="strategy.tensor_parallel",
            why=f"it does not divide the {broken.pieces} {broken.of or 'pieces'} of the model",
            fix=f"the nearest that works is tensor_parallel: {fitting}",
        )


def _require_shares(chosen: Mapping[str, Split]) -> None:
    if whole := next((path for path, how in chosen.items() if how.how in _WHOLE_SEQUENCE), None):
        raise RecipeError(
            "this model has no sequence shares",
            where="strategy.tensor_sequence_parallel",
            why=f"{whole!r} computes on whole sequences ({chosen[whole].how})",
            fix="the nearest that works is tensor_sequence_parallel: none",
        )


# ---- weights ----------------------------------------------------------------------------------------------


def _shard_weights(
    path: str, layer: nn.Module, how: str, mesh: DeviceMesh, cut: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Replace sharded weights by DTensors; a shared weight is sharded once."""
    if how not in _CUT:
        return
    expected = {"vocabulary": nn.Embedding, "own": nn.Module, "experts": nn.Module}.get(how, nn.Linear)
    if not isinstance(layer, expected) or getattr(layer, "padding_idx", None) is not None:
        raise RecipeError(
            f"{path!r} cannot be sharded by {how}",
            where="strategy.tensor_parallel",
            why=f"it is a {type(layer).__name__}, not a plain {expected.__name__}",
        )
    for name, parameter in list(layer._parameters.items()):
        if parameter is None or (how in _REDUCED and name == "bias"):
            continue
        if parameter not in cut:
            cut[parameter] = _shard_of(path, parameter, mesh, _CUT[how])
        setattr(layer, name, cut[parameter])


def _shard_of(path: str, parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard with undefined values, as a DTensor."""
    if isinstance(parameter, DTensor):
        return parameter
    shape = list(parameter.shape)
    size = parameter.shape[dim]
    # Parts are rounded up, as torch.chunk does, so the last ranks may get nothing.
    if -(-size // mesh.size()) * (mesh.size() - 1) >= size:
        raise RecipeError(
            f"tensor_parallel cannot be {mesh.size()}",
            where="strategy.tensor_parallel",
            why=f"some ranks would have no part of {path!r}, which is {size} wide",
        )
    start, stop = TPGroup.of(mesh.get_group()).span(size)
    shape[dim] = stop - start
    piece = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(
        piece, mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


# ---- hooks of a layer -------------------------------------------------------------------------------------


def _register_hooks(
    model: nn.Module,
    layer: nn.Module,
    split: Split,
    ranks: TPGroup,
    sequence_parallel: bool,
    column_input: ColumnInput | None,
) -> None:
    """Register a layer's hooks: outermost first before the layer, innermost first after it."""
    how = split.how
    weights = LocalWeights(
        ranks,
        _partial_sums(layer) if how == "summed" or sequence_parallel else (),
        "bias" if how in _REDUCED else "",
    )
    around: VocabularyRows | DividedExperts | None = None
    if how == "vocabulary":
        around = VocabularyRows(ranks, sequence_parallel)
    elif how == "experts":
        around = DividedExperts.of(layer, ranks, sequence_parallel)
    if how in _ENTERED and column_input is not None:
        layer.register_forward_pre_hook(column_input.before)
    elif how in _REDUCED and column_input is not None:
        layer.register_forward_pre_hook(column_input.release)
    elif around is not None:
        layer.register_forward_pre_hook(around.before)
    elif how == "positions" and sequence_parallel:
        layer.register_forward_pre_hook(PositionsPart(ranks).before)
    if how == "split":
        layer.register_forward_pre_hook(InputPart(ranks).before)
    layer.register_forward_pre_hook(weights.before)
    layer.register_forward_hook(weights.after, always_call=True)
    if how in _REDUCED:
        layer.register_forward_hook(RowOutput(ranks, sequence_parallel, weights).after)
    elif around is not None:
        layer.register_forward_hook(around.after)
    elif how == "gathered":
        layer.register_forward_hook(GatheredOutput(ranks, layer.out_features).after)  # type: ignore[arg-type]
    elif how == "tail":
        layer.register_forward_hook(SummedTail(ranks, split.last).after)
    elif how == "logits":
        layer.register_forward_hook(WholeLogits(model).after)
    elif how == "values" and sequence_parallel:
        layer.register_forward_hook(GatheredSequence(ranks).after)


def _partial_sums(layer: nn.Module) -> tuple[str, ...]:
    """The names of a layer's replicated parameters, whose gradients are partial sums."""
    return tuple(name for name, value in layer._parameters.items() if not isinstance(value, DTensor))
