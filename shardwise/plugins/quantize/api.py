"""``shardwise.quantize``."""

from __future__ import annotations

from pathlib import Path

from shardwise.core.paths import path_of
from shardwise.plugins.quantize.job import quantize_model as quantize_folder
from shardwise.plugins.quantize.report import Quantized
from shardwise.plugins.quantize.settings import Settings


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    scheme: str = "w4a16-g128",
    method: str = "gptq",
    rotate: str | None = None,
    calibrate: str | None = None,
    evaluate: str | None = None,
    sequences: int = 128,
    sequence_length: int | None = None,
    tokenizer: str | None = None,
    max_kl: float | None = None,
) -> Quantized:
    """Quantize the linear layers and experts of a model in this process, block by block, and write a folder.

    A result above ``max_kl`` is returned too, but not written: its ``folder`` is None then. The same call goes on with
    the finished blocks of an interrupted one.

    Args:
        model: the folder of a run or of a model, or a hub id.
        scheme: w8a16, w8a8, w4a16-g128, w4a16-channel (2 to 8 bits), fp8 or nf4.
        method: rtn, hqq, gptq, awq or kashin.
        rotate: hadamard folds a rotation into the weights first.
        calibrate, evaluate: stdlib, files or a hub id; None for the run's data, or stdlib, and for its held-out part.
        sequences: number of calibration sequences.
        sequence_length: their tokens; None for the run's, or the context up to 2048.
        tokenizer: bytes, a folder or a hub id; None for the model's.
        max_kl: the largest KL divergence from the model, in nats per token.

    Raises:
        RecipeError: a wrong name, a folder that exists, or other settings than those of the interrupted call.
        DataError: the text cannot be read.
        CheckpointError: the model cannot be read.
        ResourceError: the pass does not fit this machine, or the folder cannot be written.
    """
    texts = (calibrate, evaluate, tokenizer, sequences, sequence_length)
    return quantize_folder(Settings(str(model), path_of(out), scheme, method, *texts, max_kl, rotate))
