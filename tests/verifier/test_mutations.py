"""Faults that only arithmetic in fewer bits has: the plain process, which has no code of the engine, finds each.

A fault of 10 % is made on the ranks by a patch. The proof in fp64 does not see it, so the first comparison has to.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data import open_data
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.mixed_precision import MixedPrecision
from shardwise.verifier.plain_runs import run_plain
from shardwise.verifier.verdict import TrainedStep, Verdict
from shardwise.verifier.verify import run_near_plain
from tests.harness.corpora import write_words
from tests.harness.pool import Pool
from tests.harness.tiers import quick

CPU = torch.device("cpu")
OVERFLOWING = 2.0**20
"""A loss scale at which the first steps overflow in fp16."""

Job = tuple[Recipe, dict[str, Any], Path]
Patch = Callable[[pytest.MonkeyPatch], None]

# -- faults ------------------------------------------------------------------------------------------


def gradients(patch: pytest.MonkeyPatch) -> None:
    """Summed gradients are too large, before clipping."""
    from shardwise.engine.forward_backward import Sequential
    from shardwise.engine.optim.norm import scale_gradients

    plain = Sequential.forward_backward

    def wrong(self: Any, *rest: Any) -> Any:
        result = plain(self, *rest)
        scale_gradients(self._live.model.parameters(), torch.tensor(1.1))
        return result

    patch.setattr(Sequential, "forward_backward", wrong)


def one_gradient(patch: pytest.MonkeyPatch) -> None:
    """The norm of all barely moves."""
    from shardwise.engine.forward_backward import Sequential
    from shardwise.engine.optim.norm import scale_gradients

    plain = Sequential.forward_backward

    def wrong(self: Any, *rest: Any) -> Any:
        result = plain(self, *rest)
        named = dict(self._live.model.named_parameters())
        scale_gradients([named["layers.0.self_attn.o_proj.weight"]], torch.tensor(1.1))
        return result

    patch.setattr(Sequential, "forward_backward", wrong)


def unscaling(patch: pytest.MonkeyPatch) -> None:
    """The loss is multiplied by another scale than the gradients are divided by."""
    from shardwise.engine.forward_backward import Sequential

    plain = Sequential.forward_backward

    def wrong(self: Any, *rest: Any) -> Any:
        value = self._live.loss_scale.value
        before = value.clone()
        value.mul_(1.1)
        result = plain(self, *rest)
        value.copy_(before)
        return result

    patch.setattr(Sequential, "forward_backward", wrong)


def division_by_the_scale(patch: pytest.MonkeyPatch) -> None:
    """The norm is right, and the gradients of the update are not."""
    from shardwise.engine import optimizer_step

    plain = optimizer_step.scale_gradients
    patch.setattr(optimizer_step, "scale_gradients", lambda ps, factor: plain(ps, factor * 1.1))


def clipping(patch: pytest.MonkeyPatch) -> None:
    from shardwise.engine.loss_scale import NormLimit

    plain = NormLimit.value
    patch.setattr(NormLimit, "value", lambda self, norm: plain(self, norm) * 1.1)


def cast(patch: pytest.MonkeyPatch, narrow: Callable[[Tensor], Tensor]) -> None:
    """The 16-bit copies of master weights that FSDP2 gathers."""
    plain = torch._foreach_copy_

    def wrong(copies: Any, sources: Any, *rest: Any) -> None:
        plain(copies, sources, *rest)
        for copy, source in zip(copies, sources, strict=True):
            if copy.dtype == torch.bfloat16 and source.dtype == torch.float32:
                copy.copy_(narrow(copy))

    patch.setattr(torch, "_foreach_copy_", wrong)


def weights(patch: pytest.MonkeyPatch) -> None:
    cast(patch, lambda weight: weight * 1.1)


def one_weight(patch: pytest.MonkeyPatch) -> None:
    """Of the first layer with as many elements as an up projection's shard."""
    done: list[int] = []

    def narrow(weight: Tensor) -> Tensor:
        chosen = weight.numel() == MODEL["ffn"] * MODEL["width"] // 2 and len(done) % 6 == 0
        done.extend([1] * (weight.numel() == MODEL["ffn"] * MODEL["width"] // 2))
        return weight * 1.1 if chosen else weight

    cast(patch, narrow)


def weights_of_another_dtype(patch: pytest.MonkeyPatch) -> None:
    cast(patch, lambda weight: weight.to(torch.float8_e5m2))


def master_update(patch: pytest.MonkeyPatch) -> None:
    """No update reaches the master weights."""
    from shardwise.engine.optim.optimizer import Optimizer

    patch.setattr(Optimizer, "step", lambda self, skip: None)


def master_update_of_matrices(patch: pytest.MonkeyPatch) -> None:
    """Of gate and up projections."""
    from shardwise.engine.optim.optimizer import Optimizer

    plain = Optimizer.update

    def wrong(self: Any, parameters: Any, skip: Tensor) -> None:
        plain(self, [p for p in parameters if p.ndim != 2 or p.shape[0] != MODEL["ffn"]], skip)

    patch.setattr(Optimizer, "update", wrong)


def learning_rate(patch: pytest.MonkeyPatch) -> None:
    from shardwise.engine.optim.optimizer import Optimizer, Rate

    plain = Optimizer.rate_of

    def wrong(self: Any, parameter: Any) -> Rate:
        rate = plain(self, parameter)
        return Rate(rate.learning_rate * 1.1, rate.weight_decay)

    patch.setattr(Optimizer, "rate_of", wrong)


def overflow(patch: pytest.MonkeyPatch) -> None:
    """An update is made whatever the gradients are."""
    from shardwise.engine.optimizer_step import AfterBackward

    plain = AfterBackward.clip

    def wrong(self: Any, loss: Tensor) -> tuple[Tensor, Tensor]:
        norm, skip = plain(self, loss)
        return norm, torch.zeros_like(skip)

    patch.setattr(AfterBackward, "clip", wrong)


def overflow_as_zero(patch: pytest.MonkeyPatch) -> None:
    """Gradients that overflowed become zero, and are no overflow."""
    from shardwise.engine.forward_backward import Sequential

    plain = Sequential.forward_backward

    def wrong(self: Any, *rest: Any) -> Any:
        result = plain(self, *rest)
        for parameter in self._live.model.parameters():
            if parameter.grad is not None:
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.nan_to_num_(0.0, 0.0, 0.0)
        return result

    patch.setattr(Sequential, "forward_backward", wrong)


def rounding(patch: pytest.MonkeyPatch) -> None:
    """To the nearest bf16 number, so small updates are lost."""
    from shardwise.engine.optim import chunked

    patch.setattr(chunked, "to_bf16", lambda value, bits: value.to(torch.bfloat16))


def moments_of_8_bits(patch: pytest.MonkeyPatch) -> None:
    from shardwise.engine.optim.moment_storage import EightBit

    plain = EightBit.read

    def wrong(self: Any, state: Any, name: str) -> Tensor:
        value = plain(self, state, name)
        return value * 1.1 if name == "exp_avg" and value.ndim == 2 else value

    patch.setattr(EightBit, "read", wrong)


def products_of_8_bits(patch: pytest.MonkeyPatch) -> None:
    from shardwise.runtime import float8

    plain = float8.float8_product
    patch.setattr(float8, "float8_product", lambda *arguments: plain(*arguments) * 1.1)


def inputs_of_layers(patch: pytest.MonkeyPatch) -> None:
    """Of a user's module; the plain process computes it under autocast."""
    from shardwise.runtime import layer_inputs

    plain = layer_inputs._cast_all

    def wrong(values: Any, dtype: torch.dtype) -> Any:
        return layer_inputs.apply_to_tensors(lambda tensor: tensor * 1.1, plain(values, dtype))

    patch.setattr(layer_inputs, "_cast_all", wrong)


# -- runs --------------------------------------------------------------------------------------------

MODEL = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "vocab": 256}
STEPS = 8
BF16, FP16, FP8 = {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "fp8", "fp8_layers": "all"}
ALONE = BF16 | {"master_weights": False}
SGD = {"optimizer": {"name": "sgd", "momentum": 0.9, "learning_rate": 3e-2}}
STEADY, STATIC = {"initial": 1024.0}, {"initial": 256.0, "dynamic": False}
OWN = {"model": {"factory": "tests.verifier.test_mutations:images"}, "data": {}, "loss_scale": STEADY}
FAULTS: dict[str, tuple[Patch, dict[str, Any], dict[str, Any]]] = {
    "gradients in bf16": (gradients, BF16, {}),
    "gradients in fp16": (gradients, FP16, {"loss_scale": STEADY}),
    "gradients in fp8": (gradients, FP8, {}),
    "gradients of bf16 weights alone": (gradients, ALONE, {}),
    "one gradient": (one_gradient, BF16, {}),
    "unscaling": (unscaling, FP16, {"loss_scale": STEADY}),
    "unscaling with a static scale": (unscaling, FP16, {"loss_scale": STATIC}),
    "division by the scale": (division_by_the_scale, FP16, {"loss_scale": STEADY, **SGD}),
    "clipping": (clipping, BF16, SGD),
    "weights": (weights, BF16, {}),
    "one weight": (one_weight, BF16, {}),
    "weights in e5m2": (weights_of_another_dtype, BF16, {}),
    "master update": (master_update, BF16, {}),
    "master update of matrices": (master_update_of_matrices, BF16, {}),
    "learning rate": (learning_rate, BF16, {}),
    "overflow": (overflow, FP16, {"loss_scale": {"initial": OVERFLOWING}}),
    "overflow as zero": (overflow_as_zero, FP16, {"loss_scale": {"initial": OVERFLOWING}}),
    "rounding": (rounding, ALONE, {"optimizer": {"learning_rate": 3e-5}}),
    "moments of 8 bits": (moments_of_8_bits, {"precision": "fp32"}, {"optimizer": {"name": "adamw_8bit"}}),
    "products of 8 bits": (products_of_8_bits, FP8, {}),
    "inputs of layers in bf16": (inputs_of_layers, BF16, OWN),
    "inputs of layers in fp16": (inputs_of_layers, FP16, OWN),
    "gradients of an own module": (gradients, BF16, OWN),
}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3, 8, 8, generator=chance), "y": torch.tensor(index % 10)}


def images() -> tuple[nn.Module, Any, Any]:
    """The loss counts its targets itself, and micro-batches have unequal numbers of them."""
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.GroupNorm(4, 64), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 10)
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        counted = batch["y"] != 3
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * counted).sum(), counted.sum()

    return net, loss, Samples()


def plain_rank(job: Job) -> None:
    recipe, settings, folder = job
    run_plain(recipe, strategy_from(settings), folder, CPU)


def strategy_rank(job: Job, fault: str) -> Verdict:
    """The first comparison of ``shardwise verify``, with a fault if one is named."""
    recipe, settings, folder = job
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault][0](patch)
        return run_near_plain(recipe, strategy_from(settings), folder, CPU)


class Plain:
    """Plain runs, each trained once, and verified without a fault."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._jobs: dict[str, Job] = {}

    def job(self, settings: dict[str, Any], sections: dict[str, Any]) -> Job:
        key = repr((settings, sections))
        if key in self._jobs:
            return self._jobs[key]
        if settings["precision"] == "fp8":
            pytest.importorskip("torchao")
        values = {
            "model": MODEL,
            "data": {"source": str(write_words(self._folder / "corpus.txt")), "sequence_length": 24},
            "steps": STEPS,
            "batch_size": 8,
            **sections,
        }
        values["optimizer"] = {"learning_rate": 3e-3, **sections.get("optimizer", {})}
        folder = self._folder / str(len(self._jobs))
        folder.mkdir()
        layout = {"zero_stage": 2, "micro_batch_size": 2}
        job: Job = (recipe_of(values, SETTINGS), {**layout, **settings}, folder)
        self._pool.run(1, plain_rank, job, timeout=300)
        healthy, again = self._pool.run(2, strategy_rank, job, "", timeout=300)
        assert healthy == again and healthy.agrees, healthy
        overflows = sections.get("loss_scale", {}).get("initial") == OVERFLOWING
        assert bool(healthy.skipped[0]) == overflows and healthy.skipped[0] <= STEPS // 2
        self._jobs[key] = job
        return job


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(pool, tmp_path_factory.mktemp("plain"))


KINDS = (
    *("one gradient", "unscaling", "clipping", "one weight", "master update", "products of 8 bits"),
    "inputs of layers in fp16",
)
"""Faults of most kinds, which `make test` looks for."""


@pytest.mark.parametrize("name", quick(FAULTS, *KINDS))
def test_a_fault_of_ten_percent_fails(name: str, plain: Plain, pool: Pool, tmp_path: Path) -> None:
    _, settings, sections = FAULTS[name]
    recipe, strategy, folder = plain.job(settings, sections)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)  # a run with other skips writes its own
    for faulty in pool.run(2, strategy_rank, (recipe, strategy, tmp_path), name, timeout=300):
        assert not faulty.agrees, faulty


def test_the_plain_process_follows_another_skip(plain: Plain, pool: Pool, tmp_path: Path) -> None:
    """An update that only one of them left out is left out, or made, by both: nothing goes uncompared."""
    recipe, strategy, folder = plain.job(FP16, {"loss_scale": STEADY})
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for verdict in pool.run(2, skipping_rank, (recipe, strategy, tmp_path), timeout=300):
        assert verdict.agrees and verdict.skipped == (1, 0), verdict
        assert verdict.counted is not None and verdict.counted.loss == (STEPS, STEPS)
        assert verdict.counted.gradient_norm[1] == STEPS - 1


def skipping_rank(job: Job) -> Verdict:
    """The third step's update is left out."""
    from shardwise.engine.loss_scale import DynamicLossScale
    from shardwise.engine.optimizer_step import AfterBackward

    plain, steps = AfterBackward.clip, [0]
    learn = DynamicLossScale.update

    def wrong(self: Any, loss: Tensor) -> tuple[Tensor, Tensor]:
        norm, skip = plain(self, loss)
        steps[0] += 1
        return norm, torch.ones_like(skip) if steps[0] == 3 else skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AfterBackward, "clip", wrong)
        patch.setattr(DynamicLossScale, "update", lambda self, skipped, void: learn(self, skipped, void))
        recipe, settings, folder = job
        return run_near_plain(recipe, strategy_from(settings), folder, CPU)


def test_the_plain_process_makes_an_update_that_overflows_there(pool: Pool, tmp_path: Path) -> None:
    """With a smaller scale, so that there is a norm to compare with."""
    [(free, followed, scaled)] = pool.run(1, forced_rank, write_words(tmp_path / "corpus.txt"))
    assert free.skipped and not followed.skipped
    assert followed.loss == free.loss and followed.grad_norm == pytest.approx(scaled.grad_norm, rel=1e-3)


def forced_rank(corpus: Path) -> tuple[TrainedStep, TrainedStep, TrainedStep]:
    found = []
    for scale, skip in ((OVERFLOWING * 4, None), (OVERFLOWING * 16, False), (1024.0, None)):
        values = {
            "model": MODEL,
            "data": {"source": str(corpus), "sequence_length": 24},
            "steps": 1,
            "batch_size": 8,
            "loss_scale": {"initial": scale},
        }
        recipe = recipe_of(values, SETTINGS)
        run = MixedPrecision(recipe, blueprint_of(recipe), strategy_from(FP16), CPU)
        found.append(run.step(0, open_data(recipe).micro_batches(0, 0, 1, 2), skip))
    return found[0], found[1], found[2]
