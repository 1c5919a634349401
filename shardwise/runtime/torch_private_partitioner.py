"""Private names of AOTAutograd's min-cut partitioner, which chooses what a compiled block saves for its backward pass.

It has gaps, which are filled here. It knows which inputs are weights only from Dynamo, so it would save 8-bit copies of
weights that exist anyway. It counts some attention kernels, and operators of other namespaces, as free to recompute.
With a budget it may draw random numbers again.

A budget is PyTorch's ``activation_memory_budget``: a knapsack chooses the cheapest operations to recompute, until the
saved bytes are at most that share of those that the partitioner saves for speed alone. All names were checked
on torch 2.13.0 (``torch_private.CHECKED``).

The compiler takes seconds and 100 MB to import. So every function here imports what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from shardwise.runtime.flops import flops_of, tensor_bytes
from shardwise.runtime.torch_private import tree_iter, tree_map_only

_LEAST_SHARE = 1e-9
"""In the place of 0, at which the partitioner would draw random numbers again."""


@contextmanager
def partitioned(weights: frozenset[int], budget: float | None) -> Iterator[None]:
    """Within it joint graphs are cut with a budget, and save no copy of the inputs at the positions ``weights``.

    Args:
        budget: the share of the activations saved for speed alone that may be saved; None to recompute all but matrix
            products, attention and reductions.
    """
    from torch._functorch import config as functorch
    from torch._functorch import partitioners
    from torch._inductor import compile_fx
    from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

    class Cost(CustomRuntimeEstimator):
        """Of one operation: its FLOPs, and one for each byte that it moves."""

        def __call__(self, node: fx.Node) -> float:
            return _flops(node) + tensor_bytes(_tensors(node)) + 1

        def uuid(self) -> object:
            return None

    class Operations(partitioners.OpTypes):
        def is_compute_intensive(self, node: fx.Node) -> bool:
            return bool(super().is_compute_intensive(node)) or _flops(node) > 0

    known = partitioners.get_default_op_list()
    operations = Operations(**{field.name: getattr(known, field.name) for field in fields(known)})
    cut = partitioners.min_cut_rematerialization_partition

    def cut_with_tags(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _tag(graph.graph, weights)
        return cut(graph, inputs, **options)

    with (
        functorch.patch(
            activation_memory_budget=1.0 if budget is None else max(budget, _LEAST_SHARE),
            aggressive_recomputation=budget is None,
            activation_memory_budget_runtime_estimator=Cost(),
        ),
        mock.patch.object(partitioners, "get_default_op_list", lambda: operations),
        mock.patch.object(compile_fx, "min_cut_rematerialization_partition", cut_with_tags),
    ):
        yield


def _tag(graph: fx.Graph, weights: frozenset[int]) -> None:
    """Mark results computed from weights alone to be recomputed, and random numbers to be saved."""
    from torch.utils.checkpoint import CheckpointPolicy

    of_weights: set[fx.Node] = set()
    for position, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            if position in weights:
                of_weights.add(node)
        elif node.op == "call_function":
            if _draws_or_seeds(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif node.all_input_nodes and of_weights.issuperset(node.all_input_nodes) and _flops(node) == 0:
                of_weights.add(node)
                if _is_as_large(node):
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_as_large(node: fx.Node) -> bool:
    """Whether a result has at least as many elements as each operand: maxima of weights are small, and are saved."""
    sizes = [tensor.numel() for tensor in _tensors_of(node.all_input_nodes)]
    return all(out.numel() >= size for out in _tensors_of([node]) for size in sizes)


def _draws_or_seeds(node: fx.Node) -> bool:
    """Whether an operation draws random numbers, or seeds of numbers that are drawn where they are used."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or "inductor_seed" in str(node.target)


def _flops(node: fx.Node) -> int:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    args, kwargs = tree_map_only(fx.Node, lambda given: given.meta.get("val"), (node.args, node.kwargs))
    return flops_of(node.target, args, kwargs, node.meta.get("val"))


def _tensors(node: fx.Node) -> list[Tensor]:
    return _tensors_of([node, *node.all_input_nodes])


def _tensors_of(nodes: Sequence[fx.Node]) -> list[Tensor]:
    return [leaf for node in nodes for leaf in tree_iter(node.meta.get("val")) if isinstance(leaf, Tensor)]
