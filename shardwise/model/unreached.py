"""The matrices of a model that are no linear layers: no adapter is put on them, and no quantization packs them.

transformers 5 has the experts of a mixture as 3-D parameters of one module, and a router's weight as a bare parameter.
Other models have such matrices too: convolutions, state spaces, embeddings of single blocks. They are counted in the
built model, whatever its classes are called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.core.units import format_percent

SHOWN = 4
"""The most modules that a sentence names."""


@dataclass(frozen=True)
class Matrix:
    """A parameter of two or more dimensions, or a stack of matrices.

    Attributes:
        name: canonical. owner: path of its module. kind: class of its module.
    """

    name: str
    owner: str
    kind: str
    shape: tuple[int, ...]
    numel: int


def matrices(model: nn.Module, within: Sequence[nn.Module], but: Collection[str] = ()) -> Iterator[Matrix]:
    """The matrices in some modules of a model, a shared one once, in the order of the model.

    Args:
        within: modules of the model; [] for all.
        but: paths of layers that are left out.
    """
    inside = {module for outer in within or [model] for module in outer.modules()}
    left_out = {model.get_submodule(path) for path in but}
    seen = {parameter for module in left_out for parameter in module.parameters(recurse=False)}
    for path, module in model.named_modules():
        if module not in inside or module in left_out:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            # A dim of size 1 makes no matrix of a vector.
            if parameter not in seen and len([size for size in parameter.shape if size > 1]) > 1:
                seen.add(parameter)
                name = f"{path}.{key}" if path else key
                yield Matrix(name, path, type(module).__name__, tuple(parameter.shape), parameter.numel())


def block_pattern(path: str) -> str:
    """A path whose numbers are ``*``: that of the same module in every block."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def reached_shares(parts: Iterable[tuple[str, int]], whole: int) -> dict[str, float]:
    """The share of each module, in all blocks together, from (path, number of weights); largest first."""
    weights: dict[str, int] = {}
    for path, numel in parts:
        weights[block_pattern(path)] = weights.get(block_pattern(path), 0) + numel
    return {path: numel / max(1, whole) for path, numel in sorted(weights.items(), key=lambda item: -item[1])}


def reach_in_words(reached_shares: dict[str, float], of: str) -> str:
    """Modules with their shares of weights, as text: ``experts (93.1% of the weights), router (0.1%)``.

    Args:
        shares: by path of the module, largest first.
        of: the weights that the shares are taken of.
    """
    named = [
        f"{path or 'the model'} ({percent(share)})" for path, share in list(reached_shares.items())[:SHOWN]
    ]
    named[0] = f"{named[0][:-1]} of {of})"
    rest = list(reached_shares.values())[SHOWN:]
    if rest:
        named.append(f"{len(rest)} others ({percent(sum(rest))})")
    return ", ".join(named)


def percent(share: float) -> str:
    """With one digit, and never 0 for something."""
    return format_percent(share, 1) if share >= 0.0005 or share == 0 else "<0.1 %"
