"""Parameters without dimensions, such as CLIP's ``logit_scale``: FSDP2 shards none of them.

They are stored as vectors of one value, under the same name. The module's own code reads a view without dimensions.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def store_as_vectors(model: nn.Module) -> None:
    """Store every scalar parameter of a model as a vector of one value; a shared one stays shared."""
    vectors: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = module._parameters
        scalars = {
            name: parameter
            for name, parameter in own.items()
            if parameter is not None and parameter.ndim == 0
        }
        for name, scalar in scalars.items():
            vector = nn.Parameter(scalar.detach().reshape(1), scalar.requires_grad)
            own[name] = vectors.setdefault(id(scalar), vector)
        if scalars:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {name: _view(name) for name in scalars})


def _view(name: str) -> property:
    def scalar(module: nn.Module) -> Tensor:
        vector = module._parameters[name]
        assert vector is not None
        return vector if isinstance(vector, DTensor) else vector.view(())  # FSDP2 reads its shards by name

    return property(scalar)
