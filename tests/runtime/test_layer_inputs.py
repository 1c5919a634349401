"""Casts of layers' inputs, against the same layers with casts written by hand, and against autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.runtime.layer_inputs import cast_layer_inputs, casting
from shardwise.runtime.same_code import code_of
from shardwise.runtime.torch_private import function_modes
from tests.harness import modules

HALF = [torch.bfloat16, torch.float16]


def mixed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With weights in ``dtype`` and buffers in fp32, as FSDP2's mixed precision has them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    cast_layer_inputs(model, [])
    casting(model).dtype = dtype
    return model


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 5, 3, padding="same"), (2, 6, 9)),
    "conv2d reflected": (lambda: nn.Conv2d(6, 5, 3, padding=1, padding_mode="reflect"), (2, 6, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(6, 5, 2), (2, 6, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 5, 2, stride=2), (2, 6, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (2, 6, 5)),
    "rms norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "batch norm": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (4, 6)),
    "instance norm": (lambda: nn.InstanceNorm1d(6, affine=True), (2, 6, 5)),
    "lstm": (lambda: nn.LSTM(6, 5, batch_first=True), (2, 4, 6)),
    "gru": (lambda: nn.GRU(6, 5, num_layers=2, bidirectional=True), (4, 2, 6)),
    "rnn": (lambda: nn.RNN(6, 5), (4, 2, 6)),
    "gru cell": (lambda: nn.GRUCell(6, 5), (2, 6)),
    "prelu": (lambda: nn.PReLU(), (3, 6)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (2, 4, 6)),
}


def orthogonal() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(nn.Linear(6, 5), orthogonal_map="householder")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "decompose",
    [
        lambda x: orthogonal().to(x.dtype)(x),
        lambda x: torch.linalg.solve_triangular(x.triu(), x, upper=True),
        lambda x: torch.linalg.matrix_norm(x, 2),
        lambda x: torch.linalg.matrix_power(x, -1),
        lambda x: torch.linalg.lu_factor(x)[0],
        lambda x: torch.cholesky_inverse(x),
        lambda x: x.slogdet()[1],
        lambda x: x.quantile(0.5),
        lambda x: torch.pdist(x),
    ],
)
def test_operations_without_kernels_of_16_bits_compute_in_fp32(
    decompose: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """As under autocast."""
    x = torch.eye(6) + 0.1 * torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    with casting(mixed(nn.Identity(), dtype)):
        assert decompose(x.to(dtype)).isfinite().all()


ROUNDS_LESS = {"batch norm", "batch norm without statistics", "encoder layer"}
"""Next to fp32 statistics or a residual in fp32, an fp32 input is not rounded."""


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_inputs_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    """As one whose input is cast by hand; batch norms of 16 bits also need fp32 weights."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model = mixed(make(), dtype)
    x = torch.randn(shape)
    expected, by_hand = make(), x.to(dtype)
    expected.load_state_dict(model.state_dict())
    expected.to(torch.float32 if "batch norm" in name else dtype)
    for given in (x, x.double(), by_hand):
        with casting(model):
            found = model(given)
        wanted = expected(by_hand)
        found, wanted = (a[0] if isinstance(a, tuple) else a for a in (found, wanted))
        assert found.dtype == torch.float32
        limit = 2e-2 if name in ROUNDS_LESS else 0
        torch.testing.assert_close(found, wanted.float(), rtol=limit, atol=limit)
        found.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def test_packed_sequences_are_cast_too() -> None:
    model = mixed(nn.LSTM(3, 4), torch.bfloat16)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    expected = nn.LSTM(3, 4)
    expected.load_state_dict(model.state_dict())
    wanted = expected.bfloat16()(packed.to(torch.bfloat16))[0].data
    with casting(model):
        assert torch.equal(model(packed)[0].data, wanted)


def test_the_module_sees_its_inputs_as_they_are() -> None:
    """A cast to bf16 would turn the timestep 999 into 1000."""
    seen = []

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, t: Tensor, ids: Tensor, phase: Tensor) -> Tensor:
            seen.extend([t, ids, phase])
            return self.layer(t[:, None].sin())

    model = mixed(Timed(), torch.bfloat16)
    given = torch.tensor([999.0]), torch.tensor([999]), torch.tensor([1j])
    with casting(model):
        model(*given)
    assert all(a is b for a, b in zip(seen, given, strict=True))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "operator": lambda x, w: x @ w,
    "reversed": lambda x, w: w @ x,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "conv with an fp32 kernel": lambda x, w: F.conv1d(w[None], x[:, :, None]),
    "attention of fp32 queries": lambda x, w: F.scaled_dot_product_attention(x[None], x[None], w[None]),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, w]),
    "bilinear": lambda x, w: F.bilinear(x, w, w[None]),
    "named arguments": lambda x, w: F.linear(input=x, weight=w, bias=None),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_ones_own_weights_compute_as_under_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", dtype):
        expected = FUNCTIONS[name](x, weight)
    model = mixed(nn.Identity(), dtype)
    with casting(model):
        found = FUNCTIONS[name](x, weight.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_losses_are_in_fp32_and_transforms_run(dtype: torch.dtype) -> None:
    """A sum of 4,096 ones stops at 256 in bf16."""
    model = mixed(nn.Identity(), dtype)
    ones, labels = torch.ones(4096, dtype=dtype), torch.zeros(4096, dtype=torch.int64)
    with casting(model):
        assert F.mse_loss(ones, torch.zeros(4096), reduction="sum").item() == 4096
        assert F.l1_loss(ones, torch.zeros(4096, dtype=dtype), reduction="sum").item() == 4096
        total = F.cross_entropy(torch.zeros(4096, 2, dtype=dtype), labels, reduction="sum")
        assert total.item() == pytest.approx(4096 * 0.693147, rel=1e-6)
        assert torch.fft.rfft(ones).real[0].item() == 4096
        assert torch.linalg.inv(torch.eye(3, dtype=dtype)).dtype == torch.float32


def test_targets_in_fp64_are_no_obstacle() -> None:
    """mse_loss of fp32 and fp64 has no backward pass of its own."""
    model = mixed(nn.Identity(), torch.float32)
    found = torch.ones(3, requires_grad=True)
    with casting(model):
        F.mse_loss(found, torch.zeros(3, dtype=torch.float64)).backward()
    assert found.grad is not None


def test_equal_dtypes_stay() -> None:
    """What a user computes in fp32 within a module of 16 bits."""
    with casting(mixed(nn.Identity(), torch.bfloat16)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (torch.ones(2, 2).double() @ torch.ones(2, 2).double()).dtype == torch.float64


@pytest.mark.parametrize("name", ["group_norm", "diffusion", "regression", "batch_norm"])
def test_a_module_is_as_near_to_fp32_as_autocast_is(name: str) -> None:
    """The loss of a batch of the zoo in bf16, within 1 % of fp32."""
    torch.manual_seed(0)
    model, loss, data = getattr(modules, name)()
    batch = torch.utils.data.default_collate([data[index] for index in range(8)])
    exact = loss(model, batch)[0].item()
    with torch.autocast("cpu", torch.bfloat16):
        autocast = loss(model, batch)[0].item()
    model = mixed(model, torch.bfloat16)
    with casting(model):
        ours = loss(model, batch)[0].item()
    assert ours == pytest.approx(exact, rel=1e-2) and ours == pytest.approx(autocast, rel=1e-2)


def test_a_second_run_casts_and_keeps_statistics() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    block[1].running_mean, block[1].running_var = torch.zeros(4), torch.ones(4)
    model = nn.Sequential(block)
    cast_layer_inputs(model, [block])
    casting(model).dtype = torch.bfloat16
    x = torch.randn(8, 4, requires_grad=True)
    with casting(model):
        out: Any = checkpoint(block, x, use_reentrant=False)
    after = block[1].running_mean.clone()
    out.sum().backward()
    assert after.any() and torch.equal(block[1].running_mean, after)
    assert block[1].num_batches_tracked.item() == 1
    assert torch.overrides._get_current_function_mode_stack() == []


def test_the_mode_of_a_model_has_a_code() -> None:
    """Compiled blocks compare the modes around them; this one knows its model, which has it as an attribute."""
    modes = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(2, 2))
        cast_layer_inputs(model, [])
        with casting(model):
            modes.append(code_of(function_modes()[-1]))
            model(torch.ones(2))
            modes.append(code_of(function_modes()[-1]))
    assert len(set(modes)) == 1
