"""LoftQ's start: what PEFT computes, the same on any rank, nearer to the unquantized model than without it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.adapted import AdaptedModel
from shardwise.model.loftq import loftq, principal
from shardwise.model.lora import LoraLinear
from shardwise.model.native import NativeModel
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.runtime.quantized import Packing

SMALL = Dimensions(2, 24, 2, 1, 40, vocab=53, context=32)
IDS = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(**values: Any) -> AdaptedModel:
    return AdaptedModel(NativeModel(SMALL), AdapterSpec(**({"rank": 4, "quantize": "nf4"} | values)))


def rounded(weight: Tensor, kind: str = "nf4") -> Tensor:
    packing = Packing(kind, *weight.shape)
    return packing.unpack(packing.pack(weight, slice(0, packing.shape[0])), weight.dtype)


def weight_of(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) / 8


class _WithoutDevices(Tensor):
    """Stays on the CPU: PEFT moves the weight to a GPU."""

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        return super().to(dtype or self.dtype)


def _bitsandbytes(kind: str) -> ModuleType:
    """What PEFT calls of bitsandbytes, with our formats, for lack of a GPU."""

    class Params:
        def __init__(self, weight: Tensor, **options: Any) -> None:
            self.data, self.quant_state, self.SCB = weight, None, None

        def to(self, device: Any) -> Params:
            return self

    def dequantized(data: Tensor) -> Tensor:
        return rounded(data.as_subclass(Tensor), kind).as_subclass(_WithoutDevices)

    made: Any = ModuleType("bitsandbytes")
    made.nn = SimpleNamespace(Params4bit=Params, Int8Params=Params)
    made.functional = SimpleNamespace(
        dequantize_4bit=lambda data, state: dequantized(data),
        int8_vectorwise_dequant=lambda data, scale: dequantized(data),
    )
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4), ("int8", 8)])
@pytest.mark.parametrize("iterations", [1, 5])
@pytest.mark.parametrize("shape", [(48, 32), (24, 80)])
def test_it_is_pefts(
    shape: tuple[int, int], iterations: int, kind: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's ``loftq_init`` with the same quantizer: equal codes, and equal products A B."""
    theirs = pytest.importorskip("peft.utils.loftq_utils")
    monkeypatch.setitem(sys.modules, "bitsandbytes", _bitsandbytes(kind))
    monkeypatch.setattr(theirs, "is_bnb_available", lambda: True)
    monkeypatch.setattr(theirs, "is_bnb_4bit_available", lambda: True)
    weight = weight_of(*shape)
    base, their_a, their_b = theirs.loftq_init(weight.as_subclass(_WithoutDevices), bits, 4, iterations)
    rest, b, a = loftq(weight, lambda part: rounded(part, kind), 4, iterations)
    torch.testing.assert_close(rounded(rest, kind), base.as_subclass(Tensor), rtol=0, atol=1e-6)
    scale = float((weight - rounded(weight, kind)).abs().max())
    product = (their_b @ their_a).as_subclass(Tensor)
    torch.testing.assert_close(b @ a, product, rtol=0, atol=1e-4 * scale)
    for mine, other in ((b.norm(dim=0), their_b.norm(dim=0)), (a.norm(dim=1), their_a.norm(dim=1))):
        torch.testing.assert_close(mine, other.as_subclass(Tensor), rtol=1e-3, atol=0)


def test_the_best_approximation_of_a_rank() -> None:
    """Eckart and Young: the error is the norm of the other singular values. Factors beyond the rank are zero."""
    matrix = weight_of(20, 12)
    left = torch.linalg.svdvals(matrix.double())[5:].norm()
    b, a = principal(matrix, 5)
    assert float((matrix - b @ a).norm()) == pytest.approx(float(left), rel=1e-6)
    b, a = principal(matrix[:, :2] @ matrix[:2], 16)
    assert b.shape == (20, 16) and a.shape == (16, 12)
    assert int(a.ne(0).any(1).sum()) == int(b.ne(0).any(0).sum()) == 2
    assert not torch.stack([each.norm() for each in principal(torch.zeros(6, 4), 2)]).any()


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_on_any_rank_alike(quantize: str, gathered: Any, whole: Any) -> None:
    """Rank 30 is larger than the layers' width, and divided among three ranks."""
    blueprint = adapted(quantize=quantize, init="loftq:2", rank=30)
    expected = dict(named_parameters(whole(blueprint)))
    found = gathered(blueprint, {"data": 3})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def layers_of(model: nn.Module) -> list[LoraLinear]:
    return [layer for layer in model.modules() if isinstance(layer, LoraLinear)]


@torch.no_grad()
def errors(blueprint: AdaptedModel, whole: Any) -> Tensor:
    """|W - Q - scale B A| of every layer with an adapter."""
    plain, model = whole(blueprint.base), whole(blueprint)
    found = [
        plain.get_parameter(f"{path}.weight")
        - layer.plain_weight(torch.float32)
        - layer.scale * layer.lora_B.weight @ layer.lora_A.weight
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLinear)
    ]
    return torch.stack([each.norm() for each in found])


def test_each_layer_is_nearer_to_its_weights(whole: Any) -> None:
    """Than nf4 alone, and nearer after five iterations than after one. The scale is part of the product."""
    default, once, five = (
        errors(adapted(init=init, alpha=3.0), whole) for init in ("default", "loftq", "loftq:5")
    )
    assert (once < default).all() and (five < once).all()


@torch.no_grad()
def test_with_all_ranks_the_first_logits_are_the_unquantized_models(whole: Any) -> None:
    full = adapted(init="loftq", rank=24)
    expected = whole(full.base)(IDS)
    close = (whole(full)(IDS) - expected).abs().max()
    default = (whole(adapted(init="default", rank=24))(IDS) - expected).abs().max()
    assert close <= 1e-5 * expected.abs().max() < 1e-3 * default


def test_dora_starts_as_lora_does(whole: Any) -> None:
    """Its magnitudes are the norms of Q + scale B A, so the first logits are LoRA's."""
    lora, dora = (whole(adapted(init="loftq", name=name)) for name in ("lora", "dora"))
    with torch.no_grad():
        torch.testing.assert_close(dora(IDS), lora(IDS))
    layer = layers_of(dora)[0]
    assert layer.lora_magnitude_vector is not None
    assert not torch.equal(layer.lora_magnitude_vector, layer.plain_weight(torch.float32).norm(dim=1))
