"""A linear layer with 8-bit products: y = x wᵀ forward, dx = dy w and dw = dyᵀ x backward.

The arithmetic is torchao's. Its recipes define the 8-bit dtype of each operand, whether a scale covers a tensor or a
row, and which product may use fast accumulation. Scales are dynamic, dtype.max / max|x|: nothing overflows, and values
2^18 times smaller than the maximum become zero (e4m3). The backward pass saves the input and the weight in the compute
dtype and casts them again.

In a compiled block scales and casts are traced as plain operations. Inductor fuses them with their neighbours, such as
a norm or an activation, and with one scale per tensor the layer saves its input in 8 bits. Weights are cast again in
the backward pass (torch_private_partitioner.py), so ZeRO 3 keeps no copy of them. Elsewhere only the two steps of a
cast are compiled, on accelerators: then one cast moves 5 bytes per element.

Refused: torchao's own layer. Uncompiled it moves 31 bytes per cast element, more than 8 bits save. A test compares the
layers.

``scale``, ``cast`` and ``product`` are dispatcher operators, one kernel each for the planner. A device without 8-bit
products (a CPU) runs ``EMULATED``. The inner dim of a product must be a multiple of 16, so transposed casts pad the
tokens with zeros. Casts contain no minimum or maximum: Triton miscompiles them next to 8-bit stores
(triton-lang/triton#11111). In compiled blocks torch_private_compiler.py writes those of neighbours as comparisons.

Legend: M tokens, K width in, N width out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from shardwise.core.errors import RecipeError
from shardwise.core.extras import install
from shardwise.core.quiet_torchao import quiet_torchao
from shardwise.runtime.compiled import compiled_on_call, is_traced
from shardwise.runtime.layer_replacement import take_over
from shardwise.runtime.torch_private import scaled_product

# torch._scaled_mm, that is cuBLASLt, needs both dimensions of an 8-bit operand as multiples of 16.
FLOAT8_ALIGNMENT = 16
_SMALLEST = 1e-12
"""Largest magnitude below which a tensor counts as zero (torchao's)."""


@dataclass(frozen=True)
class Scaling:
    """A torchao recipe: operand dtypes, one scale per tensor or per row, rounding of scales."""

    operand: torch.dtype
    gradient: torch.dtype
    rows: bool
    power_of_two: bool
    fast_output: bool

    def along(self, dim: int) -> int | None:
        """The dim that one scale covers: ``dim`` for rows, None for a whole tensor."""
        return dim if self.rows else None


def scaling_named(name: str) -> Scaling:
    """torchao's recipe ``tensorwise`` or ``rowwise``. Raises RecipeError if torchao is not installed."""
    with quiet_torchao():
        try:
            from torchao.float8 import Float8LinearConfig
        except ImportError as error:
            raise RecipeError(
                "fp8 needs torchao",
                where="strategy.precision: fp8",
                why=str(error),
                fix=f"{install('fp8')}, or precision: bf16",
            ) from error
    config = Float8LinearConfig.from_recipe_name(name)
    return Scaling(
        operand=config.cast_config_input.target_dtype,
        gradient=config.cast_config_grad_output.target_dtype,
        rows=config.cast_config_input.scaling_granularity.value == "axiswise",
        power_of_two=config.round_scales_to_power_of_2,
        fast_output=config.gemm_config_output.use_fast_accum,
    )


# -- arithmetic ---------------------------------------------------------------------------------------


def _float8_scale(
    x: Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """(factor that maps x [rows, columns] into the range of ``dtype``, its inverse), [1, 1] or along ``dim``."""
    largest = torch.linalg.vector_norm(x, math.inf, dim, keepdim=True).double()
    # No clamp, see above; a comparison with NaN is false, so NaN stays.
    scale = (torch.finfo(dtype).max / torch.where(largest < _SMALLEST, _SMALLEST, largest)).float()
    if power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale, scale.reciprocal()


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """x [rows, columns] times its scale, in 8 bits; transposed: [columns, rows padded to FLOAT8_ALIGNMENT]."""
    scaled = x * scale
    if not transposed:
        return scaled.to(dtype)
    if missing := -x.shape[0] % FLOAT8_ALIGNMENT:
        scaled = F.pad(scaled, (0, 0, 0, missing))
    return scaled.t().to(dtype, memory_format=torch.contiguous_format)


def _traced_cast(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """``_cast`` for a graph. Both casts of a tensor with one scale have the 8-bit values in common, to be saved."""
    if not transposed:
        return (x * scale).to(dtype)
    missing = -x.shape[0] % FLOAT8_ALIGNMENT
    return F.pad((x * scale).to(dtype).t(), (0, missing)).contiguous()


def _product(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """a [m, k] times b [k, n], each times its inverse scale, in fp32 as 8-bit products accumulate."""
    return torch.mm(a.float(), b.float()).mul_(a_inverse).mul_(b_inverse).to(dtype)


def _product_on_tensor_cores(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return scaled_product(a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast)


def _aligned_size(size: int) -> int:
    return -(-size // FLOAT8_ALIGNMENT) * FLOAT8_ALIGNMENT


# -- the operators ------------------------------------------------------------------------------------

EMULATED: Mapping[str, Callable[..., Any]] = {
    "float8_scale": _float8_scale,
    "float8_cast": _cast,
    "float8_product": _product,
}
"""Operators of the namespace ``shardwise`` as a device without 8-bit products runs them."""

_FLOAT8_LIBRARY = torch.library.Library("shardwise", "DEF")  # lives as long as the process
_FLOAT8_LIBRARY.define(
    "float8_scale(Tensor x, ScalarType dtype, int? dim, bool power_of_two) -> (Tensor, Tensor)"
)
_FLOAT8_LIBRARY.define("float8_cast(Tensor x, Tensor scale, ScalarType dtype, bool transposed) -> Tensor")
_FLOAT8_LIBRARY.define(
    "float8_product(Tensor a, Tensor a_inverse, Tensor b, Tensor b_inverse, ScalarType dtype, bool fast) -> Tensor"
)


for _name, _function in EMULATED.items():
    _FLOAT8_LIBRARY.impl(_name, _function, "CPU")
_FLOAT8_LIBRARY.impl("float8_scale", compiled_on_call(_float8_scale), "CUDA")
_FLOAT8_LIBRARY.impl("float8_cast", compiled_on_call(_cast), "CUDA")
_FLOAT8_LIBRARY.impl("float8_product", _product_on_tensor_cores, "CUDA")


@torch.library.register_fake("shardwise::float8_scale", lib=_FLOAT8_LIBRARY)
def _(x: Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool) -> tuple[Tensor, Tensor]:
    shape = [1, 1] if dim is None else [1 if d == dim % 2 else size for d, size in enumerate(x.shape)]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("shardwise::float8_cast", lib=_FLOAT8_LIBRARY)
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    rows, columns = x.shape
    return x.new_empty((columns, _aligned_size(rows)) if transposed else (rows, columns), dtype=dtype)


@torch.library.register_fake("shardwise::float8_product", lib=_FLOAT8_LIBRARY)
def _(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


scale = torch.ops.shardwise.float8_scale
cast = torch.ops.shardwise.float8_cast
float8_product = torch.ops.shardwise.float8_product

_STEPS = scale, cast
_TRACED_STEPS = _float8_scale, _traced_cast
"""Both steps of a cast, as operators and as what a compiled block traces."""


@register_flop_formula(float8_product)
def _product_flops(a: torch.Size, a_inverse: Any, b: torch.Size, *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]


# -- the layer ----------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """x [..., K] times wᵀ, w [N, K]. Saves x, w and, with one scale per tensor, the scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Scaling) -> Tensor:
        scale, cast = ctx.steps = _TRACED_STEPS if is_traced() else _STEPS
        flat = x.reshape(-1, x.shape[-1])
        of_x = scale(flat, how.operand, how.along(1), how.power_of_two)
        of_w = scale(weight, how.operand, how.along(1), how.power_of_two)
        out = float8_product(
            cast(flat, of_x[0], how.operand, False),
            of_x[1],
            cast(weight, of_w[0], how.operand, False).t(),
            of_w[1].t(),
            x.dtype,
            how.fast_output,
        )
        ctx.how = how
        ctx.save_for_backward(x, weight, *(() if how.rows else (*of_x, *of_w)))
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, *scales = ctx.saved_tensors
        how: Scaling = ctx.how
        scale, cast = ctx.steps
        dy = gradients[0].reshape(-1, weight.shape[0])
        of_dy = scale(dy, how.gradient, how.along(1), how.power_of_two)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            of_w = scales[2:] or scale(weight, how.operand, how.along(0), how.power_of_two)
            dx = float8_product(
                cast(dy, of_dy[0], how.gradient, False),
                of_dy[1],
                cast(weight, of_w[0], how.operand, True).t(),
                of_w[1],
                x.dtype,
                False,
            ).view(x.shape)
        if ctx.needs_input_grad[1]:
            flat = x.reshape(-1, x.shape[-1])
            of_x = scales[:2] or scale(flat, how.operand, how.along(0), how.power_of_two)
            if how.rows:
                of_dy = scale(dy, how.gradient, how.along(0), how.power_of_two)
            dw = float8_product(
                cast(dy, of_dy[0], how.gradient, True),
                of_dy[1].t(),
                cast(flat, of_x[0], how.operand, True).t(),
                of_x[1],
                weight.dtype,
                False,
            )
        return dx, dw, None


class Float8Linear(nn.Linear):
    """``nn.Linear`` with 8-bit products. Takes over the parameters of the layer that it replaces."""

    def __init__(self, linear: nn.Linear, how: Scaling) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        take_over(self, linear)
        self.how = how
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        # Next to fp32 tensors of a user's module; F.linear would be cast as one of its layers (layer_inputs.py).
        out = _Linear.apply(input.to(self.weight.dtype), self.weight, self.how)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.how}"
