"""Rotations folded into the weights of a Llama-shaped model (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).

Gains of norms move into the linear layers that read them, so a norm commutes with rotations. Then

    R1 [h, h]   rotates the hidden states. Embedding and layers that write them: rows times R1 (W <- R1ᵀ W, b <- b R1);
                layers that read them: W <- W R1
    R2 [d, d]   rotates the values of every head of a block: v: W <- R2ᵀ W per head; o: W <- W R2 per head

The outputs of the model stay; outlier channels spread over all channels, which rounding likes. R1 and R2 are Hadamard
matrices with random signs (runtime/quantization/hadamard.py). Nothing runs while the model serves; QuaRot's rotations
R3 and R4, which do, are left out. Computed in fp64.

A tied output layer gets its own weight, since only it takes the gain of the last norm. ``Rotated`` names it as the
untied model does.

Refused: blocks that are not shaped as Llama's, LayerNorm (it subtracts the mean, which a rotation moves), learned
positions, and norms with biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Blueprint
from shardwise.model.merging import ReadTensor
from shardwise.plugins.quantize.blocks import PreNormBlock, is_rms_norm, norm_offset, pre_norm_block
from shardwise.runtime.parallel.shard_slices import shared_names
from shardwise.runtime.quantization.hadamard import RandomHadamard

ROTATED_VALUES = 1 << 20
"""Values that are rotated at a time, in fp64."""

_Change = Callable[[Tensor], Tensor]
"""From a tensor of the model to that of the rotated model, in fp32, or fp64 for fp64."""


class Rotated:
    """Reads the tensors of a rotated model from those of the model.

    Args:
        blueprint: of the model.
        read: reads the model's tensors by canonical name.
        seed: of the random signs.

    Attributes:
        tied: whether the output layer shares the embedding; the rotated model is ``model.untied.untied(blueprint)``.

    Raises RecipeError for a model that cannot be rotated, with the reason.
    """

    def __init__(self, blueprint: Blueprint, read: ReadTensor, seed: int) -> None:
        with torch.device("meta"):
            model = blueprint.build()
        self._source = read
        self._seed = seed
        self._paths = {module: path for path, module in model.named_modules()}
        self._aliases = shared_names(model)
        self._changes: dict[str, _Change] = {}
        blocks = blueprint.blocks(model)
        embedding, norm, head = _outside(model, blocks)
        self.tied = head.weight is embedding.weight
        hidden = RandomHadamard(embedding.embedding_dim, seed)
        self._hidden = partial(_by_rows, hidden.apply)
        self._change(embedding, self._hidden)
        for index, block in enumerate(blocks):
            self._block(pre_norm_block(block, "--rotate"), _head_width(block), index)
        self._readers(norm, [head])

    def read(self, name: str) -> Tensor:
        """A tensor of the rotated model by canonical name: in fp32 (fp64 for fp64) if it is rotated, else as it is."""
        value = self._source(self._aliases.get(name, name))
        if name not in self._changes:
            return value
        return self._changes[name](value if value.dtype == torch.float64 else value.float()).contiguous()

    def _block(self, parts: PreNormBlock, head_width: int, index: int) -> None:
        hidden = self._hidden
        heads = RandomHadamard(
            head_width, self._seed + 1 + index
        )  # R2 of this block; ``seed`` itself is R1's

        def rotate_heads(x: Tensor) -> Tensor:
            return heads.apply(x.unflatten(-1, (-1, head_width))).flatten(-2)

        per_head = partial(_by_rows, rotate_heads)
        self._readers(parts.input_norm, parts.attention_inputs, {parts.v: per_head})
        self._readers(parts.mlp_norm, parts.mlp_inputs)
        # Weights are [out, in], and ``hidden`` rotates rows: transposed, it rotates what the layer writes.
        self._change(parts.o, lambda weight: hidden(per_head(weight).T).T, hidden)
        self._change(parts.down, lambda weight: hidden(weight.T).T, hidden)

    def _readers(
        self, norm: nn.Module, layers: Sequence[nn.Linear], after: dict[nn.Linear, _Change] | None = None
    ) -> None:
        """Give the gain of a norm to the layers that read it, and rotate their inputs. ``after``: of their outputs."""
        if not is_rms_norm(norm):
            raise _cannot_rotate(
                f"{self._paths[norm]} is a {type(norm).__name__}, and a rotation moves the mean"
            )
        offset = norm_offset(norm)
        name = f"{self._paths[norm]}.weight"
        self._change(norm, lambda weight: torch.full_like(weight, 1 - offset))  # the gain 1

        def rotated_input(weight: Tensor) -> Tensor:
            return self._hidden(weight, gain=self._source(name).double() + offset)

        for layer in layers:
            outputs = (after or {}).get(layer)
            self._change(layer, rotated_input if outputs is None else _then(rotated_input, outputs), outputs)

    def _change(self, module: nn.Module, weight: _Change, bias: _Change | None = None) -> None:
        self._changes[f"{self._paths[module]}.weight"] = weight
        if bias is not None and getattr(module, "bias", None) is not None:
            self._changes[f"{self._paths[module]}.bias"] = bias


@torch.no_grad()
def rotate_model(blueprint: Blueprint, model: nn.Module, seed: int) -> None:
    """Rotate a whole model in memory. Its output layer is untied.

    Args:
        blueprint: of the model.
        model: with weights; they are replaced.

    Raises RecipeError for a model that cannot be rotated, with the reason.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    rotated = Rotated(blueprint, values.__getitem__, seed)
    for name, parameter in parameters.items():
        owner, _, key = name.rpartition(".")
        value = rotated.read(name).to(parameter.dtype)
        setattr(model.get_submodule(owner), key, nn.Parameter(value, requires_grad=parameter.requires_grad))


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[nn.Embedding, nn.Module, nn.Linear]:
    """Embedding, last norm and output layer."""
    inside = {module for block in blocks for module in block.modules()}
    owners = [
        (path, module)
        for path, module in model.named_modules()
        if module not in inside and next(module.parameters(recurse=False), None) is not None
    ]
    embeddings = [module for _, module in owners if isinstance(module, nn.Embedding)]
    heads = [module for _, module in owners if isinstance(module, nn.Linear)]
    norms = [module for _, module in owners if not isinstance(module, nn.Embedding | nn.Linear)]
    if len(embeddings) == len(heads) == len(norms) == 1:
        return embeddings[0], norms[0], heads[0]
    paths = ", ".join(path or type(module).__name__ for path, module in owners)
    raise _cannot_rotate(
        f"a token embedding, a norm and an output layer are expected next to the blocks, not {paths}"
    )


@torch.no_grad()
def _by_rows(rotate: _Change, x: Tensor, gain: Tensor | None = None) -> Tensor:
    """``rotate_model`` of x [..., n], times ``gain`` [n], a part of the rows at a time in fp64; in the dtype of x."""
    rows = x.reshape(-1, x.shape[-1])
    # Contiguous although x may be a transposed view: ``view`` below shares the memory of the result.
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    count = max(1, ROTATED_VALUES // x.shape[-1])
    for part, out in zip(rows.split(count), result.view(rows.shape).split(count), strict=True):
        out.copy_(rotate(part.double() if gain is None else part.double() * gain))
    return result


def _then(inputs: _Change, outputs: _Change) -> _Change:
    """Of a weight [out, in]: ``inputs`` on its rows, then ``outputs`` on its columns."""
    return lambda weight: outputs(inputs(weight).T).T


def _head_width(block: nn.Module) -> int:
    """Channels of a head of values, as the attention module says it."""
    attention = block.get_submodule("self_attn")
    width = getattr(attention, "head_dim", None) or getattr(attention, "head_width", None)
    if not isinstance(width, int):
        raise _cannot_rotate(f"{type(attention).__name__} does not say the width of its heads")
    return width


def _cannot_rotate(why: str) -> RecipeError:
    return RecipeError("this model cannot be rotated", where="--rotate", why=why, fix="leave out --rotate")
