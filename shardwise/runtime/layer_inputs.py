"""Layers of a user's module take their inputs in the dtype of compute, as under autocast.

Weights are in the dtype of compute already; FSDP2 gathers them so. Inputs of the module, buffers and tensors that it
makes are not. A torch function mode finds operations that meet both:

    layers (products, convolutions, attention, recurrent nets, norms)   inputs of several dtypes: all in that of compute
    norms with running statistics                                       their weights in the dtype of the statistics
    losses, transforms, decompositions                                  16-bit inputs: in fp32, as autocast does

All other operations promote. So fp32 timesteps or coordinates keep their digits until a layer takes them. What the
module returns in 16 bits is cast to fp32, so that the loss is summed in fp32.

Refused: to cast the inputs of the module and of each block, as FSDP2 does. It rounds timesteps, and leaves fp32 tensors
that are made inside. Refused: autocast itself. It casts fp32 weights once more in every pass, and its lists differ
between the CPU, on which a plan is counted, and its target.

The mode is active in the loss and where a block runs again in the backward pass. There running statistics are restored
afterwards, since the first run updated them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from shardwise.core.errors import RecipeError
from shardwise.runtime.torch_private import (
    apply_to_tensors,
    in_backward,
    non_persistent_buffers,
    storage_key,
    version_of,
)
from shardwise.runtime.torch_private_compiler import is_tracing

_LAYERS: frozenset[Any] = frozenset(
    [
        *(F.linear, F.bilinear, F.embedding_bag, F.prelu, F.scaled_dot_product_attention),
        *(F.conv1d, F.conv2d, F.conv3d, torch.conv_tbc),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(F.layer_norm, F.group_norm, F.rms_norm, torch.layer_norm, torch.group_norm, torch.rms_norm),
        *(F.multi_head_attention_forward, F.grid_sample, torch.lerp, Tensor.lerp),
        *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        *(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        *(
            torch.matmul,
            torch.mm,
            torch.bmm,
            torch.mv,
            torch.dot,
            torch.vdot,
            torch.inner,
            torch.chain_matmul,
        ),
        *(torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm, torch.addr),
        *(torch.einsum, torch.tensordot, torch.linalg.multi_dot, torch.linalg.matmul),
        *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.dot, Tensor.vdot, Tensor.inner),
        *(Tensor.addmm, Tensor.addmv, Tensor.addbmm, Tensor.baddbmm, Tensor.addr),
        Tensor.__rmatmul__,
    ]
)
"""Operations that refuse inputs of several dtypes."""

_STATISTICS: frozenset[Any] = frozenset([F.batch_norm, F.instance_norm])

_DECOMPOSITIONS = """cholesky cholesky_ex cond det eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor
    ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matrix_exp matrix_norm matrix_power matrix_rank
    pinv qr slogdet solve solve_ex solve_triangular svd svdvals tensorinv tensorsolve vander"""
_OF_MATRICES = """cholesky cholesky_inverse cholesky_solve det geqrf inverse logdet lu_solve matrix_exp matrix_power
    nanquantile orgqr ormqr pinverse qr quantile slogdet svd triangular_solve"""

_WIDE: frozenset[Any] = frozenset(
    [
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.cross_entropy, F.nll_loss, F.kl_div),
        *(
            F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits,
            F.poisson_nll_loss,
            F.gaussian_nll_loss,
        ),
        *(
            F.ctc_loss,
            F.hinge_embedding_loss,
            F.margin_ranking_loss,
            F.cosine_embedding_loss,
            F.soft_margin_loss,
        ),
        *(F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss),
        *(F.triplet_margin_loss, F.triplet_margin_with_distance_loss, torch.ctc_loss),
        *(getattr(torch.fft, name) for name in torch.fft.__all__ if not name.endswith(("freq", "shift"))),
        *(torch.stft, torch.istft, Tensor.stft, Tensor.istft, torch.cdist, torch.pdist),
        *(getattr(torch.linalg, name) for name in _DECOMPOSITIONS.split()),
        *(getattr(owner, name) for owner in (torch, Tensor) for name in _OF_MATRICES.split()),
        *(torch.polar, torch.view_as_complex, torch.complex),
    ]
)
"""Losses, whose sums need more digits, and operations that have no kernels for 16 bits."""


@dataclass(eq=False)
class LayerInputs(TorchFunctionMode):
    """Casts inputs of operations while it is active.

    Attributes:
        dtype: of compute.
        model: the module whose forward pass it is active in.
        returned: whether that pass has not begun, or is over.
    """

    dtype: torch.dtype = torch.float32
    model: nn.Module | None = field(default=None, compare=False)
    returned: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and _writes(func):
            self._require_own_weights(args[0])
        if func is torch.autograd.grad and not is_tracing():
            self._require_whole_weights()
        if func in _LAYERS:
            if len(_float_dtypes([*args, *kwargs.values()])) > 1:
                args, kwargs = _cast_all((args, kwargs), self.dtype)
        elif func in _WIDE:
            dtypes = _float_dtypes([*args, *kwargs.values()])
            if dtypes - {torch.float32, torch.float64} or len(dtypes) > 1:
                widest = torch.float64 if torch.float64 in dtypes else torch.float32
                args, kwargs = _cast_all((args, kwargs), widest)
        elif func in _STATISTICS:
            return self._normalized(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _require_own_weights(self, written: Any) -> None:
        """Raise RecipeError for a write into a gathered weight: the shards, which outlive the pass, do not get it."""
        model = self.model
        classes = type(self.model).__mro__
        if model is None or FSDPModule not in classes:
            return
        tensors = written if isinstance(written, list | tuple) else [written]
        leaves = [t for t in tensors if isinstance(t, Tensor) and t.is_leaf and t.is_floating_point()]
        keys = {storage_key(t.untyped_storage()) for t in leaves if not isinstance(t, DTensor)}
        for name, parameter in model.named_parameters() if keys else ():
            if not isinstance(parameter, DTensor) and storage_key(parameter.untyped_storage()) in keys:
                raise written_weight(name)

    def _require_whole_weights(self) -> None:
        """Raise RecipeError for a derivative within a step whose backward pass frees gathered weights."""
        sharded = [m for m in self.model.modules() if FSDPModule in type(m).__mro__] if self.model else []
        if sharded and (self.returned or sharded != [self.model]):
            raise RecipeError(
                "the loss uses torch.autograd.grad through a sharded module",
                where="strategy.zero_stage",
                why="that backward pass frees the gathered weights, which the step's own needs",
                fix="set zero_stage: 0 with one dtype, or do it in the forward() of a module without units()",
            )

    def cast_sequence(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a recurrent net in the dtype of compute: a sequence, perhaps packed, and a state."""
        return tuple(
            argument.to(self.dtype)
            if isinstance(argument, PackedSequence)
            else _cast_all(argument, self.dtype)
            for argument in args
        )

    def _normalized(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        """A norm with statistics. Those stay as they are; weights of 16 bits are widened to their dtype."""
        wide = self.dtype if running_mean is None else running_mean.dtype
        if input.dtype != wide:
            input = input.to(self.dtype)
        if weight is not None:
            weight = weight.to(wide)
        if bias is not None:
            bias = bias.to(wide)
        return func(input, running_mean, running_var, weight, bias, *rest, **named)


@cache
def _writes(func: Any) -> bool:
    """Whether a function writes into its first argument: its name says so."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    return name.endswith("_") and name != "requires_grad_"


def written_weight(name: str) -> RecipeError:
    """The error of a forward pass that changes a parameter of a model that FSDP2 shards or casts."""
    return RecipeError(
        "a forward pass writes into a weight",
        where=f"model: {name}",
        why="it is a gathered copy, and the shards of the run do not change",
        fix="keep what forward passes update in buffers, or set strategy.zero_stage: 0 with one dtype",
    )


def _float_dtypes(values: Sequence[Any]) -> set[torch.dtype]:
    """The floating-point dtypes of tensors among arguments, which may be lists of tensors."""
    dtypes: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                dtypes.add(value.dtype)
        elif isinstance(value, list | tuple):
            dtypes |= _float_dtypes(value)
    return dtypes


def _cast_all(values: Any, dtype: torch.dtype) -> Any:
    """Arguments with all floating-point tensors in one dtype."""
    return apply_to_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


# -- on a module -------------------------------------------------------------------------------------

_STATE_NAME = "_shardwise_layer_inputs"


def cast_layer_inputs(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let a module's layers cast their inputs within ``casting``, and where one of its blocks runs again.

    It computes in fp32 until ``compute_in`` names another dtype.
    """
    mode = LayerInputs(model=model)
    vars(model)[_STATE_NAME] = mode
    model.register_forward_pre_hook(lambda *_: setattr(mode, "returned", False))
    model.register_forward_hook(lambda *_: setattr(mode, "returned", True), always_call=True)
    model.register_forward_hook(_widened)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # it refuses other dtypes before it calls an operation
            module.register_forward_pre_hook(mode.cast_sequence)
    for block in blocks:
        again = _SecondRun(mode, BufferWrites(block))
        block.register_forward_pre_hook(again.begin, prepend=True)  # spectral_norm's hook changes buffers
        block.register_forward_hook(again.end, always_call=True)


def casting(model: nn.Module) -> LayerInputs:
    """The mode of a module of ``cast_layer_inputs``."""
    return cast("LayerInputs", vars(model)[_STATE_NAME])


def _widened(model: nn.Module, args: Any, result: Any) -> Any:
    """What a module returns, with 16-bit tensors in fp32."""
    return apply_to_tensors(lambda tensor: tensor.float() if is_half(tensor.dtype) else tensor, result)


def is_half(dtype: torch.dtype) -> bool:
    """Whether it is a floating-point dtype of 16 bits."""
    return dtype in (torch.bfloat16, torch.float16)


def state_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Buffers that a checkpoint has, but the statistics of norms, which training does not read."""
    for module in model.modules():
        if not hasattr(module, "num_batches_tracked"):
            own = module.named_buffers(recurse=False)
            constant = non_persistent_buffers(module)
            yield from (buffer for name, buffer in own if name not in constant)


class BufferWrites:
    """Sees which buffers of a model are written or replaced. Not statistics of norms, which training does not read."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = {
            name: module
            for name, module in model.named_modules()
            if not hasattr(module, "num_batches_tracked")
        }
        self._before: dict[str, tuple[Tensor, int]] = {}

    def written(self) -> dict[str, Tensor]:
        """The buffers that were written since the last call, by name."""
        now = {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._owners.items()
            for name, buffer in module.named_buffers(recurse=False)
        }
        before = self._before
        self._before = {name: (b, version_of(b)) for name, b in now.items()}
        return {name: b for name, b in now.items() if name in before and not _is_same(b, *before[name])}


def _is_same(buffer: Tensor, other: Tensor, version: int) -> bool:
    return buffer is other and version_of(buffer) == version


@contextmanager
def kept_statistics(module: nn.Module) -> Iterator[None]:
    """In this block norms update their running statistics in vain."""
    counting = (layer for layer in module.modules() if hasattr(layer, "num_batches_tracked"))
    buffers = [buffer for layer in counting for buffer in layer.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # without a new version: autograd may have saved it


@dataclass(eq=False)
class _SecondRun:
    """A block that runs again within the backward pass: casts its layers' inputs, and keeps its statistics."""

    mode: LayerInputs
    buffers: BufferWrites

    def __post_init__(self) -> None:
        self._running: list[ExitStack] = []
        self._changed: str | None = None

    def begin(self, block: nn.Module, args: Any) -> None:
        if not in_backward():
            self.buffers.written()
            return
        if self._changed is not None:
            raise RecipeError(
                "a block that runs again in the backward pass changes a buffer",
                where=f"strategy.activation_checkpointing: {type(block).__name__}: {self._changed}",
                why="its second run would read other values, and change them once more",
                fix="set activation_checkpointing: none, or keep this module out of units()",
            )
        self._running.append(ExitStack())
        self._running[-1].enter_context(kept_statistics(block))
        self._running[-1].enter_context(self.mode)

    def end(self, *_: object) -> None:
        if in_backward():
            if self._running:  # not where ``begin`` refused the second run
                self._running.pop().close()
        else:
            self._changed = next(iter(self.buffers.written()), self._changed)
