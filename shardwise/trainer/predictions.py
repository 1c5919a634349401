"""Metrics of a user's own module (``evaluation.metrics``): a function of all held-out predictions at once.

    def metrics(predictions, batch):
        return {"accuracy": (predictions.argmax(1) == batch["labels"]).float().mean()}

``predictions`` is what the module returned, ``batch`` what it was given, of all held-out samples in their order, on the
CPU of rank 0. A mean over ranks or micro-batches would be wrong for most metrics (F1, AUC, a median), and different for
other numbers of ranks.

What a micro-batch yields goes to the host of rank 0 at once, so evaluation takes no more device memory than without
metrics. The host needs room for the predictions of ``evaluation.sequences`` samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.checkpoint import on_rank_0
from shardwise.core.errors import RecipeError, ShardwiseError
from shardwise.core.user_objects import resolve
from shardwise.engine.run import Run
from shardwise.launch.user_code import place_in
from shardwise.model.blueprint import PADDING, Batch
from shardwise.runtime.torch_private import tree_flatten, tree_unflatten

Metric = Callable[[Any, dict[str, Tensor]], Mapping[str, Any]]
Part = tuple[int, Any, Batch]
"""The number of a micro-batch among those of all ranks, the module's results, and the batch."""


class Predictions:
    """The metrics of one run. All ranks call its methods together.

    Raises RecipeError if the function cannot be imported, or ranks hold parts of samples.
    """

    def __init__(self, run: Run) -> None:
        self._target = run.recipe.evaluation.metrics or ""
        self._function: Metric = resolve(self._target, "evaluation.metrics")
        if run.layout.ranks(lambda axis: axis.within_sample) > 1:
            raise self._error("there are no metrics with sequence_parallel", "a rank sees parts of samples")
        self._run = run
        # Ranks that differ only along other axes compute the same predictions.
        self._shares = run.layout.number(dist.get_rank(), lambda axis: not axis.samples) == 0
        # Predictions are gathered as objects in host memory; NCCL would copy them to the device and back.
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._parts: list[Part] = []

    def watch(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """The batches, one by one; when the next is asked for, the results of the one before are sent to rank 0."""
        results: list[Any] = []
        self._parts = []
        handle = self._run.model.register_forward_hook(lambda model, args, result: results.append(result))
        try:
            for index, batch in enumerate(batches):
                results.clear()
                yield batch
                self._collect(index, results, batch)
        finally:
            handle.remove()

    def _collect(self, index: int, results: Sequence[Any], batch: Batch) -> None:
        part: Part | None = None
        if self._shares and PADDING not in batch:
            if not results:
                raise self._error("there are no predictions", "the loss did not call the module itself")
            position = index * self._run.data_degree + self._run.data_rank
            # A loss may call the module several times: then there are as many results.
            result = results[0] if len(results) == 1 else tuple(results)
            part = (position, _on_host(result), _on_host(batch))
        # Ranks without a part take part too, because the gather is collective.
        gathered: list[Part | None] = [part]
        if dist.get_world_size() > 1:
            gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
            dist.gather_object(part, gathered or None, group=self._group)
        self._parts += [rank_part for rank_part in gathered if rank_part is not None]

    def values(self) -> dict[str, float]:
        """The metrics of the batches that were watched; {} without any. Raises RecipeError on all ranks."""
        return on_rank_0(self._computed)

    def _computed(self) -> dict[str, float]:
        # In the order of the samples, whatever the number of ranks.
        parts = sorted(self._parts, key=lambda part: part[0])
        self._parts = []
        if not parts:
            return {}
        _, results, batches = zip(*parts, strict=True)
        try:
            metrics = self._function(self._whole(results), self._whole(batches))
        except ShardwiseError:
            raise
        except Exception as error:  # the user's code
            raise self._error(
                "the metrics failed", f"{type(error).__name__}: {error}{place_in(error)}"
            ) from error
        try:
            return {str(name): float(value) for name, value in dict(metrics).items()}
        except (TypeError, ValueError) as error:
            why = f"it returned a {type(metrics).__name__}: {error}"
            raise self._error("the metrics must be a dict of numbers", why) from error

    def _whole(self, parts: Sequence[Any]) -> Any:
        """The same structure with the tensors of all parts in one: joined along the samples, numbers stacked."""
        flat = [tree_flatten(part) for part in parts]
        # One row for each leaf of the structure, with that leaf of every part.
        rows = zip(*(leaves for leaves, _ in flat), strict=True)
        structure = flat[0][1]
        try:
            return tree_unflatten([_joined(row) for row in rows], structure)
        except (RuntimeError, TypeError) as error:
            why = f"predictions of micro-batches do not join: {error}"
            raise self._error("there are no metrics of these predictions", why) from error

    def _error(self, what: str, why: str) -> RecipeError:
        return RecipeError(what, where=f"evaluation.metrics: {self._target}", why=why)


def _joined(row: Sequence[Any]) -> Any:
    if not isinstance(row[0], Tensor):
        return row[0]
    return torch.cat(list(row)) if row[0].ndim else torch.stack(list(row))


def _on_host(value: Any) -> Any:
    """A value with its tensors on the CPU, outside autograd; a dataclass as a dict."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _on_host(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _on_host(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [_on_host(element) for element in value]
    return value
