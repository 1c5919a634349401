"""Kernels that are kept by call: they are those that are counted at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.dryrun.counting import kernels_of
from shardwise.dryrun.tracker import Tracker
from shardwise.engine.phase import phase
from shardwise.runtime.torch_private_fake import StaticFakeMode


def counted(fake: StaticFakeMode, notes: Callable[[Any], dict[Any, Any] | None]) -> list[tuple[Any, Any]]:
    """Calls of products, of a tensor with itself, in place, of views and of lists, in two phases."""
    tracker = Tracker({}, lambda *_: 0, lambda *_: 0, lambda: "", notes=notes)
    with fake, tracker.watching():
        tracker.counting_costs = True
        x, y = torch.ones(64, 64), torch.ones(64, 64)
        for name in ("forward", "backward"):
            with phase(name):
                x * x, x * y, x @ x, x @ y, x.add_(y), x.add_(x), x.t() @ y, x.view(-1) * 2
                torch._foreach_add_([x, y], [y, x])
                torch._foreach_add_([x, x], [y, y])
                (
                    torch.addcmul(x, x, y),
                    torch.addcmul(x, y, y),
                    torch.addcmul(y, x, y),
                    torch.where(x > 0, x, y),
                )
    return list(tracker.tally.kernels.items())


def test_operations_named_as_those_on_lists_may_have_none() -> None:
    """The choice of an attention kernel launches nothing; a fused norm is one kernel. Both have no lists."""
    x = torch.ones(1, 2, 8, 16)
    choice = torch.ops.aten._fused_sdp_choice.default
    assert kernels_of("forward", choice, (x, x, x), {}, choice(x, x, x)) == []
    norm = torch.ops.aten._fused_rms_norm.default
    [kernel] = kernels_of("forward", norm, (x, [16], None, None), {}, (x + 1, torch.ones(1, 2, 8, 1)))
    assert kernel.operation == "aten::_fused_rms_norm" and kernel.bytes == 4 * (2 * x.numel() + 16)


def test_kept_kernels_are_those_that_are_counted() -> None:
    fake = StaticFakeMode()
    expected = counted(fake, lambda _: None)
    kept: list[dict[Any, Any]] = []

    def notes(func: Any) -> dict[Any, Any] | None:
        if (found := fake.notes(func)) is not None:
            kept.append(found)
        return found

    assert [counted(fake, notes) for _ in "123"] == [expected] * 3
    assert len(kept) > len({id(each) for each in kept}) > 10 and all(kept)


def test_a_call_that_is_not_the_last_one_has_no_notes() -> None:
    with StaticFakeMode() as fake:
        x = torch.ones(3, 5)
        x.exp(), x.exp(), x.exp()  # from the third on its result is made here
        assert fake.notes(torch.ops.aten.exp.default) == {}
        assert fake.notes(torch.ops.aten.log.default) is None
        torch.ones(3, 7).tan()
        assert fake.notes(torch.ops.aten.tan.default) is None
