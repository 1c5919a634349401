"""A user's own model: any ``nn.Module`` with a loss function, not only language models.

``model: {factory: package.module:function, arguments: {...}}`` names a function that returns ``(module, loss)`` or
``(module, loss, dataset)``:

    module   any nn.Module. A method ``units()`` returns the modules to wrap one by one, in forward order; without it
             the module is wrapped as a whole. A method ``tensor_plan()`` enables tensor parallelism: it maps layer
             names to splits (runtime/parallel/tensor.py), e.g. ``{"blocks.*.query": "column:12"}`` for 12 heads.
             ``*`` matches one part of a name.
    loss     called as loss(module, batch); returns (sum over the valid targets, int64 number of valid targets),
             both scalar tensors, or the number as an int, without waiting for the device.
             Under context parallelism (sequence_parallel) it must use batch["positions"].
    dataset  map-style dataset of dicts of tensors, or a function without arguments that returns one; the function is
             called outside the meta device. It needs a key ``labels``; -100 there is not a target. Without a
             dataset, the recipe's text is read as for a language model.

The function is called several times on the meta device, so its result must depend on its arguments only. Values come
from ``reset_parameters()``, PyTorch's convention; every module with its own parameters or buffers needs one. Each
module is initialized at full size on the CPU with its own seed, and this rank's slice is copied. So values do not
depend on the sharding, and memory is that of one module.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.call_signatures import Call, require_accepts
from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve
from shardwise.model.blueprint import PADDING, Batch, Blueprint, LossSum, SampleShapes, token_shapes
from shardwise.model.initial import seed_of
from shardwise.model.module_checks import require_kept
from shardwise.runtime.layer_inputs import cast_layer_inputs, casting, is_half, kept_statistics
from shardwise.runtime.parallel.shard_slices import (
    canonical_name,
    is_divided,
    local_part,
    local_slices,
    named_parameters,
    share,
    shared_names,
)
from shardwise.runtime.parallel.tensor import Split, TensorPlan
from shardwise.runtime.scalar_parameters import store_as_vectors

LossFunction = Callable[[nn.Module, Batch], LossSum]
LOSS_CALL = Call(("module", "batch"))


class FactoryModel(Blueprint):
    """The model that the function ``target`` ("package.module:function") returns for ``arguments``.

    Raises RecipeError if it cannot be imported.
    """

    objective = None
    casts_inputs = counts_in_loss = True

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self.target = target
        self.arguments = dict(arguments)
        self.name = target.partition(":")[2] or target
        self._function = _import(target)
        with torch.device("meta"):
            module, self._loss, dataset = self._call()
        self._require_real(module)
        self._require_initial_values(module)
        self.dataset = self._make_dataset(dataset)
        self._sample = None if dataset is None else self._first_sample()

    def _require_real(self, module: nn.Module) -> None:
        require_kept(module)
        for path, layer in module.named_modules():
            if getattr(layer, "sparse", False) is True:
                raise self._error(
                    f"the gradient of {path} is sparse", "runs sum dense ones", "set sparse=False"
                )
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                raise self._error(
                    f"the parameter {name} is complex",
                    why="optimizers, norms and sharding are for real numbers",
                    fix="store it as torch.view_as_real(...), and compute with torch.view_as_complex",
                )

    def _require_initial_values(self, module: nn.Module) -> None:
        """Tell it before a plan."""
        for path, child in module.named_modules():
            if _reset_function(child) is None:
                self._require_no_tensors(path, child)

    def build(self, depth: int | None = None) -> nn.Module:
        model = self._call()[0]
        store_as_vectors(model)
        for parameter in model.parameters():
            # FSDP2 takes no other order of memory, such as channels_last; fused updates need that of the gradient.
            parameter.data = parameter.data.contiguous()
        cast_layer_inputs(model, self.blocks(model))
        return model

    def compute_in(self, model: nn.Module, dtype: torch.dtype) -> None:
        casting(model).dtype = dtype

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        method = getattr(model, "units", None)
        units = list(method()) if callable(method) else []
        if not all(isinstance(unit, nn.Module) for unit in units):
            raise self._error("units() must return modules")
        self._require_blocks(model, units)
        return units

    def _require_blocks(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Blocks are called, are within the model, and none is inside of another."""
        names = {module: name for name, module in model.named_modules()}
        # Each unit counts itself once; more means twice in the list, or inside of another.
        inside = Counter(module for unit in units for module in unit.modules() if module in units)
        for unit in units:
            kind = type(unit).__name__
            if unit is model or unit not in names:
                raise self._error(f"units() returns a {kind} that is not a part of the module")
            # FSDP gathers weights when a unit is called, and a ModuleList never is.
            if type(unit).forward is nn.Module.forward:
                fix = f"return its members: list(self.{names[unit]})"
                raise self._error(f"units() returns a {kind}, which has no forward()", fix=fix)
            if inside[unit] > 1:
                raise self._error(f"units() returns {names[unit]} twice, or inside of another unit")

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        method = getattr(model, "tensor_plan", None)
        if not callable(method):
            return super().tensor_plan(model)
        try:
            return {name: Split.parsed(how) for name, how in dict(method()).items()}
        except (TypeError, ValueError) as error:
            raise self._error("tensor_plan() must map layer names to splits", why=str(error)) from error

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Zero and zero for a batch without items. Raises RecipeError if the function does not return (sum, count)."""
        if PADDING in batch:
            items = {name: value for name, value in batch.items() if name != PADDING}
            with kept_statistics(model):
                total, count = self._called(model, items)
            return 0 * total, 0 * count  # still with a graph, so that every rank runs the same collectives
        if "positions" not in batch:
            return self._called(model, batch)
        recorded = _RecordingBatch(batch)
        result = self._called(model, recorded)
        if not recorded.positions_read:
            raise self._error(
                "the loss does not read batch['positions']",
                why="with sequence_parallel (context parallelism) a batch holds parts of sequences",
                fix="pass the positions to the model, or set sequence_parallel to 1",
            )
        return result

    def _called(self, model: nn.Module, batch: Batch) -> LossSum:
        with casting(model):
            try:
                return self._summed(self._loss(model, batch))
            except RuntimeError as error:
                if (known := self._of_weights(error)) is None:
                    raise
                raise known from error
            except KeyError as error:
                if not self._reads_batch(error) or error.args[0] in batch:
                    raise
                why = f"it has {', '.join(batch)}"
                raise self._error(
                    f"the batch has no {error.args[0]!r}, which the loss reads", why=why
                ) from error

    def _of_weights(self, error: RuntimeError) -> RecipeError | None:
        """What the loss does with weights that no rank has whole, or that are not the module's, in words."""
        if "found at least two devices" in str(error) and "meta" in str(error):
            return self._error(
                "the module uses a tensor that is not its own",
                why="a weight in a list or a closure stays on the meta device",
                fix="register it as a parameter or a buffer, and read it from the module that has it",
            )
        if "does not require grad" in str(error) and not torch.is_grad_enabled():
            return self._error(
                "the loss differentiates, and an evaluation has no graph",
                fix="do it within torch.enable_grad()",
            )
        return self._read_in_shards() if "mixed torch.Tensor and DTensor" in str(error) else None

    def _read_in_shards(self) -> RecipeError:
        return self._error(
            "weights are used outside of the forward() that gathers them",
            why="a sharded run gathers a unit's weights, and those of the module, when it is called",
            fix="move this into the module's forward(), or set strategy.zero_stage: 0 with one dtype",
        )

    def _reads_batch(self, error: KeyError) -> bool:
        """Whether the loss itself raised it, and no function that it calls."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        return bool(error.args) and frames[-1].f_code is getattr(self._loss, "__code__", None)

    def _summed(self, result: object) -> LossSum:
        """What the user's loss returned, as two scalar tensors on the device of the sum; a count may be a number."""
        total, count = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        if not isinstance(total, Tensor) or total.ndim or not isinstance(count, Tensor | int):
            raise self._error(
                "the loss must return (sum over the valid targets, number of valid targets)",
                why=f"it returned {_described(result)}",
                fix="sum instead of averaging (reduction='sum'), and count: (labels != -100).sum()",
            )
        if is_divided(total):
            raise self._read_in_shards()
        if isinstance(count, Tensor) and (count.ndim or count.is_floating_point() or count.is_complex()):
            why = f"it is {_described(count)} of {str(count.dtype).removeprefix('torch.')}"
            raise self._error(
                "the number of valid targets must be one whole number", why, "count: (labels != -100).sum()"
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            raise self._error(
                "the loss depends on no trained weight",
                why="it has no gradient",
                fix="compute it from the module's result, without .detach() or .item(), also for no targets",
            )
        if is_half(total.dtype) or total.is_complex():
            why = "a sum over many targets needs more digits"
            fix = "call the module itself, whose results are in fp32, or sum with .float()"
            if total.is_complex():
                why = "a loss is a real number"
                fix = "sum squares of .abs(), or .real"
            raise self._error(f"the loss is summed in {str(total.dtype).removeprefix('torch.')}", why, fix)
        if not isinstance(count, Tensor):
            # A number needs no copy to the device: the kernel of full() takes it as an argument.
            return total, torch.full((), count, dtype=torch.int64, device=total.device)
        return total, count

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        if self._sample is None:
            return token_shapes(sequence_length)
        return {name: (tuple(value.shape), value.dtype) for name, value in self._sample.items()}

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        """Raises RecipeError, naming the module, if a module has tensors but no ``reset_parameters``."""
        with torch.device("meta"):
            reference = self._call()[0]
        share(model, shared_names(reference))
        tensors: dict[str, Tensor] = dict(named_parameters(model))
        tensors.update((canonical_name(name), buffer) for name, buffer in model.named_buffers())
        with torch.random.fork_rng(devices=[]):
            for path, module in self._resettable("", reference):
                torch.default_generator.manual_seed(seed_of(seed, path))
                module.to_empty(device="cpu")
                self._reset(path, module)
                for name, value in [
                    *module.named_parameters(prefix=path),
                    *module.named_buffers(prefix=path),
                ]:
                    # The run stores a scalar parameter as a vector, which no slice of a scalar fits.
                    if name in tensors:
                        target = tensors[name]
                        local_part(target).copy_(value[local_slices(target)] if value.ndim else value)
                module.to("meta")  # so memory is that of one module

    def _resettable(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The topmost modules with ``reset_parameters``; together they hold every tensor."""
        if _reset_function(module) is not None:
            yield path, module
            return
        self._require_no_tensors(path, module)
        for name, child in module.named_children():
            yield from self._resettable(f"{path}.{name}" if path else name, child)

    def _reset(self, path: str, module: nn.Module) -> None:
        """Reset children first, since their constructors run first: a parent may change its children's values."""
        for name, child in module.named_children():
            self._reset(f"{path}.{name}" if path else name, child)
        reset = _reset_function(module)
        if reset is None:
            self._require_no_tensors(path, module)
        else:
            reset()

    def _require_no_tensors(self, path: str, module: nn.Module) -> None:
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if tensors:
            raise self._error(
                f"module {path or type(module).__name__!r} does not initialize {tensors[0][0]}",
                fix=f"give {type(module).__name__} a reset_parameters() that fills it, or the module with values to "
                "shardwise.fit",
            )

    def _call(self) -> tuple[nn.Module, LossFunction, Any]:
        try:
            result = self._function(**self.arguments)
        except Exception as error:  # the user's code
            raise self._error(f"{self.name}() failed", why=f"{type(error).__name__}: {error}") from error
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise self._error(f"{self.name}() must return (module, loss) or (module, loss, dataset)")
        module, loss, dataset = (*result, None)[:3]
        if not isinstance(module, nn.Module) or not callable(loss):
            kinds = f"it returned ({type(module).__name__}, {type(loss).__name__})"
            raise self._error(f"{self.name}() must return an nn.Module and a function", why=kinds)
        require_accepts(loss, f"model.factory: {self.target}", LOSS_CALL)
        return module, loss, dataset

    def _make_dataset(self, dataset: Any) -> Any:
        """The dataset; a function or class is called to make it."""
        if not callable(dataset) or (hasattr(dataset, "__getitem__") and not isinstance(dataset, type)):
            return dataset
        try:
            with torch.device("cpu"):
                return dataset()
        except Exception as error:  # the user's code
            why = f"{type(error).__name__}: {error}"
            raise self._error("the dataset cannot be made", why=why) from error

    def _first_sample(self) -> dict[str, Tensor]:
        dataset: Any = self.dataset
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            why = f"a resumable order needs items by number, and {_described(dataset)} has none"
            fix = "give a map-style dataset, with __len__ and __getitem__"
            raise self._error("the dataset has no length", why=why, fix=fix)
        try:
            length = len(dataset)
            sample = dataset[0] if length else None
        except Exception as error:  # the user's code
            raise self._error("the dataset cannot be read", why=f"{type(error).__name__}: {error}") from error
        if length < 1 or not isinstance(sample, dict) or not sample:
            raise self._error(
                "the dataset's samples must be dicts of tensors",
                why=f"sample 0 is {_described(sample)}" if length else "it has no samples",
                fix='name the values: {"image": image, "label": label}',
            )
        return {str(name): self._tensor(name, value) for name, value in sample.items()}

    def _tensor(self, name: str, value: object) -> Tensor:
        """A value of a sample; numbers and NumPy arrays become tensors, as in a batch."""
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = _described(value)
            fix = "leave it out, or give a tensor, a number or an array"
            raise self._error(
                f"{name!r} of the dataset is not a tensor", why=f"it is {kind}", fix=fix
            ) from error
        if tensor.layout != torch.strided:
            raise self._error(
                f"{name!r} of the dataset is no dense tensor",
                why=str(tensor.layout),
                fix="give its .to_dense()",
            )
        if tensor.is_meta:
            fix = f"let {self.name}() return a function that makes the dataset"
            raise self._error(f"{name!r} of the dataset is on the meta device", fix=fix)
        return tensor

    def _error(self, what: str, why: str = "", fix: str = "") -> RecipeError:
        return RecipeError(what, where=f"model.factory: {self.target}", why=why, fix=fix)


class _RecordingBatch(dict[str, Tensor]):
    """A batch that records whether its positions were read."""

    positions_read = False

    def __getitem__(self, key: str) -> Tensor:
        self.positions_read |= key == "positions"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.positions_read |= key == "positions"
        return super().get(key, default)


def _described(value: object) -> str:
    """The type of a value that a user's function returned, with the shapes of tensors."""
    if isinstance(value, tuple):
        return f"({', '.join(_described(part) for part in value)})"
    if isinstance(value, Tensor):
        return "one number" if value.ndim == 0 else f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _reset_function(module: nn.Module) -> Callable[[], object] | None:
    """The module's reset function. ``_reset_parameters`` is the name in PyTorch's own attention."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _import(target: str) -> Callable[..., Any]:
    function: Any = resolve(target, "model.factory")
    if not callable(function):
        why = f"it is a {type(function).__name__}"
        raise RecipeError("the factory is not a function", where=f"model.factory: {target}", why=why)
    return function
