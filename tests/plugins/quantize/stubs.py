"""A method that rounds to multiples of a step, a SIGKILL at a chosen call, and the tiny models that tests quantize."""

from __future__ import annotations

import os
import pkgutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.base import InputStatistics, NotConverged, QuantizationMethod
from shardwise.runtime.quantization.weights import IntWeight, QuantizedWeight
from tests.harness.families import config_of

PREDICTED = 1 << 20
"""Bytes of ``unpredicted``."""


@dataclass(frozen=True)
class ToMultiples(QuantizationMethod):
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


@dataclass(frozen=True)
class KillPoint:
    """Kills this process as it calls a function for the ``call``-th time. ``function``: module:name."""

    function: str
    call: int

    def set(self) -> None:
        original, calls = pkgutil.resolve_name(self.function), count(1)

        def counted(*arguments: Any, **named: Any) -> Any:
            if next(calls) == self.call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        place, _, name = self.function.replace(":", ".").rpartition(".")
        setattr(pkgutil.resolve_name(place), name, counted)


@contextmanager
def unpredicted() -> Iterator[None]:
    """Passes run without the dry run before them, which takes most of the time of a tiny model."""
    with patch("shardwise.plugins.quantize.run.predicted_peak", return_value=PREDICTED):
        yield


def saved_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A folder with a random model, of 2 blocks by default, as transformers writes it."""
    import transformers

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0  # some families reset it after reading the files
    model.save_pretrained(folder)
    return folder
