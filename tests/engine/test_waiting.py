"""No step waits for its device: counted on a fake one, where a planted wait is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.dryrun.world import fake_world
from shardwise.engine import forward_backward, optimizer_step
from shardwise.engine.build import assemble, materialise
from shardwise.engine.loss_scale import AdaptiveNormLimit, DynamicLossScale
from shardwise.engine.optim.fused import FusedAdamW
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.launch.signals import StopRequest
from shardwise.model.blueprint import batch_shapes
from shardwise.model.decoder import Block
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.runtime.offload.host import to_device
from shardwise.technique import strategy_from
from shardwise.trainer.issued_step import IssuedStep
from tests.harness import fake_device
from tests.harness.pool import Pool

MODEL = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 257}
CLIPPED = {"optimizer": {"clip_norm": 1.0, "adaptive_clip": {"z": 2.5}}}
MIXTURE = {"model": MODEL | {"experts": 4, "experts_per_token": 2}}
QLORA = {"adapter": {"name": "lora", "rank": 2, "dropout": 0.1, "quantize": "nf4"}}
Case = tuple[int, Mapping[str, Any], Mapping[str, Any]]
FP16: Case = 1, {"precision": "fp16", "zero_stage": 1}, CLIPPED
CASES: dict[str, Case] = {
    "fp16": FP16,
    "ddp": (2, {"activation_checkpointing": "selective"}, {"optimizer": {"name": "sgd"}}),
    "zero3": (4, {"zero_stage": 3, "replicate": 2, "precision": "bf16", "loss": "chunked"}, CLIPPED),
    "weights alone": (
        1,
        {"precision": "bf16", "master_weights": False},
        {"optimizer": {"name": "adamw_8bit"}},
    ),
    "in backward": (1, {"optimizer_in_backward": True}, {"optimizer": {"clip_norm": None}}),
    "qlora": (1, {"precision": "bf16"}, QLORA | {"data": {"sequence_length": 8, "packing": True}}),
    "experts": (2, {"expert_parallel": 2}, MIXTURE),
    "ring": (2, {"sequence_parallel": 2, "sequence_method": "ring", "zero_stage": 2}, {}),
    "pipeline": (
        4,
        {"pipeline_parallel": 2, "tensor_parallel": 2, "precision": "bf16"},
        CLIPPED | {"model": MODEL | {"layers": 2}},
    ),
    "offloaded activations": (
        1,
        {"offload": "activations"},
        {"model": MODEL | {"layers": 4}, "data": {"sequence_length": 512}},
    ),
}
DOCUMENTED: dict[str, tuple[Case, str]] = {
    "offloaded optimizer": ((1, {"offload": "optimizer"}, {}), 'verdict = skip.to("cpu")'),
}
"""Steps that wait, and the line that waits first: engine/optim/offloaded.py says why. So do library optimizers."""


def waits(
    world: int, settings: Mapping[str, Any], sections: Mapping[str, Any]
) -> tuple[list[str], list[str], int]:
    """(where the second step waits, where reading the results of the first one then does, copies between memories)."""
    base = {"model": MODEL, "steps": 10, "batch_size": 8, "data": {"sequence_length": 8}}
    recipe = recipe_of({**base, **sections})
    with fake_world(0, world):
        strategy = strategy_from({**settings, "micro_batch_size": 2})
        site = assemble(recipe, blueprint_of(recipe), strategy, world, fake_device.NAME)
        device = torch.device(fake_device.NAME)
        with fake_device.watched() as watch:
            run, stopping = materialise(site, device), StopRequest(device)
            run.optimizer.start()
            first = _issue(run, 0, stopping)
            watch.seen.clear()
            watch.copies = 0
            _issue(run, 1, stopping)
            during, copies = list(watch.seen), watch.copies
            watch.seen.clear()
            first.wait()
            (
                float(first.result.loss),
                float(first.result.grad_norm),
                bool(first.result.skipped),
                first.flags.tolist(),
            )
            return during, list(watch.seen), copies


def _issue(run: Run, index: int, stopping: StopRequest) -> IssuedStep:
    """As the trainer's loop does."""
    shapes = batch_shapes(run.blueprint, run.recipe.data, run.objective)
    sizes = {name: torch.zeros(2, *shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    batches = [{name: to_device(value, run.device) for name, value in sizes.items()} for _ in range(2)]
    return IssuedStep.of(index, step(run, batches, 1e-3), stopping.agreed(True), 0.0, 0.0)


def _plain_copy(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype).copy_(value, non_blocking=True)


PLANTS: tuple[tuple[object, str, Callable[[Tensor], object]], ...] = (
    (Block, "forward", lambda value: float(value.detach().sum())),
    (forward_backward.Sequential, "forward_backward", lambda value: value.cpu()),
    (optimizer_step, "square_sum", lambda value: bool(value > 0)),
    (AdaptiveNormLimit, "value", lambda value: value.to("cpu", non_blocking=True)),
    (DynamicLossScale, "update", lambda value: value.tolist()),
    (FusedAdamW, "update", lambda value: torch.tensor([1.0], device=value.device)),
    (StopRequest, "agreed", _plain_copy),
)
"""A function of every part of a step, and a wait in it. Asynchronous copies need pinned memory: theirs is not."""


def planted() -> tuple[list[str], list[str]]:
    """(the names of the functions that waited, as often as they did, in two steps; where waits were seen)."""
    waited: list[str] = []

    def waiting(function: Callable[..., Any], wait: Callable[[Tensor], object]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            tensors = [x for x in (*_listed(result), *args) if isinstance(x, Tensor)]
            wait(tensors[0])
            waited.append(function.__qualname__)
            return result

        return called

    with ExitStack() as stack:
        for owner, name, wait in PLANTS:
            stack.enter_context(patch.object(owner, name, waiting(getattr(owner, name), wait)))
        during, _, _ = waits(*FP16)
    return waited, during


def _listed(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def all_waits() -> tuple[dict[str, tuple[list[str], list[str], int]], tuple[list[str], list[str]]]:
    fake_device.register()
    documented = {name: case for name, (case, _) in DOCUMENTED.items()}
    return {name: waits(*case) for name, case in (CASES | documented).items()}, planted()


def test_no_step_waits_for_the_device(pool: Pool) -> None:
    by_case, (waited, seen) = pool.answer(pool.start(all_waits, files=())[1])
    for name, (during, reading, copies) in by_case.items():
        if name in DOCUMENTED:
            assert DOCUMENTED[name][1] in during[0], name
        else:
            assert during == [], name
        assert len(reading) == 1, (
            name,
            reading,
        )  # for the step before, not for the one that was issued since
        assert copies >= 10, name  # two batches, and results
    assert by_case["offloaded activations"][2] > by_case["in backward"][2]
    assert {name.rpartition(".")[2] for name in waited} == {name for _, name, _ in PLANTS}
    assert len(seen) == len(waited) / 2  # of the second of two steps
