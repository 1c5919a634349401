"""Quantizing a model, or the newest checkpoint of a run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from shardwise.core.progress import Say
from shardwise.launch.placement import launched_by
from shardwise.plugins.quantize.settings import Settings, Watching

if TYPE_CHECKING:
    from shardwise.plugins.quantize.report import Quantized


def quantize_model(
    settings: Settings,
    say: Say = lambda _: None,
    watching: Watching = lambda *_: nullcontext(lambda _: None),
) -> Quantized:
    """Quantize a model or a run's newest checkpoint, measure the loss, and write the folder.

    Ranks that torchrun or srun started share the work. An interrupted pass goes on at the block it had reached. If the
    KL divergence exceeds ``max_kl``, nothing is written; the blocks are kept, so the same call with a higher limit ends
    at once.

    Raises:
        RecipeError: a wrong name, a folder that exists, other settings than those of an interrupted pass.
        DataError, CheckpointError: the text or the model cannot be read.
        ResourceError: the pass does not fit this machine, or the disk is full.
    """
    settings.check()
    from shardwise.plugins.quantize.run import run_pass  # loads torch

    if launched_by() is None:
        return run_pass(settings, say, watching)
    from shardwise.launch.process import join

    with join("cpu"):
        return run_pass(settings, say, watching)
