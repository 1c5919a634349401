"""A fake accelerator: a device type of its own whose tensors have no data, and a record of where the host waits for it.

Steps run on fake tensors, as in a dry run, but on a device that is not the CPU. So copies between the two memories are
visible, with what they wait for. PyTorch's streams and events do nothing here, in order.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from shardwise.dryrun.tracker import asked_device
from shardwise.hardware import kinds
from shardwise.runtime.torch_private import NEEDS_VALUES, storage_key
from shardwise.runtime.torch_private_fake import StaticFakeMode

NAME = "pretended"
STAGED = 64 * 1024
"""Bytes of the largest copy from pageable memory for which CUDA does not wait (CUDA C++ Programming Guide, 3.2.8.1)."""

_watch: Waits | None = None
_libraries: list[torch.library.Library] = []


class Waits(TorchDispatchMode):
    """Records every operation for which the host waits for the device, with the line of Shardwise that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.copies = 0
        self._pinned: set[Any] = set()

    def note(self, what: str) -> None:
        own = [f for f in traceback.extract_stack() if "/shardwise/" in f.filename or "test_" in f.filename]
        frame = own[-1]
        self.seen.append(f"{what}: {Path(frame.filename).name}: {frame.line}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs, name = kwargs or {}, func.name().removeprefix("aten::")
        if name == "_local_scalar_dense":
            if args[0].device.type == NAME:
                self.note("value")
            return 1.0 if args[0].is_floating_point() else 1
        if name == "_pin_memory":
            return torch.empty_like(args[0], pin_memory=True)
        if name == "_fused_sgd_":
            return None  # PyTorch has no fake kernel for it
        if name == "_to_copy":
            args[0].constant = None  # else the fake mode copies the value of ``torch.tensor(1.0)`` for real
        try:
            out = func(*args, **kwargs)
        except NEEDS_VALUES:
            self.note(name)
            raise
        if name == "copy_":
            self._see_copy(args[0], args[1], bool(args[2:] and args[2]) or kwargs.get("non_blocking", False))
        elif name == "_to_copy":
            self._see_copy(out, args[0], kwargs.get("non_blocking", False))
        elif kwargs.get("pin_memory"):
            self._pinned.add(_key(out))
        return out

    def _see_copy(self, target: Tensor, source: Tensor, asynchronous: bool) -> None:
        if target.device.type == source.device.type:
            return
        self.copies += 1
        to_host = target.device.type == "cpu"
        pinned = _key(target if to_host else source) in self._pinned
        staged = not to_host and source.nbytes <= STAGED
        if not (asynchronous and (pinned or staged)):
            self.note("copy to host" if to_host else "copy to device")


def _key(tensor: Tensor) -> Any:
    return storage_key(tensor.untyped_storage())


@contextmanager
def watched() -> Iterator[Waits]:
    """Fake tensors on the device, and its waits."""
    global _watch
    with StaticFakeMode(allow_non_fake_inputs=True), Waits() as _watch:
        yield _watch
    _watch = None


class _Stream:
    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def record_event(self, _: object = None) -> _Event:
        return _Event()


class _Event(_Stream):
    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None:
        if _watch is not None:
            _watch.note("event")


class _Module:
    """What PyTorch asks the module of a device type for."""

    Stream, Event, device = _Stream, _Event, _Stream
    _initialized = True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_stream(self, _: object = None) -> _Stream:
        return _Stream()

    def stream(self, stream: _Stream) -> _Stream:
        return stream

    def manual_seed_all(self, _: int) -> None: ...

    def get_rng_state(self, _: object = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_: object) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self, _: object = None) -> None:
        if _watch is not None:
            _watch.note("synchronize")


class _Unread(Tensor):
    """A tensor that FSDP2 makes outside of the fake mode and never reads."""

    @staticmethod
    def __new__(cls, size: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> _Unread:
        made: _Unread = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device(NAME))
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} reads it")


def register() -> torch.device:
    """Make the device known to this process, which can do nothing else from then on."""
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _Unread, "PrivateUse1")
    _libraries.append(library)
    kinds.DEVICE_KINDS = {
        **kinds.DEVICE_KINDS,
        NAME: replace(kinds.DEVICE_KINDS["cuda"], name=NAME, torch_type=NAME),
    }
    private: Any = torch
    private._C._set_only_lift_cpu_tensors(True)  # else ``torch.tensor`` copies to the device unseen
    private.autograd.set_multithreading_enabled(False).__enter__()
    private.Stream, private.Event, private.accelerator.current_stream = _Stream, _Event, _Stream
    _fsdp_init._move_states_to_device = lambda *_: None
    return torch.device(NAME)
