"""A method that rounds to multiples of a step, and the tiny models that tests of the pass quantize."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.quantize.methods.base import InputStatistics, Method, NotConverged
from shardwise.runtime.quantization.weights import IntWeight, QuantizedWeight
from tests.harness.families import config_of


@dataclass(frozen=True)
class ToMultiples(Method):
    """Rounds each input channel's weights after those of the channels before: it depends on the Hessian's diagonal."""

    name = "multiples"
    calibrated = True
    step: float = 0.4
    refused: str = ""

    def quantize(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics | None) -> QuantizedWeight:
        assert statistics is not None
        if self.refused == "square" and weight.shape[0] == weight.shape[1]:
            raise NotConverged("it is square")
        large = statistics.hessian.diagonal() > statistics.hessian.diagonal().median()
        codes = torch.where(large, weight / self.step, weight / self.step + 0.25).round()
        scale = torch.full((weight.shape[0], 1), self.step)
        return IntWeight(codes.clamp(-128, 127).to(torch.int8), scale, None, 8)


def saved_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A folder with a random model, of 2 blocks by default, as transformers writes it."""
    import transformers

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder)
    return folder
