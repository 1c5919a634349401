"""Memory that oneDNN's convolutions and LSTMs take on a CPU while they run. It is in no tensor that PyTorch sees.

oneDNN convolves in layouts of its own: channels in blocks of 16 (AVX-512) or 8 values (nChw16c). PyTorch reorders input
and weights to it and the result back, for each of the three products:

    result              x and w and y in blocks, then y in blocks and y
    gradient of x       dy and w and dx in blocks, then dx in blocks and dx; with a stride, dx twice
    gradient of w       dy and x in blocks, or dw in blocks; in 16 bits also dw in fp32, and per thread a sample of each

With AMX tiles, dense convolutions in 16 bits have the channels last instead of blocks, and the result is copied once
more. Tensors with the channels last are not reordered. Where oneDNN has no kernel (fp16 without instructions for it),
PyTorch's own convolution unfolds the whole batch. ``ONEDNN_VERBOSE=2`` prints the reorders, and
tests/dryrun/test_onednn.py measures.

As an operation without a tensor for it, each call is counted with one buffer of the bytes at its peak beyond its
results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.torch_private_onednn import convolution_backend, onednn_compiles

_FEW_CHANNELS = 3
"""A convolution of at most so many channels reads them as they are."""


ConvolutionForm = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]
"""Of a convolution: stride, padding, dilation, whether it is transposed, its output padding, groups."""


@dataclass(frozen=True)
class _Like:
    """The size of a result that is not there yet."""

    shape: tuple[int, ...]
    itemsize: int


Sized = Tensor | _Like


def _output_shape(x: Tensor, weight: Tensor, form: ConvolutionForm) -> list[int]:
    """The spatial shape of a convolution's result."""
    strides, paddings, dilations, transposed, more, _ = form
    shape = []
    for axis, (size, window) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        stride, padding, dilation = (
            setting[axis % len(setting)] for setting in (strides, paddings, dilations)
        )
        reach = dilation * (window - 1) + 1
        if transposed:
            shape.append((size - 1) * stride - 2 * padding + reach + more[axis % len(more)])
        else:
            shape.append((size + 2 * padding - reach) // stride + 1)
    return shape


def _block_channels() -> int:
    """Channels of a block."""
    # A block fills one vector register with fp32 values: 512 bits, or 256.
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _size_of(tensor: Sized) -> int:
    return math.prod(tensor.shape) * tensor.itemsize


def _in_tiles(x: Tensor, groups: int) -> bool:
    """Whether a convolution multiplies AMX tiles."""
    return groups == 1 and onednn_compiles().get(x.dtype, False)


def _blocked(tensor: Sized, tiles: bool) -> int:
    """Bytes of [n, channels, ...] in blocks of channels, or with the channels last."""
    channels = tensor.shape[1]
    if tiles:
        return _size_of(tensor)
    # The channels are rounded up to whole blocks.
    return _size_of(tensor) // channels * -(-channels // _block_channels()) * _block_channels()


def _reordered(tensor: Tensor, tiles: bool) -> int:
    """Bytes of the copy that a convolution reads."""
    return 0 if tensor.shape[1] <= _FEW_CHANNELS and not tiles else _blocked(tensor, tiles)


def _channels_last(*tensors: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return any(
        not tensor.is_contiguous() and tensor.is_contiguous(memory_format=formats[tensor.ndim])
        for tensor in tensors
        if tensor.ndim in formats
    )


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    form = (stride, padding, dilation, transposed, output_padding, groups)
    backend = convolution_backend(x, weight, bias, *form)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    y = _Like((len(x), channels, *_output_shape(x, weight, form)), x.itemsize)
    if backend.startswith("Slow"):
        size = _unfolded(backend, y if transposed else x, weight, x if transposed else y, groups)
    elif _channels_last(x, weight):
        size = _size_of(weight)
    else:
        tiles = _in_tiles(x, groups)
        again = 2 if tiles or (transposed and math.prod(stride) > 1) else 1
        # While it multiplies, y exists in blocks alone. This module allocates y next to the workspace, so it is
        # subtracted. Then x and w are freed, and y is reordered.
        during = _reordered(x, tiles) + _size_of(weight) + _blocked(y, tiles) - _size_of(y)
        size = max(during, again * _blocked(y, tiles))
    workspace = x.new_empty(size, dtype=torch.uint8)
    output = torch.ops.aten.convolution(x, weight, bias, *form)
    del workspace
    return output


def _convolution_backward(
    threads: int,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    form = (stride, padding, dilation, transposed, output_padding, groups)
    backend = convolution_backend(x, weight, None, *form, bias_sizes=bias_sizes)
    to_x, to_weight = output_mask[0], output_mask[1]
    tiles = _in_tiles(x, groups)
    sizes = [0]  # of the gradient of x and of that of w, which are computed one after the other
    if backend.startswith("Slow"):
        if not transposed:
            sizes.append(_unfolded(backend, x, weight, dy, groups, to_x))
    elif _channels_last(x, dy, weight):
        sizes.append(_size_of(weight) * (1 if x.itemsize == 4 else 3))
    else:
        if to_x:
            strided = math.prod(stride) > 1 and not transposed
            again = 2 if strided else 1
            dx = _size_of(x) if x.shape[1] == 1 or strided else _blocked(x, tiles)
            # The gradient of w does not exist yet, although it is allocated here next to the workspace.
            later = _size_of(weight) if to_weight else 0
            sizes.append(max(_blocked(dy, tiles) + _size_of(weight) + dx - _size_of(x), again * dx) - later)
        if to_weight:
            plain = _plain_weight_gradient(weight)
            reordered = 0 if plain else _blocked(dy, tiles) + _reordered(x, tiles)
            sizes.append(max(reordered + _of_half(dy, x, weight, threads), _size_of(weight)))
    workspace = x.new_empty(max(sizes), dtype=torch.uint8)
    gradients = torch.ops.aten.convolution_backward(dy, x, weight, bias_sizes, *form, output_mask)
    del workspace
    return gradients


def _plain_weight_gradient(weight: Tensor) -> bool:
    """Whether the gradient of w is a plain matrix product (gemm:jit), whose inputs are not reordered.

    oneDNN's AVX2 kernels have none for windows in three dimensions.
    """
    return weight.ndim == 5 and math.prod(weight.shape[2:]) > 1 and _block_channels() == 8


def _of_half(dy: Tensor, x: Tensor, weight: Tensor, threads: int) -> int:
    """The gradient of a weight in 16 bits: summed in fp32, from transposed samples of each thread."""
    if x.itemsize != 2:
        return 0
    wide = 2 * _size_of(weight)
    if x.shape[1] <= _FEW_CHANNELS or weight.shape[1] == 1 or math.prod(weight.shape[2:]) == 1:
        return wide
    return wide + (_size_of(dy) + _size_of(x)) * min(threads, len(x)) // len(x)


def _unfolded(backend: str, x: Sized, weight: Tensor, y: Sized, groups: int, to_x: bool = False) -> int:
    """Columns of PyTorch's own convolution: of the batch, or of one sample if it is dilated.

    The results of groups are put together. ``to_x``: whether the gradient of ``x`` is asked for.
    """
    window = math.prod(weight.shape[2:])
    if window == 1:
        return 0
    # im2col: each position of the result has the window of its inputs, of one group after the other.
    columns = x.shape[0] * x.shape[1] // groups * window * math.prod(y.shape[2:]) * x.itemsize
    if backend.startswith("SlowDilated"):
        return columns // x.shape[0] + (_size_of(x) + _size_of(y) if to_x else 0)
    if backend == "Slow3d" and to_x:
        return columns * 3 // 2
    return columns + (_size_of(y) if groups > 1 else 0)


KERNELS: Mapping[str, int] = {
    "aten::convolution": 64 * 1024,
    "aten::convolution_backward": 208 * 1024,
    "aten::mkldnn_rnn_layer": 128 * 1024,
    "aten::mkldnn_rnn_layer_backward": 128 * 1024,
}
"""Bytes of the code that a call of a new shape compiles and keeps. Convolutions: means of 40 shapes on AMD Zen 5, fp32
and bf16, 54 to 79 KiB forward and 174 to 236 KiB backward."""


# -- LSTM --------------------------------------------------------------------------------------------

_SAVED = 5
"""Values that an LSTM saves for each hidden one: four gates and the cell."""

_LSTM_FORWARD: Mapping[torch.dtype, float] = {torch.float32: 4.0, torch.bfloat16: 0.5}
_LSTM_BACKWARD: Mapping[torch.dtype, tuple[float, float, float]] = {
    torch.float32: (4.5, 2.0, 4.7),
    torch.bfloat16: (2.2, 5.2, 10.1),
}
"""Bytes of a call beyond its results, forward per byte of its output, backward of its output, input and weights: linear
fits to seven shapes on AMD Zen 5 (oneDNN 3.12), each within 4 %."""


def _lstm(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    output, hidden, cell, _ = torch.ops.aten.mkldnn_rnn_layer(x, *args)
    saved = x.new_empty(_SAVED * _size_of(output), dtype=torch.uint8)
    workspace = x.new_empty(int(_LSTM_FORWARD.get(x.dtype, 0.0) * _size_of(output)), dtype=torch.uint8)
    del workspace
    return output, hidden, cell, saved


def _lstm_backward(x: Tensor, w1: Tensor, w2: Tensor, *args: Any) -> Any:
    of_output, of_input, of_weights = _LSTM_BACKWARD.get(x.dtype, (0.0, 0.0, 0.0))
    output: Tensor = args[4]
    size = of_output * _size_of(output) + of_input * _size_of(x) + of_weights * (_size_of(w1) + _size_of(w2))
    workspace = x.new_empty(int(size), dtype=torch.uint8)
    gradients = torch.ops.aten.mkldnn_rnn_layer_backward(x, w1, w2, *args)
    del workspace
    return gradients


def with_workspaces(threads: int) -> Mapping[str, Callable[..., Any]]:
    """Operators that allocate what no tensor shows, with their workspaces in a process of `threads` threads."""
    return {
        "aten::convolution": _convolution,
        "aten::convolution_backward": partial(_convolution_backward, threads),
        "aten::mkldnn_rnn_layer": _lstm,
        "aten::mkldnn_rnn_layer_backward": _lstm_backward,
    }
