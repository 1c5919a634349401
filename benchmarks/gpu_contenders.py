"""Training steps that take turns on one device: rows of the ladder, of peers and of techniques.

Contenders are built one after the other. As long as the next one fits as well, they stay in memory and their
steps take turns, because a device's clock follows its temperature. Else each is measured alone. The speed of a large
product just before says what the device could do at that moment.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_bench import Bench, Named, Task, attempt, free, spread, timed, usable
from gpu_store import Row
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.engine.step import step
from shardwise.launch.process import join
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS

Steps = Callable[[int], float]
"""Runs some training steps in a row; seconds of one. The device is idle before the first and after the last."""

ROUNDS, STEPS = 4, 5
"""Each contender of a group runs STEPS steps in turn, ROUNDS times."""

ATTENTION: Mapping[str, tuple[SDPBackend, ...]] = {
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
}


@contextmanager
def attention(backend: str | None) -> Iterator[None]:
    """scaled_dot_product_attention by this kernel, and by the others for inputs that it does not take."""
    if backend is None:
        yield
        return
    first = ATTENTION[backend]
    others = [other for kind in ATTENTION.values() for other in kind if other not in first]
    with sdpa_kernel([*first, *others, SDPBackend.MATH], set_priority=True):
        yield


def seconds_of(device: torch.device, one: Callable[[], object], count: int) -> float:
    """Mean seconds of ``count`` calls in a row: as in training, the host does not wait for the device in between."""

    def calls() -> None:
        for _ in range(count):
            one()

    return timed(calls, device) / count


@dataclass(frozen=True)
class Contender:
    """One row.

    Attributes:
        name: of the row.
        build: makes the model on the device; within it, steps can be timed.
        recipe: as in YAML; a peer trains the same model and batch.
        more: further figures of the row.
        attention: the kernel of attention; None leaves the choice to PyTorch.
        own: whether Shardwise trains the recipe, so that a plan predicts the row.
    """

    name: str
    build: Callable[[], AbstractContextManager[Steps]]
    recipe: Mapping[str, Any]
    more: Mapping[str, Any]
    attention: str | None = None
    own: bool = True


def shardwise(
    bench: Bench, name: str, values: Mapping[str, Any], backend: str | None = None, **more: Any
) -> Contender:
    """Shardwise trains a recipe that pins its strategy."""
    recipe = _recipe(values)

    @contextmanager
    def build() -> Iterator[Steps]:
        run = bench.run(recipe, bench.pinned(recipe))
        batches = bench.batches(run)
        yield partial(seconds_of, bench.device, lambda: step(run, next(batches), 1e-4))

    return Contender(name, build, values, more, backend)


def task(bench: Bench, contenders: Sequence[Contender], seconds: float) -> Task:
    """Rows of contenders that take turns as far as memory allows."""
    by_name = {contender.name: contender for contender in contenders}

    def measure(wanted: Sequence[str]) -> Iterator[Named]:
        return measured(bench, [by_name[name] for name in wanted], seconds)

    return Task(tuple(by_name), measure, seconds)


def measured(bench: Bench, contenders: Sequence[Contender], seconds: float = 0.0) -> Iterator[Named]:
    """The rows of contenders, group by group.

    Args:
        seconds: what a row is expected to take: a group grows no further where less time is left.
    """
    rest = list(contenders)
    while rest:
        with _Group(bench) as group:
            while rest and group.takes(rest[0]) and (not group.rows or bench.left > 2 * seconds):
                group.add(rest.pop(0))
                if not usable(bench.device):
                    break
            group.run()
        yield from group.rows.items()


class _Group:
    """Contenders that are in memory together, with the same kernel of attention: compiled code keeps its own."""

    def __init__(self, bench: Bench) -> None:
        self.rows = dict[str, Row]()
        self._bench, self._live = bench, ExitStack()
        self._built: dict[str, tuple[Contender, Steps]] = {}
        self._attention: str | None = None
        self._largest = 0

    def __enter__(self) -> _Group:
        self._live.callback(_forget)
        self._live.callback(self._built.clear)
        return self

    def __exit__(self, *_: object) -> None:
        if usable(self._bench.device):  # else the process can only end
            self._live.close()

    def takes(self, contender: Contender) -> bool:
        """Whether the next one surely fits if it needs as much as the largest so far."""
        if not self.rows:
            self._attention = contender.attention
            return True
        if contender.attention != self._attention or not self._built:
            return False
        free()
        room = torch.cuda.mem_get_info(self._bench.device)[0] if self._bench.capacity else 0
        return self._bench.capacity == 0 or room > 1.25 * self._largest

    def add(self, contender: Contender) -> None:
        """Build it and run its first steps. Its row has what it allocated and reserved, or why it failed."""
        self.rows[contender.name] = attempt(lambda: self._built_row(contender))

    def _built_row(self, contender: Contender) -> Row:
        bench, recipe = self._bench, _recipe(contender.recipe)
        if contender.own:
            bench.pinned(recipe)
        flops = bench.model_flops(recipe)
        if not dist.is_initialized():
            self._live.enter_context(join(bench.device.type))
        level = _level(bench)
        with ExitStack() as parts, attention(contender.attention):
            times = parts.enter_context(contender.build())
            times(bench.untimed)
            self._live.push(parts.pop_all())
        self._built[contender.name] = contender, times
        row = {"recipe": dict(contender.recipe), "own": contender.own, "model_flops": flops}
        if level is not None:
            allocated = torch.cuda.max_memory_allocated() - level[0]
            reserved = torch.cuda.max_memory_reserved() - level[1]
            row |= {"allocated_bytes": allocated, "reserved_bytes": reserved}
            self._largest = max(self._largest, allocated)
        return row | contender.more

    def run(self) -> None:
        """Steps of all that were built, in turn: their rows get times and speeds."""
        if not self._built:
            return
        ceiling = self._bench.product_flops()
        taken: dict[str, list[float]] = {name: [] for name in self._built}
        for _ in range(1 if self._bench.tiny else ROUNDS):
            for name, (contender, times) in list(self._built.items()):
                with attention(contender.attention):
                    ran = attempt(partial(_round, times, 2 if self._bench.tiny else STEPS))
                taken[name] += ran.pop("seconds", [])
                ran["took_seconds"] = round(ran["took_seconds"] + self.rows[name]["took_seconds"], 2)
                self.rows[name] |= ran
                if "error" in ran:
                    del self._built[name]
        for name, (contender, _) in self._built.items():
            self.rows[name] |= self._figures(contender, taken[name], ceiling)

    def _figures(self, contender: Contender, seconds: list[float], ceiling: float) -> Row:
        median, recipe = statistics.median(seconds), _recipe(contender.recipe)
        speed = self.rows[contender.name]["model_flops"] / median
        return spread(seconds) | {
            "tokens_per_second": recipe.batch_size * recipe.data.sequence_length / median,
            "model_flops_per_second": speed,
            "product_flops": ceiling,
            "share_of_bf16_ceiling": speed / ceiling,
            "interleaved_with": len(self._built) - 1,
            **({"attention": contender.attention} if contender.attention else {}),
        }


def _round(times: Steps, count: int) -> Row:
    return {"seconds": [times(count)]}


def _forget() -> None:
    """Compiled code knows nothing of the kernel of attention that it was compiled for."""
    torch.compiler.reset()
    free()


def _level(bench: Bench) -> tuple[int, int] | None:
    """(allocated, reserved) bytes before a contender is built."""
    if bench.capacity == 0:
        return None
    free()
    torch.cuda.reset_peak_memory_stats(bench.device)
    return torch.cuda.memory_allocated(bench.device), torch.cuda.memory_reserved(bench.device)


def _recipe(values: Mapping[str, Any]) -> Recipe:
    return recipe_of(values, SETTINGS)
