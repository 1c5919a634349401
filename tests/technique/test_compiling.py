"""Compiled blocks: one compilation for equal blocks, counted in the plan, refused where it cannot work."""

from __future__ import annotations

import itertools
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Strategy
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.runtime import compiled, torch_private, torch_private_compiler
from shardwise.runtime.torch_private_fake import StaticFakeMode
from shardwise.technique import SETTINGS, broken_rules, layout_of, strategy_from, strategy_line
from shardwise.technique.compiling import COMPILE
from tests.harness.tiers import quick

WIDTH, FFN, BATCH, LENGTH, LAYERS = 64, 192, 2, 64, 3
MODEL = {"layers": LAYERS, "width": WIDTH, "heads": 4, "kv_heads": 4, "ffn": FFN, "vocab": 256}


def planned(length: int = LENGTH, ranks: int = 1, device: str = "cpu", **settings: Any) -> DryRun:
    cluster = {"device": device, "devices_per_node": ranks}
    values = {"model": MODEL, "data": {"sequence_length": length}, "steps": 2, "batch_size": BATCH}
    recipe = recipe_of({**values, "cluster": cluster}, SETTINGS)
    strategy = strategy_from({"micro_batch_size": BATCH, **settings})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))


def attention_of(run: DryRun) -> set[str]:
    return {kernel.operation for kernel in run.cost.kernels if "attention" in kernel.operation}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """One entry for each compilation of the test, which begins without any."""
    made: list[object] = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return original(*args)

    original = compiled.compiled
    monkeypatch.setattr(compiled, "compiled", counted)
    monkeypatch.setattr(compiled, "_compilations", OrderedDict())
    yield made


def test_equal_blocks_share_one_compilation_and_the_plan_counts_its_kernels(
    compilations: list[object],
) -> None:
    """PyTorch's kernels save gate, silu(gate), up and their product; a fused one needs no silu(gate)."""
    eager, fused = planned(), planned(compile="block")
    assert len(compilations) == 1
    kernels = [kernel for kernel in fused.cost.kernels if kernel.operation == "shardwise::fused"]
    assert sum(kernel.calls for kernel in kernels) % LAYERS == 0
    products = {run.cost.flops for run in (eager, fused)}
    assert len(products) == 1, "the same matrix products run"
    saved = LAYERS * BATCH * LENGTH * FFN * 4
    assert fused.peak.ledger.activations <= eager.peak.ledger.activations - saved


@pytest.mark.parametrize(
    ("device", "precision"),
    quick(itertools.product(["cpu", "A100-80GB"], ["fp32", "bf16"]), ("A100-80GB", "bf16")),
)
def test_the_scalar_code_of_a_dry_run_has_the_buffers_of_the_vectorized(
    device: str, precision: str, compilations: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    scalar = planned(device=device, compile="block", precision=precision)
    compiled._compilations.clear()
    monkeypatch.delitem(torch_private_compiler._SCALAR, "cpp.simdlen")
    vectorized = planned(device=device, compile="block", precision=precision)
    assert len(compilations) == 2
    assert scalar.timeline == vectorized.timeline
    assert scalar.cost == vectorized.cost


@pytest.mark.long
def test_a_plan_for_a_gpu_leaves_no_kernel_behind_in_the_compiler(compilations: list[object]) -> None:
    """The compiler's trace caches the kernel that an operator dispatches to; CUDA's have no gradient on a CPU."""
    for device in ("cpu", "H100-80GB", "cpu", "H100-80GB"):
        compiled._compilations.clear()
        eager, fused = planned(device=device), planned(device=device, compile="block")
        assert attention_of(eager) == attention_of(fused) != set(), device
        assert eager.cost.flops == fused.cost.flops, device
    assert len(compilations) == 4


@pytest.mark.parametrize("method", quick(["ring", "ulysses"], "ring"))
def test_compiled_blocks_with_context_parallelism_send_the_same_messages(
    method: str, compilations: list[object]
) -> None:
    """Blocks share one graph of this model. A graph without context parallelism is not taken for it."""
    planned(length=LENGTH // 2, compile="block")
    divided = {"sequence_parallel": 2, "sequence_method": method}
    eager, fused = planned(ranks=2, **divided), planned(ranks=2, compile="block", **divided)
    assert len(compilations) == 2
    assert fused.cost.traffic_by_axis() == eager.cost.traffic_by_axis() != {}
    assert fused.cost.flops == eager.cost.flops


@pytest.mark.parametrize("layers", quick(["none", "gathered"], "gathered"))
def test_equal_blocks_share_one_compilation_under_tensor_parallelism(
    layers: str, compilations: list[object]
) -> None:
    """Every layer has hooks of its own, which differ between blocks in nothing but the module."""
    divided = {"tensor_parallel": 2, "tensor_sequence_parallel": layers}
    eager, fused = planned(ranks=2, **divided), planned(ranks=2, compile="block", **divided)
    assert len(compilations) == 1
    assert fused.cost.traffic_by_axis() == eager.cost.traffic_by_axis() != {}
    assert fused.cost.flops == eager.cost.flops


class Numbered(nn.Module):
    """A block that knows its number, as those of transformers do."""

    def __init__(self, number: int, reads: bool) -> None:
        super().__init__()
        self.number, self.reads = number, reads
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.number if self.reads else self.layer(x).relu()


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 2},
        pytest.param({"sequence_parallel": 2, "sequence_method": "ring"}, marks=pytest.mark.long),
        pytest.param({"sequence_parallel": 2}, marks=pytest.mark.long),
    ],
)
def test_a_later_dry_run_takes_the_compilation_of_one_before(
    settings: dict[str, Any], compilations: list[object]
) -> None:
    """Its process groups are other objects with the same names."""
    runs = [planned(ranks=4, compile="block", zero_stage=stage, **settings) for stage in (3, 1)]
    assert len(compilations) == 1
    compiled._compilations.clear()
    own = planned(ranks=4, compile="block", zero_stage=1, **settings)
    assert len(compilations) == 2
    assert own.cost == runs[1].cost and own.peaks["backward"] == runs[1].peaks["backward"]


@pytest.mark.parametrize(("reads", "count"), [(False, 1), (True, 3)])
def test_blocks_that_differ_in_their_number_share_a_compilation_unless_they_read_it(
    reads: bool, count: int, compilations: list[object]
) -> None:
    with StaticFakeMode():
        blocks = [Numbered(number, reads) for number in (1, 2, 3)]
        compiled.compile_blocks(blocks)
        for _ in "12":
            for block in blocks:
                assert block(torch.ones(2, 8)).shape == (2, 8)
        assert len(compilations) == count
        assert len({compiled.compiled_as(block) for block in blocks}) == count
    assert {type(block) for block in blocks} == {Numbered}


def test_micro_batches_steps_and_evaluation_compile_nothing_again(compilations: list[object]) -> None:
    """One graph of each pass, without a break: nothing of the block runs outside of the compiled code."""
    ran: list[str] = []
    with StaticFakeMode():
        block, optimizer_steps, micro_batches = Numbered(1, False), 3, 2
        block.layer.register_forward_hook(lambda *_: ran.append("layer"))
        compiled.compile_blocks([block])
        for _ in range(optimizer_steps):
            for _ in range(micro_batches):
                block(torch.ones(2, 8)).sum().backward()
            ran.clear()
            with torch.no_grad():
                block(torch.ones(3, 8))  # evaluation, of another shape
            assert ran == ["layer"]
        block(torch.ones(2, 8))
    assert len(compilations) == 1 and ran == ["layer"]


def test_each_block_computes_with_the_number_that_it_reads() -> None:
    """Real kernels; the second call finds both compilations."""
    blocks = [Numbered(number, reads=True) for number in (2, 5)]
    x = torch.ones(2, 8)
    expected = [block(x) for block in blocks]
    compiled.compile_blocks(blocks)
    for _ in "12":
        torch.testing.assert_close([block(x) for block in blocks], expected)


class Scheduled(nn.Module):
    """A block whose attributes a schedule changes between steps. It counts the passes that Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.0)
        self.scale, self.power, self.passes = 1.0, 1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.drop(self.layer(x)) * self.scale**self.power


def test_attributes_that_change_between_calls_are_followed(compilations: list[object]) -> None:
    """Real kernels. Values that were compiled before compile nothing again."""
    block, plain, x = Scheduled(), Scheduled(), torch.ones(2, 8)
    plain.load_state_dict(block.state_dict())
    compiled.compile_blocks([block])
    for scale, power, rate in [(1.0, 1, 0.0), (3.0, 1, 0.0), (3.0, 2, 0.0), (3.0, 2, 1.0)] * 2:
        for module in (block, plain):
            module.scale, module.power, module.drop.p, module.passes = scale, power, rate, 0
        for _ in "12":
            torch.testing.assert_close(block(x), plain(x))
    assert len(compilations) == 4


def test_a_value_of_every_step_is_told_once_and_its_code_is_not_kept(
    compilations: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MANY_VALUES", 3)
    monkeypatch.setattr(compiled, "MOST_KEPT", 4)
    monkeypatch.setattr(compiled, "_warned", set())
    blocks, x = [Scheduled(), Scheduled()], torch.ones(2, 8)
    compiled.compile_blocks(blocks)
    said = []
    for power in range(1, 8):
        for block in blocks:
            block.power, block.passes = power, 0
            block(x)
        said += compiled.new_warnings()
    assert len(compilations) == 7 and len(said) == 1
    # The count of passes changes here, too, because Python runs the trace.
    assert said[0].startswith("Scheduled was compiled 3 times because its passes, power changed")
    assert sum(map(len, compiled._compilations.values())) == 4


class Storing(nn.Module):
    """A block that leaves tensors for its caller: one that has a gradient, one in a buffer, and one that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), None
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.layer.penalty, self.last = x.square().mean(), x
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x


def test_tensors_that_a_block_stores_are_results_of_its_code(compilations: list[object]) -> None:
    """Real kernels; two blocks, two steps, one compilation; and evaluation, which runs the block as it is."""
    blocks, plain, x = [Storing(), Storing()], [Storing(), Storing()], torch.ones(2, 8)
    for block, other in zip(blocks, plain, strict=True):
        other.load_state_dict(block.state_dict())
    compiled.compile_blocks(blocks)

    def seen(both: list[Storing]) -> list[Tensor]:
        results = [block(x) for block in both]
        sum(block.layer.penalty + block.last.sum() for block in both).backward()
        return [*results, *(t for block in both for t in (block.layer.weight.grad, block.mean, block.last))]

    for _ in "12":
        torch.testing.assert_close(seen(blocks), seen(plain))
    assert len(compilations) == 1
    with torch.no_grad():
        torch.testing.assert_close(blocks[0](x), plain[0](x))
        torch.testing.assert_close(blocks[0].mean, plain[0].mean)


def test_a_tensor_that_a_block_appends_to_a_list_is_refused_by_module_and_name() -> None:
    class Appending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.layer.losses = []

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            self.layer.losses.append(x.mean())
            return x

    block = Appending()
    compiled.compile_blocks([block])
    with pytest.raises(RecipeError, match="its module layer stores a tensor within 'losses'"):
        block(torch.ones(2, 8))


class Attending(nn.Module):
    """Attention and a gated layer, in fp64."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = (width, 3 * width), (width, 4 * width), (2 * width, width)
        self.qkv, self.up, self.down = (nn.Linear(*size, bias=False, dtype=torch.float64) for size in sizes)
        self.norm = nn.RMSNorm(width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def saved_bytes(block: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The result, and the bytes of saved tensors that are no weight and no argument."""
    storages: dict[int, int] = {}

    def noted(tensor: Tensor) -> Tensor:
        storages[torch_private.storage_key(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        result = block(x)
    for given in (x, *block.parameters()):
        storages.pop(torch_private.storage_key(given.untyped_storage()), None)
    return result, sum(storages.values())


@pytest.mark.long
def test_a_compiled_block_saves_less_as_its_budget_falls_and_as_much_as_is_planned() -> None:
    """Real tensors and real kernels against fakes; gradients against those of the plain block.

    None is selective: no product and no attention is recomputed.
    """
    torch.manual_seed(1)
    block, weights = Attending(), torch.randn(2, 32, 32, dtype=torch.float64)
    x = torch.randn_like(weights, requires_grad=True)

    def gradients(result: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((result * weights).sum(), [x, *block.parameters()]))

    exact, fakes = gradients(block(x)), {}
    compiled.compile_blocks([block])
    compiled.limit_saved(block, 0.3)
    result, real = saved_bytes(block, x)
    assert all((a - b).abs().max() <= 1e-10 for a, b in zip(gradients(result), exact, strict=True))
    with StaticFakeMode():
        fake, fake_x = Attending(), torch.empty(x.shape, dtype=x.dtype, requires_grad=True)
        compiled.compile_blocks([fake])
        for budget in (1.0, None, 0.3, 0.0):
            compiled.limit_saved(fake, budget)
            fakes[budget] = saved_bytes(fake, fake_x)[1]
    assert real == fakes[0.3]
    assert list(fakes.values()) == sorted(set(fakes.values()), reverse=True), fakes


def test_a_block_that_recomputes_everything_drops_the_same_values_again() -> None:
    block = nn.Sequential(nn.Linear(16, 256, bias=False), nn.Dropout(0.5))
    compiled.compile_blocks([block])
    compiled.limit_saved(block, 0.0)
    x = torch.ones(8, 16)
    result = block(x)
    result.sum().backward()
    [weight] = block.parameters()
    kept = (result != 0).sum(0)  # each adds 2 to every element of its row of the gradient
    torch.testing.assert_close(weight.grad, 2.0 * kept.unsqueeze(1).expand(-1, 16))


def test_a_compiled_block_is_one_word_of_the_strategy() -> None:
    strategy = strategy_from({"compile": "block"})
    assert "compiled" in strategy_line(strategy, layout_of(strategy, 1), 1)


@pytest.mark.parametrize(("written", "meant"), [(True, "block"), (False, "none"), ("block", "block")])
def test_true_and_false_stand_for_words(written: object, meant: str) -> None:
    assert COMPILE.parse(written) == meant


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
        {"pipeline_parallel": 2, "pipeline_schedule": "pipedream"},
        {"tensor_parallel": 2, "tensor_sequence_parallel": "regathered"},
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_by_one_rule(settings: dict[str, Any]) -> None:
    assert reasons(strategy_from({"compile": "block", **settings})) != []
    assert reasons(strategy_from(settings)) == []


def test_without_a_cpp_compiler_it_is_refused_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    strategy = strategy_from({"compile": "block"})
    assert any("C++ compiler" in reason for reason in reasons(strategy))
    assert reasons(strategy, cluster={"preset": "2xH100-80GB"}) == []


def reasons(strategy: Strategy, **sections: Any) -> list[str]:
    recipe = recipe_of({"model": MODEL, "steps": 2, "batch_size": 2, **sections}, SETTINGS)
    return [each.rule.reason for each in broken_rules(strategy, 2, recipe) if each.rule.key == "compile"]


def test_a_block_that_branches_on_a_value_is_refused_in_one_line() -> None:
    import torch
    from torch import nn

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else x

    block = Branching()
    compiled.compile_blocks([block])
    with pytest.raises(RecipeError, match="Branching cannot be compiled") as refused:
        block(torch.ones(2, 4))
    assert "\n" not in refused.value.line()
