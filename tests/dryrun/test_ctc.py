"""The CTC loss: sizes of a dry run are those of PyTorch's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.runtime.torch_private import TorchDispatchMode, tree_iter

TIME, BATCH, CLASSES, LONGEST = 11, 3, 7, 4
LENGTHS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tensors": lambda: (torch.full((BATCH,), TIME), torch.tensor([LONGEST, 1, 2])),
    "numbers": lambda: ([TIME] * BATCH, [LONGEST, 1, 2]),
}


class Shapes(TorchDispatchMode):
    """The results of the loss's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "_ctc_loss" in func.name():
            self.results += [tuple(each.shape) for each in tree_iter(out) if isinstance(each, Tensor)]
        return out


def passes(lengths: str) -> list[tuple[int, ...]]:
    logits = torch.randn(TIME, BATCH, CLASSES, requires_grad=True)
    targets = torch.ones(BATCH, LONGEST, dtype=torch.int64)
    with Shapes() as shapes:
        F.ctc_loss(logits.log_softmax(-1), targets, *LENGTHS[lengths](), reduction="sum").backward()
    return shapes.results


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_loss_saves_what_it_does_on_the_cpu(lengths: str, kind: str) -> None:
    real = passes(lengths)
    with FakeTensorMode(allow_non_fake_inputs=True), TARGET_KERNELS[kind].kernels(1, ()):
        assert passes(lengths) == real
    assert (BATCH, TIME, 2 * LONGEST + 1) in real
